"""Fixtures of tests of Spark."""

from __future__ import annotations

from typing import Any

import pytest

from stateformat.backends.spark import register_data_source


@pytest.fixture(scope="session")
def quick(spark: Any) -> Any:
    """A session for hundreds of small jobs: nothing is compiled, nothing planned again."""
    session = spark.newSession()
    for name, value in {
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.leafNodeDefaultParallelism": "1",
    }.items():
        session.conf.set(name, value)
    return session


@pytest.fixture(scope="session")
def session(quick: Any) -> Any:
    """The same, with the data source ``stateformat``."""
    register_data_source(quick)
    register_data_source(quick)  # again is no harm
    return quick

"""The recipes of docs/data.md for Spark run as they stand and print what the page shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stateformat.backends.spark import register_data_source
from tests.worlds import recipes as data_recipes
from tests.worlds.data import data_store

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("heading", data_recipes.headings(spark=True))
def test_a_recipe_for_spark_runs_as_it_stands_and_prints_what_is_shown(
    heading: str, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    data_store(str(tmp_path / "shop"), durable=False)
    monkeypatch.chdir(tmp_path)  # The JVM stays where it was.
    register_data_source(spark)
    ran = list(data_recipes.run(heading, given={"spark": spark}, url=str(tmp_path / "shop")))
    data_recipes.PAGE.check(ran, update=pytestconfig.getoption("--update"))

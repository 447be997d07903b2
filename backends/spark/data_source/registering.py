"""Makes the data source known to a session, where Spark does not find it by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register_data_source(spark: SparkSession) -> None:
    """Register ``spark.read.format("stateformat")`` in a session. May be called again.

    Needed if the package is imported from a checkout or came with ``--py-files``; Spark finds an
    installed package by itself. The machines of a cluster must have the package in any case.
    """
    from .source import StateDataSource

    spark.dataSource.register(StateDataSource)

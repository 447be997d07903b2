"""Registers the data source in a session, where Spark does not find it by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register_data_source(spark: SparkSession) -> None:
    """Register ``spark.read.format("stateformat")`` in a session. May be called again.

    Call this if the package is imported from a checkout or came with ``--py-files``; Spark finds an
    installed package by itself. In both cases, every machine of a cluster must have the package.
    """
    from .source import StateDataSource

    spark.dataSource.register(StateDataSource)

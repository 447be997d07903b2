"""The data source: what Spark calls first.

``schema`` runs in one worker, when a user calls ``load``. ``reader`` and ``partitions`` run in
another, once per DataFrame, and ``read`` runs in the workers of the tasks. The objects are pickled
in between. ``schema`` finds the checkpoint and the source keeps it. So everything computed from a
DataFrame reads the same checkpoint, even if others are published in the meantime.

Spark imports this module in every session that uses a data source, ours or not. So the module
imports what it needs only when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource

from stateformat.errors import InvalidInput

from ..worker_process import without_traceback

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSourceReader, DataSourceWriter
    from pyspark.sql.types import StructType

    from .reader import Readable, ReadOptions


NAME: Final = "stateformat"


class StateDataSource(DataSource):  # type: ignore[misc]
    """``spark.read.format("stateformat")``; ``docs/spark.md`` lists the options."""

    _found: Readable | None = None

    @classmethod
    def name(cls) -> str:
        """Return the name that users pass to ``format``."""
        return NAME

    def schema(self) -> StructType:
        """Return the columns, from metadata. This source then reads the checkpoint found here."""
        with without_traceback():
            from .reader import spark_columns, stream_of

            self._found = stream_of(self._options())
            return spark_columns(self._found.schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of these columns: all of :meth:`schema`, or those a user named."""
        with without_traceback():
            from .reader import reader_of, stream_of

            options = self._options()
            # The source is sent to every task, but only the reader needs what was found.
            found, self._found = self._found or stream_of(options), None
            return reader_of(options, found, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: ARG002 - Spark's
        """Raise ``InvalidInput``: one DataFrame does not hold all the state of a dataflow."""
        with without_traceback():
            raise InvalidInput(
                "one DataFrame is not a checkpoint, and df.write takes no others; "
                "stateformat.backends.spark.bootstrap(store, flow, {'operator/state': df}) begins a job with "
                "DataFrames as its state"
            )

    def _options(self) -> ReadOptions:
        from .reader import read_options

        return read_options({name.lower(): text for name, text in self.options.items()})


def register_data_source(spark: SparkSession) -> None:
    """Register ``spark.read.format("stateformat")`` in a session. May be called again.

    Call this if the package is imported from a checkout or came with ``--py-files``; Spark finds an
    installed package by itself. In both cases, every machine of a cluster must have the package.
    """
    spark.dataSource.register(StateDataSource)

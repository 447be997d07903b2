"""What Spark calls first: the data source.

``schema`` runs in one worker, when a user calls ``load``; ``reader`` and ``partitions`` in another,
once for a DataFrame; ``read`` in those of the tasks. Between them the objects travel pickled. So
``schema`` finds the checkpoint, and the source keeps what was found: all that becomes of a
DataFrame reads the same one, whatever is published meanwhile.

Spark imports this module in each session that uses a data source, ours or not. So what it needs is
imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource

from stateformat.errors import InvalidInput

from .failures import without_traceback

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader, DataSourceWriter
    from pyspark.sql.types import StructType

    from .options import ReadOptions
    from .streams import Readable

NAME: Final = "stateformat"


class StateDataSource(DataSource):  # type: ignore[misc]
    """``spark.read.format("stateformat")``; ``docs/spark.md`` lists the options."""

    _found: Readable | None = None

    @classmethod
    def name(cls) -> str:
        """Return what users give to ``format``."""
        return NAME

    def schema(self) -> StructType:
        """Return the columns, from metadata; from now on this source reads what is found here."""
        with without_traceback():
            from .streams import stream_of
            from .types import spark_columns

            self._found = stream_of(self._options())
            return spark_columns(self._found.schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of these columns: those of :meth:`schema`, or some that a user named."""
        with without_traceback():
            from .reader import reader_of
            from .streams import stream_of

            options = self._options()
            # The source travels to every task; what was found goes no further than the reader.
            found, self._found = self._found or stream_of(options), None
            return reader_of(options, found, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: ARG002 - Spark's
        """Raise ``InvalidInput``: one DataFrame is not all the state of a dataflow."""
        with without_traceback():
            raise InvalidInput(
                "one DataFrame is not a checkpoint, and df.write takes no others; "
                "stateformat.backends.spark.bootstrap(store, flow, {'operator/state': df}) begins a job with "
                "DataFrames as its state"
            )

    def _options(self) -> ReadOptions:
        from .options import read_options

        return read_options({name.lower(): text for name, text in self.options.items()})

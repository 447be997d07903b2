"""Sources of tests over directories, where workers of Spark can import them."""

from __future__ import annotations

import pyarrow as pa

from stateformat.backends import dataflow as df
from stateformat.backends.connectors import DirectoryEnumerator, ParquetSource


class WithoutLog(DirectoryEnumerator):
    """As it was in earlier releases: its snapshot has all files that were dealt."""

    log_columns = None

    def snapshot(self) -> pa.Table:
        dealt = {"file": [f"{self._directory}/{name}" for name in self._dealt]}
        nulls = {name: pa.nulls(len(dealt["file"]), self.columns.field(name).type) for name in ("id", "payload")}
        return pa.concat_tables([pa.table({**dealt, **nulls}, schema=self.columns), super().snapshot()])


class Earlier(ParquetSource):
    def enumerator(self) -> df.SplitEnumerator:
        assert self._directory is not None
        return WithoutLog(self._directory, self.suffix, self._splits_of, until=self._until)

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


class OfNames(DirectoryEnumerator):
    """As it was later: its log has names alone."""

    log_columns = pa.schema([DirectoryEnumerator.log_columns.field("file")])

    def logged(self) -> pa.Table:
        return super().logged().select(["file"])

    def restore_log(self, rows: pa.Table) -> None:
        nulls = [rows["file"], *(pa.nulls(len(rows), pa.int64()) for _ in range(2))]
        super().restore_log(pa.table(nulls, schema=DirectoryEnumerator.log_columns))


class Earlier(ParquetSource):
    kept: type[DirectoryEnumerator] = WithoutLog

    def enumerator(self) -> df.SplitEnumerator:
        assert self._directory is not None
        return self.kept(self._directory, self.suffix, self._splits_of, until=self._until)


class OfNamesAlone(Earlier):
    kept = OfNames

"""The sinks: what is committed is there exactly once, and nothing else is ever seen; a crash between any two steps."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stateformat.backends.connectors import CollectSink, FileSink
from stateformat.backends.connectors.sinks import file_name_of, local_directory
from stateformat.backends.connectors.sinks.local_directory import LocalDirectory
from stateformat.errors import CheckpointError, InvalidInput, InvalidState, StorageError
from tests.sink_steps import PERMIT, SCHEMA, Context, batch_of, prepared, subtask_of


def seen(directory: Path) -> list[int]:
    """What readers see in a directory, sorted; two of them, which must agree."""
    if not directory.exists():
        return []
    table = pq.read_table(directory)
    found: list[int] = sorted(table["n"].to_pylist()) if table.num_columns else []
    try:
        rows = duckdb.sql(f"SELECT n FROM '{directory}/**/*.parquet' ORDER BY n").fetchall()
    except duckdb.IOException:
        rows = []
    assert [n for (n,) in rows] == found
    return found


def visible(directory: Path) -> set[int]:
    """The numbers in all files that are not hidden; quicker than :func:`seen`."""
    return {n for path in directory.glob("[!._]*") for n in pq.read_table(path)["n"].to_pylist()}


def files(directory: Path, ending: str) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.name.endswith(ending))


# Collecting ---------------------------------------------------------------------------------------------------------------


def test_collected_rows_are_there_once_committed_and_once_however_often() -> None:
    sink = CollectSink()
    sink.output_schema(SCHEMA)
    first, second = subtask_of(sink, 0), subtask_of(sink, 1)
    first.process(batch_of(0, 1), 0)
    second.process(batch_of(2), 0)
    second.process(batch_of(), 0)
    rows = pa.concat_tables([prepared(second), prepared(first)])
    assert sink.table().equals(SCHEMA.empty_table())
    for _ in range(2):
        sink.commit(PERMIT, rows)
        assert sink.table().equals(pa.Table.from_batches([batch_of(0, 1, 2)]))
    # What was prepared under an attempt that came to nothing stands in the next one, before what came later.
    tables = [rows]
    for number, attempt in ((3, "c" * 32), (4, "b" * 32)):
        first.process(batch_of(number), 0)
        tables.append(prepared(first, 2, attempt))
    sink.commit(PERMIT, pa.concat_tables(tables))
    assert sink.table()["n"].to_pylist() == [0, 1, 2, 3, 4]


def test_one_object_in_two_places_collects_the_rows_of_both() -> None:
    sink = CollectSink()
    places = [subtask_of(sink, uid=uid) for uid in ("left", "right")]
    for number, opened in enumerate(places):
        opened.process(batch_of(number), 0)
        sink.commit(PERMIT, prepared(opened))
    assert sink.table()["n"].to_pylist() == [0, 1]


def test_a_subtask_that_collected_nothing_prepares_nothing() -> None:
    sink = CollectSink()
    opened = subtask_of(sink)
    assert prepared(opened) is None
    opened.process(batch_of(), 0)
    nothing = prepared(opened)
    assert nothing is not None
    assert nothing.num_rows == 0
    opened.process(batch_of(5), 0)
    # A new activation begins with nothing.
    opened.open(Context())
    assert prepared(opened) is None


def test_large_output_is_collected_in_payloads_of_bounded_size() -> None:
    sink = CollectSink()
    opened = subtask_of(sink)
    batch = pa.record_batch({"n": range(300_000), "text": ["x" * 200] * 300_000})
    opened.process(batch, 0)
    rows = prepared(opened)
    assert rows is not None
    assert rows["number"].to_pylist() == [0, 1]
    assert max(len(payload) for payload in rows["payload"].to_pylist()) < 40 * 2**20
    sink.commit(PERMIT, rows)
    assert sink.table().equals(pa.Table.from_batches([batch]))


def test_a_committable_that_holds_no_rows_is_named_and_nothing_is_taken() -> None:
    sink = CollectSink()
    opened = subtask_of(sink)
    opened.process(batch_of(1), 0)
    rows = prepared(opened)
    assert rows is not None
    broken = rows.set_column(2, rows.schema.field(2), pa.array([7], pa.int64()))
    broken = broken.set_column(3, rows.schema.field(3), pa.array([b"no stream"], pa.binary()))
    with pytest.raises(InvalidState, match="'out' subtask 0, prepared for checkpoint 1"):
        sink.commit(PERMIT, pa.concat_tables([rows, broken]))
    assert sink.table().num_rows == 0


# Files: the steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows_per_file", "row_group_rows"), [(1000, 100), (3, 2), (1, 1), (4, 100)])
def test_files_appear_with_their_commit_and_hold_every_row_once(
    tmp_path: Path, rows_per_file: int, row_group_rows: int
) -> None:
    out = tmp_path / "new" / "out"
    sink = FileSink(out, rows_per_file=rows_per_file, row_group_rows=row_group_rows)
    subtasks = [subtask_of(sink, number) for number in range(3)]
    tables = []
    for number, opened in enumerate(subtasks[:2]):
        for first in range(0, 12, 4):
            opened.process(batch_of(*(2 * n + number for n in range(first, first + 4))), 0)
            assert seen(out) == []
        tables.append(prepared(opened))
        assert seen(out) == []
    assert prepared(subtasks[2]) is None
    rows = pa.concat_tables(tables)
    assert rows.num_rows == 2 * -(-12 // rows_per_file)
    for _ in range(2):
        sink.commit(PERMIT, rows)
        assert seen(out) == list(range(24))
    table = pq.read_table(out)
    assert (table.schema, table["text"].null_count) == (SCHEMA, 8)
    assert pq.ParquetFile(files(out, ".parquet")[0]).metadata.row_group(0).num_rows <= row_group_rows
    assert files(out, ".prepared") == files(out, ".open") == []


def test_a_subtask_without_rows_touches_nothing(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "out")
    opened = subtask_of(sink)
    opened.process(batch_of(), 0)
    assert prepared(opened) is None
    opened.close()
    sink.commit(PERMIT, sink.committable_columns.empty_table())
    assert not (tmp_path / "out").exists()


def test_closing_throws_away_what_no_checkpoint_holds(tmp_path: Path) -> None:
    opened = subtask_of(FileSink(tmp_path, rows_per_file=2))
    opened.process(batch_of(1), 0)
    held = prepared(opened)
    assert held is not None
    opened.process(batch_of(2, 3, 4), 0)
    assert len(files(tmp_path, ".open")) == 2
    opened.close()
    assert files(tmp_path, ".open") == []
    assert [str(path.relative_to(tmp_path)) for path in files(tmp_path, ".prepared")] == held["pending"].to_pylist()


def test_what_two_runs_of_one_subtask_prepare_under_one_attempt_has_names_of_its_own(tmp_path: Path) -> None:
    sink = FileSink(tmp_path)
    tables = []
    for number in (1, 2):
        opened = subtask_of(sink)
        opened.process(batch_of(number), 0)
        tables.append(prepared(opened))
    sink.commit(PERMIT, tables[0])
    assert seen(tmp_path) == [1]


@pytest.mark.parametrize("uid", ["a b/c", "../up", "日本", ".", "x" * 200])
def test_any_uid_makes_a_name_that_stays_in_the_directory(tmp_path: Path, uid: str) -> None:
    out = tmp_path / "out"
    sink = FileSink(out)
    opened = subtask_of(sink, uid=uid)
    opened.process(batch_of(1), 0)
    sink.commit(PERMIT, prepared(opened))
    assert seen(out) == [1]
    assert [path.parent for path in files(tmp_path, ".parquet")] == [out]
    assert len(files(out, ".parquet")[0].name.encode()) < 255


def test_uids_that_look_alike_have_names_of_their_own() -> None:
    uids = ["a b", "a/b", "a-b", "a  b", "x" * 61, "x" * 62, "."]
    assert len({file_name_of(uid) for uid in uids}) == len(uids)


# Files: crashes -----------------------------------------------------------------------------------------------------------


class Crash(Exception):
    """The process is gone."""


class CrashingDirectory(LocalDirectory):
    """Counts what would be asked of the file system and stops before one of them, or after, once."""

    crash_at = -1
    calls = 0

    def step(self) -> None:
        CrashingDirectory.calls += 1
        if CrashingDirectory.calls == self.crash_at:
            raise Crash

    def rename(self, old: str, new: str) -> None:
        self.step()
        super().rename(old, new)
        self.step()

    def link(self, old: str, new: str) -> None:
        self.step()
        super().link(old, new)
        self.step()

    def sync(self, folder: str) -> None:
        self.step()
        super().sync(folder)

    def sync_file(self, name: str) -> int:
        self.step()
        return super().sync_file(name)

    def remove(self, names: Any) -> None:
        super().remove(self._stepping(names))

    def _stepping(self, names: Any) -> Iterator[str]:
        for name in names:
            self.step()
            yield name
        self.step()


def run_to_a_crash(out: Path, crash_at: int) -> int:
    """One job of two checkpoints in two subtasks that dies at some step and is run again. Returns the steps taken."""
    sink = FileSink(out, rows_per_file=2)
    sink._directory = CrashingDirectory(out, durable=False)
    CrashingDirectory.calls, CrashingDirectory.crash_at = 0, crash_at
    published: list[pa.Table] = []
    crashes = 0
    while len(published) < 2:
        try:
            if published:
                sink.commit(PERMIT, published[-1])
            sink.clean("out", len(published), None)
            subtasks = [subtask_of(sink, number) for number in range(2)]
            while len(published) < 2:
                checkpoint_id = len(published) + 1
                committed = {n for id_ in range(1, checkpoint_id) for n in rows_of(id_)}
                assert visible(out) == committed
                for subtask, opened in enumerate(subtasks):
                    opened.process(batch_of(*(n for n in rows_of(checkpoint_id) if n % 2 == subtask)), 0)
                tables = [prepared(opened, checkpoint_id, f"{crashes:032x}") for opened in subtasks]
                assert visible(out) == committed
                published.append(pa.concat_tables(tables))
                sink.commit(PERMIT, published[-1])
        except Crash:
            crashes += 1
    steps, CrashingDirectory.crash_at = CrashingDirectory.calls, -1
    sink.commit(PERMIT, published[-1])
    sink.clean("out", 2, published[-1])
    assert seen(out) == [*rows_of(1), *rows_of(2)]
    assert files(out, ".open") == files(out, ".prepared") == []
    assert crashes == (crash_at > 0)
    return steps


def rows_of(checkpoint_id: int) -> range:
    return range(10 * checkpoint_id, 10 * checkpoint_id + 6)


def test_a_crash_before_or_after_any_step_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    steps = run_to_a_crash(tmp_path / "whole", -1)
    assert steps > 40
    for crash_at in range(1, steps + 1):
        try:
            run_to_a_crash(tmp_path / str(crash_at), crash_at)
        except (AssertionError, CheckpointError) as error:
            raise AssertionError(f"after a crash at step {crash_at}") from error


def test_what_is_prepared_is_durable_before_it_is_named_and_committed_before_it_is_unlinked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def synced(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        told.append(f"sync {path.suffix or path.name}")

    class Telling(LocalDirectory):
        def rename(self, old: str, new: str) -> None:
            told.append("rename")
            super().rename(old, new)

        def link(self, old: str, new: str) -> None:
            told.append("link")
            super().link(old, new)

        def remove(self, names: Any) -> None:
            told.append("remove")
            super().remove(names)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(local_directory, "_DURABLE_NAMES", {tmp_path, *tmp_path.parents})
    sink = FileSink(tmp_path / "made" / "out")
    sink._directory = Telling(tmp_path / "made" / "out")
    opened = subtask_of(sink)
    opened.process(batch_of(1), 0)
    # The folders .pending/out, .pending, out and made are new, and so are their names in what holds them.
    assert sorted(told) == sorted(["sync .pending", "sync out", "sync made", f"sync {tmp_path.name}"])
    told.clear()
    # Whoever made them may have died before they were durable; once in a process is enough.
    sink._directory.make(".pending/out")
    assert told == []
    local_directory._DURABLE_NAMES.clear()
    sink._directory.make(".pending/out")
    assert told[:4] == ["sync .pending", "sync out", "sync made", f"sync {tmp_path.name}"]
    told.clear()
    rows = prepared(opened)
    assert told == ["sync .open", "rename", "sync out"]
    told.clear()
    sink.commit(PERMIT, rows)
    assert told == ["link", "sync out", "remove"]


# Files: cleaning and damage -----------------------------------------------------------------------------------------------


def test_cleaning_removes_what_no_checkpoint_holds_and_never_what_the_next_one_may(tmp_path: Path) -> None:
    sink = FileSink(tmp_path)
    tables = {}
    for checkpoint_id in (3, 4, 5):
        for attempt in ("a" * 32, "b" * 32):
            opened = subtask_of(sink)
            opened.process(batch_of(checkpoint_id), 0)
            tables[checkpoint_id, attempt[0]] = prepared(opened, checkpoint_id, attempt)
    other = subtask_of(sink, uid="other")
    other.process(batch_of(9), 0)
    held = prepared(other, 1)
    subtask_of(sink).process(batch_of(1), 0)
    carried = pa.concat_tables([tables[3, "b"], tables[4, "a"]])
    removed = sink.clean("out", 4, carried)
    gone = [tables[3, "a"]["pending"][0].as_py(), tables[4, "b"]["pending"][0].as_py()]
    assert sorted(name for name in removed if name.endswith(".prepared")) == sorted(gone)
    assert sum(name.endswith(".open") for name in removed) == len(removed) - 2 == 1
    sink.commit(PERMIT, pa.concat_tables([carried, tables[5, "a"], tables[5, "b"], held]))
    assert seen(tmp_path) == [3, 4, 5, 5, 9]
    assert FileSink(tmp_path / "nowhere").clean("out", 4) == []


def test_a_run_whose_open_file_was_cleaned_away_fails_before_it_promises_anything(tmp_path: Path) -> None:
    sink = FileSink(tmp_path)
    old = subtask_of(sink)
    old.process(batch_of(1), 0)
    assert len(sink.clean("out", 7)) == 1
    with pytest.raises(StorageError, match="cannot sync"):
        prepared(old, 8)
    old.close()


def test_a_file_that_is_lost_or_another_is_told_and_not_passed_over(tmp_path: Path) -> None:
    sink = FileSink(tmp_path)
    opened = subtask_of(sink)
    opened.process(batch_of(1), 0)
    rows = prepared(opened)
    assert rows is not None
    pending = tmp_path / rows["pending"][0].as_py()
    bytes_ = pending.read_bytes()
    pending.unlink()
    with pytest.raises(StorageError, match="its 1 row is lost"):
        sink.commit(PERMIT, rows)
    pending.write_bytes(bytes_[:-1])
    with pytest.raises(StorageError, match=f"has {len(bytes_) - 1} bytes and was prepared with {len(bytes_)}"):
        sink.commit(PERMIT, rows)


def test_a_full_disk_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = subtask_of(FileSink(tmp_path))
    opened.process(batch_of(1), 0)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"cannot sync .*No space left.*has room"):
        prepared(opened)


def test_a_directory_without_syncs_for_tests_still_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(descriptor: int) -> None:
        raise AssertionError("synced")

    monkeypatch.setattr(os, "fsync", never)
    sink = FileSink(tmp_path, durable=False)
    opened = subtask_of(sink)
    opened.process(batch_of(1), 0)
    sink.commit(PERMIT, prepared(opened))
    assert seen(tmp_path) == [1]


# Files: what is asked for -------------------------------------------------------------------------------------------------


def test_a_directory_may_be_given_as_a_url(tmp_path: Path) -> None:
    sink = FileSink(f"file://{tmp_path}/out")
    opened = subtask_of(sink)
    opened.process(batch_of(1), 0)
    sink.commit(PERMIT, prepared(opened))
    assert seen(tmp_path / "out") == [1]


@pytest.mark.parametrize("compression", ["none", "ZSTD", "lz4", "snappy", "gzip", "brotli"])
def test_every_compression_that_is_known_is_written(tmp_path: Path, compression: str) -> None:
    sink = FileSink(tmp_path, compression=compression)
    opened = subtask_of(sink)
    opened.process(batch_of(1), 0)
    sink.commit(PERMIT, prepared(opened))
    column = pq.ParquetFile(files(tmp_path, ".parquet")[0]).metadata.row_group(0).column(0)
    assert column.compression == {"none": "UNCOMPRESSED"}.get(compression, compression.upper())


@pytest.mark.parametrize(
    ("address", "options", "why"),
    [
        ("out", {"compression": "foo"}, "compression is 'foo'. Known are brotli, gzip, lz4, none, snappy, zstd"),
        ("out", {"compression": "lzo"}, "Known are"),
        ("out", {"compression": None}, "compression is None. Known are"),
        ("out", {"endpoint_url": "http://localhost"}, "no option endpoint_url. It takes none"),
        ("out", {"rows_per_file": 0}, "rows_per_file is 0"),
        ("memory://out", {}, "no file sink for memory://.*Known are file, s3"),
        (Path("s3://bucket/out"), {}, "one slash less. Give the URL as a str"),
        ("s3://bucket/out", {"endpoint_ulr": "http://localhost"}, "no option endpoint_ulr. Known are.*endpoint_url"),
        ("s3://user:word@bucket/out", {}, "names a bucket and nothing else"),
        ("s3://bucket/a//b", {}, "no address"),
    ],
)
def test_what_is_no_sink_is_refused_when_it_is_made(address: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        FileSink(address, **options)
    assert not Path("out").exists()

"""The sinks into files and memory: what is committed is seen exactly once, and nothing else."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stateformat.backends.connectors import CollectSink, FileSink
from stateformat.backends.connectors.sinks import local_directory, s3_directory
from stateformat.backends.connectors.sinks.local_directory import LocalDirectory
from stateformat.backends.connectors.sinks.part_names import file_name_of
from stateformat.errors import ErrorKind, InvalidInput, InvalidState, PublishConflict, StorageError
from tests.connectors.sink_s3 import Inside, Outside
from tests.connectors.sink_steps import (
    ATTEMPTS,
    PERMIT,
    SCHEMA,
    Context,
    Crash,
    batch_of,
    check_every_crash,
    prepared,
    prepared_of,
    rows_until,
    run_to_the_end,
    snapshot,
    subtask_of,
)

Place = Inside | Outside


@pytest.fixture
def inside(tmp_path: Path) -> Inside:
    return Inside(tmp_path / "new" / "out")


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, inside: Inside, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(s3_directory, "PAUSES_SECONDS", (0.0,))
    return inside if request.param == "local" else Outside(request.getfixturevalue("moto"))


# Collecting


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
    # What was prepared under an attempt that came to nothing stands before what came later.
    tables = [rows]
    for number, attempt in ((3, ATTEMPTS[2]), (4, ATTEMPTS[1])):
        first.process(batch_of(number), 0)
        tables.append(prepared(first, 2, attempt))
    sink.commit(PERMIT, pa.concat_tables(tables))
    assert sink.table()["n"].to_pylist() == [0, 1, 2, 3, 4]


def test_one_object_in_two_places_collects_the_rows_of_both() -> None:
    sink = CollectSink()
    sink.output_schema(SCHEMA)
    for number, uid in enumerate(("left", "right")):
        sink.commit(PERMIT, prepared_of(sink, number, uid=uid))
    assert sink.table()["n"].to_pylist() == [0, 1]


def test_collected_rows_that_do_not_fit_the_columns_are_named_with_their_checkpoint() -> None:
    sink = CollectSink()
    sink.output_schema(pa.schema({"n": pa.int8(), "text": pa.string()}))
    sink.commit(PERMIT, prepared_of(sink, 7, checkpoint_id=2))
    assert sink.table().to_pylist() == [{"n": 7, "text": "日 7"}]
    sink.commit(PERMIT, prepared_of(sink, 300, checkpoint_id=3))
    with pytest.raises(InvalidState, match=r"'out' subtask 0 committed rows of checkpoint 3 .*: column 'n'.*300"):
        sink.table()
    sink.output_schema(pa.schema({"n": pa.int64()}))
    with pytest.raises(InvalidState, match=r"checkpoint 2 with columns n int64, text string, .* has n int64:"):
        sink.table()


def test_a_subtask_that_collected_nothing_prepares_nothing() -> None:
    opened = subtask_of(CollectSink())
    assert snapshot(opened) is None
    opened.process(batch_of(), 0)
    assert prepared(opened).num_rows == 0
    opened.process(batch_of(5), 0)
    opened.open(Context())
    assert snapshot(opened) is None, "it begins with nothing"


def test_large_output_is_collected_in_payloads_of_bounded_size() -> None:
    sink = CollectSink()
    batch = pa.record_batch({"n": range(300_000), "text": ["x" * 200] * 300_000})
    sink.output_schema(batch.schema)
    rows = prepared_of(sink, batch)
    assert rows["number"].to_pylist() == [0, 1]
    assert max(len(payload) for payload in rows["payload"].to_pylist()) < 40 * 2**20
    sink.commit(PERMIT, rows)
    assert sink.table().equals(pa.Table.from_batches([batch]))


def test_a_committable_that_holds_no_rows_is_named_and_nothing_is_taken() -> None:
    sink = CollectSink()
    rows = prepared_of(sink, 1)
    broken = rows.set_column(2, rows.schema.field(2), pa.array([7], pa.int64()))
    broken = broken.set_column(3, rows.schema.field(3), pa.array([b"no stream"], pa.binary()))
    with pytest.raises(InvalidState, match="'out' subtask 0, prepared for checkpoint 1"):
        sink.commit(PERMIT, pa.concat_tables([rows, broken]))
    assert sink.table().num_rows == 0


# Files, in a directory and in a bucket


@pytest.mark.parametrize(("rows_per_file", "row_group_rows"), [(1000, 100), (3, 2), (1, 1), (4, 100)])
def test_files_appear_with_their_commit_and_hold_every_row_once(
    place: Place, rows_per_file: int, row_group_rows: int
) -> None:
    sink = place.sink(rows_per_file=rows_per_file, row_group_rows=row_group_rows)
    subtasks = [subtask_of(sink, number) for number in range(3)]
    tables = []
    for number, opened in enumerate(subtasks[:2]):
        for first in range(0, 12, 4):
            opened.process(batch_of(*(2 * n + number for n in range(first, first + 4))), 0)
            assert place.seen() == []
        tables.append(prepared(opened))
    assert snapshot(subtasks[2]) is None
    rows = pa.concat_tables(tables)
    assert rows.num_rows == len(place.pending()) == 2 * -(-12 // rows_per_file)
    assert place.paths() == []
    for _ in range(2):
        sink.commit(PERMIT, rows)
        assert place.seen() == list(range(24))
        assert place.paths() == sorted(rows["path"].to_pylist())
    found = place.tables()
    assert {table.schema for table in found} == {SCHEMA}
    assert sum(table["text"].null_count for table in found) == 8
    path, size = (rows[name][0].as_py() for name in ("path", "size_bytes"))
    body = place.body(path) if isinstance(place, Outside) else (place.root / path).read_bytes()
    assert len(body) == size
    assert pq.ParquetFile(pa.BufferReader(body)).metadata.row_group(0).num_rows <= row_group_rows
    assert place.pending() == []


@pytest.mark.parametrize("rows_per_file", [2, 100])
def test_a_file_that_another_run_took_for_left_behind_is_a_conflict_and_no_full_disk(
    tmp_path: Path, rows_per_file: int
) -> None:
    opened = subtask_of(FileSink(tmp_path, rows_per_file=rows_per_file))
    opened.process(batch_of(1, 2, 3), 0)
    FileSink(tmp_path).clean("out", 0)
    with pytest.raises(PublishConflict, match=r"\.open, which this run was writing, is gone: another run of the job"):
        prepared(opened)
    opened.close()


def test_closing_throws_away_what_no_checkpoint_holds(place: Place) -> None:
    sink = place.sink(rows_per_file=2)
    opened = subtask_of(sink)
    opened.process(batch_of(1), 0)
    held = prepared(opened)
    opened.process(batch_of(2, 3, 4), 0)
    if isinstance(place, Inside):
        assert len(place.files(".open")) == 2
    opened.close()
    assert len(place.pending()) == 1
    sink.commit(PERMIT, held)
    assert place.seen() == [1]
    assert place.pending() == []
    if isinstance(place, Inside):
        assert place.files(".open") == []


def test_what_two_runs_of_one_subtask_prepare_under_one_attempt_has_names_of_its_own(place: Place) -> None:
    sink = place.sink()
    first, second = prepared_of(sink, 1), prepared_of(sink, 2)
    sink.commit(PERMIT, second)
    assert place.seen() == [2]
    sink.commit(PERMIT, first)
    assert place.seen() == [1, 2]


def test_cleaning_removes_what_no_checkpoint_holds_and_never_what_the_next_one_may(place: Place) -> None:
    sink = place.sink()
    tables = {
        (id_, attempt): prepared_of(sink, id_, checkpoint_id=id_, attempt=attempt)
        for id_ in (3, 4, 5)
        for attempt in ATTEMPTS[:2]
    }
    held = [prepared_of(sink, 9, uid=uid) for uid in ("other", "out-00001", "ou")]
    carried = pa.concat_tables([tables[3, ATTEMPTS[1]], tables[4, ATTEMPTS[0]]])
    gone = [tables[3, ATTEMPTS[0]], tables[4, ATTEMPTS[1]]]
    expected = [table["pending"][0].as_py() for table in gone]
    if isinstance(place, Outside):
        # An upload that was begun twice has a twin under the same path.
        twin = tables[3, ATTEMPTS[1]]["path"][0].as_py()
        for name in (twin, "somebody else's"):
            place.server.client.create_multipart_upload(Bucket="checkpoints-bucket", Key=f"{place.prefix}/{name}")
        expected = [twin, *(table["path"][0].as_py() for table in gone)]
    else:
        # A run that still lives fails before it has promised anything.
        living = subtask_of(sink)
        living.process(batch_of(8), 0)
        expected += [str(path.relative_to(place.root)) for path in place.files(".open")]
    assert sorted(sink.clean("out", 4, carried)) == sorted(expected)
    if isinstance(place, Inside):
        with pytest.raises(PublishConflict, match="another run"):
            prepared(living, 8)
        living.close()
    sink.commit(PERMIT, pa.concat_tables([carried, tables[5, ATTEMPTS[0]], tables[5, ATTEMPTS[1]], *held]))
    assert place.pending() == ([] if isinstance(place, Inside) else ["somebody else's"])
    assert place.seen() == [3, 4, 5, 5, 9, 9, 9]
    assert sink.clean("out", 9, carried) == []
    with pytest.raises(StorageError, match="its 1 row is lost") as raised:
        sink.commit(PERMIT, gone[1])
    assert raised.value.kind is ErrorKind.OBJECT_MISSING
    assert place.seen() == [3, 4, 5, 5, 9, 9, 9]


# Files in a directory


class CrashingDirectory(LocalDirectory):
    """Counts its steps, and dies once before one of them, or after."""

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
        for name in names:
            self.step()
            super().remove([name])
        self.step()


def test_a_crash_before_or_after_any_step_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    counts = (6, 6)

    def run(crash_at: int) -> int:
        here = Inside(tmp_path / str(crash_at))
        sink = here.sink(rows_per_file=2)
        sink._directory = CrashingDirectory(here.root, durable=False)
        CrashingDirectory.calls, CrashingDirectory.crash_at = 0, crash_at
        steps = []

        def look(published: Sequence[pa.Table]) -> None:
            assert sorted(n for t in here.tables() for n in t["n"].to_pylist()) == rows_until(len(published), counts)

        def ended() -> None:
            steps.append(CrashingDirectory.calls)
            CrashingDirectory.crash_at = -1

        assert run_to_the_end(sink, look, Crash, counts=counts, subtasks=2, ended=ended) == (crash_at > 0)
        assert here.files(".open") == here.files(".prepared") == []
        return steps[0]

    check_every_crash(run, 40)


def test_what_is_prepared_is_durable_before_it_is_named_and_committed_before_it_is_unlinked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def synced(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        told.append(f"sync {path.suffix or path.name}")

    def expect(*steps: str) -> None:
        assert told == list(steps)
        told.clear()

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(local_directory, "_DURABLE_NAMES", {tmp_path, *tmp_path.parents})
    for name in ("rename", "link", "remove"):
        call = getattr(LocalDirectory, name)
        monkeypatch.setattr(LocalDirectory, name, lambda *a, call=call, name=name: (told.append(name), call(*a))[1])
    sink = FileSink(tmp_path / "made" / "out")
    opened = subtask_of(sink)
    opened.process(batch_of(1), 0)
    # The folders .pending/out, .pending, out and made are new, and so are their names in what holds
    # them.
    made = ["sync .pending", "sync out", "sync made", f"sync {tmp_path.name}"]
    assert sorted(told) == sorted(made)
    told.clear()
    # Their maker may have died before they were durable; once in a process is enough.
    directory: Any = sink._directory
    directory.make(".pending/out")
    expect()
    local_directory._DURABLE_NAMES.clear()
    directory.make(".pending/out")
    assert told[:4] == made
    told.clear()
    rows = prepared(opened)
    expect("sync .open", "rename", "sync out")
    sink.commit(PERMIT, rows)
    expect("link", "sync out", "remove")


def test_a_subtask_without_rows_touches_nothing(inside: Inside) -> None:
    sink = inside.sink()
    opened = subtask_of(sink)
    opened.process(batch_of(), 0)
    assert snapshot(opened) is None
    opened.close()
    sink.commit(PERMIT, sink.committable_columns.empty_table())
    assert sink.clean("out", 4) == []
    assert not inside.root.exists()


@pytest.mark.parametrize("uid", ["a b/c", "../up", "日本", ".", "x" * 200])
def test_any_uid_makes_a_name_that_stays_in_the_directory(inside: Inside, uid: str) -> None:
    sink = inside.sink()
    sink.commit(PERMIT, prepared_of(sink, 1, uid=uid))
    assert inside.seen() == [1]
    (path,) = inside.root.parent.rglob("*.parquet")
    assert path.parent == inside.root
    assert len(path.name.encode()) < 255


def test_uids_that_look_alike_have_names_of_their_own() -> None:
    uids = ["a b", "a/b", "a-b", "a  b", "x" * 61, "x" * 62, "."]
    assert len({file_name_of(uid) for uid in uids}) == len(uids)


def test_a_file_that_is_lost_or_another_is_told_and_not_passed_over(tmp_path: Path) -> None:
    sink = FileSink(tmp_path)
    rows = prepared_of(sink, 1)
    pending = tmp_path / rows["pending"][0].as_py()
    body = pending.read_bytes()
    pending.unlink()
    with pytest.raises(StorageError, match="its 1 row is lost"):
        sink.commit(PERMIT, rows)
    pending.write_bytes(body[:-1])
    with pytest.raises(StorageError, match=f"has {len(body) - 1} bytes and was prepared with {len(body)}"):
        sink.commit(PERMIT, rows)


def test_a_full_disk_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = subtask_of(FileSink(tmp_path))
    opened.process(batch_of(1), 0)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"cannot sync .*No space left.*has room"):
        prepared(opened)


def test_a_directory_may_be_a_url_and_without_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("synced"))
    sink = FileSink(f"file://{tmp_path}/out", durable=False)
    sink.commit(PERMIT, prepared_of(sink, 1))
    assert Inside(tmp_path / "out").seen() == [1]


@pytest.mark.parametrize("compression", ["none", "ZSTD", "lz4", "snappy", "gzip", "brotli"])
def test_every_compression_that_is_known_is_written(inside: Inside, compression: str) -> None:
    sink = inside.sink(compression=compression)
    sink.commit(PERMIT, prepared_of(sink, 1))
    column = pq.ParquetFile(inside.files(".parquet")[0]).metadata.row_group(0).column(0)
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
        ("gs://bucket/out", {}, "no file sink for gs://.*Known are file, s3, s3a, s3n"),
        (Path("s3://bucket/out"), {}, "one slash fewer. Give the URL as text"),
        *(
            (f"{scheme}://bucket/out", {"endpoint_ulr": "x"}, "no option endpoint_ulr. Known are.*endpoint_url")
            for scheme in ("s3", "s3a", "S3N")
        ),
        ("s3://user:word@bucket/out", {}, "names a bucket and nothing else"),
        ("s3://bucket/a//b", {}, "no address"),
    ],
)
def test_what_is_no_sink_is_refused_when_it_is_made(address: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        FileSink(address, **options)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "kind", [pa.month_day_nano_interval(), pa.struct([]), pa.list_(pa.month_day_nano_interval())], ids=str
)
def test_a_type_that_parquet_cannot_hold_is_refused_when_the_job_is_built(tmp_path: Path, kind: pa.DataType) -> None:
    sink = FileSink(tmp_path / "out")
    with pytest.raises(InvalidInput, match=r"column 'gap' of .*out is .*, which Parquet cannot hold"):
        sink.output_schema(pa.schema({"n": pa.int64(), "gap": kind}))
    sink.output_schema(pa.schema({"n": pa.int64(), "gap": pa.duration("us"), "half": pa.float16()}))

"""The file sink on S3: nothing is seen before its commit, whoever dies at whichever request, and damage is told."""

from __future__ import annotations

import errno
import json
import multiprocessing
import pickle
import random
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import stateformat as sf
from stateformat.backends.connectors import FileSink, RateSource
from stateformat.backends.connectors.sinks import s3_directory
from stateformat.backends.connectors.sinks.uploads import Upload
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import LocalRuntime
from stateformat.backends.runtime import JobOutcome
from stateformat.backends.storage.s3 import client as s3_client
from stateformat.errors import CheckpointError, ErrorKind, InvalidInput, StorageError
from tests.servers.fake_s3 import IMPATIENT
from tests.servers.server import BUCKET, SMALL_PART_BYTES, S3Server
from tests.sink_s3 import Crash, Mortal, Outside, before_the_first, run_to_the_end
from tests.sink_steps import PERMIT, SCHEMA, batch_of, prepared, subtask_of

pytestmark = pytest.mark.s3


@pytest.fixture
def outside(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> Outside:
    monkeypatch.setattr(s3_directory, "PAUSES_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(s3_client, "_PAUSE_SECONDS", 0.001)
    return Outside(moto)


def one(sink: FileSink, *numbers: int, checkpoint_id: int = 1, attempt: str = "a" * 32, uid: str = "out") -> pa.Table:
    """What a subtask prepares of some rows."""
    opened = subtask_of(sink, uid=uid)
    opened.process(batch_of(*numbers), 0)
    table = prepared(opened, checkpoint_id, attempt)
    assert table is not None
    return table


@pytest.mark.parametrize(("rows_per_file", "row_group_rows"), [(1000, 100), (3, 2)])
def test_files_appear_with_their_commit_and_hold_every_row_once(
    outside: Outside, rows_per_file: int, row_group_rows: int
) -> None:
    sink = outside.sink(rows_per_file=rows_per_file, row_group_rows=row_group_rows)
    subtasks = [subtask_of(sink, number) for number in range(3)]
    tables = []
    for number, opened in enumerate(subtasks[:2]):
        for first in range(0, 12, 4):
            opened.process(batch_of(*(2 * n + number for n in range(first, first + 4))), 0)
            assert outside.uploads() == outside.paths() == [] or number
        tables.append(prepared(opened))
        assert outside.paths() == []
    assert prepared(subtasks[2]) is None
    rows = pa.concat_tables(tables)
    assert rows.num_rows == 2 * -(-12 // rows_per_file)
    assert sorted(path for path, _ in outside.uploads()) == sorted(rows["path"].to_pylist())
    for _ in range(2):
        sink.commit(PERMIT, rows)
        assert outside.seen() == list(range(24))
    found = outside.tables()
    assert {table.schema for table in found} == {SCHEMA}
    assert sum(table["text"].null_count for table in found) == 8
    body = outside.body(rows["path"][0].as_py())
    assert (len(body), found[0].num_rows) == (rows["size_bytes"][0].as_py(), rows["rows"][0].as_py())
    assert pq.ParquetFile(pa.BufferReader(body)).metadata.row_group(0).num_rows <= row_group_rows
    assert outside.uploads() == []


@pytest.mark.parametrize("memory_bytes", [1, 1 << 30])
def test_a_large_file_goes_up_in_parts_from_memory_or_disk(
    outside: Outside, monkeypatch: pytest.MonkeyPatch, memory_bytes: int
) -> None:
    monkeypatch.setattr(s3_directory, "MEMORY_BYTES", memory_bytes)
    monkeypatch.setattr(s3_directory, "PART_BYTES", SMALL_PART_BYTES)
    draw = random.Random(3)
    table = pa.table({"n": range(1000), "raw": [draw.randbytes(700) for _ in range(1000)]})
    sink = outside.sink(row_group_rows=100)
    opened = subtask_of(sink)
    for batch in table.to_batches(max_chunksize=90):
        opened.process(batch, 0)
    rows = prepared(opened)
    assert rows is not None
    assert len(Upload(**_pending(rows)).tags) == -(-rows["size_bytes"][0].as_py() // SMALL_PART_BYTES) > 10
    sink.commit(PERMIT, rows)
    assert outside.tables() == [table]
    # No more parts than a server takes: they grow.
    monkeypatch.setattr(s3_directory, "PARTS_MAX", 4)
    for batch in table.to_batches():
        opened.process(batch, 0)
    rows = prepared(opened, 2)
    assert rows is not None
    assert len(Upload(**_pending(rows)).tags) == 4
    sink.commit(PERMIT, rows)
    assert outside.tables() == [table, table]


def _pending(rows: pa.Table) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(rows["pending"][0].as_py())
    return found


def test_a_subtask_without_rows_sends_nothing() -> None:
    # Nobody listens there, so anything that was sent would fail.
    sink = FileSink(f"s3://{BUCKET}/x", endpoint_url="http://127.0.0.1:9", key="k", secret="s")
    opened = subtask_of(sink)
    opened.process(batch_of(), 0)
    assert prepared(opened) is None
    opened.process(batch_of(1), 0)
    opened.close()
    sink.commit(PERMIT, sink.committable_columns.empty_table())


def test_a_repeated_commit_is_one_look_and_a_first_one_four_requests(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    call = s3_client.S3Client.call

    def told(self: Any, method: str, **arguments: Any) -> Any:
        asked.append(method)
        return call(self, method, **arguments)

    sink = outside.sink()
    rows = one(sink, 1)
    monkeypatch.setattr(s3_client.S3Client, "call", told)
    sink.commit(PERMIT, rows)
    assert asked == ["head_object", "list_multipart_uploads", "complete_multipart_upload", "head_object"]
    asked.clear()
    sink.commit(PERMIT, rows)
    assert asked == ["head_object"]


def test_what_has_gone_up_takes_no_room_on_the_worker(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[s3_directory._Spool] = []

    class Told(s3_directory._Spool):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(s3_directory, "_Spool", Told)
    opened = subtask_of(outside.sink(rows_per_file=2))
    opened.process(batch_of(1, 2, 3), 0)
    assert [spool.file.closed for spool in made] == [False, False]
    prepared(opened)
    opened.process(batch_of(4, 5, 6), 0)
    assert [spool.file.closed for spool in made] == [True, True, False, False]
    opened.close()
    assert all(spool.file.closed for spool in made)


def test_closing_throws_away_what_no_checkpoint_holds(outside: Outside) -> None:
    sink = outside.sink(rows_per_file=2)
    opened = subtask_of(sink)
    opened.process(batch_of(1), 0)
    held = prepared(opened)
    opened.process(batch_of(2, 3, 4), 0)
    opened.close()
    sink.commit(PERMIT, held)
    assert outside.seen() == [1]
    assert outside.uploads() == []


def test_what_two_runs_of_one_subtask_prepare_under_one_attempt_has_names_of_its_own(outside: Outside) -> None:
    sink = outside.sink()
    first, second = one(sink, 1), one(sink, 2)
    sink.commit(PERMIT, second)
    assert outside.seen() == [2]
    sink.commit(PERMIT, first)
    assert outside.seen() == [1, 2]


# Crashes and rivals -------------------------------------------------------------------------------------------------------


def test_a_crash_before_or_after_any_request_loses_nothing_and_repeats_nothing(
    moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    mortal = Mortal(monkeypatch)

    def run(crash_at: int) -> int:
        outside = Outside(moto)
        mortal.live(crash_at)
        sink = outside.sink(rows_per_file=2)
        crashes = run_to_the_end(outside, sink, Crash, mortal.revive, mortal.live_for_ever)
        assert crashes == (crash_at > 0)
        return mortal.counted

    moments = run(-1)
    assert moments > 30
    for crash_at in range(1, moments + 1):
        try:
            run(crash_at)
        except (AssertionError, CheckpointError) as error:
            raise AssertionError(f"after a crash at moment {crash_at}") from error


@pytest.mark.parametrize("method", ["complete_multipart_upload", "head_object"])
def test_another_driver_commits_in_between(outside: Outside, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    ours, theirs = outside.sink(), outside.sink()
    rows = one(ours, 1, 2)
    with before_the_first(monkeypatch, method, lambda: theirs.commit(PERMIT, rows)):
        ours.commit(PERMIT, rows)
    assert outside.seen() == [1, 2]


def test_a_driver_waits_for_the_object_that_another_is_completing(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = outside.sink()
    rows = one(sink, 1)
    ((path, upload_id),) = outside.uploads()
    held = {"Bucket": BUCKET, "Key": f"{outside.prefix}/{path}"}
    parts = [{"PartNumber": 1, "ETag": Upload(**_pending(rows)).tags[0]}]
    client, looks = outside.server.client, []
    call = s3_client.S3Client.call

    def slow_server(self: Any, method: str, **arguments: Any) -> Any:
        """Another driver's request is taken, and what it makes is not there before the second look."""
        if method == "complete_multipart_upload" and not looks:
            arguments["UploadId"] = "taken"
        if method == "head_object":
            looks.append(method)
            if len(looks) == 2:
                client.complete_multipart_upload(**held, UploadId=upload_id, MultipartUpload={"Parts": parts})
        return call(self, method, **arguments)

    monkeypatch.setattr(s3_client.S3Client, "call", slow_server)
    sink.commit(PERMIT, rows)
    assert len(looks) == 2
    assert outside.seen() == [1]


def test_an_upload_that_fails_leaves_nothing_of_any_file(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_directory, "PART_BYTES", SMALL_PART_BYTES)
    sink = outside.sink(rows_per_file=1, config_kwargs=IMPATIENT)
    opened = subtask_of(sink)
    opened.process(batch_of(1, 2), 0)
    begin, sent = s3_client.S3Client.begin, []

    def spoilt(self: Any, method: str, **arguments: Any) -> Any:
        """The second file's part is refused."""
        sent.append(method)
        if len(sent) == 2:
            arguments["UploadId"] = "none"
        return begin(self, method, **arguments)

    monkeypatch.setattr(s3_client.S3Client, "begin", spoilt)
    with pytest.raises(StorageError, match="cannot write part-"):
        prepared(opened)
    assert sent == ["upload_part"] * 2
    assert outside.uploads() == outside.paths() == []
    # Nothing was thrown away: the snapshot may be tried again.
    sink.commit(PERMIT, prepared(opened, 2))
    assert outside.seen() == [1, 2]


# Cleaning and damage ------------------------------------------------------------------------------------------------------


def test_cleaning_aborts_what_no_checkpoint_holds_and_never_what_the_next_one_may(outside: Outside) -> None:
    sink = outside.sink()
    tables = {
        (id_, attempt): one(sink, id_, checkpoint_id=id_, attempt=attempt * 32)
        for id_ in (3, 4, 5)
        for attempt in ("a", "b")
    }
    held = [one(sink, 9, uid=uid) for uid in ("other", "out-00001", "ou")]
    carried = pa.concat_tables([tables[3, "b"], tables[4, "a"]])
    # An upload whose begin was told twice to the server has a twin under the same path.
    twin = tables[3, "b"]["path"][0].as_py()
    outside.server.client.create_multipart_upload(Bucket=BUCKET, Key=f"{outside.prefix}/{twin}")
    outside.server.client.create_multipart_upload(Bucket=BUCKET, Key=f"{outside.prefix}/somebody else's")
    outside.put("README", b"x")
    removed = sink.clean("out", 4, carried)
    assert removed == sorted([tables[3, "a"]["path"][0].as_py(), twin, tables[4, "b"]["path"][0].as_py()])
    sink.commit(PERMIT, pa.concat_tables([carried, tables[5, "a"], tables[5, "b"], *held]))
    assert [path for path, _ in outside.uploads()] == ["somebody else's"]
    outside.server.client.delete_object(Bucket=BUCKET, Key=f"{outside.prefix}/README")
    assert outside.seen() == [3, 4, 5, 5, 9, 9, 9]
    assert sink.clean("out", 9, carried) == []
    with pytest.raises(StorageError, match="its 1 row is lost") as raised:
        sink.commit(PERMIT, tables[4, "b"])
    assert raised.value.kind is ErrorKind.OBJECT_MISSING
    assert outside.seen() == [3, 4, 5, 5, 9, 9, 9]


def test_an_object_that_is_lost_or_another_is_told_and_not_passed_over(outside: Outside) -> None:
    sink = outside.sink()
    rows, path = one(sink, 1), ""
    sink.commit(PERMIT, rows)
    (path,) = outside.paths()
    body = outside.body(path)
    outside.put(path, body[:-1])
    with pytest.raises(StorageError, match=f"has {len(body) - 1} bytes and was prepared with {len(body)}") as raised:
        sink.commit(PERMIT, rows)
    assert raised.value.kind is ErrorKind.OBJECT_SIZE_DIFFERS
    for metadata in ({}, {s3_directory.DIGEST: "0" * 32}):
        outside.put(path, body[:-1] + b"?", Metadata=metadata)
        with pytest.raises(StorageError, match="in its metadata and was prepared with") as raised:
            sink.commit(PERMIT, rows)
        assert raised.value.kind is ErrorKind.OBJECT_DIGEST_DIFFERS
    outside.server.client.delete_object(Bucket=BUCKET, Key=f"{outside.prefix}/{path}")
    with pytest.raises(StorageError, match="rule of the bucket that aborts unfinished uploads"):
        sink.commit(PERMIT, rows)


def test_what_was_prepared_in_a_local_directory_is_not_taken_for_an_upload(outside: Outside, tmp_path: Any) -> None:
    rows = one(FileSink(tmp_path), 1)
    with pytest.raises(InvalidInput, match=r"Commit it once with the directory under which it was prepared"):
        outside.sink().commit(PERMIT, rows)
    rows = one(outside.sink(), 1)
    with pytest.raises(StorageError, match="its 1 row is lost"):
        FileSink(tmp_path).commit(PERMIT, rows)


def test_a_full_disk_of_the_worker_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(s3_directory._Spool):
        def write(self, data: Any, /) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    class Filling(s3_directory._Spool):
        def write(self, data: Any, /) -> int:
            if self.size_bytes:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(s3_directory, "_Spool", Full)
    opened = subtask_of(FileSink("s3://bucket/out", row_group_rows=1))
    with pytest.raises(StorageError, match=r"cannot keep a file for S3 in .*No space left.*set TMPDIR"):
        opened.process(batch_of(1), 0)
    monkeypatch.undo()
    monkeypatch.setattr(s3_directory, "_Spool", Filling)
    opened = subtask_of(FileSink("s3://bucket/out", row_group_rows=1))
    with pytest.raises(StorageError, match="No space left"):
        opened.process(batch_of(1), 0)
    opened.close()


def test_a_bucket_that_is_not_there_is_told_when_the_run_begins_and_when_it_commits(moto: S3Server) -> None:
    sink = FileSink("s3://no-such-bucket/out", **moto.options(config_kwargs=IMPATIENT))
    with pytest.raises(StorageError, match=r"no bucket 'no-such-bucket'\. Create it"):
        sink.clean("out", 0)
    rows = one(Outside(moto).sink(), 1)
    with pytest.raises(StorageError, match=r"no bucket 'no-such-bucket'\. Create it"):
        sink.commit(PERMIT, rows)


# Processes ----------------------------------------------------------------------------------------------------------------


def in_a_child(sink: FileSink, number: int) -> pa.Table:
    return one(sink, number)


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_prototype_is_sent_to_another_process_which_makes_clients_of_its_own(outside: Outside, way: str) -> None:
    sink = outside.sink()
    sink.commit(PERMIT, one(sink, 1))
    with multiprocessing.get_context(way).Pool(1) as pool:
        rows = pool.apply(in_a_child, (sink, 2))
        pool.close()
        pool.join()
    sink.commit(PERMIT, rows)
    assert outside.seen() == [1, 2]


def test_no_message_and_no_name_shows_a_secret(outside: Outside) -> None:
    secret = "a-very-secret/word"
    sink = outside.sink(secret=secret, endpoint_url="http://127.0.0.1:9", config_kwargs=IMPATIENT)
    opened = pickle.loads(pickle.dumps(sink))
    with pytest.raises(StorageError) as raised:
        one(opened, 1)
    shown = [str(raised.value), repr(raised.value), repr(sink._directory), str(sink._directory), outside.url]
    assert not [text for text in shown if secret in text]


# Jobs ---------------------------------------------------------------------------------------------------------------------


def test_a_job_that_is_killed_and_rescaled_writes_every_row_once(outside: Outside, tmp_path: Any) -> None:
    draw, total = random.Random(5), 600
    shown: list[int] = []
    for life in range(60):
        flow = Dataflow("numbers", parallelism=2)
        numbers = flow.source(RateSource(rows_per_read=20, total=total, shards=3), uid="in", event_time="at")
        numbers.apply(outside.sink(), uid="out")
        store = sf.open(str(tmp_path / "store"), durable=False)
        options = {"checkpoint_interval_us": None, "checkpoint_rows": 60, "parallelism": draw.randrange(1, 4)}
        run = LocalRuntime(store, seed=life, **options).begin(flow)
        if isinstance(run, JobOutcome):
            break
        for _ in range(draw.randrange(10, 60)):
            if not run.step():
                break
        before, shown = shown, outside.seen()
        assert not Counter(before) - Counter(shown)
    assert life > 2
    assert shown == sorted(n for shard in range(3) for n in range(total // 3))
    assert outside.sink().clean("out", 10**6) == []

"""The file sink on S3: its requests, whoever dies at whichever of them, and damage that is told."""

from __future__ import annotations

import errno
import json
import multiprocessing
import pickle
import random
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.connectors import FileSink
from stateformat.backends.connectors.sinks import s3_directory
from stateformat.backends.connectors.sinks.uploads import Upload
from stateformat.backends.storage import object_clients
from stateformat.backends.storage.s3 import S3Uploads
from stateformat.errors import ErrorKind, InvalidInput, StorageError
from tests.connectors.sink_s3 import Mortal, Outside, before_the_first
from tests.connectors.sink_steps import (
    PERMIT,
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
from tests.servers.fake_s3 import IMPATIENT
from tests.servers.server import BUCKET, SMALL_PART_BYTES, S3Server

pytestmark = pytest.mark.s3


@pytest.fixture
def outside(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> Outside:
    monkeypatch.setattr(s3_directory, "PAUSES_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(object_clients, "_PAUSE_SECONDS", 0.001)
    return Outside(moto)


def tags_of(rows: pa.Table) -> list[str]:
    return Upload(**json.loads(rows["pending"][0].as_py())).tags


@pytest.mark.parametrize("memory_bytes", [1, 1 << 30])
def test_a_large_file_goes_up_in_parts_from_memory_or_disk(
    outside: Outside, monkeypatch: pytest.MonkeyPatch, memory_bytes: int
) -> None:
    monkeypatch.setattr(s3_directory, "MEMORY_BYTES", memory_bytes)
    monkeypatch.setattr(s3_directory, "PART_BYTES", SMALL_PART_BYTES)
    draw = random.Random(3)
    table = pa.table({"n": range(1000), "raw": [draw.randbytes(700) for _ in range(1000)]})
    sink = outside.sink(row_group_rows=100)
    rows = prepared_of(sink, *table.to_batches(max_chunksize=90))
    assert len(tags_of(rows)) == -(-rows["size_bytes"][0].as_py() // SMALL_PART_BYTES) > 10
    sink.commit(PERMIT, rows)
    assert outside.tables() == [table]
    # No more parts than a server takes: they grow.
    monkeypatch.setattr(s3_directory, "PARTS_MAX", 4)
    rows = prepared_of(sink, *table.to_batches(), checkpoint_id=2)
    assert len(tags_of(rows)) == 4
    sink.commit(PERMIT, rows)
    assert outside.tables() == [table, table]


def test_a_subtask_without_rows_sends_nothing() -> None:
    # Nobody listens there, so anything that was sent would fail.
    sink = FileSink(f"s3://{BUCKET}/x", endpoint_url="http://127.0.0.1:9", key="k", secret="s")
    opened = subtask_of(sink)
    opened.process(batch_of(), 0)
    assert snapshot(opened) is None
    opened.process(batch_of(1), 0)
    opened.close()
    sink.commit(PERMIT, sink.committable_columns.empty_table())


def test_a_repeated_commit_is_one_look_and_a_first_one_four_requests(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    call = S3Uploads._call

    def told(self: Any, method: str, **arguments: Any) -> Any:
        asked.append(method)
        return call(self, method, **arguments)

    sink = outside.sink()
    rows = prepared_of(sink, 1)
    monkeypatch.setattr(S3Uploads, "_call", told)
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


# Crashes and rivals


@pytest.mark.truth
def test_a_crash_before_or_after_any_request_loses_nothing_and_repeats_nothing(
    moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    mortal, counts = Mortal(monkeypatch), (3, 1)

    def run(crash_at: int) -> int:
        outside = Outside(moto)
        mortal.live(crash_at)
        sink = outside.sink(rows_per_file=2)
        crashes = run_to_the_end(
            sink, outside.look, Crash, counts=counts, failed=mortal.revive, ended=mortal.live_for_ever
        )
        assert crashes == (crash_at > 0)
        assert outside.uploads() == []
        assert outside.seen() == rows_until(2, counts)
        return mortal.counted

    check_every_crash(run, 30)


@pytest.mark.parametrize("method", ["complete_multipart_upload", "head_object"])
def test_another_driver_commits_in_between(outside: Outside, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    ours, theirs = outside.sink(), outside.sink()
    rows = prepared_of(ours, 1, 2)
    with before_the_first(monkeypatch, method, lambda: theirs.commit(PERMIT, rows)):
        ours.commit(PERMIT, rows)
    assert outside.seen() == [1, 2]


def test_a_driver_waits_for_the_object_that_another_is_completing(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = outside.sink()
    rows = prepared_of(sink, 1)
    ((path, upload_id),) = outside.uploads()
    held = {"Bucket": BUCKET, "Key": f"{outside.prefix}/{path}"}
    parts = [{"PartNumber": 1, "ETag": tags_of(rows)[0]}]
    client, looks = outside.server.client, []
    call = S3Uploads._call

    def slow_server(self: Any, method: str, **arguments: Any) -> Any:
        """Another driver's request is taken, and its object is not there before the second look."""
        if method == "complete_multipart_upload" and not looks:
            arguments["UploadId"] = "taken"
        if method == "head_object":
            looks.append(method)
            if len(looks) == 2:
                client.complete_multipart_upload(**held, UploadId=upload_id, MultipartUpload={"Parts": parts})
        return call(self, method, **arguments)

    monkeypatch.setattr(S3Uploads, "_call", slow_server)
    sink.commit(PERMIT, rows)
    assert len(looks) == 2
    assert outside.seen() == [1]


def test_an_upload_that_fails_leaves_nothing_of_any_file(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_directory, "PART_BYTES", SMALL_PART_BYTES)
    sink = outside.sink(rows_per_file=1, config_kwargs=IMPATIENT)
    opened = subtask_of(sink)
    opened.process(batch_of(1, 2), 0)
    call, sent = S3Uploads._call, list[str]()

    def spoilt(self: Any, method: str, **arguments: Any) -> Any:
        """The second file's part is refused."""
        if method == "upload_part":
            sent.append(method)
            if len(sent) == 2:
                arguments["UploadId"] = "none"
        return call(self, method, **arguments)

    monkeypatch.setattr(S3Uploads, "_call", spoilt)
    with pytest.raises(StorageError, match="cannot write part-"):
        prepared(opened)
    assert sent == ["upload_part"] * 2
    assert outside.uploads() == outside.paths() == []
    # The snapshot may be tried again.
    sink.commit(PERMIT, prepared(opened, 2))
    assert outside.seen() == [1, 2]


# Damage


def test_an_object_that_is_lost_or_another_is_told_and_not_passed_over(outside: Outside) -> None:
    sink = outside.sink()
    rows = prepared_of(sink, 1)
    sink.commit(PERMIT, rows)
    (path,) = outside.paths()
    body = outside.body(path)
    size, digest = ErrorKind.OBJECT_SIZE_DIFFERS, ErrorKind.OBJECT_DIGEST_DIFFERS
    sizes = f"has {len(body) - 1} bytes and was prepared with {len(body)}"
    for put, metadata, words, kind in (
        (body[:-1], {}, sizes, size),
        (body[:-1] + b"?", {}, "in its metadata and was prepared with", digest),
        (body[:-1] + b"?", {s3_directory.DIGEST: "0" * 32}, "in its metadata and was prepared with", digest),
    ):
        outside.put(path, put, Metadata=metadata)
        with pytest.raises(StorageError, match=words) as raised:
            sink.commit(PERMIT, rows)
        assert raised.value.kind is kind
    outside.server.client.delete_object(Bucket=BUCKET, Key=f"{outside.prefix}/{path}")
    with pytest.raises(StorageError, match="rule of the bucket that aborts unfinished uploads"):
        sink.commit(PERMIT, rows)


def test_what_was_prepared_in_a_local_directory_is_not_taken_for_an_upload(outside: Outside, tmp_path: Any) -> None:
    rows = prepared_of(FileSink(tmp_path), 1)
    with pytest.raises(InvalidInput, match=r"Commit it once with the directory under which it was prepared"):
        outside.sink().commit(PERMIT, rows)
    rows = prepared_of(outside.sink(), 1)
    with pytest.raises(StorageError, match="its 1 row is lost"):
        FileSink(tmp_path).commit(PERMIT, rows)


@pytest.mark.parametrize("room", [0, 4])
def test_a_full_disk_of_the_worker_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    class Full(s3_directory._Spool):
        def write(self, data: Any, /) -> int:
            if self.size_bytes >= room:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(s3_directory, "_Spool", Full)
    opened = subtask_of(FileSink("s3://bucket/out", row_group_rows=1))
    with pytest.raises(StorageError, match=r"cannot keep a file for S3 in .*No space left.*set TMPDIR"):
        opened.process(batch_of(1), 0)
    opened.close()


def test_a_bucket_that_is_not_there_is_told_when_the_run_begins_and_when_it_commits(moto: S3Server) -> None:
    sink = FileSink("s3://no-such-bucket/out", **moto.options(config_kwargs=IMPATIENT))
    rows = prepared_of(Outside(moto).sink(), 1)
    for call in (lambda: sink.clean("out", 0), lambda: sink.commit(PERMIT, rows)):
        with pytest.raises(StorageError, match=r"no bucket 'no-such-bucket'\. Create it"):
            call()


# Processes


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_prototype_is_sent_to_another_process_which_makes_clients_of_its_own(outside: Outside, way: str) -> None:
    sink = outside.sink()
    sink.commit(PERMIT, prepared_of(sink, 1))
    with multiprocessing.get_context(way).Pool(1) as pool:
        rows = pool.apply(prepared_of, (sink, 2))
        pool.close()
        pool.join()
    sink.commit(PERMIT, rows)
    assert outside.seen() == [1, 2]


def test_no_message_and_no_name_shows_a_secret(outside: Outside) -> None:
    secret = "a-very-secret/word"
    sink = outside.sink(secret=secret, endpoint_url="http://127.0.0.1:9", config_kwargs=IMPATIENT)
    opened = pickle.loads(pickle.dumps(sink))
    with pytest.raises(StorageError) as raised:
        prepared_of(opened, 1)
    shown = [str(raised.value), repr(raised.value), repr(sink._directory), str(sink._directory), outside.url]
    assert not [text for text in shown if secret in text]

"""Committables that no sink has prepared: names of other files, other sinks and other attempts are
refused, and nothing changes.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import stateformat
from stateformat.backends.connectors import FileSink, MemorySource, SqlSink
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import JobFailed, LocalRuntime
from stateformat.backends.rewrite import RewriteSpec, rewrite
from stateformat.errors import DamagedCheckpoint, StorageError
from tests.connectors.sink_s3 import Outside
from tests.connectors.sink_steps import PERMIT, SCHEMA, batch_of, prepared, subtask_of
from tests.forgery import Forger
from tests.servers.server import BUCKET, S3Server

ID, ATTEMPT = 1, "a" * 32
OTHER = "b" * 32

Change = Callable[[str], object]
"""What a forger makes of a right name."""

EVERYWHERE: dict[str, Change] = {
    "a parent": lambda name: f"../{name}",
    "a parent further down": lambda name: name.replace("/", "/../") if "/" in name else f"x/../../{name}",
    "an absolute path": lambda name: f"/tmp/{name}",
    "a folder": lambda name: f"sub/{name}",
    "a backslash": lambda name: name.replace("-", "\\", 1),
    "NUL": lambda name: f"{name}\0",
    "a newline at the end": lambda name: f"{name}\n",
    "nothing": lambda name: "",
    "a dot": lambda name: ".",
    "another case": lambda name: name.upper(),
    "other digits": lambda name: name.replace("0", "\u0660"),
    "too long": lambda name: name.replace("-out-", f"-{'x' * 200}-").replace("out/", f"{'x' * 200}/"),
    "another spelling of a number": lambda name: name.replace("-00000-00000-", "-000000-00000-"),
    "another checkpoint": lambda name: name.replace(f"{ID:020d}", f"{ID + 1:020d}"),
    "another attempt": lambda name: name.replace(ATTEMPT, OTHER),
    "an attempt that is a path": lambda name: name.replace(ATTEMPT, "../" + "a" * 29),
    "another sink": lambda name: name.replace("-out-", "-other-").replace("out/", "other/"),
    "a sink that is a folder above": lambda name: name.replace("-out-", "-..-").replace("out/", "../"),
}


def tree(place: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a directory: its bytes, and how many names it has."""
    paths = sorted(path for path in place.rglob("*") if path.is_file())
    return {str(path.relative_to(place)): (path.read_bytes(), path.stat().st_nlink) for path in paths}


def changed(rows: pa.Table, /, **columns: Any) -> pa.Table:
    """A table with these values in its last row."""
    for name, value in columns.items():
        values = [*rows[name].to_pylist()[:-1], value]
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, rows.schema.field(at), pa.array(values, rows.schema.field(at).type))
    return rows


def refused(place: Path, sink: Any, rows: pa.Table, *, of_any: bool = True) -> None:
    """The rows are refused as a whole at every door, and nothing has changed; ``of_any``: they are
    of no such sink.
    """
    before = tree(place)
    doors = [lambda: sink.check_committables("out", rows)]
    if of_any:
        doors += [lambda: sink.check_committables("out", rows, renamed=True), lambda: sink.commit(PERMIT, rows)]
        doors.append(lambda: sink.clean("out", 9, rows))
    words = r"cannot have written .* Nothing was committed or removed"
    for door in doors:
        with pytest.raises(DamagedCheckpoint, match=words) as raised:
            door()
        assert str(raised.value).isprintable()
    assert tree(place) == before


# Files --------------------------------------------------------------------------------------------


def two_files(sink: FileSink) -> pa.Table:
    opened = subtask_of(sink)
    tables = []
    for number in (1, 2):
        opened.process(batch_of(number), 0)
        tables.append(prepared(opened, ID, ATTEMPT))
    return pa.concat_tables(tables)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A directory beside one with a secret and an empty home."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "victim.txt").write_text("mine")
    (tmp_path / "home").mkdir()
    return tmp_path / "out"


@pytest.mark.parametrize("what", EVERYWHERE)
@pytest.mark.parametrize("column", ["path", "pending"])
def test_a_file_sink_takes_no_name_that_it_has_not_made(out: Path, column: str, what: str) -> None:
    sink = FileSink(out, durable=False)
    rows = two_files(sink)
    name = rows[column].to_pylist()[-1]
    forged = EVERYWHERE[what](name)
    assert forged != name
    refused(out.parent, sink, changed(rows, **{column: forged}), of_any=(column, what) != ("path", "another sink"))
    # And the right ones are taken.
    sink.commit(PERMIT, rows)
    assert len(list(out.glob("part-*"))) == 2


def test_a_file_sink_neither_links_nor_removes_files_of_others(out: Path) -> None:
    sink = FileSink(out, durable=False)
    rows = two_files(sink)
    secret, home = out.parent / "secret" / "victim.txt", out.parent / "home" / "authorized_keys"
    size_bytes = secret.stat().st_size
    for pending, path in (("../secret/victim.txt", "../home/authorized_keys"), (str(secret), str(home))):
        refused(out.parent, sink, changed(rows, pending=pending, path=path, size_bytes=size_bytes))


def test_both_names_of_another_sink_or_attempt_are_refused_though_they_agree(out: Path) -> None:
    sink = FileSink(out, durable=False)
    rows = two_files(sink)
    for what in ("another sink", "another attempt", "another checkpoint"):
        names = {name: EVERYWHERE[what](rows[name].to_pylist()[-1]) for name in ("pending", "path")}
        refused(out.parent, sink, changed(rows, **names), of_any=what != "another sink")
    # A checkpoint from before a rename has names of the old uid.
    sink.check_committables("new", rows, renamed=True)
    with pytest.raises(DamagedCheckpoint, match="a committable of sink 'new', prepared for checkpoint 1"):
        sink.check_committables("new", rows)


UPLOAD = {"upload_id": "u", "digest": "0" * 32, "tags": ["t"]}


WRONG_UPLOADS = [
    *({**UPLOAD, "upload_id": wrong} for wrong in (7, "", "a\r\nb", "u" * 1025)),
    *({**UPLOAD, "digest": wrong} for wrong in ("0" * 31, None)),
    *({**UPLOAD, "tags": wrong} for wrong in ("t", [1], ["t"] * 10_001)),
    {**UPLOAD, "key": "elsewhere"},
    {"upload_id": "u"},
    [],
    "[" * 100_000,
    "1" * 5_000,
]


@pytest.mark.parametrize("upload", WRONG_UPLOADS, ids=lambda upload: repr(upload)[:40])
def test_what_is_no_upload_is_refused(out: Path, upload: Any) -> None:
    sink = FileSink(out, durable=False)
    text = upload if isinstance(upload, str) else json.dumps(upload)
    refused(out.parent, sink, changed(two_files(sink), pending=text))


def test_links_in_the_directory_are_not_followed(out: Path) -> None:
    sink = FileSink(out, durable=False)
    rows = two_files(sink)
    pending = out / rows["pending"].to_pylist()[-1]
    kept = pending.read_bytes()
    pending.unlink()
    pending.symlink_to(out.parent / "secret" / "victim.txt")
    with pytest.raises(StorageError, match="is not a file"):
        sink.commit(PERMIT, rows)
    pending.unlink()
    pending.write_bytes(kept)
    folder = pending.parent
    (out.parent / "elsewhere").mkdir()
    (out.parent / "elsewhere" / "thesis.open").write_text("mine")
    aside = folder.rename(folder.with_name("aside"))
    folder.symlink_to(out.parent / "elsewhere")
    for act in (lambda: sink.clean("out", 9), lambda: sink.commit(PERMIT, rows), lambda: two_files(sink)):
        with pytest.raises(StorageError, match="is a link, and a sink works only in folders of its own"):
            act()
    assert (out.parent / "elsewhere" / "thesis.open").read_text() == "mine"
    folder.unlink()
    aside.rename(folder)
    # The directory itself may be one.
    (out.parent / "link").symlink_to(out)
    FileSink(out.parent / "link", durable=False).commit(PERMIT, rows)
    assert len(list(out.glob("part-*"))) == 2


# Files in a bucket --------------------------------------------------------------------------------


@pytest.fixture
def outside(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> Outside:
    monkeypatch.setattr("stateformat.backends.connectors.sinks.s3_directory.PAUSES_SECONDS", (0.001,))
    return Outside(moto)


def test_an_upload_to_another_key_is_not_completed(outside: Outside) -> None:
    sink = outside.sink()
    rows = two_files(sink)
    client, key = outside.server.client, f"{outside.prefix}-elsewhere/theirs"
    upload_id = client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    part = client.upload_part(Bucket=BUCKET, Key=key, UploadId=upload_id, PartNumber=1, Body=b"x")
    pending = json.dumps({**UPLOAD, "upload_id": upload_id, "tags": [part["ETag"]]})
    with pytest.raises(StorageError, match="its 1 row is lost"):
        sink.commit(PERMIT, changed(rows, pending=pending))
    (kept,) = client.list_multipart_uploads(Bucket=BUCKET, Prefix=key)["Uploads"]
    assert kept["UploadId"] == upload_id
    client.abort_multipart_upload(Bucket=BUCKET, Key=key, UploadId=upload_id)


@pytest.mark.parametrize("what", EVERYWHERE)
def test_a_key_that_the_sink_has_not_made_is_refused(outside: Outside, what: str) -> None:
    sink = outside.sink()
    rows = two_files(sink)
    before = outside.uploads()
    forged = changed(rows, path=EVERYWHERE[what](rows["path"].to_pylist()[-1]))
    with pytest.raises(DamagedCheckpoint, match="Nothing was committed or removed"):
        sink.check_committables("out", forged)
    if what != "another sink":
        for act in (lambda: sink.commit(PERMIT, forged), lambda: sink.clean("out", 9, forged)):
            with pytest.raises(DamagedCheckpoint, match="Nothing was committed or removed"):
                act()
    assert (outside.uploads(), outside.paths()) == (before, [])


# Tables -------------------------------------------------------------------------------------------


def sql_sink(tmp_path: Path, **options: Any) -> SqlSink:
    places: dict[str, Any] = {"staging": tmp_path / "staging", "durable": False, "object_bytes": 1}
    sink = SqlSink(f"sqlite:///{tmp_path}/data.db", "t", **places, **options)
    sink.output_schema(SCHEMA)
    sink.clean("out", 0)
    return sink


def in_table(tmp_path: Path) -> list[int]:
    with closing(sqlite3.connect(tmp_path / "data.db")) as connection:
        return [n for (n,) in connection.execute("SELECT n FROM t ORDER BY n")]


@pytest.mark.parametrize("what", EVERYWHERE)
def test_a_sql_sink_takes_no_object_that_it_has_not_staged(tmp_path: Path, what: str) -> None:
    sink = sql_sink(tmp_path)
    rows = two_files(sink)  # type: ignore[arg-type]
    name = rows["object"].to_pylist()[-1]
    forged = EVERYWHERE[what](name)
    assert forged != name
    refused(tmp_path, sink, changed(rows, object=forged))
    sink.commit(PERMIT, rows)
    assert in_table(tmp_path) == [1, 2]


def test_a_sql_sink_reads_inserts_and_removes_nothing_of_others(tmp_path: Path) -> None:
    sink = sql_sink(tmp_path)
    rows = two_files(sink)  # type: ignore[arg-type]
    # A true stream, with its true size and digest, at another place.
    name = rows["object"].to_pylist()[-1]
    (tmp_path / "victim").write_bytes((tmp_path / "staging" / name).read_bytes())
    for forged in ("../victim", str(tmp_path / "victim")):
        refused(tmp_path, sink, changed(rows, object=forged))
    refused(tmp_path, sink, changed(rows, subtask=1))
    refused(tmp_path, sink, changed(rows, sink="other"))
    theirs = {"sink": "other", "object": EVERYWHERE["another sink"](name)}
    refused(tmp_path, sink, changed(rows, **theirs), of_any=False)
    # The folder of a sink is its own too.
    staged = tmp_path / "staging" / name
    staged.unlink()
    staged.symlink_to(tmp_path / "victim")
    with pytest.raises(StorageError, match="is not a file"):
        sink.commit(PERMIT, rows)
    assert in_table(tmp_path) == []


@pytest.mark.parametrize("body", [b"no stream", b"", None], ids=["no stream", "empty", "other rows"])
def test_an_object_that_is_no_stream_of_these_rows_is_told(tmp_path: Path, body: bytes | None) -> None:
    sink = sql_sink(tmp_path)
    rows = two_files(sink)  # type: ignore[arg-type]
    if body is None:
        rows, words = changed(rows, rows=2), "has 1 rows and was prepared with 2"
    else:
        (tmp_path / "staging" / rows["object"].to_pylist()[-1]).write_bytes(body)
        digest = blake2b(body, digest_size=16).hexdigest()
        rows, words = changed(rows, size_bytes=len(body), digest=digest), "is not an Arrow stream"
    with pytest.raises(StorageError, match=words):
        sink.commit(PERMIT, rows)
    assert in_table(tmp_path) == []


def test_marks_that_people_insert_remove_no_file(tmp_path: Path) -> None:
    sink = sql_sink(tmp_path, marks_days=1)
    rows = two_files(sink)  # type: ignore[arg-type]
    (tmp_path / "victim").write_bytes(b"mine")
    sink.commit(PERMIT, rows.slice(0, 1))
    connection = sqlite3.connect(tmp_path / "data.db")
    with connection:
        connection.execute("INSERT INTO stateformat_commits VALUES ('out', 1, 'a', '../victim', 1, 0)")
    sink.commit(PERMIT, rows.slice(1))
    with connection:
        marks = connection.execute("SELECT object FROM stateformat_commits ORDER BY object").fetchall()
    connection.close()
    assert (tmp_path / "victim").read_bytes() == b"mine"
    assert [name for (name,) in marks] == sorted(rows["object"].to_pylist())


# A whole job --------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Any]:
    """Run a job with a file sink and a SQL sink, which has finished and committed, once more."""
    store = stateformat.open(f"{tmp_path}/store")
    table = pa.table({"n": [1, 2, 3]})

    def run(files: str = "files", table_uid: str = "table", into: str | None = None) -> Any:
        flow = Dataflow("forged")
        rows = flow.source(MemorySource(table), uid="rows")
        rows.apply(FileSink(tmp_path / "files", durable=False), uid=files)
        sink = SqlSink(f"sqlite:///{tmp_path}/data.db", "t", staging=tmp_path / "staging", durable=False)
        rows.apply(sink, uid=table_uid)
        own = store if into is None else stateformat.open(into)
        start_from = None if into is None else store.url
        return LocalRuntime(own, start_from=start_from, max_restarts=0, restart_delay_us=0).run(flow)

    run()
    return run


@pytest.mark.parametrize(
    ("operator", "column", "forged"),
    [("files", "path", "../victim"), ("files", "pending", "../victim"), ("table", "object", "../victim")],
)
def test_a_job_does_not_start_from_forged_committables_and_no_sink_commits(
    tmp_path: Path, job: Callable[..., Any], operator: str, column: str, forged: str
) -> None:
    (tmp_path / "victim").write_bytes(b"mine")
    store = stateformat.open(f"{tmp_path}/store")
    forger = Forger(store.storage, store.open().record.checkpoint_id)
    at = forger.find(operator, "committables")
    rows = forger.table_of(at)
    forger.set_rows(at, changed(rows, **{column: forged}))
    forger.seal()
    # What the other sink would commit again is there to be seen.
    for path in (tmp_path / "files").glob("part-*"):
        path.rename(tmp_path / "moved")
    before = tree(tmp_path)
    with pytest.raises((JobFailed, DamagedCheckpoint), match=rf"sink '{operator}'.* has '\.\./victim' as '{column}'"):
        job()
    assert tree(tmp_path) == before


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_renamed_sink_commits_what_it_prepared_under_its_old_uid(
    tmp_path: Path, job: Callable[..., Any], elsewhere: bool
) -> None:
    store = stateformat.open(f"{tmp_path}/store")
    rewrite(store, store.open(), RewriteSpec(renames={"files": "new files", "table": "new table"}))
    before = tree(tmp_path / "files")
    job("new files", "new table", into=f"{tmp_path}/own" if elsewhere else None)
    assert tree(tmp_path / "files") == before
    assert in_table(tmp_path) == [1, 2, 3]

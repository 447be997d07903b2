"""Checkpoints of other systems answer as ours do, wherever they lie, and are only read."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import stateformat
from stateformat import formats
from stateformat.backends.foreign import checkpoint as foreign
from stateformat.backends.foreign.checkpoint import ForeignCheckpoint, ForeignFormat
from stateformat.backends.foreign.source import Note, Opened
from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput, NotFound, UnsupportedFormat
from stateformat.findings import Finding
from stateformat.model import Capability
from stateformat.ttl import Ttl
from tests.ckpt.ckpt_runs import document, failure, page, run
from tests.foreign.foreign_fakes import WORDS, FakeSource, flink_like, spark_like
from tests.servers.fault_proxy import Fault, FaultProxy
from tests.servers.server import BUCKET, S3Server
from tests.worlds.stores import flights_store

NOTES = (Note("renamed", "operator-0/default", "two columns are called word; the second is word_2"),)
WORD_COUNTS = ("operator-0", "default")


class _Entry:
    """What ``importlib.metadata`` gives for an entry point."""

    def __init__(self, form: ForeignFormat) -> None:
        self._form = form

    def load(self) -> Callable[..., Any]:
        return self._form.found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the format ``fake`` finds checkpoints 3 and 2."""
    return make_folder(tmp_path, monkeypatch, spark_like(notes=NOTES, counts_rows=False))


def make_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: FakeSource) -> Path:
    def opened(folder: Any, checkpoint_id: int | None, outside: Any) -> FakeSource:
        return replace(source, record=replace(source.record, checkpoint_id=checkpoint_id or 3))

    form = ForeignFormat(
        "a fake checkpoint",
        recognises=lambda folder: bool(folder.list("fake")),
        sources=lambda folder, outside: Opened([opened(folder, 3, None), opened(folder, 2, None)]),
        source=opened,
        check=lambda source, level, progress: source.check(level, progress),
    )
    monkeypatch.setattr(formats, "_formats", lambda: {"fake": _Entry(form)})
    path = tmp_path / "theirs"
    path.mkdir()
    (path / "fake").write_bytes(b"fake")
    return path


def test_the_door_opens_what_it_finds(folder: Path) -> None:
    checkpoint = stateformat.open(folder).open()
    assert isinstance(checkpoint, ForeignCheckpoint)
    assert (checkpoint.id, checkpoint.system, checkpoint.notes) == (3, "a fake checkpoint", NOTES)
    assert [record.checkpoint_id for record in stateformat.open(folder).history()] == [3, 2]
    assert stateformat.open(folder).open(2).id == 2


def test_what_only_a_store_can_do_is_no_capability_of_another_system(folder: Path, tmp_path: Path) -> None:
    assert not stateformat.open(folder).open().capabilities
    assert flights_store(str(tmp_path / "ours")).open().capabilities == {*Capability}


def test_a_checkpoint_shows_expired_rows_wherever_it_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = spark_like()
    states = tuple(replace(state, ttl=Ttl(1), ttl_now_us=5) for state in source.record.states)
    source = replace(source, record=replace(source.record, states=states))
    checkpoint = stateformat.open(make_folder(tmp_path, monkeypatch, source)).open()
    assert {state.ttl_now_us for state in checkpoint.states} == {5}
    sent = pickle.loads(pickle.dumps(checkpoint.with_expired()))
    assert {state.ttl_now_us for state in sent.states} == {None}


def test_an_address_can_name_the_format(folder: Path, tmp_path: Path) -> None:
    assert stateformat.open(f"fake:{folder}").open().id == 3
    with pytest.raises(NotFound, match="there is no fake checkpoint at file://"):
        stateformat.open(f"fake:{tmp_path / 'elsewhere'}").open()


def test_only_installed_formats_are_prefixes(folder: Path) -> None:
    assert formats.split_format("fake:s3://bucket/x") == ("fake", "s3://bucket/x")
    assert formats.split_format("other:path") == (None, "other:path")
    assert formats.split_format("s3://fake/x") == (None, "s3://fake/x")


def test_a_folder_of_two_formats_is_opened_by_the_name_of_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twice = formats._formats() | {"other": formats._formats()["fake"]}
    monkeypatch.setattr(formats, "_formats", lambda: twice)
    assert stateformat.open(f"other:{folder}").open().id == 3
    with pytest.raises(InvalidInput, match="say which is meant: fake:PATH or other:PATH"):
        stateformat.open(folder).open()


def test_a_store_of_ours_is_one_whatever_lies_beside_it(folder: Path) -> None:
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/00000000000000000001.json").write_bytes(b"{}")
    with pytest.raises(DamagedCheckpoint):
        stateformat.open(folder).open()
    assert stateformat.open(f"fake:{folder}").open().id == 3


@pytest.mark.parametrize("counted", [False, True])
def test_rows_are_those_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: bool) -> None:
    source = spark_like(counts_rows=counted)
    checkpoint = stateformat.open(make_folder(tmp_path, monkeypatch, source)).open()
    found = pickle.loads(pickle.dumps(checkpoint)).read(*WORD_COUNTS).table()
    assert sorted(found["word"].to_pylist()) == sorted(WORDS)
    groups = found["_key_group"].to_pylist()
    assert groups == sorted(groups)
    one = checkpoint.read(*WORD_COUNTS, subtask=1)
    assert set(one.table()["_key_group"].to_pylist()) == {1}
    assert pc.sum(one.slices["rows"]).as_py() == (one.table().num_rows if counted else None)


def test_a_restore_at_another_parallelism_reads_every_row_once(folder: Path) -> None:
    checkpoint = stateformat.open(folder).open()
    plan = checkpoint.plan_restore(checkpoint.graph.at(parallelism=2))
    plan.check()
    parts = [pickle.loads(pickle.dumps(checkpoint.restore(plan, "operator-0", i)["default"])).table() for i in (0, 1)]
    assert [set(part["_key_group"].to_pylist()) for part in parts] == [{0, 1, 2}, {3, 4}]
    assert sorted(pa.concat_tables(parts)["word"].to_pylist()) == sorted(WORDS)


def test_entries_of_operator_state_are_cut_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = flink_like()
    checkpoint = stateformat.open(make_folder(tmp_path, monkeypatch, source)).open()
    plan = checkpoint.plan_restore(checkpoint.graph.at(parallelism=3))
    whole = checkpoint.read("source", "SourceReaderState").table()
    parts = [checkpoint.restore(plan, "source", i)["SourceReaderState"].table() for i in range(3)]
    assert pa.concat_tables(parts)["value"].to_pylist() == whole["value"].to_pylist()
    assert max(part.num_rows for part in parts) - min(part.num_rows for part in parts) <= 1


def test_files_that_change_between_counting_and_reading_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = stateformat.open(make_folder(tmp_path, monkeypatch, spark_like())).open()
    plan = checkpoint.plan_restore(checkpoint.graph)
    checkpoint.source.rows[WORD_COUNTS].pop()  # type: ignore[attr-defined]
    checkpoint.source._tables.clear()  # type: ignore[attr-defined]
    tasks = [checkpoint.restore(plan, "operator-0", subtask)["default"] for subtask in range(5)]
    with pytest.raises(DamagedCheckpoint, match="rows when it was counted, and"):
        [task.table() for task in tasks]


def test_validation_asks_the_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Finding(ErrorKind.OBJECT_MISSING, "Fake files", "the file state/1 is missing", path="state/1")
    path = make_folder(tmp_path, monkeypatch, spark_like(problems=(problem,)))
    report = stateformat.validate(stateformat.open(path))
    assert (report.checkpoint_id, report.problems) == (3, (problem,))
    found = run("validate", path)
    assert found.status == 1
    assert "file state/1 is missing" in found.out


def test_what_cannot_be_opened_is_a_problem_of_the_report(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: FakeSource, level: object, progress: object) -> Iterator[Finding]:
        yield Finding(ErrorKind.OBJECT_MISSING, "Fake files", "the file state/1 is left over", severity="warning")
        raise UnsupportedFormat("the codec lzf is not read")

    monkeypatch.setattr(FakeSource, "check", broken)
    found = run("validate", folder)
    assert found.status == 1
    assert "file state/1 is left over" in found.out
    assert "codec lzf is not read" in found.out


def test_nothing_is_ever_written_there(folder: Path, tmp_path: Path) -> None:
    store, checkpoint = stateformat.open(folder), stateformat.open(folder).open()
    other = stateformat.open(tmp_path / "ours")
    graph = stateformat.JobGraph((stateformat.Operator("a", 1),))
    refused: list[Callable[[], object]] = [
        lambda: store.start("job"),
        lambda: other.copy(checkpoint, stateformat.open(tmp_path / "copy")),
        lambda: other.start_from(checkpoint),
        lambda: other.begin(job_id="job", graph=graph, states=[], parent=checkpoint),
        lambda: checkpoint.carried(checkpoint.plan_restore(checkpoint.graph)),
    ]
    for call in refused:
        with pytest.raises(InvalidInput, match="ckpt import"):
            call()
    for command in (["gc"], ["rollback"], ["rewrite"], ["copy", tmp_path / "copy"], ["repair"], ["stop"]):
        found = run(command[0], f"{folder}@3" if command[0] == "rollback" else folder, *command[1:])
        assert found.status in (2, 3), (command, found.out, found.err)
        assert "ckpt import" in " ".join(found.err.split()), command
    assert [path.name for path in folder.iterdir()] == ["fake"]
    assert not (tmp_path / "ours").exists()


def test_inspect_counts_the_rows_of_a_small_one(folder: Path) -> None:
    document = json.loads(run("inspect", folder, "--format", "json").out)
    (state,) = (one for one in document["states"] if (one["operator"], one["name"]) == WORD_COUNTS)
    assert state["rows"] == sum(entry["rows"] for entry in state["subtasks"]) == len(WORDS)
    assert document["totals"]["rows"] == sum(one["rows"] for one in document["states"])


def test_what_cannot_be_counted_is_shown_without_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(self: object, part: object) -> None:
        raise DamagedCheckpoint("a file is cut", kind=ErrorKind.DAMAGED_SEGMENT)

    monkeypatch.setattr(FakeSource, "group_rows", damaged)
    assert "rows are not counted here" in " ".join(run("inspect", folder).out.split())


def test_inspect_shows_a_large_one_without_counting_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "COUNTED_BYTES", 0)
    monkeypatch.setattr(FakeSource, "group_rows", lambda self, part: pytest.fail("rows were counted"))
    monkeypatch.setattr(FakeSource, "read", lambda self, *some: pytest.fail("a data file was read"))
    page = " ".join(run("inspect", folder).out.split())
    for text in (
        "Checkpoint 3",
        "a fake checkpoint",
        "bytes per subtask",
        "two columns are called word",
        "spark.query_id",
    ):
        assert text in page
    document = json.loads(run("inspect", folder, "--format", "json").out)
    assert (document["system"], document["totals"]["rows"]) == ("a fake checkpoint", None)
    assert document["notes"][0]["kind"] == "renamed"
    assert document["holds"]["timers"] == 0  # It declares none.
    state = document["states"][0]
    assert state["rows"] is None
    assert [entry["rows"] for entry in state["subtasks"]] == [None] * 5
    assert sum(entry["bytes"] for entry in state["subtasks"]) == state["bytes"] == 100 * len(WORDS)


def test_a_time_that_nobody_wrote_down_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = spark_like()
    path = make_folder(tmp_path, monkeypatch, replace(source, record=replace(source.record, created_at_us=0)))
    assert "1970" not in run("history", path).out


def test_the_other_pages_show_it(folder: Path, tmp_path: Path) -> None:
    rows = run("inspect", f"fake:{folder}@3", "--operator", "dedupe", "--rows", "2")
    assert rows.status == 0
    assert "word 1" in rows.out
    assert run("history", folder).out.count("checkpoint") >= 2
    assert "operator-0" in run("explain-restore", folder, "--parallelism", "2").out
    beyond = run("explain-restore", folder, "--parallelism", "6")
    assert beyond.status == 1
    assert "`ckpt import --max-parallelism 6 --to STORE`" in " ".join(beyond.out.split())
    target = tmp_path / "rows.jsonl"
    exported = run("export", folder, "--operator", "operator-0", "--state", "default", "--to", target)
    assert exported.status == 0, exported.err
    assert len(target.read_text().splitlines()) == len(WORDS)


# ---- wherever they lie

FIXTURES = Path(__file__).parent / "fixtures"
FLINK = FIXTURES / "flink-2.3.0/core-rocksdb-canonical/savepoint"
SPARK = FIXTURES / "spark-4.3.0/aggregate/checkpoint"

INSIDE: dict[str, tuple[Path, tuple[str, ...]]] = {
    "a file": (FLINK, ("export", "--operator", "by-string", "--state", "mean", "--as", "csv")),
    "a savepoint": (FLINK, ("export", "--as", "flink-savepoint")),
    "a store": (FLINK, ("import",)),
    "a copy": (SPARK, ("rescale", "--parallelism", "4")),
    "a copy of a batch": (SPARK, ("copy",)),
}


@pytest.mark.parametrize("linked", [False, True], ids=["by its name", "through a link"])
@pytest.mark.parametrize("what", INSIDE)
def test_nothing_is_written_into_their_folder(what: str, tmp_path: Path, *, linked: bool) -> None:
    fixture, (command, *options) = INSIDE[what]
    theirs = tmp_path / "theirs"
    shutil.copytree(fixture, theirs)
    (tmp_path / "link").symlink_to(theirs)
    before = sorted(theirs.rglob("*"))
    for address, to in ((tmp_path / "link", theirs), (theirs, tmp_path / "link")) if linked else ((theirs, theirs),):
        said = failure(command, address, *options, "--to", to / "new", status=2)["message"]
        assert "lies in" in said
    assert sorted(theirs.rglob("*")) == before


def test_no_spark_state_becomes_a_savepoint_of_flinks(tmp_path: Path) -> None:
    found = failure("export", SPARK, "--as", "flink-savepoint", "--to", tmp_path / "out", status=2)
    assert "is the checkpoint of a Spark query; a savepoint is made of what came from Flink" in found["message"]


@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_header_that_cannot_be_read_is_a_problem(level: str, tmp_path: Path) -> None:
    shutil.copytree(FLINK, tmp_path / "theirs")
    for path in (tmp_path / "theirs").iterdir():
        if path.name != "_metadata":
            path.write_bytes(path.read_bytes().replace(b"StringSerializer$", b"StringSerialyzer$"))
    found = document("validate", tmp_path / "theirs", "--level", level, status=1)
    places = {(one["operator"], one["kind"]) for one in found["problems"]}
    assert ("by-string", "unsupported_feature") in places
    assert "StringSerialyzer" in found["problems"][0]["message"]


def test_state_in_a_changelog_is_a_problem_with_the_way_out(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "flink-2.3.0/brief-rocksdb-checkpoint-changelog/savepoint", tmp_path / "theirs")
    (checkpoint,) = (tmp_path / "theirs").glob("*/chk-*")
    said = [one["message"] for one in document("validate", checkpoint, status=1)["problems"]]
    assert any("lies in a changelog, which is not read: take a savepoint" in message for message in said)


def test_values_that_nobody_can_decode_are_told_with_their_state(tmp_path: Path) -> None:
    types = FIXTURES / "flink-2.3.0/types-hashmap-canonical/savepoint"
    drop: list[str] = []
    while True:
        found = run("import", types, "--to", tmp_path / "store", *drop, "--format", "json")
        if not found.status:
            break
        said = found.document["error"]["message"]
        name, _, rest = said.partition(" cannot be read: ")
        assert "whose fields the checkpoint does not describe" in rest
        assert ["--drop", name] != drop[-2:]
        drop += ["--drop", name]
    assert drop


def test_paths_stay_as_they_are_in_sentences_and_no_line_is_too_wide(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "flink-2.3.0/namespaces-rocksdb-checkpoint/savepoint", tmp_path / "theirs")
    tables = [path for path in (tmp_path / "theirs").rglob("shared/*") if path.is_file()]
    for path in tables:
        data = path.read_bytes()
        path.write_bytes(data[:900] + bytes(octet ^ 1 for octet in data[900:910]) + data[910:])
    (home,) = (tmp_path / "theirs").iterdir()
    text = page("validate", home, "--level", "full", status=1)
    assert "    shared/" in text
    assert "    Shared/" not in text


def test_no_history_is_shown_of_checkpoints_that_cannot_be_opened(tmp_path: Path) -> None:
    (checkpoint,) = (FIXTURES / "flink-2.3.0/brief-rocksdb-checkpoint/savepoint").glob("*/chk-*")
    assert "--allow-outside" in failure("history", checkpoint, status=2)["message"]
    shutil.copytree(SPARK, tmp_path / "query")
    for path in (tmp_path / "query/state/0/0").glob("*.*"):
        path.unlink()
    assert "can be opened; `ckpt validate" in failure("history", tmp_path / "query", status=1)["message"]


def test_a_time_that_flink_does_not_keep_is_not_shown() -> None:
    assert "1970" not in page("history", FLINK)


# ---- nothing is written to them

KINDS = {
    "Spark": ("spark-4.3.0/aggregate/checkpoint", "operator-0", "default"),
    "Flink": ("flink-2.3.0/core-rocksdb-canonical/savepoint", "by-string", "mean"),
}


def bytes_of(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def commands(address: object, operator: str, state: str, tmp_path: Path) -> list[tuple[object, ...]]:
    """Every command that reads, as a user would call it, and those that refuse."""
    return [
        ("inspect", address),
        ("inspect", address, "--operator", operator, "--rows", "3"),
        ("history", address),
        ("validate", address),
        ("validate", address, "--level", "full"),
        ("top", address, "--by", "bytes"),
        ("explain-restore", address, "--parallelism", "2"),
        ("export", address, "--operator", operator, "--state", state, "--to", tmp_path / "rows.parquet"),
        ("import", address, "--to", tmp_path / "store"),
        *([("copy", address, tmp_path / "copy")] if operator == "operator-0" else []),
    ]


REFUSED: tuple[Callable[[object, Path], tuple[object, ...]], ...] = (
    lambda address, _: ("gc", address, "--delete"),
    lambda address, _: ("stop", address),
    lambda address, _: ("repair", address, "--yes"),
    lambda address, _: ("rollback", f"{address}@1"),
    lambda address, _: ("rewrite", address),
)


@pytest.mark.parametrize("kind", KINDS)
def test_no_command_changes_a_byte(kind: str, tmp_path: Path) -> None:
    path, operator, state = KINDS[kind]
    shutil.copytree(FIXTURES / path, tmp_path / "theirs")
    before = bytes_of(tmp_path / "theirs")
    for command in commands(tmp_path / "theirs", operator, state, tmp_path):
        found = run(*command)
        assert found.status == 0, (command, found.out, found.err)
    for refused in REFUSED:
        assert run(*refused(tmp_path / "theirs", tmp_path)).status in (2, 3)
    assert bytes_of(tmp_path / "theirs") == before


@pytest.mark.s3
@pytest.mark.parametrize("kind", KINDS)
def test_on_s3_nothing_is_sent_but_reads(
    kind: str, tmp_path: Path, moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, operator, state = KINDS[kind]
    prefix = f"theirs/{uuid.uuid4().hex}"
    for file in (FIXTURES / path).rglob("*"):
        if file.is_file():
            key = f"{prefix}/{file.relative_to(FIXTURES / path)}"
            moto.client.put_object(Bucket=BUCKET, Key=key, Body=file.read_bytes())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto.secret)
    monkeypatch.setenv("AWS_DEFAULT_REGION", moto.region)
    with FaultProxy(moto) as proxy:
        # Whoever may only read is refused anything else.
        proxy.reset(lambda request: None if request.method in ("GET", "HEAD") else Fault.CONFLICT)
        for command in commands(f"s3://{BUCKET}/{prefix}", operator, state, tmp_path):
            found = run(*command, "--endpoint-url", proxy.endpoint)
            assert found.status == 0, (command, found.out, found.err)
        for refused in REFUSED:
            arguments = refused(f"s3://{BUCKET}/{prefix}", tmp_path)
            assert run(*arguments, "--endpoint-url", proxy.endpoint).status in (2, 3)
        assert {request.method for request in proxy.requests} <= {"GET", "HEAD"}


@pytest.mark.parametrize(
    ("path", "newest", "damaged"),
    [
        ("spark-4.3.0/window/checkpoint", 10, "state/0/1/10.delta"),
        ("flink-2.3.0/brief-rocksdb-checkpoint/savepoint/*", 12, "chk-12/_metadata"),
    ],
)
def test_history_shows_a_newest_checkpoint_that_cannot_be_opened(
    path: str, newest: int, damaged: str, tmp_path: Path
) -> None:
    (found,) = FIXTURES.glob(path)
    shutil.copytree(found, tmp_path / "theirs")
    file = tmp_path / "theirs" / damaged
    if file.name == "_metadata":
        older = tmp_path / "theirs/chk-2"
        shutil.copytree(file.parent, older)
        file.write_bytes(file.read_bytes()[:100])
    else:
        file.unlink()
    result = run("history", tmp_path / "theirs")
    assert result.status == 1, result.out
    assert f"{newest}  damaged" in result.out

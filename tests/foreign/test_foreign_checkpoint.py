"""A foreign checkpoint behind the door of our own: opened, planned, shown, and never written to."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import stateformat
from stateformat import formats
from stateformat.backends.foreign.checkpoint import ForeignCheckpoint, ForeignFormat
from stateformat.backends.foreign.source import Note, Opened
from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput, NotFound, UnsupportedFormat
from stateformat.findings import Finding
from tests.ckpt.ckpt_runs import run
from tests.foreign.foreign_fakes import WORDS, FakeSource, flink_like, spark_like

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
    assert (sum(one.slices["rows"].to_pylist()) == one.table().num_rows) is counted


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


def test_inspect_shows_it_without_counting_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

"""Nothing is written into another system's folder, by whatever name it is given; and what cannot be
read of a checkpoint is a finding of `ckpt validate`, at its place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.ckpt.ckpt_runs import document, failure, page, run

FIXTURES = Path(__file__).parent / "fixtures"
FLINK = FIXTURES / "flink-2.3.0/core-rocksdb-canonical/savepoint"
SPARK = FIXTURES / "spark-4.3.0/aggregate/checkpoint"

INSIDE: dict[str, tuple[Path, tuple[str, ...]]] = {
    "a file": (FLINK, ("export", "--operator", "by-string", "--state", "mean", "--as", "csv")),
    "a savepoint": (FLINK, ("export", "--as", "flink-savepoint")),
    "a store": (FLINK, ("import",)),
    "a copy": (SPARK, ("rescale", "--parallelism", "4")),
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

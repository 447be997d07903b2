"""``ckpt import``: its pages (``pages/``, written anew with ``--update``), its JSON, and how it
fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stateformat.formats
from stateformat.backends.foreign.checkpoint import ForeignFormat
from stateformat.backends.foreign.source import Note, Opened
from stateformat.graph import SubtaskSet
from stateformat.store import open as open_store
from tests.ckpt.ckpt_runs import document, failure, page, run
from tests.foreign.foreign_fakes import FakeSource, flink_like, spark_like
from tests.foreign.import_runs import LOG, file_log, finished

PAGES = Path(__file__).parent / "pages"
TOLD = tuple(Note("opaque", f"op/state {i}", f"sentence {i}") for i in range(23))


@pytest.fixture
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that hold a checkpoint by a fake source: ``flink`` and ``spark``, by their names."""
    sources: dict[str, FakeSource] = {
        "flink": flink_like(),
        "spark": spark_like(),
        "told": finished(flink_like(notes=TOLD), "source", SubtaskSet.of([1])),
    }

    def entry(name: str, source: FakeSource) -> Any:
        form = ForeignFormat(
            f"a fake of {name}",
            lambda folder: f"/{name}-" in folder.url,
            lambda folder, outside: Opened([source]),
            lambda folder, checkpoint_id, outside: source,
            lambda source, level, progress: source.check(level, progress),
        )
        return type("Entry", (), {"load": lambda self: form.found})()

    monkeypatch.setattr(
        stateformat.formats, "_formats", lambda: {name: entry(name, source) for name, source in sources.items()}
    )


def place(path: Path, name: str) -> Path:
    folder = path / f"{name}-0"
    folder.mkdir()
    return folder


CALLS: dict[str, tuple[str, list[str]]] = {
    "import-flink": (
        "flink",
        ["--job-id", "words", "--map", "counts=totals", "--map", "counts/accState.value.count=rows"],
    ),
    "import-spark": ("spark", ["--source", "ticks=rate@7"]),
    "import-spark-files": ("spark", ["--key-hash", "keep", "--source", "lines=files"]),
    "import-told": ("told", ["--max-parallelism", "64", "--drop", "counts/last"]),
}


@pytest.mark.usefixtures("_fakes")
@pytest.mark.parametrize("name", CALLS)
def test_a_page_is_the_golden_one(name: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    system, options = CALLS[name]
    file_log(tmp_path, LOG)
    folder = (tmp_path / "foreign").rename(tmp_path / f"{system}-0")
    # The paths are long and change, so the page is as wide as any can be.
    found = page("import", folder, "--to", tmp_path / "store", *options, COLUMNS="120")
    text = found.replace(f"file://{tmp_path}", "/tmp")
    golden = PAGES / f"{name}.txt"
    if pytestconfig.getoption("update"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8"), "if this is right, run pytest with --update"


@pytest.mark.usefixtures("_fakes")
def test_its_json_says_what_the_page_does(tmp_path: Path) -> None:
    folder = place(tmp_path, "flink")
    found = document("import", folder, "--to", tmp_path / "store", "--job-name", "Words")
    assert (found["checkpoint_id"], found["kind"], found["parent"], found["job_name"]) == (
        1,
        "checkpoint",
        None,
        "Words",
    )
    assert found["source"]["checkpoint_id"] == 12
    assert (
        found["written"]["rows"] == found["totals"]["rows"] == open_store(tmp_path / "store").open().record.totals.rows
    )
    assert [one["kind"] for one in found["remarks"]] == ["opaque", "renamed"]
    assert found["key_hashes"] == ["spark-murmur3-seed42"]
    assert (found["positions"], found["offsets"]) == ([], [])
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("_fakes")
def test_spark_offsets_that_are_left_are_in_the_json(tmp_path: Path) -> None:
    found = document("import", place(tmp_path, "spark"), "--to", tmp_path / "store")
    assert found["offsets"] == [{"source": 0, "offset": '{"logOffset":2}'}]


@pytest.mark.usefixtures("_fakes")
def test_sources_that_continue_and_subtasks_that_had_finished_are_in_the_json(tmp_path: Path) -> None:
    found = document("import", place(tmp_path, "spark"), "--to", tmp_path / "one", "--source", "ticks=rate@7")
    assert [one["uid"] for one in found["positions"]] == ["ticks"]
    found = document("import", place(tmp_path, "told"), "--to", tmp_path / "two")
    assert [(one["uid"], one["subtasks"]) for one in found["finished"]] == [("source", [[1, 1]])]


FAILURES: list[tuple[list[str], int, str]] = [
    (["--map", "count=totals"], 2, "did you mean 'counts'"),
    (["--map", "counts=sink"], 2, "two operators would be called 'sink'"),
    (["--source", "in=kafka"], 2, "give files or rate"),
    (["--key-hash", "keep", "--max-parallelism", "7"], 2, "key groups are kept"),
]


@pytest.mark.usefixtures("_fakes")
@pytest.mark.parametrize(("options", "status", "said"), FAILURES, ids=[said for _, _, said in FAILURES])
def test_what_cannot_be_is_misuse(tmp_path: Path, options: list[str], status: int, said: str) -> None:
    found = failure("import", place(tmp_path, "flink"), "--to", tmp_path / "store", *options, status=status)
    assert said in found["message"]
    assert not (tmp_path / "store").exists()


@pytest.mark.usefixtures("_fakes")
def test_stores_of_ours_and_places_in_use_are_refused(tmp_path: Path) -> None:
    folder, store = place(tmp_path, "flink"), tmp_path / "store"
    page("import", folder, "--to", store, COLUMNS="120")
    assert "holds checkpoint 1" in failure("import", folder, "--to", store, status=2)["message"]
    assert (
        "already a stateformat checkpoint" in failure("import", store, "--to", tmp_path / "other", status=2)["message"]
    )
    assert "stays as it is" in failure("import", folder, "--to", folder / "store", status=2)["message"]
    other = place(tmp_path, "spark")
    assert "a fake of spark" in failure("import", folder, "--to", other, status=2)["message"]
    assert failure("import", tmp_path / "nowhere", "--to", tmp_path / "new", status=3)["kind"] == "store_not_found"
    assert run("import", folder).status == 2


@pytest.mark.usefixtures("_fakes")
def test_a_name_that_is_given_twice_is_misuse(tmp_path: Path) -> None:
    options = ["--map", "counts=a", "--map", "counts=b"]
    found = failure("import", place(tmp_path, "flink"), "--to", tmp_path / "store", *options, status=2)
    assert "gives 'counts' twice" in found["message"]


def test_damage_is_an_answer_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = spark_like(moved=1)
    form = ForeignFormat(
        "a fake", lambda folder: "/broken-" in folder.url, lambda *_: [broken], lambda *_: broken, FakeSource.check
    )
    entry = type("Entry", (), {"load": lambda self: form.found})()
    monkeypatch.setattr(stateformat.formats, "_formats", lambda: {"broken": entry})
    found = failure("import", place(tmp_path, "broken"), "--to", tmp_path / "store", status=1)
    assert "but its hash (spark-murmur3-seed42) puts it in" in found["message"]


def test_the_page_of_a_flink_import_names_its_own_hash_and_nothing_that_was_dropped(tmp_path: Path) -> None:
    saved = Path(__file__).parent / "fixtures" / "flink-2.3.0" / "core-hashmap-canonical" / "savepoint"
    options = ["--key-hash", "keep", "--drop", "numbers", "--prove"]
    text = " ".join(page("import", saved, "--to", tmp_path / "store", *options, COLUMNS="120").split())
    assert "key hash flink-java-hashcode-murmur size" in text
    assert "4 rows of the import's own" in text
    assert "flink-savepoint" not in text
    assert "Opaque (numbers" not in text
    assert "Left out as asked, and not compared: numbers." in text

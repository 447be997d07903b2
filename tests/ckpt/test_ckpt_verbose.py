"""``ckpt --verbose``: what is done, and at the end what it took, on standard error and nowhere
else."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import stateformat.storage as storage_room
from stateformat.store import open as open_store
from stateformat.tools.ckpt.main import main
from stateformat.tools.ckpt.watch import Watch
from tests.ckpt.ckpt_runs import DOCS, Run, program, run
from tests.stores import counts_store

ENDING = re.compile(
    r"\nckpt (?P<command>\S+): (?P<wall>[\d.]+) s, (?P<cpu>[\d.]+) s of CPU time, "
    r"at most (?P<memory>[\d.,]+) [MG]iB of memory\n(?P<table>(?:.*\n)*?)"
    r"retries \d+, waits \d+ \([\d.]+ s\), conflicts \d+, unknown \d+, restarts \d+\n\Z"
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with two checkpoints."""
    counts_store(str(tmp_path / "store"), 2)
    return tmp_path / "store"


def ending(err: str) -> re.Match[str]:
    """The last lines of standard error, which must be those of ``--verbose`` and fit 80 columns."""
    match = ENDING.search(err)
    assert match, err
    assert max(map(len, match[0].splitlines())) <= 80
    assert 0 <= float(match["wall"]) < 120
    assert float(match["cpu"]) > 0
    return match


def rows(found: Run) -> dict[str, list[float]]:
    """The table: calls, objects, bytes, seconds and failures of each operation."""
    title, *lines = ending(found.err)["table"].splitlines()
    assert title.split() == ["operation", "calls", "objects", "bytes", "seconds", "failures"]
    cells = [line.replace(",", "").split() for line in lines]
    return {name: [float(cell) for cell in rest] for name, *rest in cells}


def test_the_program_says_how_much_time_and_memory_it_took(store: Path) -> None:
    match = ending(program("history", store, "--verbose").stderr)
    assert float(match["wall"]) > 0
    assert float(match["cpu"]) < 120
    assert 20 < float(match["memory"].replace(",", "")) < 400


def test_a_command_shows_what_its_storage_did_and_its_page_stays_as_it_was(store: Path) -> None:
    quiet, loud = run("inspect", store), run("inspect", store, "--verbose")
    assert quiet.err == ""
    assert loud.status == quiet.status
    assert re.sub(r"\d+ s ago", "", loud.out) == re.sub(r"\d+ s ago", "", quiet.out)
    library = open_store(str(store))
    assert library.open().manifest.handles.num_rows
    expected = {name: counts for name, counts in library.stats.operations.items() if counts.calls}
    found = rows(loud)
    assert {name: row[:3] for name, row in found.items() if name != "all"} == {
        name: list(counts[:3]) for name, counts in expected.items()
    }
    assert found["all"][0] == sum(counts.calls for counts in expected.values())
    (manifest,) = (store / "manifests").glob(f"{2:020d}-*")
    assert found["all"][2] == sum(path.stat().st_size for path in (store / f"checkpoints/{2:020d}.json", manifest))


def test_json_stays_one_document_and_the_table_is_text_beside_it(store: Path) -> None:
    found = run("history", store, "--format", "json", "-v")
    assert [item["checkpoint_id"] for item in found.document["checkpoints"]] == [2, 1]
    assert ending(found.err)["command"] == "history"
    assert rows(found)["all"][0] > 2
    assert rows(found)["all"][4] == 0


@pytest.mark.parametrize("output_format", ["text", "json"])
def test_a_command_that_fails_shows_a_trace_and_what_it_took(tmp_path: Path, output_format: str) -> None:
    found = run("history", tmp_path / "nowhere", "--verbose", "--format", output_format, traces=True)
    assert found.status == 3
    sentence, trace, table = (found.err.index(text) for text in ("ckpt: there is no store", "Traceback", "operation  "))
    assert sentence < trace < table
    assert rows(found)["exists"][0] == 1
    assert rows(found)["list"][1] == 0
    assert (found.document["error"]["exit_status"] if output_format == "json" else len(found.out)) in (3, 0)


def test_once_logs_what_is_published_and_twice_every_request(store: Path) -> None:
    once = run("rescale", store, "--parallelism", 1, "-v")
    twice = run("rescale", store, "--parallelism", 2, "-vv")
    line = re.compile(r"(?m)^\d\d:\d\d:\d\d\.\d{3} (\S+) +(.*)$")
    ((level, text),) = line.findall(once.err)
    assert level == "INFO"
    assert re.search(
        r"published checkpoint 3 of file://\S+: 20 rows, \d+ segments, \d+ bytes; publishing took [\d.]+ s", text
    )
    logged = line.findall(twice.err)
    requests = [text.split()[0] for level, text in logged if level == "DEBUG"]
    assert len(logged) == len(requests) + 1
    assert {name: requests.count(name) for name in requests} == {
        name: row[0] for name, row in rows(twice).items() if name != "all"
    }


def test_the_docs_show_the_table_as_it_is(store: Path) -> None:
    (block,) = re.findall(r"```text\n(\$ ckpt .*?)```", (DOCS / "observability.md").read_text(), re.DOTALL)
    shown, real = rows(Run(0, "", block)), rows(run("rescale", store, "--parallelism", 1, "--verbose"))
    assert ending(block)["command"] == "rescale"
    assert {name: row[0] for name, row in shown.items()} == {name: row[0] for name, row in real.items()}


def test_a_copy_counts_what_both_stores_do(store: Path, tmp_path: Path) -> None:
    found = rows(run("copy", store, tmp_path / "copy", "--verbose"))
    (manifest,) = (tmp_path / "copy" / "manifests").iterdir()
    assert found["open_input"][1:3] == [1, manifest.stat().st_size], "what is linked is read for its digest"
    assert found["link_from"][:2] == [1, 1]
    assert found["create"][:2] == [1, 1]


def test_a_command_line_that_is_wrong_took_nothing(store: Path) -> None:
    found = run("inspect", store, "--verbose", "--rows", "many")
    assert found.status == 2
    assert "operation" not in found.err


def test_nothing_is_counted_unless_asked(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[object] = []
    monkeypatch.setattr(storage_room, "instrumented", lambda storage, _: (counted.append(storage), storage)[1])
    assert run("inspect", store).status == 0
    assert counted == []
    assert run("inspect", store, "-v").status == 0
    assert len(counted) == 1


def test_a_call_from_python_leaves_the_loggers_as_they_were(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("stateformat")
    before = (logger.level, list(logger.handlers))
    for _ in range(2):
        assert main(["history", str(store), "-vv"]) == 0
        found = capsys.readouterr().err
        assert found.count("\noperation ") == 1
        lists = int(found[found.rindex("\nlist ") :].split()[1])
        assert len(re.findall(r" list \S+ of ", found)) == lists > 0, "each request is logged once"
    assert main(["history", str(store)]) == 0
    assert capsys.readouterr().err == ""
    assert (logger.level, list(logger.handlers)) == before


def test_calls_at_the_same_time_leave_the_loggers_as_they_were() -> None:
    logger = logging.getLogger("stateformat")
    before = (logger.level, list(logger.handlers))
    first, second = Watch(), Watch()
    first.end()
    second.end()
    assert (logger.level, list(logger.handlers)) == before

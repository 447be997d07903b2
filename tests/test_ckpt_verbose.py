"""``ckpt --verbose``: what is done, and at the end what it took, on standard error and nowhere else."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stateformat.store import open as open_store
from tests.ckpt_runs import CKPT, DOCS, Run, run
from tests.stores import counts_store

ENDING = re.compile(
    r"\nckpt (?P<command>\S+): (?P<wall>[\d.]+) s, (?P<cpu>[\d.]+) s of CPU time, at most (?P<memory>[\d.]+) MiB of memory\n"
    r"(?P<table>(?:.*\n)*?)retries (?P<retries>\d+), waits (?P<waits>\d+) \((?P<slept>[\d.]+) s\), conflicts (?P<conflicts>\d+), "
    r"unknown (?P<unknown>\d+), restarts (?P<restarts>\d+)\n\Z"
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with two checkpoints."""
    counts_store(str(tmp_path / "store"), 2)
    return tmp_path / "store"


def ending(found: Run) -> re.Match[str]:
    """The last lines of standard error, which must be those of ``--verbose`` and fit 80 columns."""
    match = ENDING.search(found.err)
    assert match, found.err
    assert max(map(len, match[0].splitlines())) <= 80
    assert 0 < float(match["wall"]) < 120
    assert 0 < float(match["cpu"]) < 120
    assert 20 < float(match["memory"]) < 400
    return match


def rows(found: Run) -> dict[str, list[float]]:
    """The table: calls, objects, bytes, seconds and failures of each operation."""
    title, *lines = ending(found)["table"].splitlines()
    assert title.split() == ["operation", "calls", "objects", "bytes", "seconds", "failures"]
    cells = [line.replace(",", "").split() for line in lines]
    return {name: [float(cell) for cell in rest] for name, *rest in cells}


def test_a_command_tells_what_its_storage_did_and_its_page_stays_as_it_was(store: Path) -> None:
    quiet, loud = run("inspect", store), run("inspect", store, "--verbose")
    assert quiet.err == ""
    assert loud.status == quiet.status
    assert [re.sub(r"\d+ s ago", "", found.out) for found in (loud, quiet)].count(
        re.sub(r"\d+ s ago", "", quiet.out)
    ) == 2
    library = open_store(str(store))
    manifest = library.open().manifest
    assert manifest.handles.num_rows
    expected = {name: counts for name, counts in library.stats.operations.items() if counts.calls}
    found = rows(loud)
    assert {name: row[:3] for name, row in found.items() if name != "all"} == {
        name: list(counts[:3]) for name, counts in expected.items()
    }
    assert found["all"][0] == sum(counts.calls for counts in expected.values())
    (manifest,) = (store / "manifests").glob(f"{2:020d}-*")
    read = store / "checkpoints" / f"{2:020d}.json", manifest
    assert found["all"][2] == sum(path.stat().st_size for path in read)


def test_json_stays_one_document_and_the_table_is_text_beside_it(store: Path) -> None:
    found = run("history", store, "--format", "json", "-v")
    assert [item["checkpoint_id"] for item in found.document["checkpoints"]] == [2, 1]
    assert ending(found)["command"] == "history"
    assert rows(found)["all"][0] > 2
    assert rows(found)["all"][4] == 0


@pytest.mark.parametrize("output_format", ["text", "json"])
def test_a_command_that_fails_tells_what_it_took_below_its_sentence(tmp_path: Path, output_format: str) -> None:
    arguments = ("history", str(tmp_path / "nowhere"), "--verbose", "--format", output_format)
    # Not by run(): that there is a stack trace is what --verbose is asked for, too.
    done = subprocess.run([CKPT, *arguments], capture_output=True, encoding="utf-8", check=False, timeout=120)
    found = Run(done.returncode, done.stdout, done.stderr)
    assert found.status == 3
    sentence, trace, table = (found.err.index(text) for text in ("ckpt: there is no store", "Traceback", "operation  "))
    assert sentence < trace < table
    assert rows(found)["exists"][0] == 1
    assert rows(found)["list"][1] == 0
    assert (found.document["error"]["exit_status"] if output_format == "json" else len(found.out)) in (3, 0)


def test_once_tells_what_is_published_and_twice_every_request(store: Path) -> None:
    once = run("rescale", store, "--parallelism", 1, "-v")
    twice = run("rescale", store, "--parallelism", 2, "-vv")
    line = re.compile(r"(?m)^\d\d:\d\d:\d\d\.\d{3} (\S+) +(.*)$")
    assert [level for level, _ in line.findall(once.err)] == ["INFO"]
    assert re.search(
        r"published checkpoint 3 of file://\S+: 20 rows, \d+ segments, \d+ bytes; publishing took [\d.]+ s", once.err
    )
    told = line.findall(twice.err)
    requests = [text.split()[0] for level, text in told if level == "DEBUG"]
    assert len(told) == len(requests) + 1
    assert {name: requests.count(name) for name in requests} == {
        name: row[0] for name, row in rows(twice).items() if name != "all"
    }


def test_the_docs_show_the_table_as_it_is(store: Path) -> None:
    blocks = re.findall(r"```text\n(\$ ckpt .*?)```", (DOCS / "observability.md").read_text(), re.DOTALL)
    (shown,) = [Run(0, "", block) for block in blocks]
    assert ending(shown)["command"] == "rescale"
    real = rows(run("rescale", store, "--parallelism", 1, "--verbose"))
    assert rows(shown).keys() == real.keys()
    assert {name: row[0] for name, row in rows(shown).items()} == {name: row[0] for name, row in real.items()}


def test_a_copy_counts_what_both_stores_do(store: Path, tmp_path: Path) -> None:
    found = run("copy", store, tmp_path / "copy", "--verbose")
    (manifest,) = (tmp_path / "copy" / "manifests").iterdir()
    assert rows(found)["open_output"][1:3] == [1, manifest.stat().st_size]
    assert rows(found)["open_input"][1:3] == [1, manifest.stat().st_size]
    assert rows(found)["create"][:2] == [1, 1]


def test_a_command_line_that_is_wrong_took_nothing(store: Path) -> None:
    found = run("inspect", store, "--verbose", "--rows", "many")
    assert found.status == 2
    assert "operation" not in found.err


def test_nothing_is_counted_where_nobody_asks(store: Path) -> None:
    code = (
        "import sys\nfrom stateformat.tools.ckpt.main import main\nmain()\n"
        "print(*(name for name in sys.modules if name.startswith('stateformat.')), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(store)], capture_output=True, text=True, check=True
    )
    imported = set(done.stderr.split())
    assert "stateformat.history.records" in imported
    assert imported.isdisjoint({"stateformat.storage.stats", "stateformat.storage.instrumented"})


def test_a_call_from_python_leaves_the_loggers_as_they_were(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from stateformat.tools.ckpt.main import main

    logger = logging.getLogger("stateformat")
    before = (logger.level, list(logger.handlers))
    for _ in range(2):
        assert main(["history", str(store), "-vv"]) == 0
        found = capsys.readouterr().err
        assert found.count("\noperation ") == 1
        lists = int(found[found.rindex("\nlist ") :].split()[1])
        assert found.count(" list checkpoints/ of") == lists > 0, "each request is told once"
    assert main(["history", str(store)]) == 0
    assert capsys.readouterr().err == ""
    assert (logger.level, list(logger.handlers)) == before

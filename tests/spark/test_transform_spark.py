"""Functions of a rewrite on Spark's workers: the same rows as in threads, errors as sentences, and
functions of files that no worker has.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateformat.backends.rewrite import RewriteSpec, Transform, rewrite
from stateformat.backends.spark.rewrite import SparkEngine
from stateformat.errors import ErrorKind, InvalidInput
from stateformat.segments import WriteOptions
from stateformat.store import CheckpointStore, open as open_store
from tests.ckpt.ckpt_runs import CKPT, document
from tests.rewrite import rewrite_jobs as jobs
from tests.rewrite.transform_cases import CASES, put, rewritten_to
from tests.worlds import data as world

pytestmark = pytest.mark.spark

FIXES = """
import pyarrow as pa
import pyarrow.compute as pc

import fixes_rates

def correct(rows):
    cents = pc.multiply(rows["euros"], fixes_rates.CENTS)
    return rows.set_column(rows.column_names.index("euros"), "cents", cents)

def fail(rows):
    if len(rows):
        raise fixes_rates.Wrong(f"{len(rows)} rows\\nare too many")
    return rows
"""
RATES = """
CENTS = 100.0

class Wrong(Exception):
    pass
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    """The data world. Tests leave it as it is."""
    return world.data_store(str(tmp_path_factory.mktemp("transform") / "shop"))


@pytest.fixture
def fixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a module of functions and one that it uses."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "fixes_of_mine.py").write_text(FIXES)
    (folder / "fixes_rates.py").write_text(RATES)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("fixes_of_mine", "fixes_rates"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


@pytest.mark.parametrize(
    "more", [{}, {"max_parallelism": 32, "parallelism": 4, "options": WriteOptions(inline_bytes_max=0)}]
)
def test_both_engines_make_the_same_of_every_state(
    spark: Any, shop: CheckpointStore, tmp_path: Path, more: dict[str, Any]
) -> None:
    chosen = {case.state: case for case in reversed(CASES)}
    assert {case.rekey for case in CASES[6:7] + list(chosen.values())} == {False, True}
    spec = RewriteSpec(transforms={place: case.transform for place, case in chosen.items()}, **more)
    engines = {"local": None, "spark": SparkEngine(spark)}
    told = [rewritten_to(tmp_path / name, shop, engine, spec).transformed for name, engine in engines.items()]
    assert told[0] == told[1]
    local, remote = (open_store(str(tmp_path / name)).open() for name in engines)
    facts = ("operator", "state", "subtask", "rows", "first_group", "last_group")
    handles = [[[h[name] for name in facts] for h in jobs.handles_of(one)] for one in (local, remote)]
    assert handles[0] == handles[1]
    for place, case in chosen.items():
        assert world.same_rows(remote.state(*place).table(), case.expected()), place


def test_rows_whose_keys_change_are_dealt_anew_by_one_exchange(
    spark: Any, shop: CheckpointStore, tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.rekey)
    spec = RewriteSpec(transforms={case.state: case.transform})
    done = rewritten_to(tmp_path / "to", shop, SparkEngine(spark), spec)
    assert world.same_rows(open_store(str(tmp_path / "to")).open().state(*case.state).table(), case.expected())
    rows = len(case.expected())
    assert [(one.read, one.written) for one in done.transformed] == [(rows, rows)]


def fail_on_rows(rows: pa.Table) -> pa.Table:
    if len(rows):
        raise LookupError("no such\nrate")
    return rows


def twice(rows: pa.Table) -> pa.Table:
    return pa.concat_tables([rows, rows])


LOCK = threading.Lock()


def locked(rows: pa.Table) -> pa.Table:
    with LOCK:
        return rows


@pytest.mark.parametrize(
    ("function", "rekey", "kind", "told"),
    [
        (
            fail_on_rows,
            False,
            "transform_failed",
            r"fail_on_rows raised LookupError: no such rate, called with \d+ rows",
        ),
        (
            fail_on_rows,
            True,
            "transform_failed",
            r"fail_on_rows raised LookupError: no such rate, called with \d+ rows",
        ),
        (
            twice,
            True,
            "duplicate_row_key",
            r"after .*:twice, .*row key \{.*\} stands on 2 rows, \{.*\} on 2, \{.*\} on 2",
        ),
        (lambda rows: put(rows, "key", pc.utf8_upper(rows["key"])), False, "transform_failed", "rekey=True"),
        (locked, False, "transform_failed", "cannot be sent to Spark's workers: .*lock"),
    ],
)
def test_what_goes_wrong_in_a_worker_is_the_same_sentence(
    spark: Any, tmp_path: Path, function: Any, rekey: bool, kind: str, told: str
) -> None:
    store = jobs.new_store(tmp_path / "store")
    jobs.publish(store)
    spec = RewriteSpec(transforms={("sums", "total"): Transform(function, rekey=rekey)})
    with pytest.raises(InvalidInput, match=told) as refused:
        rewrite(store, store.open(), spec, engine=SparkEngine(spark))
    assert refused.value.kind is ErrorKind(kind)
    assert "Traceback" not in str(refused.value)
    assert [record.checkpoint_id for record in store.history()] == [1]


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("name", ["fixes_of_mine", "fixes_of_mine.py"])
def test_a_function_of_the_current_directory_reaches_the_workers(
    shop: CheckpointStore, fixes: Path, tmp_path: Path, name: str
) -> None:
    url = shutil.copytree(shop.url.removeprefix("file://"), tmp_path / "shop")
    options = ("--transform", f"totals/spent={name}:correct", "--rename-column", "euros=cents")
    found = document("rewrite", url, "--engine", "spark", *options)
    [one] = found["transformed"]
    assert (one["function"], one["rows_before"], one["rekeyed"]) == (f"{name}:correct", one["rows_after"], False)
    wanted = [
        {("cents" if name == "euros" else name): value for name, value in row.items()} | {"cents": row["euros"] * 100.0}
        for row in world.expected_rows("totals", "spent")
    ]
    assert world.same_rows(open_store(str(url)).open().state("totals", "spent").table(), wanted)


@pytest.mark.truth
def test_a_terminal_shows_a_sentence_and_no_stack_trace(shop: CheckpointStore, fixes: Path) -> None:
    function = "totals/spent=fixes_of_mine:fail"
    command = [str(CKPT), "rewrite", shop.url, "--engine", "spark", "--transform", function]
    done = subprocess.run(command, cwd=fixes, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    told = [line for line in done.stderr.splitlines() if not line.startswith("WARNING: Using incubator")]
    assert len(told) == 1, done.stderr
    assert told[0].startswith("ckpt: fixes_of_mine:fail raised Wrong: ")
    assert len(shop.history()) == world.NEWEST

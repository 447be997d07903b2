"""``ckpt rewrite --transform``: functions of the current directory, what the page says, and each
sentence for what cannot be.
"""

from __future__ import annotations

import os
import re
import sys
import uuid
from pathlib import Path

import pytest

from stateformat.model import CheckpointId
from stateformat.store import open as open_store
from tests.ckpt.ckpt_runs import document, failure, page, program, run
from tests.servers.server import BUCKET, S3Server
from tests.worlds import data as world, stores

DOCS = Path(__file__).resolve().parents[2] / "docs"
FOREIGN = Path(__file__).resolve().parents[1] / "foreign" / "fixtures"
FIXES = """
import pyarrow as pa
import pyarrow.compute as pc

import fixes_helper


def correct(rows):
    rows = rows.filter(pc.greater_equal(rows["n"], fixes_helper.least()))
    return rows.append_column("language", pa.array(["en"] * len(rows), pa.string()))


def shout(rows):
    return rows.set_column(rows.column_names.index("word"), "word", pc.utf8_upper(rows["word"]))


def text(rows):
    return rows.set_column(rows.column_names.index("n"), "count", pc.cast(rows["n"], pa.string()))


def fail(rows):
    if len(rows):
        raise KeyError("w7")
    return rows


LEAST = 5
"""
HELPER = """
def least():
    return 5
"""


@pytest.fixture(autouse=True)
def fixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with modules of the user's own."""
    folder = tmp_path / "work"
    folder.mkdir()
    for name, text in (
        ("fixes", FIXES),
        ("fixes_helper", HELPER),
        ("fixes_broken", "import fixes_not_there"),
        ("fixes_ended", "raise SystemExit('no')"),
        ("json", "def f(rows): return rows"),
    ):
        (folder / f"{name}.py").write_text(text)
        if name != "json":
            monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder


def rows(store: Path, state: str = "counts") -> list[dict[str, object]]:
    return sorted(open_store(str(store)).open().state("counter", state).table().to_pylist(), key=str)


def test_the_page_says_what_became_of_each_column_and_how_many_rows_there_are(counts: Path) -> None:
    shown = page("rewrite", counts, "--transform", "counter/counts=fixes:correct", "--rename-column", "n=times")
    assert shown.startswith("Published checkpoint 2\n")
    assert shown.endswith(
        f"""
{"counter/counts by fixes:correct":<68}20 → 15 rows

  column    what became of it  type
  word      kept               string
  times     renamed, was n     int64
  language  added              string
"""
    )
    wanted = [{"word": f"w{i}", "times": i, "language": "en"} for i in range(5, 20)]
    assert rows(counts) == sorted(wanted, key=str)
    assert page("validate", counts, "--level", "full").rstrip().endswith("no problems")


@pytest.mark.parametrize("named", ["", "counts=", "counter/counts="])
@pytest.mark.parametrize("where", ["fixes", "fixes.py", "../work/fixes.py"])
def test_the_only_state_need_not_be_named_and_a_file_may_be(counts: Path, named: str, where: str) -> None:
    found = document(
        "rewrite",
        counts,
        "--transform",
        f"{named}{where}:text",
        "--rename-column",
        f"{named[:-1]}.n=count" if named else "n=count",
    )
    [one] = found["transformed"]
    assert (one["operator"], one["state"], one["function"]) == ("counter", "counts", f"{where}:text")
    assert (one["rows_before"], one["rows_after"], one["rekeyed"]) == (20, 20, False)
    assert one["columns"] == [
        {"column": "word", "was": "word", "change": "kept", "type": "string", "type_was": "string"},
        {"column": "count", "was": "n", "change": "retyped", "type": "string", "type_was": "int64"},
    ]


def test_keys_that_change_are_dealt_anew_if_told_so(counts: Path, tmp_path: Path) -> None:
    error = failure("rewrite", counts, "--transform", "fixes:shout", status=2)
    assert re.search(r"fixes:shout changed keys: of \d+ rows.*, \d+ came back.*`--rekey`", error["message"])
    shown = page("rewrite", counts, "--transform", "fixes:shout", "--rekey", "--to", tmp_path / "to")
    assert "20 → 20 rows, rehashed" in shown
    assert {row["word"] for row in rows(tmp_path / "to")} == {f"W{i}" for i in range(20)}
    assert len(open_store(str(counts)).history()) == 1


def test_a_column_may_be_renamed_without_a_function(counts: Path) -> None:
    shown = page("rewrite", counts, "--rename-column", "n=times")
    assert "counter/counts by a renaming of columns" in shown
    assert rows(counts)[0] == {"word": "w0", "times": 0}


@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        ("--transform fixes", "usage", "'fixes' names no function; give a file or module and a function"),
        ("--transform =fixes:correct", "usage", "names no state before its '='"),
        ("--transform nowhere.py:f", "usage", "there is no file 'nowhere.py', seen from /"),
        (
            "--transform fixes_nowhere:f",
            "invalid_argument",
            "there is no module 'fixes_nowhere' in .*/work; install it",
        ),
        (
            "--transform fixes:corect",
            "invalid_argument",
            "fixes has no function 'corect'; its functions are: correct, fail, shout, text",
        ),
        ("--transform fixes:LEAST", "invalid_argument", "has no function 'LEAST'"),
        (
            "--transform json.py:f",
            "invalid_argument",
            "json.py would replace the module 'json'.*give the file another name",
        ),
        (
            "--transform fixes_broken:f",
            "invalid_argument",
            "fixes_broken imports 'fixes_not_there', which is not installed",
        ),
        ("--transform fixes_ended:f", "invalid_argument", "fixes_ended cannot be imported: it raised SystemExit: no"),
        (
            "--transform fixes:fail",
            "transform_failed",
            r"fixes:fail raised KeyError: 'w7', called with \d+ rows of state 'counts'",
        ),
        ("--transform zz/counts=fixes:fail", "unknown_state", "no state 'zz/counts'; did you mean 'counter/counts'"),
        ("--transform cunts=fixes:fail", "unknown_state", "no state 'cunts'"),
        (
            "--transform fixes:text --transform counts=fixes:fail",
            "usage",
            "two functions for state counter/counts: fixes:text and fixes:fail",
        ),
        ("--rekey", "usage", "--rekey is for a --transform of keyed state"),
        ("--rename-column n", "usage", "is not of the form"),
        ("--rename-column m=n", "schema_mismatch", "no column 'm' to be renamed"),
        ("--rename-column counts.m=n", "schema_mismatch", "no column 'm' to be renamed"),
    ],
)
def test_what_cannot_be_is_a_sentence_and_nothing_is_published(
    counts: Path, options: str, kind: str, told: str
) -> None:
    error = failure("rewrite", counts, *options.split(), status=2)
    assert error["kind"] == kind
    assert re.search(told, error["message"]), error["message"]
    assert len(open_store(str(counts)).history()) == 1


def test_a_state_must_be_named_where_several_have_rows(tmp_path: Path) -> None:
    world.data_store(str(tmp_path / "shop"), checkpoints=1)
    error = failure("rewrite", tmp_path / "shop", "--transform", "fixes:fail", status=2)
    assert "totals/spent" in error["message"]
    assert "totals/refunds" not in error["message"]  # It has no rows.
    error = failure("rewrite", tmp_path / "shop", "--rename-column", "euros=x", status=2)
    assert error["message"].endswith("say which, as in OPERATOR/STATE.OLD=NEW")
    # An operator may be named by its name.
    found = document("rewrite", tmp_path / "shop", "--rename-column", "Totals per user/spent.euros=cents")
    assert [(one["operator"], one["state"]) for one in found["transformed"]] == [("totals", "spent")]


def test_what_a_function_prints_is_not_the_result(counts: Path, fixes: Path) -> None:
    (fixes / "fixes_loud.py").write_text("print('imported')\ndef chatty(rows):\n    print('hello')\n    return rows\n")
    found = run("rewrite", counts, "--transform", "fixes_loud:chatty", "--format", "json")
    assert found.document["transformed"][0]["function"] == "fixes_loud:chatty"
    assert set(found.err.split("\n")) == {"imported", "hello", ""}


def test_the_stack_trace_of_a_function_is_shown_with_verbose(counts: Path) -> None:
    found = run("rewrite", counts, "--transform", "fixes:fail", "-v", traces=True)
    assert found.status == 2
    assert 'raise KeyError("w7")' in found.err
    assert "fixes.py" in found.err


def test_the_installed_program_finds_the_current_directory_and_not_before_what_is_installed(
    counts: Path, fixes: Path
) -> None:
    done = program("rewrite", counts, "--transform", "fixes:correct", "--format", "json", cwd=fixes)
    assert (done.returncode, done.stderr) == (0, "")
    done = program("rewrite", counts, "--transform", "json:f", cwd=fixes)
    assert (done.returncode, "json has no function 'f'" in done.stderr) == (2, True)
    (fixes / "json.py").unlink()
    other = {**os.environ, "PYTHONPATH": str(fixes)}
    done = program("rewrite", counts, "--transform", "fixes:text", cwd=fixes.parent, env=other)
    assert (done.returncode, "count" in done.stdout) == (0, True)


def test_the_state_of_another_system_has_other_ways(tmp_path: Path) -> None:
    query = FOREIGN / "spark-4.3.0" / "totals-with-crc" / "checkpoint"
    error = failure("rewrite", query, "--rename-column=a=b", "--to", tmp_path / "copy", status=2)
    assert "leave --operator-parallelism, --max-parallelism, --rename and --rename-column out" in error["message"]
    savepoint = FOREIGN / "flink-2.3.0" / "core-hashmap-canonical" / "savepoint"
    error = failure("rewrite", savepoint, "--transform=fixes:fail", "--to", tmp_path / "copy", status=2)
    assert re.search("no store of this library. `ckpt import .*makes a store of it", error["message"])


@pytest.mark.s3
def test_a_store_on_s3_is_transformed(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto.secret)
    monkeypatch.setenv("AWS_DEFAULT_REGION", moto.region)
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    stores.counts_job(keys=50).publish(open_store(url, endpoint_url=moto.endpoint), None)
    there = ("--endpoint-url", moto.endpoint)
    found = document("rewrite", url, "--transform", "fixes:correct", "--rekey", *there)
    assert [(one["rows_before"], one["rows_after"]) for one in found["transformed"]] == [(50, 45)]
    assert document("validate", url, "--level", "full", *there)["ok"]


def test_a_rollback_takes_a_transform_back(counts: Path) -> None:
    before = rows(counts)
    document("rewrite", counts, "--transform", "fixes:correct")
    assert rows(counts) != before
    document("rollback", f"{counts}@1")
    assert rows(counts) == before
    assert open_store(str(counts)).open().id == CheckpointId(3)


def test_the_function_of_the_guide_does_what_it_says(tmp_path: Path) -> None:
    import pyarrow as pa

    from stateformat.graph import JobGraph
    from stateformat.states import declare
    from tests.worlds.stores import Job, operator, owned

    accounts = operator("accounts", 2)
    state = declare.value_state(
        "accounts", "balance", keys={"id": pa.int64()}, values={"name": pa.string(), "amount": pa.int64()}
    )
    table = pa.table({"id": [1, 2, 3], "name": ["a", None, "c"], "amount": [1, 2, 3]})
    job = Job(
        "bank",
        JobGraph((accounts,), ()),
        (state,),
        {("accounts", "balance"): lambda i: owned(table, ["id"], accounts, i)},
    )
    job.publish(open_store(str(tmp_path / "store")), None)
    [code, *_] = re.findall(r"```python\n(.*?)```", (DOCS / "transform.md").read_text(), re.S)
    (tmp_path / "work" / "fixes.py").write_text(code)
    found = document("rewrite", tmp_path / "store", "--transform", "accounts/balance=fixes:correct")
    [one] = found["transformed"]
    assert (one["rows_before"], one["rows_after"]) == (3, 2)
    after = open_store(str(tmp_path / "store")).open().state("accounts", "balance").table().to_pylist()
    assert sorted(after, key=str) == [
        {"id": 1, "name": "a", "amount": 100, "currency": "EUR"},
        {"id": 3, "name": "c", "amount": 300, "currency": "EUR"},
    ]

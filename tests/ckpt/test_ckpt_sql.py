"""``ckpt sql``: pages, documents, files, and how it ends."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import stateformat as sf
from stateformat.backends.connectors import MemorySource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import LocalRuntime
from stateformat.segments import WriteOptions
from stateformat.store import open as open_store
from tests.ckpt.ckpt_runs import CKPT, document, failure, fingerprint, page, program, run
from tests.worlds import stores
from tests.worlds.data import data_store, expected, same_rows

FIXTURES = Path(__file__).resolve().parents[1] / "foreign" / "fixtures"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The shop of tests/worlds/data.py. Tests leave it as it is."""
    folder = tmp_path_factory.mktemp("sql") / "shop"
    data_store(str(folder))
    before = fingerprint(folder)
    yield folder
    assert fingerprint(folder) == before


def answer(*arguments: object) -> Any:
    """The document of a query."""
    found = run("sql", *arguments, "--format", "json")
    assert (found.status, found.err) == (0, ""), found
    return found.document


def names(folder: Path) -> list[str]:
    """What lies in a folder."""
    return sorted(path.name for path in folder.iterdir())


# ---- pages


def test_a_page_is_a_table_and_the_number_of_its_rows(shop: Path) -> None:
    assert page("sql", shop, "select * from (values (1, 'a', null), (22, 'b\nb', true)) t(n, word, yes)").split(
        "\n"
    ) == [
        " n  word  yes",
        " 1  a     null",
        "22  b\\nb  true",
        "",
        "2 rows",
        "",
    ]
    assert page("sql", shop, "select 1 as one where false") == "one\n\n0 rows\n"


def test_texts_are_cut_to_the_page_and_numbers_never_are(shop: Path) -> None:
    text = page(
        "sql", shop, "select 123456789012345678 as n, repeat('長', 90) as wide, ['a', 'b'] as l, repeat('x', 99) as x"
    )
    titles, row, *_ = text.split("\n")
    assert titles.split() == ["n", "wide", "l", "x"]
    number, wide, nested, long = row.split("  ")
    assert (number, nested) == ("123456789012345678", '["a", "b"]')
    assert wide.strip("長") == long.strip("x") == "…"
    assert min(len(wide), len(long)) > 10


def test_an_empty_text_has_its_line_where_rows_stand_one_below_the_other(shop: Path) -> None:
    columns = ", ".join(f"{i} as number_{i:02}" for i in range(12))
    text = page("sql", shop, f"select '' as note, '  ' as spaces, null as nothing, {columns}")
    assert text.split("\n")[:4] == ["Row 1", '  note       ""', '  spaces     "  "', "  nothing    null"]


def test_rows_that_no_table_holds_stand_one_below_the_other(shop: Path) -> None:
    text = page("sql", shop, "select *, repeat('x', 1000) as long from checkpoints order by checkpoint_id limit 2")
    head, *lines = text.split("\n")
    assert head == "Row 1"
    assert lines[0].split() == ["checkpoint_id", "1"]
    assert text.count("\n  long ") == 2
    assert 400 < text.count("x") < 600
    assert "…\n\n2 rows\n" in text
    assert text.endswith("marks values that are cut (--format json has them whole)\n")


def test_a_page_has_a_hundred_rows_or_what_rows_says_and_tells_that_there_are_more(shop: Path) -> None:
    query = "select range as n from range(101)"
    more = "(--rows N shows more, --to FILE writes all)"
    assert page("sql", shop, query).endswith(f"\n99\n\nthe first 100 rows {more}\n")
    assert page("sql", shop, query, "--rows", 1) == f"n\n0\n\nthe first 1 row {more}\n"
    assert page("sql", shop, query, "--rows", 101).endswith("\n100\n\n101 rows\n")


def test_a_plan_is_shown_as_it_is(shop: Path) -> None:
    text = page("sql", shop, "explain select count(*) from totals.spent where user = 'u0002'")
    assert "\\n" not in text
    assert "'u0002'" in text
    assert len(text.split("\n")) > 5


def test_tables_are_listed(shop: Path) -> None:
    lines = page("sql", shop, "show tables").split("\n")
    assert [line.split()[0] for line in lines[1:6]] == [
        "checkpoints",
        "operators",
        "states",
        "handles",
        "orders.positions",
    ]
    assert any(line.split("  ")[0] == "totals.spent" for line in lines)


# ---- documents


def test_the_document_has_all_rows_with_the_values_of_json_lines(shop: Path) -> None:
    found = answer(shop, "select orders, euros, seen, vip from totals.spent order by user nulls first limit 3")
    assert found["checkpoint_ids"] == [6]
    assert found["columns"] == [
        {"name": "orders", "type": "int64"},
        {"name": "euros", "type": "double"},
        {"name": "seen", "type": "timestamp[us, tz=UTC]"},
        {"name": "vip", "type": "bool"},
    ]
    rows = sorted(expected("totals", "spent").to_pylist(), key=lambda row: row["user"] or "")[:3]
    assert [row["orders"] for row in found["rows"]] == [row["orders"] for row in rows]
    assert [row["seen"] for row in found["rows"]] == [
        row["seen"] and row["seen"].isoformat(timespec="microseconds").replace("+00:00", "Z") for row in rows
    ]
    assert found["more"] is False
    whole = answer(shop, "from totals.baskets")
    assert same_rows(
        [{**row, "price": str(row["price"])} for row in expected("totals", "baskets").to_pylist()], whole["rows"]
    )


def test_rows_of_a_document_can_be_limited(shop: Path) -> None:
    found = answer(shop, "from totals.spent", "--rows", 2)
    assert (len(found["rows"]), found["more"]) == (2, True)
    assert answer(shop, "select 1 where false")["rows"] == []


def test_a_document_is_ascii_where_the_output_takes_no_more(shop: Path) -> None:
    found = run("sql", shop, "select 'schön\u202e' as a", "--format", "json", encoding="ascii")
    assert found.out.isascii()
    assert found.document["rows"] == [{"a": "schön\u202e"}]


def test_every_checkpoint_is_read_with_its_id(shop: Path) -> None:
    query = "select _checkpoint_id as id, count(*) as n from totals.spent group by id order by id"
    found = answer(shop, query, "--all-checkpoints")
    assert found["rows"] == [{"id": one, "n": len(expected("totals", "spent", one))} for one in range(1, 7)]
    assert found["checkpoint_ids"] == [6, 5, 4, 3, 2, 1]
    assert answer(f"{shop}@2", "select count(*) as n from totals.spent")["rows"] == [
        {"n": len(expected("totals", "spent", 2))}
    ]


def test_a_query_comes_from_standard_input(shop: Path) -> None:
    done = program("sql", shop, "-", "--format", "json", input="-- users\nselect count(*) as n\nfrom totals.spent;\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["rows"] == [{"n": len(expected("totals", "spent"))}]


def test_notes_about_names_go_to_standard_error_and_into_the_document(tmp_path: Path) -> None:
    from stateformat.states import declare
    from tests.worlds.stores import Job, JobGraph, operator, pa

    state = declare.even_split_state("main", "s", columns={"n": pa.int64(), "N": pa.int64()})
    rows = {("main", "s"): lambda _: pa.table({"n": pa.array([1]), "N": pa.array([2])})}
    Job("j", JobGraph((operator("main", 1),)), (state,), rows).publish(open_store(str(tmp_path)), None)
    found = run("sql", tmp_path, "from main_2.s", "--format", "json")
    assert found.document["rows"] == [{"n": 1, "N_2": 2}]
    assert found.document["notes"] == found.err.rstrip("\n").split("\n")
    assert found.document["notes"][0].startswith("operator 'main' is main_2 here")
    assert found.document["notes"][1].startswith("column 'N' of main_2.s is N_2 here")


# ---- files


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl", "ndjson", "json"])
def test_an_answer_is_written_to_a_file_by_its_ending(shop: Path, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"out.{ending}"
    query = "select user, orders, price, note from totals.spent join totals.baskets using (user) left join totals.reminders using (user)"
    found = answer(shop, query, "--to", path)
    rows = answer(shop, query)["rows"]
    assert (found["rows"], found["bytes"], found["path"]) == (len(rows), path.stat().st_size, str(path))
    assert found["format"] == {"ndjson": "jsonl"}.get(ending, ending)
    assert len(rows) > 3000
    if ending == "parquet":
        read = [
            {**row, "price": str(row["price"]), "note": row["note"] and row["note"].hex()}
            for row in pq.read_table(path).to_pylist()
        ]
        assert pq.ParquetFile(path).num_row_groups == 1
    elif ending == "csv":
        read = [
            {**row, "orders": int(row["orders"]), "note": row["note"] or None, "user": row["user"] or None}
            for row in csv.DictReader(io.StringIO(path.read_text()))
        ]
        rows = [{**row, "note": row["note"] or None} for row in rows]
    else:
        text = path.read_text()
        read = json.loads(text) if ending == "json" else [json.loads(line) for line in text.splitlines()]
    assert same_rows(read, rows)
    assert names(tmp_path) == [path.name]


def test_the_page_of_a_file_says_what_was_written_where(shop: Path, tmp_path: Path) -> None:
    text = page("sql", shop, "select 1 as a, 2 as b", "--to", tmp_path / "a.csv")
    assert text.startswith("Answer written\n")
    assert "1 row · 12 B of csv" in text
    assert "a, b" in text


@pytest.mark.parametrize(
    ("given", "out"), [("csv", '"a"\n1\n2\n'), ("jsonl", '{"a":1}\n{"a":2}\n'), ("json", '[{"a":1},\n{"a":2}]\n')]
)
def test_standard_output_takes_the_data(shop: Path, given: str, out: str) -> None:
    for more in ([], ["--to", "-"]):
        found = run("sql", shop, "select unnest([1, 2]) as a", "--as", given, *more)
        assert (found.status, found.out, found.err) == (0, out, "2 rows\n")


def test_no_rows_are_a_whole_file(shop: Path, tmp_path: Path) -> None:
    query = "from totals.spent where false"
    for ending, text in {
        "csv": '"user","orders","euros","city","seen","vip","tier"\n',
        "jsonl": "",
        "json": "[]\n",
    }.items():
        page("sql", shop, query, "--to", tmp_path / f"a.{ending}")
        assert (tmp_path / f"a.{ending}").read_text() == text
    page("sql", shop, query, "--to", tmp_path / "a.parquet")
    assert pq.read_table(tmp_path / "a.parquet").schema.equals(expected("totals", "spent").schema)


def test_a_query_that_fails_leaves_the_file_as_it_was(shop: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("before")
    query = "select user::int from totals.spent order by 1"
    assert "Could not convert string" in failure("sql", shop, query, "--to", path, "--force", status=2)["message"]
    assert (path.read_text(), names(tmp_path)) == ("before", ["a.csv"])


# ---- misuse


MISUSE = {
    ("select 1", "--rows", "0"): "--rows",
    ("select 1", "--to", "a.xlsx"): "does not say its format",
    ("select 1", "--to", "-"): "add --as csv",
    ("select 1", "--as", "parquet"): "cannot be written to standard output",
    ("select 1", "--to", "{tmp}", "--as", "csv"): "is a directory",
    ("select 1", "--to", "{tmp}/there.csv"): "exists; give another name, or --force",
    ("select 1", "--to", "a.csv", "--rows", "3"): "put LIMIT in the query",
    (): "Missing argument 'QUERY'",
    ("", ): "the query is empty",
    ("from totals.spend",): "did you mean 'totals.spent'?",
    ("selec 1",): 'syntax error at or near "selec" (line 1, column 1)',
    ("select foo from totals.spent",): '"foo" not found in FROM clause',
    ("copy (select 1) to '{tmp}/x.csv'",): "COPY is refused. ckpt sql reads, and nothing else",
    ("from '{tmp}/there.csv'",): "files cannot be read here",
    ("select 1; select 2",): "the query holds 2 statements",
}  # fmt: skip


@pytest.mark.parametrize("arguments", MISUSE)
def test_what_cannot_be_is_told(shop: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "there.csv").write_text("a\n")
    given = [one.replace("{tmp}", str(tmp_path)) for one in arguments]
    assert MISUSE[arguments] in failure("sql", shop, *given, status=2)["message"]
    assert names(tmp_path) == ["there.csv"]


def test_all_checkpoints_are_not_one(shop: Path) -> None:
    message = failure("sql", f"{shop}@3", "select 1", "--all-checkpoints", status=2)["message"]
    assert "leave @3 out" in message


def test_a_store_or_checkpoint_that_is_not_there_is_told(shop: Path, tmp_path: Path) -> None:
    assert failure("sql", tmp_path / "none", "select 1", status=3)["kind"] == "store_not_found"
    assert failure("sql", f"{shop}@99", "select 1", status=3)["kind"] == "checkpoint_not_found"


def test_a_damaged_segment_is_told_as_by_other_commands(tmp_path: Path) -> None:
    stores.counts_job(keys=500).publish(
        open_store(str(tmp_path / "store")), None, options=WriteOptions(inline_bytes_max=0)
    )
    for path in tmp_path.glob("store/segments/**/*.parquet"):
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 1
        path.write_bytes(data)
    error = failure("sql", tmp_path / "store", "select sum(n) from counter.counts", status=1)
    export = failure(
        *("export", tmp_path / "store", "--operator", "counter", "--state", "counts", "--to", tmp_path / "a.csv"),
        status=1,
    )
    assert (error["kind"], error["message"]) == (export["kind"], export["message"])


# ---- other systems' checkpoints


def test_state_of_flink_and_of_spark_is_queried_where_it_lies() -> None:
    savepoint = FIXTURES / "flink-2.3.0" / "core-hashmap-canonical"
    wanted = [
        entry
        for entry in map(json.loads, (savepoint / "expected.jsonl").read_text().splitlines())
        if (entry["operator"], entry["state"]) == ("by-string", "mean")
    ]
    query = 'select count(*) as n, sum(value.f0) as total from "by-string".mean'
    for address in (savepoint / "savepoint", f"flink:{savepoint / 'savepoint'}"):
        [row] = answer(address, query)["rows"]
        assert row == {"n": len(wanted), "total": str(sum(entry["value"]["f0"] for entry in wanted))}
    spark = FIXTURES / "spark-4.3.0" / "aggregate" / "checkpoint"
    names = [row["name"] for row in answer(spark, "show tables")["rows"]]
    state = next(name for name in names if "operator-0" in name)
    [row] = answer(f"spark:{spark}", f"select count(*) as n from {state}")["rows"]
    assert row["n"] == len(open_store(spark).open().state("operator-0", "default").table()) > 0
    assert answer(spark, "select count(*) as n from checkpoints")["rows"] == [{"n": len(open_store(spark).history())}]


def test_nothing_is_written_into_another_systems_folder() -> None:
    folder = FIXTURES / "flink-2.3.0" / "core-hashmap-canonical" / "savepoint"
    before = fingerprint(folder)
    error = failure("sql", folder, "select 1", "--to", folder / "a.csv", status=2)
    assert "Flink" in error["message"]
    assert fingerprint(folder) == before


# ---- as a process


ENDS = {
    "select count(*) from totals.spent": 0,
    "from totals.spent order by user": 0,
    "from totals.spent limit 1": 0,
    "show tables": 0,
    "explain analyze from totals.spent": 0,
    "selec": 2,
    "select foo from totals.spent": 2,
    "select user::int from totals.spent": 2,
    "copy (select 1) to 'x'": 2,
    "from read_csv('x')": 2,
}
ENDS_TRIED_FIRST = (
    "from totals.spent limit 1",
    "explain analyze from totals.spent",
    "select user::int from totals.spent",
)
"""A result read in part, one that DuckDB makes itself, and an error; the others take longer."""


@pytest.mark.parametrize(
    "query", [pytest.param(query, marks=[] if query in ENDS_TRIED_FIRST else [pytest.mark.truth]) for query in ENDS]
)
def test_the_process_ends_without_a_word_of_duckdbs_own(shop: Path, query: str) -> None:
    """DuckDB tells of objects that are left when the interpreter ends."""
    done = program("sql", shop, query)
    assert done.returncode == ENDS[query]
    assert len(done.stderr.splitlines()) == (1 if ENDS[query] else 0), done.stderr


def test_a_reader_that_leaves_ends_it_quietly(shop: Path) -> None:
    arguments = ["sql", str(shop), "select a.user from totals.spent a, totals.spent b", "--as", "csv"]
    with subprocess.Popen([CKPT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1000)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("to", [False, True])
def test_ctrl_c_ends_the_query_with_a_sentence(shop: Path, tmp_path: Path, *, to: bool) -> None:
    query = "select count(*) from totals.spent, range(100000000000) where orders + range > 7"
    place = ["--to", str(tmp_path / "a.csv")] if to else []
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with subprocess.Popen(
        [CKPT, "sql", shop, query, "-vv", *place],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    ) as process:
        assert process.stderr is not None
        while "segments/" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    effect = f"{tmp_path / 'a.csv'} was not written" if to else "nothing was changed"
    assert f"ckpt: interrupted; {effect}\n" in err
    assert "Traceback" not in err
    assert "nanobind" not in err
    assert (names(tmp_path), names(scratch)) == (["scratch"], [])


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("how", ["constant", "rows", "export"])
def test_ctrl_c_ends_one_call_of_a_function_that_takes_minutes(shop: Path, tmp_path: Path, how: str) -> None:
    call = "levenshtein(repeat('a', 300000), repeat('b', 300000))"
    arguments = {
        "constant": ("sql", shop, f"select {call}"),
        "rows": ("sql", shop, f"select {call} + orders from totals.spent"),
        "export": ("export", shop, "--operator", "totals", "--state", "spent", "--as", "csv", "--to", "-"),
    }[how]
    where = ("--where", f"{call} > orders") if how == "export" else ()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [CKPT, *map(str, (*arguments, *where))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        while not names(tmp_path):  # DuckDB has begun.
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "ckpt: interrupted; nothing was changed\n")
    # What a killed process leaves is removed by the next one.
    assert program("sql", shop, "select 1", env=environment).returncode == 0
    assert names(tmp_path) == []


def test_a_query_that_takes_too_much_memory_is_stopped_with_a_sentence(shop: Path) -> None:
    done = program("sql", shop, "select length(repeat('x', 1000000000)) from range(20)", "--format", "json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["kind"]) == (2, "limit_exceeded")
    assert error["message"].startswith("the query took more than 768 MiB of memory and was stopped")
    assert done.stderr == f"ckpt: {error['message']}\n"
    # What it advises.
    assert program("sql", shop, "select length(repeat('x', 1000)) from range(20)").returncode == 0


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_values_cannot_command_a_terminal(shop: Path, form: str) -> None:
    query = "select chr(27) || '[2J' || chr(155) || 'ä' as a, chr(7) as b"
    ours, terminal = pty.openpty()
    try:
        subprocess.run([CKPT, "sql", shop, query, "--as", form], stdout=terminal, stderr=subprocess.DEVNULL, check=True)
        shown = os.read(ours, 10_000).decode()
    finally:
        os.close(ours)
        os.close(terminal)
    assert not [char for char in shown if not char.isprintable() and char not in "\r\n"]
    assert "[2J" in shown
    assert "ä" in shown
    assert "\x1b[2J" in run("sql", shop, query, "--as", "csv").out, "a file or pipe gets what there is"


def test_a_table_of_an_operator_that_has_finished_is_said_to_have_no_state(tmp_path: Path) -> None:
    flow = Dataflow("delays")
    rows = flow.source(MemorySource(pa.table({"plane": ["N1"], "late": [2]})), uid="flights")
    rows.key_by("plane").aggregate({"worst": ("late", "max")}, emit="end", uid="delays")
    LocalRuntime(sf.open(str(tmp_path / "store"))).run(flow)
    said = "operator 'delays' has finished; it has no state in checkpoint 1"
    assert document("sql", tmp_path / "store", "from delays.totals")["notes"] == [said]
    assert document("sql", tmp_path / "store", "from operators")["notes"] == []
    found = run("get", tmp_path / "store", "--operator", "delays", "--key", '"N1"')
    assert (found.status, said in " ".join(found.err.split())) == (1, True)

"""Bootstrap and transforms of checkpoints, on Spark as in threads."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateformat.backends import bootstrap as local
from stateformat.backends.bootstrap import Rows
from stateformat.backends.connectors import CollectSink
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import LocalRuntime
from stateformat.backends.rewrite import RewriteSpec, Transform, rewrite
from stateformat.backends.spark import DirectoryFrames, OffsetTable, SparkRuntime, SparkSource, bootstrap
from stateformat.backends.spark.rewrite import SparkEngine
from stateformat.errors import ErrorKind, InvalidInput, InvalidState
from stateformat.segments import WriteOptions
from stateformat.store import CheckpointStore, open as open_store
from stateformat.validation import validate
from tests.bootstrap.history_jobs import orders, plain, shop_flow, shop_states, world_flow
from tests.ckpt.ckpt_runs import CKPT, document
from tests.rewrite import rewrite_jobs as jobs
from tests.rewrite.transform_cases import CASES, put, rewritten_to
from tests.worlds import data as world

pytestmark = pytest.mark.spark
ROOT = Path(__file__).resolve().parents[2]


def frames(spark: Any, states: dict[str, pa.Table]) -> dict[str, Any]:
    """The tables as DataFrames of several partitions."""
    return {name: spark.createDataFrame(rows).coalesce(3) for name, rows in states.items()}


def content(store: CheckpointStore) -> Counter[Any]:
    """Every row with its operator, state and subtask, without the numbers of places in lists."""
    checkpoint = store.open()
    found: Counter[Any] = Counter()
    for handle in checkpoint.handles.to_pylist():
        place = (handle["operator"], handle["state"], handle["subtask"])
        rows = checkpoint.read(*place).table().to_pylist() if handle["rows"] and handle["mode"] == "keyed" else []
        found.update((*place, *sorted((k, repr(v)) for k, v in row.items() if k != "_index")) for row in rows)
    return found


@pytest.mark.truth
def test_a_run_on_spark_that_begins_with_history_ends_as_one_that_has_seen_it(spark: Any, tmp_path: Path) -> None:
    every, seen = orders(120), orders(70)
    wanted, found = CollectSink(), CollectSink()
    LocalRuntime(open_store(str(tmp_path / "whole"))).run(shop_flow(every, wanted))
    flow, begun, beside = shop_flow(every, found), open_store(str(tmp_path / "begun")), open_store(str(tmp_path / "b"))
    positions = {"Orders": 70, "rates": 2}
    told: list[tuple[str, int]] = []
    done = bootstrap(
        begun, flow, frames(spark, shop_states(seen)), positions=positions, progress=lambda *now: told.append(now)
    )
    assert not validate(begun, level="full").problems
    assert {name: sum(rows for other, rows in told if other == name) for name, _ in told} == done.rows
    local.bootstrap(beside, flow, shop_states(seen), positions=positions)
    assert content(begun) == content(beside)
    SparkRuntime(spark, begun).run(flow)
    assert plain(found) == plain(wanted)


def test_the_states_of_another_checkpoint_arrive_whole_by_spark(spark: Any, tmp_path: Path) -> None:
    """Columns as Spark has them: structs, lists, decimals, dates, instants, binary, and nulls."""
    flow, names = world_flow(3)
    given = {
        new: spark.createDataFrame(world.expected(*old))
        for new, old in names.items()
        if old[1] in ("spent", "baskets", "recent", "reminders", "by_day")
    }
    bootstrap(tmp_path / "s", flow, given, parallelism=2)
    store = open_store(str(tmp_path / "s"))
    assert not validate(store, level="full").problems
    for new in given:
        assert world.same_rows(store.open().state(*new.split("/")).table(), world.expected(*names[new])), new


def test_the_last_row_of_a_key_counts_and_others_stay_as_they_are(spark: Any, tmp_path: Path) -> None:
    flow = shop_flow(orders(1), CollectSink())
    sums = "select id % 7 as key, id as sum, cast(1 as int) as rows, make_date(2026, 1, cast(id % 31 as int) + 1) as at"
    rows = spark.sql(f"{sums} from range(28)")
    states = {"shop/sums": Rows(rows.unionAll(rows), "at", "last"), "shop/all": pa.table({"key": [1], "value": [2]})}
    done = bootstrap(tmp_path / "s", flow, states)
    assert done.rows == {"shop/sums": 7, "shop/all": 1}
    found = open_store(str(tmp_path / "s")).open().state("shop", "sums").table()
    assert sorted(found["sum"].to_pylist()) == [21, 22, 23, 24, 25, 26, 27]
    assert not spark.catalog.listTables()


@pytest.mark.parametrize(
    ("sql", "words", "kind"),
    [
        ("select 1L key, 2L sum", "they lack 'rows'", ErrorKind.SCHEMA_MISMATCH),
        ("select 1.5 key, 2L sum, 3 rows", "'key' is decimal", ErrorKind.SCHEMA_MISMATCH),
        ("select id % 5 key, id sum, 1 rows from range(12)", r"one key: (\{'key': \d\} \(\d rows\)(, )?){3} and perhaps",
         ErrorKind.DUPLICATE_ROW_KEY),
        ("select id key, id sum, id + 2147483640 rows from range(12)", "not every value of it is a int32",
         ErrorKind.SCHEMA_MISMATCH),
        ("select id key, nullif(id, 3) sum, 1 rows from range(5)", "'sum' is declared without nulls and holds 1",
         ErrorKind.NULL_NOT_ALLOWED),
        ("select id key, id sum, cast(raise_error('no such price') as int) rows from range(5)", "no such price", None),
    ],
)  # fmt: skip
def test_frames_that_do_not_fit_are_refused_in_a_sentence(
    spark: Any, tmp_path: Path, sql: str, words: str, kind: ErrorKind | None
) -> None:
    with pytest.raises((InvalidState, OSError), match=words) as caught:
        bootstrap(tmp_path / "s", shop_flow(orders(1), CollectSink()), {"shop/sums": spark.sql(sql)})
    assert kind is None or caught.value.kind is kind
    assert "Traceback" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "s" / "checkpoints").exists()


def test_what_spark_cannot_write_is_said_before_a_job_begins(spark: Any, tmp_path: Path) -> None:
    flow, rows = shop_flow(orders(1), CollectSink()), spark.sql("select 1L key, 2L value")
    with pytest.raises(InvalidInput, match=r"Call stateformat\.backends\.spark\.bootstrap"):
        local.bootstrap(tmp_path / "s", flow, {"shop/all": rows})
    with pytest.raises(InvalidInput, match=r"memory:.*exists only in this process"):
        bootstrap("memory://bootstrap-on-spark", flow, {"shop/all": rows})
    with pytest.raises(InvalidInput, match="are a streaming DataFrame"):
        bootstrap(tmp_path / "s", flow, {"shop/all": spark.readStream.format("rate").load()})


@pytest.mark.truth
def test_tasks_that_are_killed_after_writing_and_a_driver_that_fails_change_nothing(tmp_path: Path) -> None:
    # Spark retries only where its master says so, and a process has one session: this one is
    # another's.
    command = [sys.executable, "-m", "tests.spark.bootstrap_retried", str(tmp_path / "s")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    interrupted, counts = done.stdout.splitlines()[-2:]
    assert interrupted == "the driver is interrupted []"
    written, named, found = counts.split()
    assert int(written) > 2 * int(named)
    assert found == "True"
    store = open_store(str(tmp_path / "s"))
    assert [record.checkpoint_id for record in store.history()] == [1]
    assert not validate(store, level="full").problems
    local.bootstrap(
        tmp_path / "t",
        shop_flow(orders(300), CollectSink()),
        {name: rows for name, rows in shop_states(orders(300)).items() if name != "shop/ours"},
    )
    assert content(store) == content(open_store(str(tmp_path / "t")))
    assert len(store.collect_garbage(delete=True).segments) == int(written) - int(named)
    assert not validate(store, level="full").problems


@pytest.mark.usefixtures("spark")
def test_the_example_begins_with_the_history_of_a_year(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import history_begins

    assert history_begins.go_on(tmp_path, "spark")
    assert history_begins.committed(tmp_path / "totals") == history_begins.wanted()
    del sys.modules["history_begins"]


def test_a_source_of_frames_begins_behind_what_was_there(spark: Any, tmp_path: Path) -> None:
    folder, sums = tmp_path / "in", CollectSink()
    for number in range(2):
        spark.range(10 * number, 10 * number + 10).write.parquet(str(folder / f"part={number}"))
    files = DirectoryFrames(str(folder), schema="id bigint", recursive=True, grows=True, until="_END")
    table = OffsetTable(lambda session: session.range(100), "id", rows_per_epoch=100)
    flow = Dataflow("frames")
    flow.source(SparkSource(files, spark=spark), uid="files").apply(sums, uid="sums")
    flow.source(SparkSource(table, spark=spark), uid="table").apply(rest := CollectSink(), uid="rest")
    there = files.latest(spark, files.first(spark))
    positions = {"files": there, "table": {"read": 89, "until": 99}}
    done = bootstrap(tmp_path / "s", flow, {}, positions=positions)
    assert done.positions["table"] == "behind {'read': 89, 'until': 99}"
    spark.range(70, 75).write.parquet(str(folder / "part=9"))
    (folder / "_END").touch()
    SparkRuntime(spark, open_store(str(tmp_path / "s"))).run(flow)
    assert sorted(sums.table()["id"].to_pylist()) == [*range(70, 75)]
    assert sorted(rest.table()["id"].to_pylist()) == [*range(90, 100)]


# ---- transforms

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

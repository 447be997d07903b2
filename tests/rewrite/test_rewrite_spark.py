"""Rewriting on Spark: the same rows as in threads, one history whatever is retried, errors as
sentences."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.rewrite import RewriteSpec, plan_rewrite, rewrite
from stateformat.backends.spark.rewrite import FRAME_BYTES, TASK_BYTES, SparkEngine, decode, evened, task_count
from stateformat.backends.spark.sessions import check
from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput, StorageError
from stateformat.graph import Partitioner
from stateformat.segments import WriteOptions
from stateformat.storage import open_storage
from stateformat.store import CheckpointStore
from stateformat.tables import cut
from stateformat.validation import validate
from tests.dataflow.test_in_flight_order import check_order, publish, records_for
from tests.rewrite import rewrite_jobs as jobs
from tests.rewrite.rewrite_jobs import new_store

pytestmark = pytest.mark.spark
ROOT = Path(__file__).resolve().parents[2]
OBJECTS = WriteOptions(inline_bytes_max=0)


def content(store: CheckpointStore) -> dict[tuple[str, str, int], Counter[Any]]:
    """Every row of every handle with the place where it stands, key group included."""
    checkpoint = store.open()
    found = {}
    for handle in jobs.handles_of(checkpoint):
        place = (handle["operator"], handle["state"], handle["subtask"])
        rows = checkpoint.read(*place).table() if handle["rows"] else pa.table({})
        found[place] = Counter(jobs.plain(rows))
    return found


@pytest.mark.parametrize(
    "spec",
    [
        RewriteSpec(parallelism=5, renames={"sums": "totals"}),
        RewriteSpec(parallelism=2, max_parallelism=33, options=OBJECTS),
    ],
)
def test_both_engines_write_the_same_rows_to_the_same_places(spark: Any, tmp_path: Path, spec: RewriteSpec) -> None:
    contents = []
    for name in ("local", "spark"):
        store = new_store(tmp_path / name)
        jobs.publish(store)
        seen: list[tuple[int, int]] = []
        engine = SparkEngine(spark) if name == "spark" else None
        done = rewrite(store, store.open(), spec, engine=engine, progress=lambda *now, seen=seen: seen.append(now))
        assert not validate(store, level="full").problems
        assert seen[-1][0] == seen[-1][1] >= done.rows > 0
        contents.append(content(store))
    attempts = {"prepared", "left"}  # the attempt in these is each store's own
    kept = [{place: rows for place, rows in found.items() if place[1] not in attempts} for found in contents]
    assert kept[0] == kept[1]
    assert sum(sum(rows.values()) for rows in kept[0].values()) > 300
    assert contents[0].keys() == contents[1].keys()


def test_records_in_flight_of_several_segments_keep_the_order_of_their_channels(spark: Any, tmp_path: Path) -> None:
    store = new_store(tmp_path / "store")
    sent = records_for(Partitioner.REBALANCE, 3)
    publish(store, Partitioner.REBALANCE, sent, OBJECTS)
    for parallelism in (2, 5):
        rewrite(store, store.open(), RewriteSpec(per_operator={"c": parallelism}), engine=SparkEngine(spark))
    checkpoint = store.open()
    plan = checkpoint.plan_restore(checkpoint.graph.at(per_operator={"c": 1}))
    rows = checkpoint.restore(plan, "c", 0)["mail"].table().to_pylist()
    check_order(rows, by_key=False)
    assert sorted((row["_sender"], row["_receiver"], row["_seq"], row["k"]) for row in rows) == sorted(sent)


@pytest.mark.truth
def test_tasks_that_fail_after_writing_are_retried_and_leave_garbage_and_one_history(tmp_path: Path) -> None:
    # Spark retries only where its master says so, and a process has one session: this one is
    # another's.
    url = str(tmp_path / "store")
    command = [sys.executable, "-m", "tests.rewrite.rewrite_retried", url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    failed = int(done.stdout.split()[-1])
    last, seen = len(jobs.keyed_rows()["last"]), 3 * 2
    # Each row was given to a function once, as far as it counts: of broadcast state one copy.
    assert done.stdout.splitlines()[-2].split() == [str(last), str(seen), "3"]
    assert failed == 4  # two tasks that write moves and two that write targets, on two cores
    store = new_store(Path(url))
    assert [record.checkpoint_id for record in store.history()] == [2, 1]
    assert not validate(store, level="full").problems
    for name in ("total", "per_day", "last", "timers", "overtaken"):
        assert jobs.all_rows(store.open(), "sums", name) == jobs.all_rows(store.open(1), "sums", name)
    garbage = store.collect_garbage(delete=True)
    assert len(garbage.segments) == failed
    assert not validate(store, level="full").problems


def test_an_error_of_a_worker_arrives_as_what_it_was(spark: Any, tmp_path: Path) -> None:
    store = new_store(tmp_path / "store")
    jobs.publish(store)
    rewrite(store, store.open(), RewriteSpec(options=OBJECTS))
    handles = [handle for handle in jobs.handles_of(store.open()) if handle["state"] == "last" and handle["rows"]]
    path = handles[0]["path"]
    (tmp_path / "store" / path).unlink()
    for spec in (RewriteSpec(), RewriteSpec(max_parallelism=8)):
        with pytest.raises(DamagedCheckpoint, match=path) as caught:
            rewrite(store, store.open(), spec, engine=SparkEngine(spark))
        assert caught.value.kind is ErrorKind.OBJECT_MISSING
        assert "Traceback" not in str(caught.value)
    assert [record.checkpoint_id for record in store.history()] == [2, 1]


def test_what_spark_says_of_a_failure_that_is_not_ours_becomes_one_sentence() -> None:
    error = decode("Job aborted\nTraceback ...\nValueError: no space\n\n")
    assert isinstance(error, StorageError)
    assert str(error).endswith("ValueError: no space")


def test_a_store_in_memory_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(open_storage("memory://rewrite-on-spark"))
    jobs.publish(store)
    for target in (None, new_store(tmp_path / "target")):
        with pytest.raises(InvalidInput, match="exists only in this process"):
            rewrite(store, store.open(), engine=SparkEngine(), target=target)


def test_frames_are_of_bounded_size_and_lose_no_row() -> None:
    rows = 3 * FRAME_BYTES // 8 + 5
    batch = pa.record_batch({"x": pa.array(range(rows), pa.int64())})
    parts = list(cut(batch, batch.num_rows, FRAME_BYTES))
    assert max(part.nbytes for part in parts) <= FRAME_BYTES
    assert sum(part.num_rows for part in parts) == rows
    assert [part["x"][0].as_py() for part in parts] == sorted(part["x"][0].as_py() for part in parts)
    wide = pa.record_batch({"x": pa.array([b"a" * (2 * FRAME_BYTES), b"b"])})
    assert [part.num_rows for part in cut(wide, 2, FRAME_BYTES)] == [1, 1]


def test_tasks_are_evened_out_and_none_is_lost(tmp_path: Path) -> None:
    store = new_store(tmp_path / "store")
    jobs.publish(store)
    moves = plan_rewrite(store.open(), RewriteSpec(parallelism=8)).moves
    for cores in (1, 3, 4, 1000):
        groups = evened([(move.bytes, move) for move in moves], cores)
        assert sorted(id(move) for group in groups for _, move in group) == sorted(map(id, moves))
        assert len(groups) == min(cores, len(moves))
        sizes = [sum(size for size, _ in group) for group in groups]
        assert max(sizes) - min(sizes) <= max(move.bytes for move in moves)


@pytest.mark.parametrize(
    ("units", "size_bytes", "tasks"),
    [(100, 0, 4), (100, 10 * TASK_BYTES, 10), (100, 10 * TASK_BYTES + 1, 11), (3, 10 * TASK_BYTES, 3)],
)
def test_there_are_more_tasks_than_cores_only_if_there_is_much_to_do(units: int, size_bytes: int, tasks: int) -> None:
    assert task_count(units, size_bytes, 4) == tasks


def test_the_demo_counts_a_row_that_is_lost_repeated_or_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from flights_check import differing_rows

    right = pa.table({"tailnum": ["a", None, "b"], "flights": [1, 2, 3]})
    for wrong, count in (
        (right.slice(1), 1),
        (pa.concat_tables([right, right.slice(0, 1)]), 1),
        (pa.table({"tailnum": ["a", "", "b"], "flights": [1, 2, 3]}), 2),
        (right.take([2, 0, 1]), 0),
    ):
        assert differing_rows(right, wrong, ["tailnum", "flights"]) == count


def test_an_active_session_is_used_unless_its_workers_are_others(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(spark) is spark
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/usr/bin/some-python")
    with pytest.raises(InvalidInput, match="/usr/bin/some-python") as caught:
        check(spark)
    assert caught.value.kind is ErrorKind.MISSING_DEPENDENCY
    monkeypatch.undo()
    (tmp_path / "stateformat").mkdir()
    monkeypatch.chdir(tmp_path)
    assert check(spark) is spark
    monkeypatch.delitem(spark.sparkContext.environment, "PYTHONSAFEPATH")
    with pytest.raises(InvalidInput, match="stateformat of its own"):
        check(spark)

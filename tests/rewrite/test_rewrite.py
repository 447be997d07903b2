"""Rewriting a checkpoint, by the engine in threads: what comes out, what is refused, what stays
when it fails.

Rewriting under other names, of operators, states and columns, and with another key hash.
"""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stateformat.backends.rewrite import RewriteSpec, ThreadEngine, plan_rewrite, rewrite
from stateformat.backends.rewrite.rewrite import check_counts
from stateformat.errors import DamagedCheckpoint, InvalidInput, JobMismatch, PublishConflict, RestoreRefused
from stateformat.graph import Edge, JobGraph, Operator, OperatorId, Partitioner, Status
from stateformat.keys import DEFAULT_KEY_HASH, hash_keys, key_hash, register_key_hash
from stateformat.model import CheckpointKind, Handle
from stateformat.reading import Checkpoint
from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.store import CheckpointStore
from stateformat.validation import validate
from tests.rewrite import rewrite_jobs as jobs
from tests.rewrite.rewrite_jobs import new_store

REHASHED = ("total", "per_day", "last", "timers", "overtaken")
OBJECTS = WriteOptions(inline_bytes_max=0)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    made = new_store(tmp_path / "store")
    jobs.publish(made)
    return made


def ids(store: CheckpointStore) -> list[int]:
    return [record.checkpoint_id for record in store.history()]


def assert_same_rows(store: CheckpointStore, before: Any, after: Any) -> None:
    """The states that a new max parallelism rehashes keep their rows, and all is valid."""
    for name in REHASHED:
        assert jobs.all_rows(after, "sums", name) == jobs.all_rows(before, "sums", name)
    assert problems(store) == []


def problems(store: CheckpointStore) -> list[str]:
    return [problem.message for problem in validate(store, level="full").problems]


@pytest.mark.parametrize("parallelism", [None, 1, 2, 3, 4, 5, 8])
def test_a_rewritten_checkpoint_gives_every_subtask_what_the_old_one_would_have(
    store: CheckpointStore, parallelism: int | None
) -> None:
    before = store.open()
    done = rewrite(store, before, RewriteSpec(parallelism=parallelism))
    after = store.open()
    assert (after.id, after.record.kind, after.record.parent) == (2, CheckpointKind.REWRITE, before.record.ref)
    assert done.record == after.record
    found, wanted = jobs.restored(after, parallelism), jobs.restored(before, parallelism)
    # Subtasks had finished, so all that is not keyed was distributed anew: everyone has the least
    # watermark.
    least = [("lookup-sums", 2**63 - 1, True), ("names-sums", 100, False)]
    assert [found.pop(place) for place in list(found) if place[1] == "progress"] == [least] * (parallelism or 3)
    assert found == {place: rows for place, rows in wanted.items() if place[1] != "progress"}
    assert problems(store) == []


def test_each_state_of_each_subtask_becomes_one_segment_of_its_own(store: CheckpointStore) -> None:
    done = rewrite(store, store.open(), RewriteSpec(parallelism=5))
    handles = jobs.handles_of(store.open())
    places = Counter((handle["operator"], handle["state"], handle["subtask"]) for handle in handles)
    assert set(places.values()) == {1}
    assert {handle["layer"] for handle in handles} == {0}
    paths = [handle["path"] for handle in handles if handle["rows"]]
    assert len(paths) == len(set(paths)) == done.segments
    assert all(path.startswith("segments/00000000000000000002/") for path in paths)
    assert done.rows == sum(handle["rows"] for handle in handles)
    assert done.bytes == sum(handle["size_bytes"] for handle in handles)


def test_what_had_finished_wholly_stays_so_and_what_had_in_part_runs_and_is_remembered(store: CheckpointStore) -> None:
    source = store.open().record
    rewrite(store, store.open(), RewriteSpec(parallelism=4))
    record = store.open().record
    assert record.graph.operator("lookup") == source.graph.operator("lookup")
    others = [operator for operator in record.graph.operators if operator.uid != "lookup"]
    assert {(operator.status, operator.parallelism) for operator in others} == {(Status.RUNNING, 4)}
    assert record.rescaled_from is not None
    assert record.rescaled_from.source == source.ref
    assert {(former.uid, str(former.finished)) for former in record.rescaled_from.operators} == {
        ("source", "2"),
        ("names", "2"),
    }


def test_nothing_is_said_to_be_rescaled_if_everyone_keeps_its_own(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    jobs.publish(store, ended=())
    rewrite(store, store.open())
    assert store.open().record.rescaled_from is None
    rewrite(store, store.open(), RewriteSpec(per_operator={"sums": 2}))
    rescaled = store.open().record.rescaled_from
    assert rescaled is not None
    # A third rewrite changes nothing, so what the second one did is still to be known.
    rewrite(store, store.open())
    assert store.open().record.rescaled_from == rescaled


@pytest.mark.parametrize(("maximum", "parallelism"), [(3, None), (8, 2), (17, None), (32, 2), (4096, None)])
def test_another_max_parallelism_moves_every_key_to_its_new_group(
    store: CheckpointStore, maximum: int, parallelism: int | None
) -> None:
    before = store.open()
    done = rewrite(store, before, RewriteSpec(parallelism=parallelism, max_parallelism=maximum))
    after = store.open()
    assert {operator.max_parallelism for operator in after.graph.operators} == {maximum}
    assert set(done.rehashed) == {("sums", name) for name in REHASHED}
    assert_same_rows(store, before, after)
    subtasks = after.graph.operator("sums").parallelism
    for name in REHASHED:
        for subtask in range(subtasks):
            rows = after.read("sums", name, subtask).table()
            groups = (hash_keys([rows["key"]], "spark-murmur3-seed42") % maximum).tolist()
            assert rows["_key_group"].to_pylist() == groups
            assert {group * subtasks // maximum for group in groups} <= {subtask}
    # The rest is distributed as a rescale does it.
    found, wanted = jobs.restored(after, parallelism), jobs.restored(before, parallelism)
    assert found.keys() == wanted.keys()
    others = [place for place in found if place[:2] not in done.rehashed and place[1] != "progress"]
    assert {place: found[place] for place in others} == {place: wanted[place] for place in others}


def test_records_in_flight_keep_their_order_per_channel_when_keys_are_rehashed(store: CheckpointStore) -> None:
    rewrite(store, store.open(), RewriteSpec(max_parallelism=3))
    after = store.open()
    for subtask in range(3):
        data = after.read("sums", "overtaken", subtask).table()
        order = list(zip(*(data[name].to_pylist() for name in ("_key_group", "_sender", "_seq")), strict=True))
        assert order == sorted(order)
        assert len(order) > 0


def test_much_state_of_few_subtasks_is_read_in_more_parts_than_there_were_subtasks(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = store.open()
    spec = RewriteSpec(max_parallelism=64)
    few = plan_rewrite(before, spec).sources
    monkeypatch.setattr("stateformat.backends.rewrite.planning.SOURCE_BYTES", 100)
    many = plan_rewrite(before, spec).sources
    assert len(many) > 2 * len(few)
    assert sum(source.rows for source in many) == sum(source.rows for source in few)
    rewrite(store, before, spec)
    assert_same_rows(store, before, store.open())


def test_max_parallelism_may_rise_and_parallelism_above_the_old_one_with_it(store: CheckpointStore) -> None:
    rewrite(store, store.open(), RewriteSpec(parallelism=20, max_parallelism=32))
    assert store.open().graph.operator("sums").parallelism == 20
    assert problems(store) == []


def test_layers_of_three_schemas_become_one_segment_of_the_newest(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    key, number = {"key": pa.string()}, pa.field("n", pa.int32())
    tag, label = (pa.field(name, pa.string(), nullable=False) for name in ("tag", "label"))
    first = declare.value_state("op", "s", keys=key, values={"n": pa.int32(), "old": pa.string()})
    second = declare.value_state(
        "op", "s", keys=key, values=pa.schema([number, tag]), previous=first, defaults={"tag": "none"}
    )
    long = pa.schema([label, number.with_type(pa.int64())])
    third = declare.value_state("op", "s", keys=key, values=long, previous=second, renames={"tag": "label"})
    graph = JobGraph((Operator(OperatorId("op"), 2, 8),))

    def layer(state: Any, rows: list[dict[str, Any]], *, delta: bool) -> None:
        pending = store.begin(job_id="j", graph=graph, states=[state], parent=store.start("j"))
        names = [*state.key_columns, *(["_op"] if delta else [])]
        names += [item.name for item in state.current.fields if item.name not in names]
        columns = {name: [row.get(name) for row in rows] for name in names}
        types = {"_op": pa.int8(), "n": pa.int64() if state is third else pa.int32()}
        data = pa.table({name: pa.array(values, types.get(name, pa.string())) for name, values in columns.items()})
        owners = pending.context.owners("op", "s", data)
        for subtask in range(2):
            with pending.context.subtask("op", subtask) as writer:
                writer.write("s", data.filter(pa.array(owners == subtask)), delta=delta)
            pending.add(writer)
        pending.publish()

    layer(first, [{"key": f"k{i}", "n": i, "old": "x"} for i in range(10)], delta=False)
    upserts = [{"key": "k1", "n": 100, "tag": "b", "_op": 0}, {"key": "k20", "n": 20, "tag": "c", "_op": 0}]
    layer(second, [upserts[0], {"key": "k2", "_op": 1}, upserts[1]], delta=True)
    layer(third, [{"key": "k3", "n": 2**40, "label": "d", "_op": 0}, {"key": "k20", "_op": 1}], delta=True)
    wanted = {f"k{i}": ("none", i) for i in range(10)} | {"k1": ("b", 100), "k3": ("d", 2**40)}
    del wanted["k2"]

    for spec in (RewriteSpec(), RewriteSpec(max_parallelism=32, parallelism=3)):
        rewrite(store, store.open(), spec)
        after = store.open()
        (state,) = after.states
        assert state.schemas == third.schemas
        assert {handle["layer"] for handle in jobs.handles_of(after)} == {0}
        assert "layers" not in after.record.required_features
        rows = after.read("op", "s").table().to_pylist()
        assert {row["key"]: (row["label"], row["n"]) for row in rows} == wanted
        assert len(rows) == len(wanted)
        assert problems(store) == []


def test_a_renamed_operator_takes_its_edges_and_states_along(store: CheckpointStore) -> None:
    before = store.open()
    renames = {"sums": "totals", "lookup": "codes", "source": "names", "names": "source"}
    rewrite(store, before, RewriteSpec(renames=renames))
    after = store.open()
    assert [operator.uid for operator in after.graph.operators] == ["codes", "names", "source", "totals", "sink"]
    assert {(edge.id, edge.source, edge.target) for edge in after.graph.edges} == {
        ("lookup-sums", "codes", "totals"),
        ("source-names", "names", "source"),
        ("names-sums", "source", "totals"),
        ("sums-sink", "totals", "sink"),
    }
    assert after.graph.operator("codes").status is Status.FULLY_FINISHED
    assert {former.uid for former in after.record.rescaled_from.operators} == {"names", "source"}  # type: ignore[union-attr]
    assert jobs.all_rows(after, "totals", "per_day") == jobs.all_rows(before, "sums", "per_day")
    assert jobs.all_rows(after, "names", "splits") == jobs.all_rows(before, "source", "splits")
    assert problems(store) == []


def test_committables_keep_the_attempt_under_which_they_were_prepared(store: CheckpointStore) -> None:
    before = store.open()
    rewrite(store, before, RewriteSpec(parallelism=2))
    rewrite(store, store.open(), RewriteSpec(max_parallelism=64))
    rows = jobs.all_rows(store.open(), "sink", "prepared")
    assert rows == Counter({(1, before.record.attempt_id, f"part-{i}"): 1 for i in (1, 2)})


def test_codec_and_row_groups_are_those_asked_for(store: CheckpointStore) -> None:
    options = WriteOptions(codec="zstd", encoding="plain", inline_bytes_max=0)
    rewrite(store, store.open(), RewriteSpec(options=options))
    handle = next(handle for handle in jobs.handles_of(store.open()) if handle["state"] == "total" and handle["rows"])
    with pq.ParquetFile(store.storage.open_input(handle["path"])) as file:
        assert file.metadata.row_group(0).column(1).compression == "ZSTD"


def test_another_store_takes_the_rewritten_checkpoint_and_needs_nothing_of_the_first(
    store: CheckpointStore, tmp_path: Path
) -> None:
    target = new_store(tmp_path / "target")
    wanted = jobs.restored(store.open(), 2)
    rewrite(store, store.open(), RewriteSpec(parallelism=2), target=target)
    assert ids(store) == [1]
    shutil.rmtree(tmp_path / "store")
    assert jobs.restored(target.open(), 2) == wanted
    assert problems(target) == []


def test_progress_is_in_rows_up_to_the_last(store: CheckpointStore) -> None:
    told: list[tuple[int, int]] = []
    spec = RewriteSpec(parallelism=4, max_parallelism=64)
    rows = store.open().record.totals.rows
    rewrite(store, store.open(), spec, progress=lambda now, total: told.append((now, total)))
    (total,) = {total for _, total in told}
    assert total >= rows
    assert [now for now, _ in told] == sorted(now for now, _ in told)
    assert (told[0], told[-1]) == ((0, total), (total, total))
    assert len(told) > 4


@pytest.mark.parametrize(
    ("spec", "error", "sentence"),
    [
        (RewriteSpec(max_parallelism=0), InvalidInput, "max parallelism 0"),
        (RewriteSpec(max_parallelism=40_000), InvalidInput, "32768"),
        (RewriteSpec(per_operator={"nobody": 2}), InvalidInput, "nobody"),
        (RewriteSpec(renames={"nobody": "x"}), InvalidInput, "nobody"),
        (RewriteSpec(renames={"sums": "sink"}), InvalidInput, "'sink'"),
        (RewriteSpec(renames={"sums": ""}), InvalidInput, "empty name"),
        (RewriteSpec(parallelism=0), RestoreRefused, "parallelism 0"),
        (RewriteSpec(parallelism=17), RestoreRefused, "max parallelism"),
        (RewriteSpec(max_parallelism=2), RestoreRefused, "max parallelism"),
    ],
)
def test_what_cannot_be_right_and_what_a_restore_would_refuse_is_refused(
    store: CheckpointStore, spec: RewriteSpec, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        rewrite(store, store.open(), spec)
    assert ids(store) == [1]


def test_an_engine_by_name_is_refused(store: CheckpointStore) -> None:
    with pytest.raises(InvalidInput, match="give a ThreadEngine or a SparkEngine"):
        rewrite(store, store.open(), engine="local")  # type: ignore[arg-type]


def test_keyed_state_that_is_not_fed_by_key_keeps_its_key_groups(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    one, two = OperatorId("one"), OperatorId("two")
    state = declare.value_state("two", "s", keys={"k": pa.int64()}, values={"v": pa.int64()})
    graph = JobGraph((Operator(one, 1, 8), Operator(two, 1, 8)), (Edge("e", one, two, Partitioner.FORWARD),))
    pending = store.begin(job_id="j", graph=graph, states=[state], parent=None)
    with pending.context.subtask("two", 0) as writer:
        writer.write("s", pa.table({"k": [1], "v": [1]}))
    pending.add(writer)
    pending.publish()
    with pytest.raises(InvalidInput, match="does not send by key"):
        rewrite(store, store.open(), RewriteSpec(max_parallelism=16))
    rewrite(store, store.open(), RewriteSpec(max_parallelism=8))
    assert store.open().id == 2


class Wrapped(ThreadEngine):
    """Threads, with something done to what they report."""

    def __init__(self, spoil: Any) -> None:
        super().__init__(2)
        object.__setattr__(self, "spoil", spoil)

    def run(self, *arguments: Any) -> list[Handle]:
        found: list[Handle] = self.spoil(super().run(*arguments))  # type: ignore[attr-defined]
        return found


@pytest.mark.parametrize("lost", ["total", "prepared", "positions", "queued"])
def test_a_segment_that_was_lost_on_the_way_is_noticed_and_nothing_is_published(
    store: CheckpointStore, lost: str
) -> None:
    engine = Wrapped(lambda handles: [handle for handle in handles if handle.state != lost])
    with pytest.raises(DamagedCheckpoint, match=f"'{lost}'.* wrote 0 rows"):
        rewrite(store, store.open(), RewriteSpec(max_parallelism=8), engine=engine)
    assert ids(store) == [1]


def test_counts_are_exact_unless_layers_merge_and_else_a_bound(store: CheckpointStore) -> None:
    plan = plan_rewrite(store.open(), RewriteSpec())
    good = [Handle(*move.place[:2], "keyed", move.place.subtask, 0, None, 1, rows=move.rows) for move in plan.moves]
    check_counts(plan, good)
    more = [*good, good[0]]
    with pytest.raises(DamagedCheckpoint):
        check_counts(plan, more)
    merged = replace(plan, moves=tuple(replace(move, exact=False) for move in plan.moves))
    check_counts(merged, good[:-1])
    with pytest.raises(DamagedCheckpoint):
        check_counts(merged, more)


def test_a_damaged_segment_ends_the_rewrite_and_leaves_the_store_as_it_was(
    store: CheckpointStore, tmp_path: Path
) -> None:
    rewrite(store, store.open(), RewriteSpec(options=OBJECTS))
    before = store.open()
    path = next(handle["path"] for handle in jobs.handles_of(before) if handle["state"] == "last" and handle["rows"])
    file = tmp_path / "store" / path
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    for spec in (RewriteSpec(), RewriteSpec(max_parallelism=8)):
        with pytest.raises(DamagedCheckpoint):
            rewrite(store, before, spec)
    assert ids(store) == [2, 1]


def test_a_checkpoint_published_meanwhile_is_not_overrun(store: CheckpointStore) -> None:
    with pytest.raises(PublishConflict):
        rewrite(store, store.open(), engine=Wrapped(lambda handles: (jobs.publish(store), handles)[1]))
    assert ids(store) == [2, 1]
    with pytest.raises(PublishConflict, match="not the newest"):
        rewrite(store, store.open(1))


def test_another_jobs_store_is_refused_as_target(store: CheckpointStore, tmp_path: Path) -> None:
    other = new_store(tmp_path / "other")
    pending = other.begin(job_id="other", graph=JobGraph((Operator(OperatorId("x"), 1, 1),)), states=[], parent=None)
    pending.publish()
    with pytest.raises(JobMismatch):
        rewrite(store, store.open(), target=other)


def test_the_first_failure_of_a_task_ends_the_others_that_have_not_begun(store: CheckpointStore) -> None:
    plan = plan_rewrite(store.open(), RewriteSpec(parallelism=8))
    begun: list[str] = []
    lock = threading.Lock()

    class Failing:
        """Storage whose every new segment fails."""

        url = store.url

        def __getattr__(self, name: str) -> Any:
            if name == "open_output":
                with lock:
                    begun.append(name)
                raise OSError("disk full")
            return getattr(store.storage, name)

    parent = store.start(jobs.JOB)
    pending = store.begin(job_id=jobs.JOB, graph=plan.graph, states=plan.states, parent=parent, options=OBJECTS)
    context = replace(pending.context, storage=Failing())  # type: ignore[arg-type]
    with pytest.raises(OSError, match="disk full"):
        ThreadEngine(1).run(context, plan, lambda _: None, lambda _place, _rows: None)
    assert len(begun) < len(plan.moves)


def test_planning_a_rewrite_opens_no_segment(store: CheckpointStore) -> None:
    class Closed:
        """Storage of which nothing can be read any more."""

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was called")

    checkpoint = store.open()
    checkpoint.manifest.full()
    checkpoint.storage = Closed()  # type: ignore[assignment]
    plan = plan_rewrite(checkpoint, RewriteSpec(parallelism=2, max_parallelism=32))
    assert plan.sources
    assert plan.moves


BACKWARDS = "test-murmur3-backwards"


def _backwards(columns: Any) -> Any:
    return np.bitwise_not(key_hash(DEFAULT_KEY_HASH)(columns))


register_key_hash(BACKWARDS, _backwards)

KEY = pa.struct([pa.field("f0", pa.string()), pa.field("f1", pa.int64())])
VALUE = pa.struct([pa.field("count", pa.int64()), pa.field("sum", pa.float64()), pa.field("kept", pa.bool_())])
ROWS: list[dict[str, Any]] = [
    {
        "key": {"f0": f"k{i}", "f1": None if i == 3 else i},
        "value": None if i == 7 else {"count": i, "sum": i / 2, "kept": i % 2 == 0},
    }
    for i in range(40)
]


def published(store: CheckpointStore, parallelism: int = 2, *, wrong: bool = False) -> Checkpoint:
    """One state of structs; with ``wrong`` its rows lie in other key groups than their keys'."""
    graph = JobGraph((Operator("old", parallelism, 16),))
    state = declare.value_state("old", "accState", keys={"key": KEY}, values={"value": VALUE})
    options = WriteOptions(trust_key_groups=wrong)
    pending = store.begin(job_id="j", graph=graph, states=[state], parent=None, options=options)
    data = pa.Table.from_pylist(ROWS, pa.schema([pa.field("key", KEY), pa.field("value", VALUE)]))
    owners = pending.context.owners("old", "accState", data)
    for subtask in range(parallelism):
        mine = data.filter(pa.array(owners == subtask))
        if wrong:
            first = subtask * 8
            mine = mine.add_column(0, "_key_group", pa.array(np.full(len(mine), first, np.int32)))
        with pending.context.subtask("old", subtask) as writer:
            writer.write("accState", mine)
        pending.add(writer)
    pending.publish()
    return store.open()


def rows_of(checkpoint: Checkpoint, operator: str, state: str) -> list[dict[str, Any]]:
    found = checkpoint.read(operator, state).table().drop_columns(["_key_group"]).to_pylist()
    return sorted(found, key=repr)


@pytest.mark.parametrize("max_parallelism", [None, 64])
def test_states_and_columns_get_other_names_and_fields_of_structs_become_columns(
    tmp_path: Path, max_parallelism: int | None
) -> None:
    store = new_store(tmp_path)
    place = ("old", "accState")
    columns = {"key.f0": "word", "key.f1": "number", "value.count": "rows", "value.sum": "total"}
    spec = RewriteSpec(
        renames={"old": "new"}, states={place: "totals"}, columns={place: columns}, max_parallelism=max_parallelism
    )
    rewrite(store, published(store), spec)
    after = store.open()
    state = after.record.state("new", "totals")
    assert state.key_columns == ("word", "number")
    assert [item.name for item in state.current.fields] == ["word", "number", "value", "rows", "total"]
    assert rows_of(after, "new", "totals") == sorted(
        (
            {
                "word": row["key"]["f0"],
                "number": row["key"]["f1"],
                "value": row["value"] and {"kept": row["value"]["kept"]},
                "rows": row["value"] and row["value"]["count"],
                "total": row["value"] and row["value"]["sum"],
            }
            for row in ROWS
        ),
        key=repr,
    )
    assert [problem.message for problem in validate(store, level="full").problems] == []


def test_a_struct_of_which_every_field_became_a_column_is_gone(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    columns = {"key": "id", "value.count": "rows", "value.sum": "total", "value.kept": "kept"}
    rewrite(store, published(store), RewriteSpec(columns={("old", "accState"): columns}))
    state = store.open().record.state("old", "accState")
    assert [item.name for item in state.current.fields] == ["id", "rows", "total", "kept"]
    assert rows_of(store.open(), "old", "accState")[0]["id"] == {"f0": "k0", "f1": 0}


def test_another_key_hash_deals_every_key_anew(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    before = published(store, 4)
    wanted = rows_of(before, "old", "accState")
    done = rewrite(store, before, RewriteSpec(key_hash=BACKWARDS))
    after = store.open()
    assert done.rehashed == (("old", "accState"),)
    assert after.graph.operator("old").key_hash == BACKWARDS
    assert rows_of(after, "old", "accState") == wanted
    assert [problem.message for problem in validate(store, level="full").problems] == []
    # The same hash again moves nothing.
    assert rewrite(store, after, RewriteSpec(key_hash=BACKWARDS)).rehashed == ()


@pytest.mark.parametrize("change", [{}, {"max_parallelism": 32}], ids=["moved", "rehashed"])
def test_key_groups_that_are_not_those_of_their_keys_are_noticed_if_asked_for(
    tmp_path: Path, change: dict[str, int]
) -> None:
    store = new_store(tmp_path)
    before = published(store, wrong=True)
    with pytest.raises(DamagedCheckpoint, match=r"key \{'key': \{'f0': 'k\d+'.* lies in key group \d+, but its hash"):
        rewrite(store, before, RewriteSpec(verify_keys=True, **change))
    assert store.open().id == 1


REFUSED: list[tuple[Callable[[], RewriteSpec], str]] = [
    (lambda: RewriteSpec(states={("old", "totals"): "x"}), "no state 'totals'; it has 'accState'"),
    (lambda: RewriteSpec(states={("older", "accState"): "x"}), "no operator 'older'"),
    (lambda: RewriteSpec(states={("old", "accState"): ""}), "cannot have an empty name"),
    (lambda: RewriteSpec(columns={("old", "accState"): {"values": "x"}}), "did you mean 'value'"),
    (lambda: RewriteSpec(columns={("old", "accState"): {"value.counts": "x"}}), "did you mean 'value.count'"),
    (lambda: RewriteSpec(columns={("old", "accState"): {"value.count.x": "x"}}), "no column 'value.count.x'"),
    (lambda: RewriteSpec(columns={("old", "accState"): {"value": "key"}}), "two columns 'key'"),
    (lambda: RewriteSpec(columns={("old", "accState"): {"value.count": "_index"}}), "belong to the format"),
    (lambda: RewriteSpec(columns={("old", "accState"): {"_key_group": "x"}}), "no column '_key_group'"),
    (lambda: RewriteSpec(key_hash="md5"), "unknown key hash 'md5'"),
]


@pytest.mark.parametrize(("spec", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_names_that_are_not_there_or_cannot_be_are_refused(
    tmp_path: Path, spec: Callable[[], RewriteSpec], said: str
) -> None:
    store = new_store(tmp_path)
    before = published(store)
    with pytest.raises(InvalidInput) as refused:
        rewrite(store, before, spec())
    assert said in str(refused.value)
    assert store.open().id == 1


def test_a_field_of_a_struct_that_may_be_null_becomes_no_key(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    graph = JobGraph((Operator("old", 1, 16),))
    state = declare.value_state("old", "s", keys={"key": KEY}, values={"n": pa.int64()})
    pending = store.begin(job_id="j", graph=graph, states=[state], parent=None)
    with pending.context.subtask("old", 0) as writer:
        rows = [{"key": None, "n": 1}, {"key": {"f0": None, "f1": None}, "n": 2}]
        writer.write("s", pa.Table.from_pylist(rows, pa.schema([pa.field("key", KEY), pa.field("n", pa.int64())])))
    pending.add(writer)
    pending.publish()
    with pytest.raises(InvalidInput, match="two keys would be one"):
        rewrite(store, store.open(), RewriteSpec(columns={("old", "s"): {"key.f0": "a", "key.f1": "b"}}))

"""The store from outside: a run's life on it, what publish takes and refuses, copies, derived
stores, rollback.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xxhash

from stateformat import paths as layout
from stateformat.backends.storage.local import LocalStorage
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import (
    CheckpointExpired,
    DamagedCheckpoint,
    ErrorKind,
    InvalidInput,
    InvalidState,
    JobMismatch,
    NotFound,
    OutcomeUnknown,
    PublishConflict,
    StorageError,
)
from stateformat.graph import JobGraph, Operator, OperatorId, Status, SubtaskSet
from stateformat.history import record_ids
from stateformat.keys import hash_keys, key_groups, subtask_of_key_group
from stateformat.model import CheckpointId, CheckpointKind, Handle, Stop, StopMode
from stateformat.publication import CommitPermit, CopyProgress, PendingCheckpoint
from stateformat.reading import Checkpoint, load_record
from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.storage import InFront
from stateformat.store import CheckpointStore, open as open_store
from stateformat.validation import validate
from tests.worlds.stepping import Driver
from tests.worlds.stores import refused

JOB = "counting"
KEYS = pa.table({"word": [f"w{i}" for i in range(40)], "n": pa.array(range(40), pa.int64())})
COUNTS = declare.value_state("count", "counts", keys={"word": pa.string()}, values={"n": pa.int64()})
SPLITS = declare.even_split_state("count", "splits", columns={"path": pa.string()})
STATES = (COUNTS, SPLITS)
OBJECTS = WriteOptions(inline_bytes_max=0)


def graph(parallelism: int = 2, **more: Any) -> JobGraph:
    return JobGraph((Operator(OperatorId("count"), parallelism, 128, **more), Operator(OperatorId("print"), 1, 128)))


@pytest.fixture
def storage(request: pytest.FixtureRequest) -> Iterator[MemoryStorage]:
    name = f"store-{request.node.name}"
    yield MemoryStorage(name)
    for suffix in ("", "-target"):
        MemoryStorage.reset(name + suffix)


@pytest.fixture
def store(storage: MemoryStorage) -> CheckpointStore:
    return CheckpointStore(storage, sleep=lambda seconds: None)


@pytest.fixture
def target(storage: MemoryStorage) -> CheckpointStore:
    return CheckpointStore(MemoryStorage(storage.url.removeprefix("memory://") + "-target"), sleep=lambda seconds: None)


def begin(store: CheckpointStore, parent: CommitPermit | Checkpoint | None, **more: Any) -> PendingCheckpoint:
    how: dict[str, Any] = {"job_id": JOB, "graph": graph(), "states": STATES, "options": OBJECTS, **more}
    return store.begin(parent=parent, **how)


def rows_of(subtask: int, parallelism: int = 2, table: pa.Table = KEYS) -> pa.Table:
    groups = key_groups(hash_keys([table["word"]]), 128)
    return table.filter(pa.array(subtask_of_key_group(groups, parallelism=parallelism, max_parallelism=128) == subtask))


def fill(pending: PendingCheckpoint, *, delta: pa.Table | None = None, carry: bool = False, skip: int = -1) -> None:
    """Write every subtask's snapshot: the state whole, or with a layer on top, or carried as it
    is.
    """
    parallelism = pending.graph.operator("count").parallelism
    for subtask in range(parallelism):
        if subtask == skip:
            continue
        with pending.context.subtask("count", subtask) as writer:
            if carry:
                writer.carry("counts")
            elif delta is not None:
                writer.write("counts", rows_of(subtask, parallelism, delta), delta=True)
            else:
                writer.write("counts", rows_of(subtask, parallelism))
            writer.write("splits", pa.table({"path": [f"part-{subtask}"]}))
        assert pending.add(writer)


def publish(
    store: CheckpointStore,
    parent: CommitPermit | None,
    delta: pa.Table | None = None,
    carry: bool = False,
    finished: int = -1,
    **more: Any,
) -> CommitPermit:
    pending = begin(store, parent, **more)
    fill(pending, delta=delta, carry=carry, skip=finished)
    if finished >= 0:
        pending.mark_finished("count", [finished])
    return pending.publish()


def several(store: CheckpointStore, count: int) -> CommitPermit:
    permit = store.start(JOB)
    for _ in range(count):
        permit = publish(store, permit)
    assert permit is not None
    return permit


def flip(storage: Any, path: str, at: int) -> None:
    """Damage one byte of an object."""
    data = bytearray(storage.read(path).to_pybytes())
    data[at] ^= 1
    storage.delete([path])
    with storage.open_output(path) as output:
        output.write(bytes(data))


def counts(checkpoint: Checkpoint) -> dict[str, int]:
    table = checkpoint.read("count", "counts").table()
    return dict(zip(table["word"].to_pylist(), table["n"].to_pylist(), strict=True))


def ids(store: CheckpointStore) -> list[int]:
    return [record.checkpoint_id for record in store.history()]


# --- a run ----------------------------------------------------------------------------------------


def test_a_first_run_starts_from_nothing_and_publishes_one_two_three(store: CheckpointStore) -> None:
    assert store.start(JOB) is None
    permit = several(store, 3)
    assert ids(store) == [3, 2, 1]
    assert [record.checkpoint_id for record in store.history(limit=2)] == [3, 2]
    refused(InvalidInput, lambda: store.history(limit=0))
    newest, middle, first = store.history()
    assert (newest.parent, middle.parent, first.parent) == (middle.ref, first.ref, None)
    assert permit.record == newest
    again = store.start(JOB)
    assert again is not None
    assert (again.record, again.checkpoint().record) == (newest, newest)
    assert store.permit_of(store.open()).ref == newest.ref
    with pytest.raises(PublishConflict, match=r"checkpoint 2 is not the newest of .*, which is 3"):
        store.permit_of(store.open(2))
    assert store.strays() == []


def test_what_was_written_is_read_back_and_valid(store: CheckpointStore) -> None:
    publish(store, None, job_name="Words", properties={"owner": "ann"})
    checkpoint = store.open()
    assert counts(checkpoint) == dict(zip(KEYS["word"].to_pylist(), KEYS["n"].to_pylist(), strict=True))
    record = checkpoint.record
    assert (record.job_name, record.properties, record.kind) == ("Words", {"owner": "ann"}, CheckpointKind.CHECKPOINT)
    assert record.writer.startswith("stateformat ")
    assert record.created_at_us > 1_600_000_000_000_000
    assert record.required_features == ()
    assert record.graph.operator("count").key_hash == "spark-murmur3-seed42"
    assert validate(store, level="full").problems == ()


def test_a_local_store_comes_to_be_by_its_first_checkpoint(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "not" / "yet"), durable=False)
    assert store.start(JOB) is None
    assert not record_ids(store.storage)
    publish(store, None)
    assert ids(store) == [1]
    assert store.storage.url == f"file://{tmp_path}/not/yet"
    assert counts(open_store(str(tmp_path / "not" / "yet")).open())["w7"] == 7


def test_a_store_that_is_not_there_is_told_from_an_empty_one(tmp_path: Path) -> None:
    for path, kind in ((tmp_path / "gone", ErrorKind.STORE_NOT_FOUND), (tmp_path, ErrorKind.STORE_EMPTY)):
        store = open_store(str(path))
        for ask in (
            store.history,
            store.open,
            lambda store=store: store.open(3),
            lambda store=store: store.rollback(1),
        ):
            with pytest.raises(NotFound) as caught:
                ask()
            assert caught.value.kind is kind
        assert store.strays() == []


def test_the_history_does_not_pass_over_a_damaged_record(store: CheckpointStore, storage: MemoryStorage) -> None:
    several(store, 3)
    flip(storage, layout.record_path(CheckpointId(2)), 100)
    assert store.open().record.checkpoint_id == 3
    for ask in (store.history, lambda: store.open(2), lambda: store.rollback(1)):
        refused(DamagedCheckpoint, ask, "0002")
    assert store.open(1).id == 1, "an id needs its own record only"
    assert store.strays() == []
    assert [record.checkpoint_id for record in store.history(limit=1)] == [3]


def test_the_stores_of_two_jobs_do_not_mix(store: CheckpointStore) -> None:
    permit = publish(store, None)
    refused(JobMismatch, lambda: store.start("other"), "counting")
    refused(JobMismatch, lambda: begin(store, permit, job_id="other"))
    refused(InvalidInput, lambda: begin(store, None, job_id=""), "job id is empty")


# --- what a checkpoint is made of -----------------------------------------------------------------


def test_the_second_snapshot_of_a_subtask_is_ignored(store: CheckpointStore) -> None:
    pending = begin(store, None)
    fill(pending)
    with pending.context.subtask("count", 1) as writer:
        writer.write("counts", rows_of(1).slice(0, 1))
        writer.empty("splits")
    assert not pending.add(writer)
    assert not pending.add(writer.snapshot().to_bytes())
    pending.publish()
    assert len(counts(store.open())) == 40


def test_a_pending_checkpoint_publishes_once(store: CheckpointStore) -> None:
    pending = begin(store, None)
    fill(pending)
    pending.publish()
    for again in (
        pending.publish,
        lambda: pending.mark_finished("count", [0]),
        lambda: pending.add_handles(store.open().manifest.full()),
    ):
        refused(InvalidInput, again, "begin another")


def test_a_missing_snapshot_is_refused_and_may_be_mended(store: CheckpointStore, storage: MemoryStorage) -> None:
    pending = begin(store, None)
    fill(pending, skip=1)
    with pytest.raises(InvalidState) as caught:
        pending.publish()
    assert caught.value.details["problems"]
    assert {problem.subtask for problem in caught.value.details["problems"]} == {1}
    assert storage.list("manifests/") == []
    with pending.context.subtask("count", 1) as writer:
        writer.write("counts", rows_of(1))
        writer.empty("splits")
    pending.add(writer)
    assert pending.publish().ref.checkpoint_id == 1


def test_a_union_state_in_a_partially_finished_operator_is_refused_by_its_own_kind(store: CheckpointStore) -> None:
    limits = declare.union_state("count", "limits", columns={"x": pa.int64()})
    pending = begin(store, None, states=(limits,))
    with pending.context.subtask("count", 0) as writer:
        writer.write("limits", pa.table({"x": [1]}))
    pending.add(writer)
    pending.mark_finished("count", [1])
    refused(InvalidState, pending.publish, kind=ErrorKind.UNION_PARTIALLY_FINISHED)


def test_finished_and_finishing_subtasks_stand_in_the_record(store: CheckpointStore) -> None:
    files = declare.committables_state("count", "files", columns={"path": pa.string()})
    pending = begin(store, None, graph=graph(4), states=(*STATES, files))
    pending.mark_finished("count", [0])
    for subtask in (1, 2, 3):
        with pending.context.subtask("count", subtask, finishing=subtask > 1) as writer:
            if subtask == 1:
                writer.write("counts", rows_of(1, 4))
                writer.empty("splits")
            if subtask < 3:
                writer.write("files", pa.table({"path": [f"out-{subtask}"]}))
        pending.add(writer)
    record = pending.publish().record
    count = record.graph.operator("count")
    assert (str(count.finished), str(count.finishing)) == ("0", "2-3")
    assert count.status is Status.PARTIALLY_FINISHED
    assert record.required_features == ("committables", "finished_operators")
    assert validate(store, level="full").problems == ()


def test_what_has_finished_is_inherited_by_the_graph(store: CheckpointStore) -> None:
    first = begin(store, None)
    fill(first, skip=0)
    first.mark_finished("count", [0])
    permit = first.publish()
    second = begin(store, permit, graph=permit.record.graph)
    fill(second, skip=0)
    assert str(second.publish().record.graph.operator("count").finished) == "0"


@pytest.mark.parametrize("how", ["finished", "finishing"])
def test_a_status_that_contradicts_a_snapshot_is_refused(store: CheckpointStore, how: str) -> None:
    marked: Any = {how: SubtaskSet.of([1])}
    ended = replace(graph().operator("count"), **marked)
    pending = begin(store, None, graph=graph().with_operators({"count": ended}))
    fill(pending)
    refused(InvalidState, pending.publish, "subtask 1 of 'count'", kind=ErrorKind.STATUS_CONTRADICTION)


def test_subtasks_and_operators_that_do_not_exist_are_refused(store: CheckpointStore) -> None:
    pending = begin(store, None)
    refused(InvalidState, lambda: pending.mark_finished("count", [2]), "subtasks 0 to 1; there is no subtask 2")
    refused(InvalidInput, lambda: pending.mark_finished("nobody", [0]), "'nobody'")
    snapshot = pending.context.subtask("print", 0).snapshot()
    refused(InvalidState, lambda: pending.add(replace(snapshot, subtask=7)), "there is no subtask 7")


def test_snapshots_may_come_from_many_threads_at_once(store: CheckpointStore) -> None:
    pending = begin(store, None, graph=graph(16))
    added: list[bool] = []

    def work(subtask: int) -> None:
        with pending.context.subtask("count", subtask) as writer:
            writer.write("counts", rows_of(subtask, 16))
            writer.empty("splits")
        added.append(pending.add(writer))

    threads = [threading.Thread(target=work, args=(i % 16,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(added) == [False] * 16 + [True] * 16
    pending.publish()
    assert len(counts(store.open())) == 40


# --- carrying -------------------------------------------------------------------------------------


def delta(word: str, n: int) -> pa.Table:
    return pa.table({"word": [word], "n": pa.array([n], pa.int64()), "_op": pa.array([0], pa.int8())})


def test_deltas_lie_on_top_of_what_the_parent_has(store: CheckpointStore, storage: MemoryStorage) -> None:
    permit = publish(store, None)
    for n in (100, 101):
        permit = publish(store, permit, delta=delta("w3", n))
    handles = store.open().handles.to_pylist()
    layers = {
        (row["subtask"], row["layer"], row["rows"]) for row in handles if row["state"] == "counts" and row["layer"]
    }
    (owner,) = {subtask for subtask, _, _ in layers}
    assert layers == {(owner, 1, 1), (owner, 2, 1)}
    assert counts(store.open())["w3"] == 101
    assert counts(store.open(2))["w3"] == 100
    assert permit.record.required_features == ("layers",)
    assert len([item for item in storage.list("segments/") if "/00000000000000000001/" in item.path]) == 4
    assert validate(store, level="full").problems == ()


def test_a_run_that_carries_its_own_checkpoint_does_not_read_its_manifest_again(storage: MemoryStorage) -> None:
    def body(stepped: Any) -> None:
        store = CheckpointStore(stepped)
        permit = publish(store, None)
        publish(store, permit, carry=True)

    driver = Driver("A", storage, body)
    driver.finish()
    assert [line for line in driver.trace if line.startswith("read")] == []
    assert counts(CheckpointStore(storage).open())["w3"] == 3


def test_a_restart_carries_what_it_restored(store: CheckpointStore) -> None:
    publish(store, None)
    permit = store.start(JOB)
    pending = begin(store, permit)
    fill(pending, carry=True)
    assert pending.publish().ref.checkpoint_id == 2
    assert len(counts(store.open())) == 40


def test_state_is_not_carried_to_another_parallelism_unless_it_was_cut_for_it(store: CheckpointStore) -> None:
    permit = publish(store, None, graph=graph(1))
    pending = begin(store, permit, graph=graph(2))
    fill(pending, carry=True)
    refused(InvalidState, pending.publish, "parallelism 2 of 128, and was 1 of 128 in the parent")
    # What a restore plan does, by hand: the one handle is cut in two at the border of the new
    # subtasks' key groups.
    (whole,) = [row for row in permit.checkpoint().manifest.full().to_pylist() if row["state"] == "counts"]
    first, last = whole["first_group"], whole["last_group"]
    border = 64 - first
    low, high = whole["rows_per_group"][:border], whole["rows_per_group"][border:]
    while not low[-1]:
        low.pop()
    skipped = 0
    while not high[skipped]:
        skipped += 1
    parts = [
        {**whole, "rows": sum(low), "rows_per_group": low, "last_group": first + len(low) - 1},
        {
            **whole,
            "subtask": 1,
            "row_start": sum(low),
            "rows": sum(high),
            "rows_per_group": high[skipped:],
            "first_group": 64 + skipped,
            "last_group": last,
        },
    ]
    carried = pa.Table.from_pylist(parts, permit.checkpoint().manifest.full().schema)
    publish(store, permit, delta=delta("w3", 100), graph=graph(2), carried=carried)
    assert counts(store.open()) == {**counts(store.open(1)), "w3": 100}
    assert validate(store, level="full").problems == ()


def test_a_state_that_is_as_it_was_is_repeated_by_its_handle(store: CheckpointStore, storage: MemoryStorage) -> None:
    def filled(parent: CommitPermit | None, handles: list[Handle]) -> CommitPermit:
        pending = begin(store, parent)
        for subtask in range(2):
            with pending.context.subtask("count", subtask) as writer:
                writer.write("counts", rows_of(subtask))
                if parent is None:
                    handles.append(writer.write("splits", pa.table({"path": [f"part-{subtask}"]})))
                else:
                    writer.repeat(handles[subtask])
            pending.add(writer)
        return pending.publish()

    handles: list[Handle] = []
    permit = filled(filled(filled(None, handles), handles), handles)
    assert permit.checkpoint().read("count", "splits").table()["path"].to_pylist() == ["part-0", "part-1"]
    assert [row["path"] for row in store.open().handles.to_pylist() if row["state"] == "splits"] == [
        handle.path for handle in handles
    ]
    store.expire(1)
    assert validate(store, level="full").problems == ()
    again = [begin(store, permit).context.subtask("count", subtask) for subtask in range(2)]
    with pytest.raises(InvalidInput, match="cannot repeat a handle of even_split state 'splits' of 'count' subtask 1"):
        again[0].repeat(handles[1])
    with pytest.raises(InvalidState, match="keyed state is carried"):
        again[1].repeat(again[0].write("counts", rows_of(0))._replace(subtask=1))


def test_what_nothing_protects_is_not_repeated(store: CheckpointStore) -> None:
    """Whatever a checkpoint names must not be collected: it lies under its own id, or its parent
    names it.
    """
    other = begin(store, publish(store, None))
    with other.context.subtask("count", 0) as writer:
        writer.empty("counts")
        lost = writer.write("splits", pa.table({"path": ["nobody"]}))
    publish(store, publish(store, store.start(JOB)))
    pending = begin(store, store.start(JOB))
    for subtask in range(2):
        with pending.context.subtask("count", subtask) as writer:
            writer.empty("counts")
            writer.empty("splits") if subtask else writer.repeat(lost)
        pending.add(writer)
    refused(InvalidState, pending.publish, "neither it nor its parent owns")


def test_nothing_to_carry_is_refused(store: CheckpointStore) -> None:
    pending = begin(store, None)
    fill(pending, carry=True)
    refused(InvalidState, pending.publish, "was absent in the parent")
    finished = begin(store, None)
    fill(finished, skip=1)
    finished.mark_finished("count", [1])
    pending = begin(store, finished.publish())
    fill(pending, carry=True)
    refused(InvalidState, pending.publish, "no handle of it", kind=ErrorKind.STATE_MISSING)


def test_a_delta_on_top_of_nothing_is_refused(store: CheckpointStore) -> None:
    permit = publish(store, None)
    pending = begin(store, permit)
    with pending.context.subtask("count", 0) as writer:
        writer.write("counts", rows_of(0, 2, KEYS.append_column("_op", pa.array([0] * 40, pa.int8()))), delta=True)
        writer.empty("splits")
    pending.add(replace(writer.snapshot(), carried=()))
    refused(InvalidState, pending.publish, "carries nothing underneath")


def test_a_segment_that_nothing_protects_is_refused(store: CheckpointStore) -> None:
    first = publish(store, None)
    second = publish(store, first)
    pending = begin(store, second)
    pending.add_handles(first.checkpoint().manifest.full())
    refused(InvalidState, pending.publish, "neither it nor its parent owns")
    rolled = begin(store, second, source=first.ref, kind=CheckpointKind.REWRITE)
    rolled.add_handles(first.checkpoint().manifest.full())
    assert rolled.publish().ref.checkpoint_id == 3


def test_inline_segments_beyond_four_mebibytes_become_objects_of_this_checkpoint(
    store: CheckpointStore, storage: MemoryStorage
) -> None:
    blobs = declare.broadcast_state("count", "blob", columns={"data": pa.binary()})
    sizes = (1_500_000, 1_800_000, 900_000, 700_000)
    options = WriteOptions(inline_bytes_max=2**22, codec="none")
    pending = begin(store, None, graph=graph(4), states=(blobs,), options=options)
    for subtask, size in enumerate(sizes):
        with pending.context.subtask("count", subtask) as writer:
            writer.write("blob", pa.table({"data": [bytes([subtask]) * size]}))
        pending.add(writer)
    assert storage.list("") == []
    permit = pending.publish()
    rows = store.open().manifest.full().to_pylist()
    objects = {row["subtask"] for row in rows if row["inline"] is None}
    assert objects == {1}, "the largest goes first, and the rest fits"
    for row in rows:
        held = row["inline"] or storage.read(row["path"]).to_pybytes()
        assert xxhash.xxh3_128_digest(held) == row["digest"]
    assert [layout.owner_id(item.path) for item in storage.list("segments/")] == [1]
    # Carried on with more beside it, what the parent kept inline is spilled under a name of the
    # child's own.
    second = begin(store, permit, graph=permit.record.graph, states=(blobs,), options=options)
    second.add_handles(permit.checkpoint().manifest.full().slice(0, 3))
    with second.context.subtask("count", 3) as writer:
        writer.write("blob", pa.table({"data": [bytes([9]) * 3_000_000]}))
    second.add(writer)
    second.publish()
    assert validate(store, level="full").problems == ()
    assert {layout.owner_id(item.path) for item in storage.list("segments/")} == {1, 2}
    assert sorted(len(value) for value in store.open().read("count", "blob").table()["data"].to_pylist()) == [
        900_000,
        1_500_000,
        1_800_000,
        3_000_000,
    ]


class Slow(InFront):
    """Four writers of segments go on only together, as a storage answers that is far away."""

    reads_at_once = 4

    def __init__(self, inner: MemoryStorage) -> None:
        super().__init__(inner)
        self.together = threading.Barrier(4, timeout=60)

    def open_output(self, path: str) -> Any:
        if path.startswith(layout.SEGMENTS):
            self.together.wait()
        return super().open_output(path)


def test_what_does_not_fit_inline_is_written_side_by_side(storage: MemoryStorage) -> None:
    blobs = declare.broadcast_state("count", "blob", columns={"data": pa.binary()})
    options = WriteOptions(inline_bytes_max=2**22, codec="none")
    pending = begin(CheckpointStore(Slow(storage)), None, graph=graph(12), states=(blobs,), options=options)
    for subtask in range(12):
        with pending.context.subtask("count", subtask) as writer:
            writer.write("blob", pa.table({"data": [bytes([subtask]) * 900_000]}))
        pending.add(writer)
    pending.publish()
    assert len(storage.list(layout.SEGMENTS)) == 8, "four of them fit"
    assert validate(CheckpointStore(storage), level="full").problems == ()


# --- other stores ---------------------------------------------------------------------------------


def test_a_copy_is_self_contained_and_can_be_run_from(store: CheckpointStore, target: CheckpointStore) -> None:
    permit = publish(store, None)
    publish(store, permit, delta=delta("w3", 100), stop=Stop(StopMode.NO_DRAIN, "r1"))
    steps: list[CopyProgress] = []
    record = store.copy(store.open(), target, progress=steps.append)
    assert record.kind is CheckpointKind.SAVEPOINT
    assert record == replace(store.open().record, kind=CheckpointKind.SAVEPOINT)
    assert (steps[0].objects_done, steps[-1].objects_done) == (0, steps[-1].objects_total)
    assert steps[-1].bytes_done == steps[-1].bytes_total > 0
    before = counts(store.open())
    MemoryStorage.reset(store.url.removeprefix("memory://"))
    assert counts(target.open()) == before
    assert ids(target) == [2]
    assert validate(target, level="full").problems == ()
    restarted = target.start(JOB)
    assert restarted is not None
    assert publish(target, restarted).record.parent == record.ref
    assert target.expire(1).stopped is None
    assert counts(target.open())["w3"] == 3


def test_a_copy_that_was_interrupted_is_made_whole_by_making_it_again(
    store: CheckpointStore, target: CheckpointStore
) -> None:
    publish(store, None)
    checkpoint = store.open()
    steps = 0
    while True:
        driver = Driver(
            "copy",
            target.storage,
            lambda storage: store.copy(checkpoint, CheckpointStore(storage, sleep=lambda s: None)),
        )
        for _ in range(steps):
            if not driver.done:
                driver.step()
        if driver.done:
            break
        driver.kill()
        assert not record_ids(target.storage) or counts(target.open()) == counts(checkpoint)
        steps += 1
    assert driver.error is None
    assert steps > 6
    assert counts(target.open()) == counts(checkpoint)
    # And once more, on what is complete.
    assert store.copy(checkpoint, target) == driver.result
    assert validate(target, level="full").problems == ()


def test_a_copy_keeps_what_is_right_and_says_what_is_wrong(store: CheckpointStore, target: CheckpointStore) -> None:
    publish(store, None)
    store.copy(store.open(), target)
    path = target.storage.list("segments/")[0].path
    kept = target.storage.read(path).to_pybytes()
    target.storage.delete([path])
    store.copy(store.open(), target)
    assert target.storage.read(path).to_pybytes() == kept
    flip(target.storage, path, -1)
    found = refused(DamagedCheckpoint, lambda: store.copy(store.open(), target), "with other bytes")
    assert found.details["path"] == path


def test_damage_is_not_copied(store: CheckpointStore, target: CheckpointStore, storage: MemoryStorage) -> None:
    publish(store, None)
    path = storage.list("segments/")[-1].path
    flip(storage, path, storage.size(path) // 2)
    copied = lambda: store.copy(store.open(), target)  # noqa: E731
    assert refused(DamagedCheckpoint, copied, kind=ErrorKind.OBJECT_DIGEST_DIFFERS).details["path"] == path
    assert not record_ids(target.storage)
    assert path not in [item.path for item in target.storage.list("segments/")]


def test_a_checkpoint_that_expires_while_it_is_copied_is_told_so(
    store: CheckpointStore, target: CheckpointStore
) -> None:
    permit = publish(store, None)
    checkpoint = store.open()
    _ = checkpoint.manifest
    publish(store, permit)
    store.expire(1)
    refused(CheckpointExpired, lambda: store.copy(checkpoint, target))
    assert not record_ids(target.storage)


def test_a_copy_refuses_a_target_that_holds_something_else(store: CheckpointStore, target: CheckpointStore) -> None:
    permit = publish(store, None)
    first = store.open()
    publish(store, permit)
    refused(InvalidInput, lambda: store.copy(first, store), "its own store")
    store.copy(first, target)
    before = target.storage.list("")
    refused(InvalidInput, lambda: store.copy(store.open(), target), kind=ErrorKind.STORE_NOT_EMPTY)
    stranger = CheckpointStore(MemoryStorage(target.url.removeprefix("memory://") + "/stranger"))
    publish(stranger, None, job_id="stranger")
    refused(JobMismatch, lambda: stranger.copy(stranger.open(), target), "stranger")
    rival = CheckpointStore(MemoryStorage(target.url.removeprefix("memory://") + "/rival"))
    publish(rival, None)
    assert rival.open().record.checkpoint_id == first.record.checkpoint_id
    refused(InvalidInput, lambda: rival.copy(rival.open(), target), kind=ErrorKind.STORE_NOT_EMPTY)
    assert target.storage.list("") == before
    for other in (stranger, rival):
        MemoryStorage.reset(other.url.removeprefix("memory://"))


def test_of_two_copies_into_one_store_one_wins(store: CheckpointStore, target: CheckpointStore) -> None:
    permit = publish(store, None)
    publish(store, permit)

    def copier(checkpoint_id: int) -> Driver:
        checkpoint = store.open(checkpoint_id)
        return Driver(
            str(checkpoint_id), target.storage, lambda storage: store.copy(checkpoint, CheckpointStore(storage))
        ).until("create")

    low, high = copier(1), copier(2)
    high.finish()
    error = low.fail()
    assert isinstance(error, PublishConflict)
    # The child names the parent that was copied, so its record may stay; the newest is the one that
    # won.
    assert target.open().record.checkpoint_id == 2
    assert validate(target, 2, level="full").problems == ()


@pytest.mark.parametrize("folder", ["segments/00000000000000000001/sp", "checkpoints/x", "manifests/x", "requests/x"])
def test_a_copy_into_a_stores_own_folders_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "store")
    store, other = open_store(str(tmp_path / "store")), open_store(str(tmp_path / "other"))
    permit = publish(store, None)
    publish(other, None)
    before = sorted(tmp_path.rglob("*"))
    places = [f"{store.url}/{folder}", tmp_path / "x" / ".." / "store" / folder, tmp_path / "link" / folder]
    for place in (*places, tmp_path / "other" / folder):
        target = open_store(str(place))
        for into in (lambda to: store.copy(permit.checkpoint(), to), lambda to: to.adopt_objects(permit.checkpoint())):
            refused(InvalidInput, lambda into=into, target=target: into(target), "garbage collection would delete it")
    for place in places:
        with pytest.raises(InvalidInput, match="garbage collection would delete it"):
            store.request_stop(StopMode.DRAIN, str(place))
    assert sorted(tmp_path.rglob("*")) == before
    store.copy(permit.checkpoint(), open_store(f"{store.url}/savepoints/mine"))
    store.copy(permit.checkpoint(), open_store(str(tmp_path / "segments" / "not" / "of" / "a" / "store")))


def test_a_checkpoint_derived_into_another_store_goes_on_from_the_id(
    store: CheckpointStore, target: CheckpointStore
) -> None:
    permit = publish(store, publish(store, None))
    checkpoint = permit.checkpoint()
    target.adopt_objects(checkpoint)
    pending = begin(target, permit, kind=CheckpointKind.RESCALE, source=permit.ref)
    pending.add_handles(checkpoint.manifest.full())
    derived = pending.publish()
    assert (derived.ref.checkpoint_id, derived.record.parent) == (3, permit.ref)
    assert ids(target) == [3]
    assert ids(store) == [2, 1]
    MemoryStorage.reset(store.url.removeprefix("memory://"))
    assert len(counts(target.open())) == 40
    assert target.collect_garbage(delete=True).objects == ()
    assert validate(target, level="full").problems == ()


def test_what_is_derived_needs_an_empty_store_and_a_looker_is_no_publisher(
    store: CheckpointStore, target: CheckpointStore
) -> None:
    permit = publish(store, None)
    refused(InvalidInput, lambda: begin(store, store.open()), "opened for reading")
    target.adopt_objects(store.open())
    pending = begin(target, store.open())
    pending.add_handles(permit.checkpoint().manifest.full())
    publish(target, None)
    refused(InvalidInput, pending.publish, kind=ErrorKind.STORE_NOT_EMPTY)
    assert ids(target) == [1]


# --- rollback -------------------------------------------------------------------------------------


def test_a_rollback_makes_an_older_checkpoint_the_newest(store: CheckpointStore) -> None:
    permit = publish(store, None, properties={"owner": "ann"})
    for n in (100, 101, 102):
        permit = publish(store, permit, delta=delta("w3", n), stop=Stop(StopMode.DRAIN, "r1") if n == 100 else None)
    rolled = store.rollback(2)
    assert "left behind: 3, 4." in rolled.notes[0]
    assert "stays in the output" in rolled.notes[0]
    record = rolled.record
    assert (record.checkpoint_id, record.kind, record.parent) == (5, CheckpointKind.ROLLBACK, permit.ref)
    assert record.stop is None, "the job is to go on"
    assert counts(store.open())["w3"] == 100
    refused(PublishConflict, lambda: publish(store, permit))
    store.expire(1)
    assert ids(store) == [5]
    assert counts(store.open())["w3"] == 100
    assert validate(store, level="full").problems == ()
    assert publish(store, store.start(JOB)).ref.checkpoint_id == 6


# --- storages that misbehave ----------------------------------------------------------------------


def test_a_record_that_may_not_survive_a_power_failure_gives_no_permit(
    store: CheckpointStore, storage: MemoryStorage
) -> None:
    create = storage.create

    def unsynced(path: str, data: bytes) -> Any:
        create(path, data)
        raise StorageError("the directory could not be synced", visible=True)

    storage.create = unsynced  # type: ignore[method-assign]
    refused(OutcomeUnknown, lambda: publish(store, None), "could not be synced")
    restarted = store.start(JOB)
    assert restarted is not None
    assert restarted.ref.checkpoint_id == 1


def test_a_storage_that_ignores_the_condition_is_not_published_to(
    store: CheckpointStore, storage: MemoryStorage
) -> None:
    def refuse(path: str, data: bytes) -> Any:
        raise StorageError("overwrites", kind=ErrorKind.STORAGE_UNSUITABLE)

    storage.create = refuse  # type: ignore[method-assign]
    refused(StorageError, lambda: publish(store, None), "overwrites")


def test_pauses_between_tries_grow_and_are_bounded(storage: MemoryStorage) -> None:
    pauses: list[float] = []
    store = CheckpointStore(storage, sleep=pauses.append)

    def silent(path: str, data: bytes) -> Any:
        raise StorageError("no connection")

    storage.create = silent  # type: ignore[method-assign]
    refused(OutcomeUnknown, lambda: publish(store, None), "no connection")
    assert len(pauses) == 8
    assert pauses == sorted(pauses)
    assert all(0 < pause <= 5 for pause in pauses)


def test_a_record_of_an_attempt_says_which_attempt(store: CheckpointStore, storage: MemoryStorage) -> None:
    pending = begin(store, None)
    fill(pending)
    permit = pending.publish()
    assert load_record(storage, CheckpointId(1)).ref == pending.ref == permit.ref
    assert permit.record.manifest.path == layout.manifest_path(pending.checkpoint_id, pending.attempt_id)


def test_of_many_threads_on_one_permit_one_publishes(tmp_path: Path) -> None:
    store = CheckpointStore(LocalStorage(tmp_path, durable=False), sleep=lambda seconds: None)
    permit = publish(store, None)
    together = threading.Barrier(8)
    permits: list[CommitPermit] = []
    conflicts: list[PublishConflict] = []

    def work() -> None:
        pending = begin(store, permit)
        fill(pending)
        together.wait()
        try:
            permits.append(pending.publish())
        except PublishConflict as error:
            conflicts.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(permits), len(conflicts)) == (1, 7)
    assert store.open().record.ref == permits[0].ref
    assert {error.details["newest_attempt_id"] for error in conflicts} == {permits[0].ref.attempt_id}
    store.collect_garbage(delete=True)
    assert len(counts(store.open())) == 40

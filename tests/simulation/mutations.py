"""The core broken on purpose, in twenty ways that could go unnoticed. The simulator must notice.

Each mutation is a context manager that replaces one rule by a plausible mistake. :data:`MUTATIONS`
names them as issue and README do; ``tests/simulation/test_simulation.py`` shows that each is found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import stateformat.redistribution.restore_plan
from stateformat.backends.dataflow import task_tracker as roster
from stateformat.backends.dataflow.chain import OperatorChain
from stateformat.backends.dataflow.chained_operator import ChainedOperator
from stateformat.backends.dataflow.coordinator import BarrierInFlight, Coordinator
from stateformat.backends.dataflow.events import MIN_WATERMARK, LogRecords, Publish, TaskCommand
from stateformat.backends.dataflow.task import Task
from stateformat.backends.dataflow.task_inputs import Alignment, LoopBuffer
from stateformat.backends.dataflow.task_states import TaskState
from stateformat.backends.runtime import Driver, Restored, driver, runtime
from stateformat.backends.state.expiry import Expiry
from stateformat.history import records as history, retention
from stateformat.model import Mode
from stateformat.publication import pending, protocol as publication
from stateformat.publication.protocol import MOVES, Observation, Step
from stateformat.redistribution.tables import Slices
from tests.simulation.work import Recording

Mutation = Callable[[], AbstractContextManager[Any]]


def drop_the_ended_channel_mark() -> AbstractContextManager[Any]:
    """An ended channel does not count as aligned for the checkpoint that is pending."""

    def end(self: Alignment, channel: Any) -> list[TaskCommand]:
        del self._open[channel]
        return []

    return patch.object(Alignment, "end", end)


def log_all_loop_records() -> AbstractContextManager[Any]:
    """A head logs what is fed back until every channel's barrier has come, not until that
    channel's.
    """
    right = LoopBuffer.receive

    def receive(self: LoopBuffer, channel: Any, batch: pa.RecordBatch, *, hold: bool) -> list[TaskCommand]:
        commands = right(self, channel, batch, hold=hold)
        if self._logging and channel not in self._logging and self._writes:
            commands.insert(0, LogRecords(channel, batch))
        return commands

    return patch.object(LoopBuffer, "receive", receive)


def commit_before_publish() -> AbstractContextManager[Any]:
    """Sinks commit what was prepared as soon as all have acknowledged."""
    right = Driver._publish

    def publish(self: Driver, command: Publish) -> None:
        assert self.in_flight is not None
        pending = self.in_flight.checkpoint
        assert pending is not None
        for handle in pending._handles().to_pylist():
            if handle["mode"] == Mode.COMMITTABLES and handle["rows"]:
                rows = pq.read_table(pa.BufferReader(handle["inline"]))
                self.sinks[handle["operator"]].commit(SimpleNamespace(ref=pending.ref), rows)  # type: ignore[arg-type]
        right(self, command)

    return patch.object(Driver, "_publish", publish)


def skip_the_read_back() -> AbstractContextManager[Any]:
    """A create without an answer counts as done."""
    return patch.dict(
        MOVES, {(Step.CREATE, Observation.NO_ANSWER): Step.LIST, (Step.CREATE_AGAIN, Observation.NO_ANSWER): Step.LIST}
    )


@contextlib.contextmanager
def deal_out_the_state_of_finishing_subtasks() -> Iterator[None]:
    """A subtask whose logic has ended writes its states as if it ran, and a restore deals them
    out.
    """
    snapshot, acknowledge = OperatorChain.snapshot, Coordinator._acknowledge

    def as_running(self: OperatorChain, command: Any, context: Any) -> Any:
        return snapshot(self, command._replace(finishing=False), context)

    def none_finishing(self: Coordinator, pending: Any, event: Any) -> Any:
        commands = acknowledge(self, pending, event)
        return [
            command._replace(finishing=frozenset()) if isinstance(command, Publish) else command for command in commands
        ]

    with patch.object(OperatorChain, "snapshot", as_running), patch.object(Coordinator, "_acknowledge", none_finishing):
        yield


def end_inputs_again_after_a_restore() -> AbstractContextManager[Any]:
    """A restore forgets which inputs had ended."""
    right = Restored.progress

    def progress(self: Restored, vertex: Any, subtask: int) -> tuple[dict[str, int], frozenset[str]]:
        return right(self, vertex, subtask)[0], frozenset()

    return patch.object(Restored, "progress", progress)


def count_feedback_edges_for_roots() -> AbstractContextManager[Any]:
    """A loop's tail counts as a predecessor of its head, so a head whose sources have finished is
    not a root.
    """
    right = roster.make_plan

    def make_plan(job: Any, running: Any) -> Any:
        vertices = [replace(vertex, inputs=(*vertex.inputs, *vertex.feedback)) for vertex in job.vertices]
        return right(SimpleNamespace(vertices=vertices, states=job.states, unaligned=job.unaligned), running)  # type: ignore[arg-type]

    return patch.object(roster, "make_plan", make_plan)


@contextlib.contextmanager
def forget_the_union_refusal() -> Iterator[None]:
    """Union state may be in an operator that is partially finished."""

    def content(*args: Any) -> list[Any]:
        return [problem for problem in check(*args) if problem.kind != "union_partially_finished"]

    check = pending.check_content
    with (
        patch.object(roster.TaskTracker, "partial_union", lambda self: None),
        patch.object(BarrierInFlight, "partial_union", lambda self, union, parallelism: None),
        patch.object(pending, "check_content", content),
    ):
        yield


def merge_two_broadcast_copies() -> AbstractContextManager[Any]:
    """A subtask without its own copy gets two."""
    right = stateformat.redistribution.modes.copy_broadcast

    def copy_broadcast(handles: Any, states: Any) -> Slices:
        slices = right(handles, states)
        own = {
            (state, subtask) for state, subtask in zip(handles.state.tolist(), handles.subtask.tolist(), strict=True)
        }
        wants = zip(slices.state.tolist(), slices.subtask.tolist(), strict=True)
        without = np.array([(state, subtask) not in own for state, subtask in wants], dtype=np.bool_)
        return Slices.concat([slices, slices.take(without)])

    return patch.object(stateformat.redistribution.restore_plan, "copy_broadcast", copy_broadcast)


def end_on_any_checkpoint() -> AbstractContextManager[Any]:
    """A task that waits for the savepoint of a stop leaves when any checkpoint since its end is
    complete.
    """
    right = Task._leave

    def leave(self: Task) -> list[TaskCommand]:
        if self.state is TaskState.WAITING and self._may_leave:
            stop, self._stop = self._stop, None
            try:
                return right(self)
            finally:
                self._stop = stop
        return right(self)

    return patch.object(Task, "_leave", leave)


@contextlib.contextmanager
def let_a_watermark_fall_back() -> Iterator[None]:
    """A restore forgets how far time had advanced."""
    right = Restored.progress

    def progress(self: Restored, vertex: Any, subtask: int) -> tuple[dict[str, int], frozenset[str]]:
        return {}, right(self, vertex, subtask)[1]

    with (
        patch.object(Restored, "progress", progress),
        patch.object(ChainedOperator, "_restored_watermark", lambda self, rows: MIN_WATERMARK),
    ):
        yield


def a_zombie_publishes() -> AbstractContextManager[Any]:
    """A run begins its checkpoint from the newest that exists, not from the one that it holds."""
    right = Driver._begin

    def begin(self: Driver, command: Any) -> None:
        self.permit = self._store.start(self._job.flow.job_id)
        right(self, command)

    return patch.object(Driver, "_begin", begin)


def clean_up_one_id_too_far() -> AbstractContextManager[Any]:
    """A sink removes what was prepared under newest + 1 too, where a rival may be about to
    publish.
    """
    right = Recording.clean

    def clean(self: Recording, uid: str, newest_id: int, carried: Any) -> None:
        right(self, uid, newest_id + 1, carried)

    return patch.object(Recording, "clean", clean)


def expire_the_highest_first() -> AbstractContextManager[Any]:
    """Retention deletes a checkpoint before its parent."""
    right = retention.remove_records
    return patch.object(retention, "remove_records", lambda storage, records: right(storage, list(records)[::-1]))


def roll_back_without_looking() -> AbstractContextManager[Any]:
    """A rollback does not check whether its source still exists once its manifest is written."""
    return patch.object(pending.PendingCheckpoint, "_check_before_creating", lambda self: None)


@contextlib.contextmanager
def name_parents_by_id_only() -> Iterator[None]:
    """Any record with the parent's id counts as the parent."""

    def see_child(found: Any, ours: Any) -> Observation:
        named = found.parent.checkpoint_id if found is not None and found.parent is not None else None
        return Observation.OUR_CHILD if named == ours.checkpoint_id else right(found, ours)

    right = publication.see_child

    def is_link(found: Any, parent: Any) -> bool:
        return bool(found.ref.checkpoint_id == parent.checkpoint_id)

    with (
        patch.object(history, "is_link", is_link),
        patch.object(publication, "see_child", see_child),
    ):
        yield


@contextlib.contextmanager
def forget_what_a_sink_put_off() -> Iterator[None]:
    """What a sink wants to commit later is dropped."""

    def commit(*args: Any) -> dict[str, Any]:
        right(*args)
        return {}

    right = driver.commit
    with patch.object(driver, "commit", commit), patch.object(runtime, "commit", commit):
        yield


def return_what_has_expired() -> AbstractContextManager[Any]:
    """An expired row is seen until a base or a growing store has dropped it."""
    return patch.object(Expiry, "hide", lambda self, slots, at=None: slots)


def expire_by_event_time_only() -> AbstractContextManager[Any]:
    """The clock of rows that expire by processing time stands still."""
    right = Expiry.advance

    def advance(self: Expiry, now_us: int) -> None:
        if self.ttl.clock == "event_time":
            right(self, now_us)

    return patch.object(Expiry, "advance", advance)


def name_only_the_newest_part_of_a_log() -> AbstractContextManager[Any]:
    """A checkpoint names only what a log has gained since the last one."""
    return patch.object(driver._Log, "staying", [])


MUTATIONS: dict[str, Mutation] = {
    "drop the ended-channel mark": drop_the_ended_channel_mark,
    "log all loop records": log_all_loop_records,
    "commit before publish": commit_before_publish,
    "skip the read-back after a lost answer": skip_the_read_back,
    "deal out the state of finishing subtasks": deal_out_the_state_of_finishing_subtasks,
    "call end_input twice after a restore": end_inputs_again_after_a_restore,
    "count feedback edges when finding roots": count_feedback_edges_for_roots,
    "forget the union refusal": forget_the_union_refusal,
    "merge two broadcast copies": merge_two_broadcast_copies,
    "end on any checkpoint instead of the savepoint": end_on_any_checkpoint,
    "let a watermark fall back": let_a_watermark_fall_back,
    "a zombie publishes": a_zombie_publishes,
    "clean up one id too far": clean_up_one_id_too_far,
    "expire the highest first": expire_the_highest_first,
    "roll back without looking": roll_back_without_looking,
    "name parents by id only": name_parents_by_id_only,
    "forget what a sink put off": forget_what_a_sink_put_off,
    "return what has expired": return_what_has_expired,
    "expire by event time only": expire_by_event_time_only,
    "name only the newest part of a log": name_only_the_newest_part_of_a_log,
}

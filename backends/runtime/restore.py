"""What a run begins with: the job laid out, and what its tasks take from the checkpoint they go on from."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.graph import Partitioner
from stateformat.model import Mode, SchemaVersion
from stateformat.publication import CommitPermit
from stateformat.reading import Checkpoint, ReadTask
from stateformat.redistribution import RestorePlan

from ..dataflow.flow import Dataflow
from ..dataflow.graph import Job, Vertex, compile_job, graph_of, states_to_plan


@dataclass(frozen=True)
class _Shared(ReadTask):
    """A task of which other subtasks have the same: what it reads is read once for all of them."""

    key: tuple[Any, ...] = ()
    known: dict[Any, pa.Table] = field(default_factory=dict, compare=False, repr=False)

    def table(self, *, as_schema: SchemaVersion | None = None) -> pa.Table:
        """As of any task."""
        key = (*self.key, as_schema)
        if key not in self.known:
            self.known[key] = super().table(as_schema=as_schema)
        return self.known[key]


@dataclass(frozen=True)
class Restored:
    """A job laid out for a run, and what it goes on from (``permit`` None: a first run).

    ``finished``: the vertices of which every subtask has ended; they are not started.
    """

    job: Job
    permit: CommitPermit | None = None
    plan: RestorePlan | None = None
    finished: frozenset[str] = frozenset()
    _read: dict[Any, pa.Table] = field(default_factory=dict, compare=False, repr=False)
    """What many subtasks get of union and progress states: reading it for each of them would cost the square of their number."""

    def states(self, vertex: Vertex, subtask: int) -> Mapping[str, Mapping[str, ReadTask]] | None:
        """What a task's operators read, by uid and state; None on a first run."""
        if self.permit is None:
            return None
        return {uid: self._tasks(uid, subtask) for uid in vertex.operators if self._knows(uid)}

    def _tasks(self, uid: str, subtask: int) -> Mapping[str, ReadTask]:
        assert self.permit is not None
        assert self.plan is not None
        tasks = self.permit.checkpoint().restore(self.plan, uid, subtask)
        return {name: self._shared(task, subtask) for name, task in tasks.items()}

    def _shared(self, task: ReadTask, subtask: int) -> ReadTask:
        state = task.state
        if state.mode not in (Mode.PROGRESS, Mode.UNION) or len(task.slices) < 2:
            return task
        assert self.plan is not None
        # Of these modes whole handles are dealt out, so the numbers of the handles say it all.
        handles = self.plan.slices_of(state.operator, subtask, state.name)["handle"].to_numpy().tobytes()
        fields = {item.name: getattr(task, item.name) for item in dataclasses.fields(task)}
        return _Shared(**fields, key=(state.operator, state.name, handles), known=self._read)

    def progress(self, vertex: Vertex, subtask: int) -> tuple[dict[str, int], frozenset[str]]:
        """Per edge into the vertex: how far event time had come, and which had ended."""
        task = self._task(vertex.id, subtask, Mode.PROGRESS)
        if task is None:
            return {}, frozenset()
        watermarks: dict[str, int] = {}
        running: set[str] = set()
        seen: set[str] = set()
        # After a rescale several rows may stand for one edge: the least watermark, and ended only if ended everywhere.
        for row in task.table().to_pylist():
            edge = row["_edge"]
            watermarks[edge] = min(watermarks.get(edge, row["_watermark"]), row["_watermark"])
            seen.add(edge)
            if not row["_ended"]:
                running.add(edge)
        return watermarks, frozenset(seen - running)

    def in_flight(self, vertex: Vertex, subtask: int) -> Mapping[str, ReadTask]:
        """By edge: the records that were on their way to a task."""
        if self.permit is None or vertex.id not in self._logged:
            return {}
        tasks = self._tasks(vertex.id, subtask)
        return {
            task.state.edge: task
            for task in tasks.values()
            if task.state.mode is Mode.IN_FLIGHT and task.state.edge is not None and task.slices.num_rows
        }

    def gives_up(self, uid: str, state: str) -> bool:
        """Whether the run gives up a state of the checkpoint as a whole."""
        return self.plan is not None and not {uid, f"{uid}/{state}"}.isdisjoint(self.plan.drop)

    @cached_property
    def _logged(self) -> frozenset[str]:
        """The operators of which the checkpoint holds in-flight states."""
        states = () if self.permit is None else self.permit.record.states
        return frozenset(str(state.operator) for state in states if state.mode is Mode.IN_FLIGHT)

    @cached_property
    def coordinators(self) -> Mapping[str, pa.Table]:
        """What the coordinators of operators kept, by uid, in the columns that they have now."""
        if self.permit is None or self.plan is None:
            return {}
        found = {}
        for state in self.permit.record.states:
            if state.mode is Mode.COORDINATOR and state.operator in self.job.graph.by_uid:
                tasks = self.permit.checkpoint().restore(self.plan, state.operator, None)
                declared = self.job.state(state.operator, state.name)
                if state.name in tasks and declared is not None:
                    found[str(state.operator)] = tasks[state.name].table(as_schema=declared.current)
        return found

    def _knows(self, uid: str) -> bool:
        assert self.permit is not None
        return uid in self.permit.record.graph.by_uid

    def _task(self, uid: str, subtask: int, mode: Mode) -> ReadTask | None:
        if self.permit is None or not self._knows(uid):
            return None
        tasks = self._tasks(uid, subtask)
        return next((task for task in tasks.values() if task.state.mode is mode), None)


def restore(
    flow: Dataflow,
    permit: CommitPermit | None,
    *,
    parallelism: int | None = None,
    per_operator: Mapping[str, int] | None = None,
    unaligned: bool = False,
    drop: Collection[str] = (),
    again: bool = False,
) -> Restored:
    """Lay out a dataflow for a run that goes on from ``permit``.

    ``again``: of ``drop`` only columns are given up, which stay given up; operators and states were, when the job was started. Raises ``RestoreRefused`` with every reason where the checkpoint does not fit, ``InvalidInput`` for a dataflow that cannot be.
    """
    if permit is None:
        graph = graph_of(flow, parallelism=parallelism, per_operator=per_operator or {}, unaligned=unaligned)
        return Restored(compile_job(flow, graph, unaligned=unaligned, drop=_names(drop)))
    plan = plan_of(
        flow,
        permit.checkpoint(),
        parallelism=parallelism,
        per_operator=per_operator,
        unaligned=unaligned,
        drop=drop,
        again=again,
    )
    job = compile_job(flow, plan.topology, unaligned=unaligned, previous=permit.record, drop=_names(drop))
    skipped = {operator.uid for operator in plan.operators if operator.action == "skip_finished"}
    finished = frozenset(vertex.id for vertex in job.vertices if vertex.id in skipped)
    return Restored(job, permit, plan, finished)


def plan_of(
    flow: Dataflow,
    checkpoint: Checkpoint,
    *,
    parallelism: int | None = None,
    per_operator: Mapping[str, int] | None = None,
    unaligned: bool = False,
    drop: Collection[str] = (),
    again: bool = False,
    check: bool = True,
) -> RestorePlan:
    """The plan by which a dataflow is restored from a checkpoint. Raises as :func:`restore`; ``check`` False gives the plan that
    refuses, too.
    """
    logged = _logged(checkpoint)
    by_edge = checkpoint.graph.by_edge
    graph = graph_of(
        flow,
        parallelism=parallelism,
        per_operator=per_operator or {},
        unaligned=unaligned,
        rebalanced=frozenset(edge for edge in logged if by_edge[edge].partitioner is Partitioner.REBALANCE),
        previous=checkpoint.record,
    )
    states, whole, columns = states_to_plan(
        flow, graph, unaligned=unaligned, previous=checkpoint.record, drop=_names(drop), logged=logged
    )
    plan = checkpoint.plan_restore(graph, states=states, drop=columns if again else [*whole, *columns])
    if check:
        plan.check()
    return plan


def _names(drop: Collection[str]) -> Collection[str]:
    return (drop,) if isinstance(drop, str) else drop


def _logged(checkpoint: Checkpoint) -> frozenset[str]:
    """The edges on which the checkpoint holds records in flight."""
    handles = checkpoint.handles
    holding = pc.and_(pc.equal(handles["mode"], str(Mode.IN_FLIGHT)), pc.greater(handles["rows"], 0))
    return frozenset(handles["edge"].filter(holding).unique().to_pylist())


__all__ = ["Restored", "plan_of", "restore"]

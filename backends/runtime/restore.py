"""What a run starts from: the compiled job, and what its tasks read from a checkpoint."""

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
    """A read task that several subtasks have; its table is read once."""

    key: tuple[Any, ...] = ()
    known: dict[Any, pa.Table] = field(default_factory=dict, compare=False, repr=False)

    def table(self, *, as_schema: SchemaVersion | None = None) -> pa.Table:
        key = (*self.key, as_schema)
        if key not in self.known:
            self.known[key] = super().table(as_schema=as_schema)
        return self.known[key]


@dataclass(frozen=True)
class Restored:
    """A compiled job, and the checkpoint from which it goes on."""

    job: Job
    permit: CommitPermit | None = None
    """None: a first run."""
    plan: RestorePlan | None = None
    finished: frozenset[str] = frozenset()
    """The fully finished vertices, which are not started."""
    _tables: dict[Any, pa.Table] = field(default_factory=dict, compare=False, repr=False)
    """Tables of union and progress states.

    Reading them for each subtask would cost the square of their number.
    """

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
        # Subtasks get whole handles in these modes, so equal handles are equal tables.
        handles = self.plan.slices_of(state.operator, subtask, state.name)["handle"].to_numpy().tobytes()
        fields = {item.name: getattr(task, item.name) for item in dataclasses.fields(task)}
        return _Shared(**fields, key=(state.operator, state.name, handles), known=self._tables)

    def progress(self, vertex: Vertex, subtask: int) -> tuple[dict[str, int], frozenset[str]]:
        """By edge into the vertex its watermark, and the edges that had ended."""
        task = self._task(vertex.id, subtask, Mode.PROGRESS)
        if task is None:
            return {}, frozenset()
        watermarks: dict[str, int] = {}
        running: set[str] = set()
        seen: set[str] = set()
        # After a rescale several rows may stand for one edge: the least watermark counts, and an
        # edge has ended only where all of them have.
        for row in task.table().to_pylist():
            edge = row["_edge"]
            watermarks[edge] = min(watermarks.get(edge, row["_watermark"]), row["_watermark"])
            seen.add(edge)
            if not row["_ended"]:
                running.add(edge)
        return watermarks, frozenset(seen - running)

    def in_flight(self, vertex: Vertex, subtask: int) -> Mapping[str, ReadTask]:
        """The in-flight records of a task, by edge."""
        if self.permit is None or vertex.id not in self._logged:
            return {}
        tasks = self._tasks(vertex.id, subtask)
        return {
            task.state.edge: task
            for task in tasks.values()
            if task.state.mode is Mode.IN_FLIGHT and task.state.edge is not None and task.slices.num_rows
        }

    def drops(self, uid: str, state: str) -> bool:
        """Whether the run drops a state of the checkpoint as a whole."""
        return self.plan is not None and not {uid, f"{uid}/{state}"}.isdisjoint(self.plan.drop)

    @cached_property
    def _logged(self) -> frozenset[str]:
        states = () if self.permit is None else self.permit.record.states
        return frozenset(str(state.operator) for state in states if state.mode is Mode.IN_FLIGHT)

    @cached_property
    def coordinators(self) -> Mapping[str, pa.Table]:
        """The rows of the operators' coordinators, by uid, in the columns that they declare now."""
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
    """Compile a dataflow for a run that goes on from ``permit``.

    ``again``: a restart, so ``drop`` discards columns only. Raises ``RestoreRefused`` with every
    reason if the checkpoint does not fit, ``InvalidInput`` for an impossible dataflow.
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
    """The plan that restores a dataflow from a checkpoint.

    Raises as :func:`restore`; without ``check`` it returns the plan that refuses, too.
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
    """The edges with in-flight records in the checkpoint."""
    handles = checkpoint.handles
    holding = pc.and_(pc.equal(handles["mode"], str(Mode.IN_FLIGHT)), pc.greater(handles["rows"], 0))
    return frozenset(handles["edge"].filter(holding).unique().to_pylist())

"""What a run starts from: the compiled job, and what its tasks read from a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.graph import JobGraph, Partitioner
from stateformat.model import LATE_PROPERTY, Mode, Record, SchemaVersion
from stateformat.publication import CommitPermit
from stateformat.reading import Checkpoint, ReadTask
from stateformat.redistribution import RestorePlan

from ..dataflow.compile import Job, Vertex, compile_job
from ..dataflow.flow import Dataflow
from ..dataflow.graph import ENUMERATOR_LOG, graph_of, states_to_plan
from .options import Options
from .rescales import Rescales


@dataclass(frozen=True)
class _Shared(ReadTask):
    """A read task that several subtasks share; its table is read once."""

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
    """None: a first run, without a ``plan``."""
    plan: RestorePlan | None = None
    finished: frozenset[str] = frozenset()
    """The fully finished vertices, which are not started."""
    origin: Mapping[str, str] = field(default_factory=dict)
    """The properties that tell who runs the job."""
    rescales: Rescales = field(default_factory=Rescales)
    _tables: dict[Any, pa.Table] = field(default_factory=dict, compare=False, repr=False)
    """Union and progress states, since reading them for each subtask would be quadratic."""

    @property
    def processing_time_us(self) -> int:
        """The latest processing time that the checkpoint has seen; 0 if it has kept none."""
        states = self.permit.record.states if self.permit is not None else ()
        return max((state.processing_now_us or 0 for state in states), default=0)

    @property
    def late_rows(self) -> int:
        """How many rows had been dropped as late when the checkpoint was taken."""
        said = self.permit.record.properties.get(LATE_PROPERTY, "") if self.permit is not None else ""
        return int(said) if said.isdecimal() and len(said) < 19 else 0

    def states(self, vertex: Vertex, subtask: int) -> Mapping[str, Mapping[str, ReadTask]]:
        """What a task's operators read, by uid and state, as far as the checkpoint has them."""
        known = self.permit.record.graph.by_uid if self.permit else {}
        return {uid: self._tasks(uid, subtask) for uid in vertex.operators if uid in known}

    def _tasks(self, uid: str, subtask: int | None) -> Mapping[str, ReadTask]:
        if self.permit is None or self.plan is None or uid not in self.permit.record.graph.by_uid:
            return {}
        tasks = self.permit.checkpoint().restore(self.plan, uid, subtask)
        return {name: self._shared(self.plan, task, subtask) for name, task in tasks.items()}

    def _shared(self, plan: RestorePlan, task: ReadTask, subtask: int | None) -> ReadTask:
        state = task.state
        if state.mode not in (Mode.PROGRESS, Mode.UNION) or len(task.slices) < 2:
            return task
        # Subtasks get whole handles in these modes, so equal handles are equal tables.
        handles = plan.slices_of(state.operator, subtask, state.name)["handle"].to_numpy().tobytes()
        fields = {item.name: getattr(task, item.name) for item in dataclasses.fields(task) if item.init}
        return _Shared(**fields, key=(state.operator, state.name, handles), known=self._tables)

    def progress(self, vertex: Vertex, subtask: int) -> tuple[dict[str, int], frozenset[str]]:
        """Return the watermark of each edge into the vertex, and the edges that had ended."""
        tasks = self._tasks(vertex.id, subtask).values()
        rows = [row for task in tasks if task.state.mode is Mode.PROGRESS for row in task.table().to_pylist()]
        watermarks: dict[str, int] = {}
        # After a rescale several rows may stand for one edge: the lowest watermark counts, and an
        # edge has ended only if all of them have.
        for row in rows:
            watermarks[row["_edge"]] = min(watermarks.get(row["_edge"], row["_watermark"]), row["_watermark"])
        return watermarks, frozenset(watermarks) - {row["_edge"] for row in rows if not row["_ended"]}

    def in_flight(self, vertex: Vertex, subtask: int) -> Mapping[str, ReadTask]:
        """Return the in-flight records of a task, by edge."""
        if vertex.id not in self._logged:
            return {}
        return {
            task.state.edge: task
            for task in self._tasks(vertex.id, subtask).values()
            if task.state.mode is Mode.IN_FLIGHT and task.state.edge is not None and task.slices.num_rows
        }

    def drops(self, uid: str, state: str) -> bool:
        """Return whether the run drops a state of the checkpoint as a whole."""
        return self.plan is not None and self.plan.gives_up(uid, state)

    @cached_property
    def _logged(self) -> frozenset[str]:
        states = () if self.permit is None else self.permit.record.states
        return frozenset(str(state.operator) for state in states if state.mode is Mode.IN_FLIGHT)

    @cached_property
    def coordinators(self) -> Mapping[str, pa.Table]:
        """The rows of the operators' coordinators, by uid, in the columns that they declare now."""
        found = {}
        for state in self.permit.record.states if self.permit else ():
            declared = self.job.state(state.operator, state.name)
            if state.mode is Mode.COORDINATOR and state.operator in self.job.graph.by_uid and declared is not None:
                task = self._tasks(state.operator, None).get(state.name)
                if task is not None:
                    found[str(state.operator)] = task.table(as_schema=declared.current)
        return found

    def enumerator_log(self, uid: str) -> pa.Table | None:
        """The log of a source's enumerator, of all subtasks; None if the checkpoint has none."""
        declared, saved = self.job.state(uid, ENUMERATOR_LOG), self.permit and self.permit.record.by_state
        if self.permit is None or declared is None or (uid, ENUMERATOR_LOG) not in (saved or {}):
            return None
        if self.drops(uid, ENUMERATOR_LOG):
            return None
        return self.permit.checkpoint().read(uid, ENUMERATOR_LOG).table(as_schema=declared.current)


def restore(flow: Dataflow, permit: CommitPermit | None, options: Options, *, again: bool = False) -> Restored:
    """Compile a dataflow for a run that goes on from ``permit``.

    ``again``: a restart, so ``drop`` discards columns only. Raises ``RestoreRefused`` with every
    reason if the checkpoint does not fit, ``InvalidInput`` for an impossible dataflow.
    """
    unaligned, drop = options.unaligned, _names(options.drop)
    if permit is None:
        return Restored(compile_job(flow, _graph_of(flow, options), unaligned=unaligned, drop=drop))
    plan = plan_of(flow, permit.checkpoint(), options, again=again)
    job = compile_job(flow, plan.topology, unaligned=unaligned, previous=permit.record, drop=drop)
    skipped = {operator.uid for operator in plan.operators if operator.action == "skip_finished"}
    return Restored(job, permit, plan, frozenset(vertex.id for vertex in job.vertices if vertex.id in skipped))


def plan_of(
    flow: Dataflow, checkpoint: Checkpoint, options: Options, *, again: bool = False, check: bool = True
) -> RestorePlan:
    """Return the plan that restores a dataflow from a checkpoint.

    Raises as :func:`restore`; without ``check`` it also returns a plan with refusals.
    """
    handles, by_edge, record = checkpoint.handles, checkpoint.graph.by_edge, checkpoint.record
    holding = pc.and_(pc.equal(handles["mode"], str(Mode.IN_FLIGHT)), pc.greater(handles["rows"], 0))
    logged = frozenset(handles["edge"].filter(holding).unique().to_pylist())
    rebalanced = frozenset(edge for edge in logged if by_edge[edge].partitioner is Partitioner.REBALANCE)
    graph = _graph_of(flow, options, rebalanced, record)
    drop = _names(options.drop)
    states, whole, columns = states_to_plan(
        flow, graph, unaligned=options.unaligned, previous=record, drop=drop, logged=logged
    )
    plan = checkpoint.plan_restore(graph, states=states, drop=columns if again else [*whole, *columns])
    if check:
        plan.check()
    return plan


def at_parallelism(options: Options, flow: Dataflow, sizes: Mapping[str, int]) -> Options:
    """Return the options with these parallelisms, by uid, which override the program's."""
    known = {uid: size for uid, size in sizes.items() if uid in flow.steps}
    return replace(options, per_operator={**options.per_operator, **known})


def _graph_of(
    flow: Dataflow, options: Options, rebalanced: frozenset[str] = frozenset(), previous: Record | None = None
) -> JobGraph:
    return graph_of(
        flow,
        parallelism=options.parallelism,
        per_operator=options.per_operator,
        unaligned=options.unaligned,
        rebalanced=rebalanced,
        previous=previous,
    )


def _names(drop: Collection[str]) -> Collection[str]:
    return (drop,) if isinstance(drop, str) else drop

"""What a run starts from: the compiled job, its tasks and channels, and what they read.

The layers of keyed state are a base, and deltas on it (SPEC.md section 5.4). The snapshot of a task
names what was written: whole segments, or a delta on layers that stay. :func:`merge_snapshot` adds
the handles of these layers, so it names everything. Each layer has the *version* of the state that
wrote it; layers of the restored checkpoint have none.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.graph import Edge, JobGraph, Partitioner
from stateformat.model import LATE_PROPERTY, ON_TOP, Handle, Mode, Record, SchemaVersion
from stateformat.publication import CommitPermit
from stateformat.reading import Checkpoint, ReadTask, SegmentTask
from stateformat.redistribution import RestorePlan
from stateformat.snapshot import Snapshot
from stateformat.states import Layer

from ..dataflow import events as ev
from ..dataflow.compile import Job, Vertex, compile_job, loops_of
from ..dataflow.events import TaskId
from ..dataflow.flow import Dataflow
from ..dataflow.graph import ENUMERATOR_LOG, graph_of, states_to_plan
from ..dataflow.task import Task
from ..dataflow.task_inputs import InputEdge
from .options import Options
from .rescales import Rescales


@dataclass(frozen=True)
class _Shared(SegmentTask):
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


Versions = Mapping[str, tuple[int | None, ...]]
"""The versions of the layers of each keyed state, lowest first."""


class OperatorState(NamedTuple):
    """The state of one operator in one subtask."""

    snapshot: Snapshot
    versions: Versions
    tasks: Mapping[str, ReadTask] | None = None
    """How to read each state after a restore; None: as the snapshot says."""


def layers_of(state: OperatorState) -> Mapping[str, Sequence[Layer]]:
    """Return the layers of each keyed state, lowest first."""
    return {
        name: [
            Layer(version, sum(handle.rows for handle in some), sum(_share(handle) for handle in some))
            for version, some in zip(versions, by_layer(state.snapshot, name), strict=True)
        ]
        for name, versions in state.versions.items()
    }


def _share(handle: Handle) -> int:
    return handle.size_bytes * handle.rows // handle.segment_rows if handle.segment_rows else 0


def by_layer(snapshot: Snapshot, state: str) -> list[list[Handle]]:
    """Return the handles of a state, layer by layer, lowest first."""
    mine = sorted((handle for handle in snapshot.handles if handle.state == state), key=lambda handle: handle.layer)
    return [list(some) for _, some in groupby(mine, key=lambda handle: handle.layer)]


def merge_snapshot(
    snapshot: Snapshot, kept: Mapping[str, int], before: OperatorState | None, version: int
) -> OperatorState:
    """The reported snapshot of a task, with the handles of the layers that stay, and all versions.

    ``kept``: by keyed state, how many of the lowest layers stay (``SubtaskStates.snapshot``).
    """
    underneath: list[Handle] = []
    versions: dict[str, tuple[int | None, ...]] = {}
    own: list[Handle] = []
    by_state: dict[str, list[Handle]] = {name: [] for name in kept}
    for handle in snapshot.handles:
        if handle.state in by_state:
            by_state[handle.state].append(handle)
        else:
            own.append(handle)
    for state, count in kept.items():
        lower = by_layer(before.snapshot, state)[:count] if before is not None and count else []
        underneath += [handle for some in lower for handle in some]
        top = lower[-1][0].layer + 1 if lower else 0
        written = [handle._replace(layer=top) if handle.layer == ON_TOP else handle for handle in by_state[state]]
        own += written
        below = before.versions[state][:count] if before is not None and count else ()
        versions[state] = (*below, version) if written else below
    full = Snapshot(snapshot.operator, snapshot.subtask, (*underneath, *own), (), snapshot.finishing, snapshot.times)
    return OperatorState(full, versions)


def restored_states(restored: Restored) -> Iterator[tuple[TaskId, Mapping[str, OperatorState]]]:
    """Yield what each task of a run starts from, by operator; nothing on a first run."""
    if restored.permit is None or restored.plan is None:
        return
    carried: dict[tuple[str, int], list[Handle]] = defaultdict(list)
    for row in restored.permit.checkpoint().carried(restored.plan).to_pylist():
        carried[row["operator"], row["subtask"]].append(Handle(**row))
    for vertex in restored.job.vertices:
        for subtask in () if vertex.id in restored.finished else range(vertex.parallelism):
            states = {}
            for uid, tasks in restored.states(vertex, subtask).items():
                handles = sorted(carried[uid, subtask], key=lambda handle: (handle.state, handle.layer))
                snapshot = Snapshot(uid, subtask, tuple(handles))
                names = {handle.state for handle in handles}
                versions = {name: (None,) * len(by_layer(snapshot, name)) for name in names}
                states[uid] = OperatorState(snapshot, versions, tasks)
            yield TaskId(vertex.id, subtask), states


class TaskChannels(NamedTuple):
    """One task with its channels by edge, in the order of the vertex's edges."""

    vertex: Vertex
    core: Task
    inputs: Mapping[str, tuple[ev.Channel, ...]]
    """Channels from tasks that run, including feedback."""
    outputs: Mapping[str, tuple[ev.Channel, ...]]
    """Channels to tasks that run."""


class EdgeChannels(NamedTuple):
    """The channels of an edge, each in order. Both ends of one have the same object: there may be
    very many.
    """

    leaving: Sequence[tuple[ev.Channel, ...]]
    """By sender."""
    arriving: Sequence[tuple[ev.Channel, ...]]
    """By receiver."""


def channels_of(restored: Restored) -> dict[str, EdgeChannels]:
    """Return the channels of all edges between tasks that run, by edge."""
    job = restored.job
    return {
        edge.id: _channels_of(job, edge)
        for edge in job.graph.edges
        if restored.finished.isdisjoint((job.vertex_of(edge.source).id, job.vertex_of(edge.target).id))
    }


def tasks_of(
    restored: Restored, known: Mapping[str, EdgeChannels] | None = None, *, by_epoch: bool = False
) -> Iterator[TaskChannels]:
    """Yield the tasks that a run starts: all but those of finished vertices.

    ``known``: their channels. ``by_epoch``: see :class:`Task`.
    """
    job = restored.job
    loops = loops_of(job.vertices)
    known = channels_of(restored) if known is None else known
    for vertex in job.vertices:
        if vertex.id in restored.finished:
            continue
        for subtask in range(vertex.parallelism):
            inputs = {
                edge.id: known[edge.id].arriving[subtask] if edge.id in known else ()
                for edge in (*vertex.inputs, *vertex.feedback)
            }
            outputs = {edge.id: known[edge.id].leaving[subtask] for edge in vertex.outputs if edge.id in known}
            edges = _input_edges(restored, vertex, subtask, inputs, loops)
            channels = [channel for some in outputs.values() for channel in some]
            replayed = bool(restored.in_flight(vertex, subtask))
            asks = job.graph.operator(vertex.id).coordinator and not vertex.is_source
            core = Task(ev.TaskId(vertex.id, subtask), edges, channels, replayed=replayed, asks=asks, by_epoch=by_epoch)
            yield TaskChannels(vertex, core, inputs, outputs)


def _channels_of(job: Job, edge: Edge) -> EdgeChannels:
    senders, receivers = (job.graph.operator(uid).parallelism for uid in (edge.source, edge.target))
    leaving = [
        tuple(ev.Channel(edge.id, sender, receiver) for receiver in job.receivers(edge.id, sender))
        for sender in range(senders)
    ]
    arriving: list[list[ev.Channel]] = [[] for _ in range(receivers)]
    for some in leaving:
        for channel in some:
            arriving[channel.receiver].append(channel)
    return EdgeChannels(leaving, [tuple(some) for some in arriving])


def _input_edges(
    restored: Restored,
    vertex: Vertex,
    subtask: int,
    inputs: Mapping[str, tuple[ev.Channel, ...]],
    loops: Sequence[frozenset[str]],
) -> list[InputEdge]:
    watermarks, ended = restored.progress(vertex, subtask)
    return [
        InputEdge(
            edge.id,
            edge.input,
            inputs[edge.id],
            feedback=edge.feedback,
            overtakable=restored.job.overtakable(edge),
            inside=not edge.feedback and _in_one_loop(restored.job, vertex, edge, loops),
            watermark=watermarks.get(edge.id, ev.MIN_WATERMARK),
            ended=edge.id in ended,
        )
        for edge in (*vertex.inputs, *vertex.feedback)
    ]


def _in_one_loop(job: Job, head: Vertex, edge: Edge, loops: Sequence[frozenset[str]]) -> bool:
    source = job.vertex_of(edge.source).id
    return bool(head.feedback) and any(head.id in loop and source in loop for loop in loops)


def sender_of(job: Job, channel: ev.Channel) -> ev.TaskId:
    """Return the task that sends on a channel."""
    return ev.TaskId(job.vertex_of(job.graph.by_edge[channel.edge].source).id, channel.sender)


def receiver_of(job: Job, channel: ev.Channel) -> ev.TaskId:
    """Return the task that a channel leads to."""
    return ev.TaskId(job.vertex_of(job.graph.by_edge[channel.edge].target).id, channel.receiver)

"""The tasks of a run, with their channels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from stateformat.graph import Edge

from ..dataflow import events as ev
from ..dataflow.compile import Job, Vertex, loops_of
from ..dataflow.task import Task
from ..dataflow.task_inputs import InputEdge
from .restore import Restored


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

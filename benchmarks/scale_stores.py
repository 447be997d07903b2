"""Stores with as many handles, or as many bytes, as one likes: what the measurements and tests of scale are made on.

A store of many handles is made as a job would come to it: every operator of a chain of any length reports one snapshot, and the
checkpoint is rescaled, by metadata alone, to a thousand subtasks, say. Its handles are cut from segments that are real objects,
one for each operator; the modes are those of :data:`MODES`, in turn. ``own_segments`` gives every handle a segment of its
own instead, as a job has that writes its whole state.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

import stateformat as sf
from stateformat.backends.storage.local import LocalStorage
from stateformat.graph import Edge, OperatorId, Partitioner
from stateformat.manifest import cut_handles
from stateformat.model import Mode
from stateformat.paths import SEGMENTS
from stateformat.redistribution import rescale
from stateformat.storage import ObjectInfo

MAX_PARALLELISM: Final = 4096
ROWS: Final = 8192
PAYLOAD_BYTES: Final = 96
MODES: Final = (*[Mode.KEYED] * 6, Mode.EVEN_SPLIT, Mode.BROADCAST, Mode.IN_FLIGHT, Mode.UNION, Mode.PROGRESS)
OPTIONS: Final = sf.WriteOptions(inline_bytes_max=0, check_unique=False)
COLUMNS: Final = {"value": pa.int64()}


def graph(operators: int, subtasks: int, max_parallelism: int = MAX_PARALLELISM) -> sf.JobGraph:
    """A chain of operators joined by hash edges; those that hold records in flight have a loop to themselves."""
    uids = [uid_of(number) for number in range(operators)]
    edges = [
        Edge(f"{before}-{after}", before, after, Partitioner.HASH, key_columns=("key",))
        for before, after in pairwise(uids)
    ]
    edges += [
        Edge(f"loop-{uid}", uid, uid, Partitioner.REBALANCE, input=1, feedback=True)
        for number, uid in enumerate(uids)
        if mode_of(number) is Mode.IN_FLIGHT
    ]
    return sf.JobGraph(tuple(sf.Operator(uid, subtasks, max_parallelism) for uid in uids), tuple(edges))


def uid_of(number: int) -> OperatorId:
    """The uid of an operator by its place in the chain."""
    return OperatorId(f"operator-{number:04}")


def mode_of(number: int) -> Mode:
    """The mode of its state."""
    return MODES[number % len(MODES)]


def declare(number: int) -> sf.State:
    """The state of an operator."""
    uid = uid_of(number)
    match mode_of(number):
        case Mode.KEYED:
            return sf.value_state(uid, "state", keys={"key": pa.int64()}, values=COLUMNS)
        case Mode.EVEN_SPLIT:
            return sf.even_split_state(uid, "state", columns=COLUMNS)
        case Mode.BROADCAST:
            return sf.broadcast_state(uid, "state", columns=COLUMNS)
        case Mode.UNION:
            return sf.union_state(uid, "state", columns=COLUMNS)
        case Mode.IN_FLIGHT:
            return sf.in_flight_state(uid, "state", edge=f"loop-{uid}", columns=COLUMNS)
        case _:
            return sf.progress_state(uid, "state")


def rows_of(mode: Mode, rows: int = ROWS) -> pa.Table:
    """What one subtask writes."""
    numbers = np.arange(rows)
    match mode:
        case Mode.KEYED:
            return pa.table({"key": numbers, "value": numbers})
        case Mode.IN_FLIGHT:
            sender = np.zeros(rows, np.int32)
            return pa.table({"_sender": sender, "_receiver": sender, "_seq": numbers, "value": numbers})
        case Mode.PROGRESS:
            return pa.table({"_edge": ["in"], "_watermark": pa.array([1], pa.int64()), "_ended": [False]})
        case _:
            return pa.table({"value": numbers})


def many_handles(folder: Path, operators: int, subtasks: int) -> sf.CheckpointStore:
    """A store of two checkpoints: a snapshot for each operator, and the same dealt out to ``subtasks`` subtasks each."""
    store = sf.open(str(folder), durable=False)
    states = [declare(number) for number in range(operators)]
    pending = store.begin(job_id="scale", graph=graph(operators, 1), states=states, parent=None, options=OPTIONS)
    for number, state in enumerate(states):
        with pending.context.subtask(state.operator, 0) as writer:
            writer.write("state", rows_of(mode_of(number)))
        pending.add(writer)
    pending.publish()
    publish_rescaled(store, store.open(), subtasks)
    return store


class SharedSegments(LocalStorage):
    """Local storage of a store in which the segments of another are listed, too."""

    def __init__(self, folder: Path, other: sf.CheckpointStore) -> None:
        super().__init__(str(folder), durable=False)
        self._other = other.storage

    def list(self, prefix: str) -> list[ObjectInfo]:
        """What is there, or the segments of the other store."""
        return self._other.list(prefix) if prefix == SEGMENTS else super().list(prefix)


def sharing_segments(store: sf.CheckpointStore, folder: Path) -> sf.CheckpointStore:
    """An empty store for rescaled checkpoints of another: publishing looks for their segments, and needs no copy of them."""
    return sf.CheckpointStore(SharedSegments(folder, store))


def publish_rescaled(
    store: sf.CheckpointStore, source: sf.Checkpoint, subtasks: int, target: sf.CheckpointStore | None = None
) -> None:
    """Publish a checkpoint at another parallelism, by metadata alone: the newest, or the first of another store.

    ``target`` gets a manifest and a record; it has the segments already (:func:`sharing_segments`).
    """
    plan = source.plan_restore(source.graph.at(subtasks))
    plan.check()
    dealt = rescale(source, plan)
    into = store if target is None else target
    pending = into.begin(
        job_id=source.record.job_id,
        graph=dealt.graph,
        states=dealt.states,
        parent=store.permit_of(source) if target is None else source,
        kind=sf.CheckpointKind.RESCALE,
        rescaled_from=dealt.rescaled_from,
    )
    pending.add_handles(cut_handles(source.manifest.full(), dealt.slices))
    pending.publish()


def own_segments(folder: Path, operators: int, subtasks: int, rows: int = 10) -> sf.CheckpointStore:
    """A store of one checkpoint in which each subtask of each operator has written a keyed segment of its own."""
    store = sf.open(str(folder), durable=False)
    states = [
        sf.value_state(uid_of(number), "state", keys={"key": pa.int64()}, values=COLUMNS) for number in range(operators)
    ]
    job = graph(operators, subtasks)
    pending = store.begin(job_id="scale", graph=job, states=states, parent=None, options=OPTIONS)
    table = rows_of(Mode.KEYED, rows * subtasks)
    owners = pending.context.owners(uid_of(0), "state", table)
    parts: list[Any] = [table.filter(pa.array(owners == subtask)) for subtask in range(subtasks)]
    for state in states:
        for subtask in range(subtasks):
            with pending.context.subtask(state.operator, subtask) as writer:
                writer.write("state", parts[subtask])
            pending.add(writer)
    pending.publish()
    return store


def many_bytes(folder: Path, state_bytes: int, subtasks: int = 4) -> sf.CheckpointStore:
    """A store of one checkpoint of one keyed state of about this many bytes that do not compress, in ``subtasks`` segments."""
    store = sf.open(str(folder), durable=False)
    uid = uid_of(0)
    job = sf.JobGraph((sf.Operator(uid, subtasks, MAX_PARALLELISM),))
    state = sf.value_state(uid, "state", keys={"key": pa.int64()}, values={"payload": pa.binary()})
    pending = store.begin(job_id="scale", graph=job, states=[state], parent=None, options=OPTIONS)
    rows = state_bytes // (PAYLOAD_BYTES + 8)
    payload = np.random.default_rng(0).bytes(rows * PAYLOAD_BYTES)
    table = pa.table({"key": np.arange(rows), "payload": _binary(payload, rows)})
    owners = pending.context.owners(uid, "state", table)
    for subtask in range(subtasks):
        with pending.context.subtask(uid, subtask) as writer:
            writer.write("state", table.filter(pa.array(owners == subtask)))
        pending.add(writer)
    pending.publish()
    return store


def _binary(data: bytes, rows: int) -> pa.Array:
    offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(PAYLOAD_BYTES)
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


__all__ = ["many_bytes", "many_handles", "own_segments", "publish_rescaled"]

"""Stores with as many handles, or as many bytes, as one likes.

A store of many handles: every operator of a chain reports one snapshot, and the checkpoint is
rescaled, by metadata alone, to many subtasks. So its handles are cut from segments that are real
objects, one for each operator. The modes are those of :data:`MODES`, in turn.
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
from stateformat.segments import WriteOptions
from stateformat.states import (
    broadcast_state,
    even_split_state,
    in_flight_state,
    progress_state,
    union_state,
    value_state,
)
from stateformat.storage import ObjectInfo

MAX_PARALLELISM: Final = 4096
ROWS: Final = 8192
PAYLOAD_BYTES: Final = 96
MODES: Final = (*[Mode.KEYED] * 6, Mode.EVEN_SPLIT, Mode.BROADCAST, Mode.IN_FLIGHT, Mode.UNION, Mode.PROGRESS)
OPTIONS: Final = WriteOptions(inline_bytes_max=0, check_unique=False)
COLUMNS: Final = {"value": pa.int64()}


def graph(operators: int, subtasks: int, max_parallelism: int = MAX_PARALLELISM) -> sf.JobGraph:
    """A chain of operators with hash edges; those with records in flight have a loop."""
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
    return OperatorId(f"operator-{number:04}")


def mode_of(number: int) -> Mode:
    return MODES[number % len(MODES)]


def declare(number: int, mode: Mode | None = None) -> sf.State:
    uid = uid_of(number)
    match mode or mode_of(number):
        case Mode.KEYED:
            return value_state(uid, "state", keys={"key": pa.int64()}, values=COLUMNS)
        case Mode.IN_FLIGHT:
            return in_flight_state(uid, "state", edge=f"loop-{uid}", columns=COLUMNS)
        case Mode.PROGRESS:
            return progress_state(uid, "state")
        case other:
            make = {
                Mode.EVEN_SPLIT: even_split_state,
                Mode.BROADCAST: broadcast_state,
                Mode.UNION: union_state,
            }
            return make[other](uid, "state", columns=COLUMNS)


def rows_of(mode: Mode, rows: int = ROWS) -> pa.Table:
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
    """A store of two checkpoints: a snapshot for each operator; the same at ``subtasks``."""
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
    """Local storage in which the segments of another store are listed, too."""

    def __init__(self, folder: Path, other: sf.CheckpointStore) -> None:
        super().__init__(str(folder), durable=False)
        self._other = other.storage

    def list(self, prefix: str) -> list[ObjectInfo]:
        return self._other.list(prefix) if prefix == SEGMENTS else super().list(prefix)


def sharing_segments(store: sf.CheckpointStore, folder: Path) -> sf.CheckpointStore:
    """An empty store for rescaled checkpoints of another, which find their segments there."""
    return sf.CheckpointStore(SharedSegments(folder, store))


def publish_rescaled(
    store: sf.CheckpointStore, source: sf.Checkpoint, subtasks: int, target: sf.CheckpointStore | None = None
) -> None:
    """Publish a checkpoint at another parallelism: as the newest, or as the first of ``target``."""
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


def publish_keyed(
    store: sf.CheckpointStore,
    table: pa.Table,
    subtasks: int,
    max_parallelism: int = 128,
    parent: sf.CommitPermit | None = None,
    options: WriteOptions | None = OPTIONS,
) -> sf.CommitPermit:
    """Publish a checkpoint of one keyed state ``sums/sum``, with ``key`` and one value."""
    graph = sf.JobGraph((sf.Operator("sums", subtasks, max_parallelism),))
    values = {name: table.schema.field(name).type for name in table.column_names[1:]}
    state = value_state("sums", "sum", keys={"key": pa.int64()}, values=values)
    own = {} if options is None else {"options": options}
    pending = store.begin(job_id="bench", graph=graph, states=[state], parent=parent, **own)
    owners = pending.context.owners("sums", "sum", table)
    for subtask in range(subtasks):
        with pending.context.subtask("sums", subtask) as writer:
            writer.write("sum", table.filter(pa.array(owners == subtask)))
        pending.add(writer)
    return pending.publish()


def many_bytes(folder: Path, state_bytes: int, subtasks: int = 4) -> sf.CheckpointStore:
    """A store with a keyed state of so many bytes that do not compress, in segments."""
    store = sf.open(str(folder), durable=False)
    rows = state_bytes // (PAYLOAD_BYTES + 8)
    payload = np.random.default_rng(0).bytes(rows * PAYLOAD_BYTES)
    table = pa.table({"key": np.arange(rows), "payload": _binary(payload, rows)})
    publish_keyed(store, table, subtasks, MAX_PARALLELISM)
    return store


class Metered(LocalStorage):
    """Local storage that notes in a file how many bytes each process reads."""

    def __init__(self, root: str, log: str) -> None:
        super().__init__(root, durable=False)
        self._given = root, log

    def __reduce__(self) -> tuple[Any, ...]:
        return Metered, self._given

    def _count(self, data: pa.Buffer) -> pa.Buffer:
        with open(self._given[1], "a") as log:  # noqa: PTH123
            log.write(f"{len(data)}\n")
        return data

    def read(self, path: str) -> pa.Buffer:
        return self._count(super().read(path))

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        return self._count(super().read_range(path, offset, length))

    def bytes_read(self) -> int:
        log = Path(self._given[1])
        return sum(int(line) for line in log.read_text().split()) if log.exists() else 0


def _binary(data: bytes, rows: int) -> pa.Array:
    offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(PAYLOAD_BYTES)
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(data)])

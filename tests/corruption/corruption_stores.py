"""The tiny stores that the tests of corruption damage. Together they have every mode, kind, layer,
status, codec and encoding.

They have few rows and short names, because every byte is a case. Ids and times are the same in
every run.

- ``whole``: everything inline, a delta, finished and finishing subtasks; 3 checkpoints, the last
  rescaled from 2 to 3.
- ``keyed``, ``lists``, ``entries``, ``driver``: the same states in groups, spilled into objects.
  The last checkpoint is rescaled, except in ``entries``, which has three of the same size, so that
  an older object fits in place of a newer one.
- ``expiring``: rows that expire, some of them already expired, and timers of processing time.
- ``lz4`` … ``none``: one state per codec and encoding, in row groups of two rows.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

import stateformat as sf
from stateformat import model
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.graph import Edge, JobGraph, Operator, OperatorId, Partitioner
from stateformat.keys import hash_keys, key_groups
from stateformat.model import State
from stateformat.publication import pending
from stateformat.segments import WriteOptions
from stateformat.states import declare
from tests.worlds.stores import Job, owned, rescale_newest

GROUPS = 8
KEYS = {"k": pa.string()}
CODECS = ("lz4", "zstd", "snappy", "none")


def _operator(uid: str, parallelism: int = 2, **more: Any) -> Operator:
    return Operator(OperatorId(uid), parallelism, GROUPS, **more)


def _edge(source: str, target: str, partitioner: Partitioner, *keys: str, **more: Any) -> Edge:
    return Edge(f"{source}{target}", OperatorId(source), OperatorId(target), partitioner, key_columns=keys, **more)


@cache
def _key(group: int, other: int = 0) -> str:
    """Return the ``other``-th short key of a key group."""
    names = map("".join, product("abcdefghij", "0123456789"))
    return [name for name in names if key_groups(hash_keys([pa.array([name])]), GROUPS)[0] == group][other]


def _keyed(columns: Mapping[str, Any]) -> Callable[[int], pa.Table]:
    table = pa.table(columns)
    return lambda subtask: owned(table, ["k"], _operator("k"), subtask)


def _graph(uids: str) -> JobGraph:
    """Return the part of the job that these operators need."""
    edges = (
        _edge("a", "k", Partitioner.HASH, "k"),
        _edge("b", "k", Partitioner.BROADCAST, input=1),
        _edge("u", "k", Partitioner.BROADCAST, input=2),
        _edge("k", "r", Partitioner.REBALANCE),
        _edge("r", "z", Partitioner.REBALANCE),
    )
    return JobGraph(
        tuple(_operator(uid, 3 if uid == "b" else 2, coordinator=uid == "a") for uid in uids),
        tuple(edge for edge in edges if edge.source in uids and edge.target in uids),
    )


def _states() -> dict[tuple[str, str], State]:
    states = (
        declare.even_split_state("a", "s", columns={"p": pa.string(), "n": pa.int64()}),
        declare.coordinator_state("a", "c", columns={"p": pa.string()}),
        declare.broadcast_state("b", "b", columns={"x": pa.date32(), "y": pa.bool_()}),
        declare.union_state("u", "u", columns={"x": pa.int32(), "y": pa.float32()}),
        declare.value_state("k", "v", keys=KEYS, values={"n": pa.int64(), "d": pa.float64()}),
        declare.map_state("k", "m", keys=KEYS, map_key=pa.int16(), values={"x": pa.decimal128(9, 2)}),
        declare.list_state("k", "l", keys=KEYS, values={"r": pa.list_(pa.string()), "w": pa.binary()}),
        declare.timers("k", "t", keys=KEYS),
        declare.progress_state("k", "p"),
        declare.in_flight_state("k", "f", edge="ak", keys=KEYS, columns={"x": pa.timestamp("us")}),
        declare.in_flight_state("r", "f", edge="kr", columns={"x": pa.int8()}),
        declare.committables_state("z", "o", columns={"p": pa.string()}),
    )
    return {(state.operator, state.name): state for state in states}


def _rows(version: int) -> dict[tuple[str, str], Callable[[int], pa.Table]]:
    """Return what each subtask writes; another ``version`` has other values of the same size."""
    groups = (0, 2, 3, 3, 6)
    keys = [_key(group, i % 2) for i, group in enumerate(groups)]
    senders = pa.array([0, 1, 1], pa.int32())
    return {
        ("a", "s"): lambda i: pa.table({"p": [f"p{i}", f"q{version}", "r"][: 3 - i], "n": [i, version, 7][: 3 - i]}),
        ("a", "c"): lambda _: pa.table({"p": [f"x{version}", "y"]}),
        ("b", "b"): lambda _: pa.table({"x": pa.array([version, 9], pa.date32()), "y": [True, False]}),
        ("u", "u"): lambda i: pa.table(
            {"x": pa.array([i, version], pa.int32()), "y": pa.array([1.5, i], pa.float32())}
        ),
        ("k", "v"): _keyed({"k": keys, "n": [version + i for i in range(5)], "d": [i / 4 for i in range(5)]}),
        ("k", "m"): _keyed(
            {
                "k": [_key(1), _key(1), _key(3)],
                "_map_key": pa.array([1, 2, version], pa.int16()),
                "x": pa.array([Decimal(1), None, Decimal(version)], pa.decimal128(9, 2)),
            }
        ),
        ("k", "l"): _keyed(
            {
                "k": [_key(1), _key(1), _key(3)],
                "_index": [0, version, 1],
                "r": [["E", "F"], None, [None]],
                "w": [b"\0\xff", bytes([version]), None],
            }
        ),
        ("k", "t"): _keyed({"k": [_key(0), _key(3)], "_timestamp": [version, 10**6], "_tag": ["late", ""]}),
        ("k", "p"): lambda i: pa.table(
            {"_edge": ["ak", "bk"], "_watermark": [2**63 - 1, version + i], "_ended": [True, False]}
        ),
        ("k", "f"): lambda i: _in_flight(i, version),
        ("r", "f"): lambda i: pa.table(
            {
                "_sender": senders,
                "_receiver": pa.array([i] * 3, pa.int32()),
                "_seq": [0, 1, 2 + version],
                "x": pa.array([1, version, 3], pa.int8()),
            }
        ),
        ("z", "o"): lambda i: pa.table({"p": [f"o{version}"][:i]}, pa.schema([pa.field("p", pa.string())])),
    }


def _in_flight(subtask: int, version: int) -> pa.Table:
    rows = {"k": [_key(1), _key(3), _key(3, 1)], "_sender": pa.array([0, 1, 0], pa.int32()), "_seq": [0, 1, version]}
    mine = owned(pa.table(rows), ["k"], _operator("k"), subtask)
    mine = mine.append_column("_receiver", pa.array([subtask] * len(mine), pa.int32()))
    return mine.append_column("x", pa.array([version] * len(mine), pa.timestamp("us")))


def _delta() -> Callable[[int], pa.Table]:
    """Return a delta of ``v``: an upsert, a delete and a clear."""
    return _keyed(
        {
            "k": [_key(0), _key(2, 1), _key(3, 0)],
            "_op": pa.array([0, 1, 2], pa.int8()),
            "n": [77, None, None],
            "d": [0.5, None, None],
        }
    )


def _job(name: str, graph: JobGraph, names: Sequence[tuple[str, str]], version: int = 1) -> Job:
    known = _states()
    return Job(name, graph, tuple(known[at] for at in names), _rows(version))


def _whole(store: sf.CheckpointStore) -> None:
    graph, names = _graph("abukrz"), list(_states())
    first = _job("j", graph, names).publish(store, None, properties={"é": "ü"})
    _job("j", graph, names, 2).publish(
        store, first, finished={"a": range(2), "b": [0]}, finishing={"b": [1]}, deltas={("k", "v"): _delta()}
    )
    rescale_newest(store, 3)


def _spilled(
    uids: str, names: Sequence[tuple[str, str]], versions: int, parallelism: int = 2, **options: Any
) -> Callable[[Any], Any]:
    def build(store: sf.CheckpointStore) -> Any:
        permit, chosen = None, WriteOptions(inline_bytes_max=0, **options)
        for version in range(1, versions + 1):
            deltas = {("k", "v"): _delta()} if version == 2 else {}
            job = _job("j", _graph(uids).at(parallelism, max_parallelism=GROUPS), names, version)
            permit = job.publish(store, permit, deltas=deltas, options=chosen)
        return permit

    return build


def _rescaled(build: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def both(store: sf.CheckpointStore) -> Any:
        build(store)
        return rescale_newest(store, 3)

    return both


def _codec(codec: Any) -> Callable[[Any], Any]:
    """Return a builder of two operators with one state each, one per encoding; two rows of each key
    group, in row groups of two rows.
    """

    def build(store: sf.CheckpointStore) -> Any:
        graph = JobGraph((_operator("e", 1), _operator("p", 1)))
        columns = {"n": pa.int64(), "d": pa.float64(), "s": pa.string()}
        states = [declare.value_state(uid, "v", keys={"k": pa.int32()}, values=columns) for uid in "ep"]
        by_group: dict[int, list[int]] = {}
        for key in range(99):
            group = int(key_groups(hash_keys([pa.array([key], pa.int32())]), GROUPS)[0])
            by_group.setdefault(group, []).append(key)
        keys = [key for group in (1, 4, 6) for key in by_group[group][:2]]
        rows = pa.table(
            {
                "k": pa.array(keys, pa.int32()),
                "n": [1, 1, None, 2**40, -1, 3],
                "d": [0.5, 0.5, -1.0, None, 1e300, 2.0],
                "s": ["x", "x", "", None, "x" * 40, "é"],
            }
        )
        begun = store.begin(job_id="j", graph=graph, states=states, parent=None)
        for uid, encoding in (("e", "fast"), ("p", "plain")):
            chosen: Any = WriteOptions(codec=codec, encoding=encoding, row_group_rows=2, inline_bytes_max=0)  # type: ignore[arg-type]
            with replace(begun.context, options=chosen).subtask(uid, 0) as writer:
                writer.write("v", rows)
            begun.add(writer)
        return begun.publish()

    return build


def _expiring(store: sf.CheckpointStore) -> Any:
    """At 4 µs, the rows last accessed at 1 and 2 µs have expired; the one at 3 µs has not."""
    states = [
        declare.value_state("k", "v", keys=KEYS, values={"n": pa.int64()}, ttl=sf.Ttl(2)),
        declare.timers("k", "t", keys=KEYS, clock="processing_time"),
    ]
    begun = store.begin(job_id="j", graph=JobGraph((_operator("k", 1),)), states=states, parent=None)
    keys = [_key(group) for group in (0, 3, 6)]
    times = pa.array([1, 2, 3], pa.timestamp("us"))
    with replace(begun.context, options=WriteOptions(codec="none", inline_bytes_max=0)).subtask("k", 0) as writer:
        writer.write("v", pa.table({"k": keys, "n": [7, 8, 9], "ttl_last_access": times}))
        writer.write("t", pa.table({"k": keys[:1], "_timestamp": [5], "_tag": ["wake"]}))
    begun.add(writer)
    begun.set_now("k", event_time_us=4, processing_time_us=4)
    begun.publish()
    return rescale_newest(store, 3)


_BUILD: Mapping[str, Callable[[Any], Any]] = {
    "whole": _whole,
    "keyed": _rescaled(_spilled("ak", [("k", "v"), ("k", "m")], 2, codec="none")),
    "lists": _rescaled(_spilled("ak", [("k", "l"), ("k", "t"), ("k", "f")], 1, codec="zstd")),
    "entries": _spilled("abu", [("a", "s"), ("a", "c"), ("b", "b"), ("u", "u")], 3, 1, codec="none", encoding="plain"),
    "driver": _rescaled(_spilled("krz", [("k", "p"), ("r", "f"), ("z", "o")], 1)),
    "expiring": _expiring,
    **{codec: _codec(codec) for codec in CODECS},
}


@contextmanager
def _repeatable(seed: str) -> Iterator[None]:
    """Make ids and times depend on the seed alone."""
    rng = random.Random(seed)
    before = model.os, pending.time
    model.os = SimpleNamespace(**{**vars(os), "urandom": rng.randbytes})  # type: ignore[assignment]
    pending.time = SimpleNamespace(**{**vars(time), "time_ns": lambda: 1_750_000_000_000_000_000})  # type: ignore[assignment]
    try:
        yield
    finally:
        model.os, pending.time = before


NAMES = [*_BUILD]


def stores() -> Mapping[str, Mapping[str, bytes]]:
    return {name: objects(name) for name in NAMES}


@cache
def objects(name: str) -> Mapping[str, bytes]:
    with _repeatable(name):
        store = sf.open(f"memory://corruption-{name}")
        _BUILD[name](store)
    found = {item.path: store.storage.read(item.path).to_pybytes() for item in store.storage.list("")}
    MemoryStorage.reset(f"corruption-{name}")
    return found

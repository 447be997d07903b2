"""The sound stores of the corpus: small jobs that together use every feature of the format, with
the same bytes each time.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pyarrow as pa

import stateformat as sf
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.graph import Edge, JobGraph, Operator, Partitioner
from stateformat.model import State
from stateformat.publication import CommitPermit, pending
from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.store import CheckpointStore
from stateformat.ttl import NO_TIME_US, TTL_COLUMN
from tests.worlds.stores import Job, owned, rescale_newest

MAX = 8
OBJECTS = WriteOptions(inline_bytes_max=0)
Rows = Callable[[int], pa.Table]


@contextlib.contextmanager
def same_bytes() -> Iterator[None]:
    """Ids, times and the writer's name are the same in every run."""
    draw = random.Random(147)
    with (
        patch.object(os, "urandom", draw.randbytes),
        patch.object(time, "time_ns", lambda: 1_800_000_000_000_000_000),
        patch.object(pending, "_writer", lambda: "the corpus of stateformat"),
    ):
        yield


def edge(source: str, target: str, partitioner: Partitioner, *keys: str, **more: Any) -> Edge:
    return Edge(f"{source}-{target}", source, target, partitioner, key_columns=keys, **more)


LINES, COUNT = Operator("lines", 2, MAX), Operator("count", 2, MAX)
WORDS = ["ann", "bob", "cy", "dee", "eve", "flo"]
TOTALS = pa.table({"word": WORDS, "n": pa.array(range(6), pa.int64())})
COUNTS = declare.value_state(
    "count", "sums", keys={"word": pa.string()}, values=pa.schema([pa.field("n", pa.int64(), nullable=False)])
)
SMALL_GRAPH = JobGraph((LINES, COUNT), (edge("lines", "count", Partitioner.HASH, "word"),))
SMALL_ROWS: dict[tuple[str, str], Rows] = {("count", "sums"): lambda i: owned(TOTALS, ["word"], COUNT, i)}


def small_job() -> Job:
    """``lines`` → ``count`` by ``word``: one keyed state."""
    return Job("corpus", SMALL_GRAPH, (COUNTS,), SMALL_ROWS)


def expiring(store: CheckpointStore) -> None:
    """Of six rows three have expired at noon, one has no time yet."""
    ttl = sf.Ttl(3_600_000_000, "processing_time", "read_and_write")
    sums = declare.value_state("count", "sums", keys={"word": pa.string()}, values={"n": pa.int64()}, ttl=ttl)
    noon = 1_790_000_000_000_000
    hours = [noon - 7_200_000_000, noon - 3_600_000_001, noon - 3_600_000_000, noon - 3_599_999_999, noon, NO_TIME_US]
    rows = TOTALS.append_column(TTL_COLUMN, pa.array(hours, pa.timestamp("us")))
    sums = replace(sums, ttl_now_us=noon)
    job = Job("corpus", SMALL_GRAPH, (sums,), {("count", "sums"): lambda i: owned(rows, ["word"], COUNT, i)})
    job.publish(store, None)


def waking(store: CheckpointStore) -> None:
    """Timers of processing time, beside others."""
    noon = 1_790_000_000_000_000
    own = {"_timestamp": pa.array([noon + n for n in range(6)], pa.int64()), "_tag": [f"t{n}" for n in range(6)]}
    wake = declare.timers("count", "wake", keys={"word": pa.string()}, clock="processing_time")
    wake = replace(wake, clock_now_us=noon)
    other = declare.timers("count", "over", keys={"word": pa.string()})
    rows = {("count", name): _keyed(**own) for name in ("wake", "over")}
    Job("corpus", SMALL_GRAPH, (wake, other), rows).publish(store, None)


def wide_graph() -> JobGraph:
    """A source with a coordinator, a counter with a loop, a sink; two subtasks each."""
    return JobGraph(
        (Operator("read", 2, MAX, coordinator=True), COUNT, Operator("write", 2, MAX)),
        (
            edge("read", "count", Partitioner.HASH, "word"),
            edge("count", "write", Partitioner.REBALANCE),
            edge("count", "count", Partitioner.REBALANCE, feedback=True, input=1),
        ),
    )


KEYS = {"word": pa.string()}


def wide_states() -> tuple[State, ...]:
    return (
        declare.even_split_state("read", "splits", columns={"path": pa.string()}),
        declare.union_state("read", "limits", columns={"rate": pa.float64()}),
        declare.coordinator_state("read", "todo", columns={"path": pa.string()}),
        COUNTS,
        declare.map_state("count", "days", keys=KEYS, map_key=pa.date32(), values={"n": pa.int64()}),
        declare.list_state("count", "last", keys=KEYS, values={"page": pa.string()}),
        declare.timers("count", "wake", keys=KEYS),
        declare.broadcast_state("count", "names", columns={"code": pa.string()}),
        declare.in_flight_state("count", "mail", edge="read-count", keys=KEYS, columns={}),
        declare.in_flight_state("count", "loop", edge="count-count", columns={"n": pa.int64()}),
        declare.progress_state("count"),
        declare.committables_state("write", "prepared", columns={"file": pa.string()}),
    )


def _keyed(**columns: Any) -> Rows:
    table = pa.table({"word": WORDS, **columns})
    return lambda i: owned(table, ["word"], COUNT, i)


def _mail(i: int) -> pa.Table:
    mine = owned(pa.table({"word": WORDS}), ["word"], COUNT, i)
    count = mine.num_rows
    columns = {"_sender": [n % 2 for n in range(count)], "_receiver": [i] * count}
    for name, values in columns.items():
        mine = mine.append_column(name, pa.array(values, pa.int32()))
    return mine.append_column("_seq", pa.array(range(count), pa.int64()))


def wide_rows() -> dict[tuple[str, str], Rows]:
    return {
        ("read", "splits"): lambda i: pa.table({"path": [f"{i}-{n}.csv" for n in range(i + 1)]}),
        ("read", "limits"): lambda i: pa.table({"rate": [i + 0.5]}),
        ("read", "todo"): lambda _: pa.table({"path": ["8.csv", "9.csv"]}),
        ("count", "sums"): _keyed(n=pa.array(range(6), pa.int64())),
        ("count", "days"): _keyed(_map_key=pa.array(range(6), pa.date32()), n=pa.array([None, *range(5)], pa.int64())),
        ("count", "last"): _keyed(_index=range(6), page=[f"p{n}" for n in range(6)]),
        ("count", "wake"): _keyed(_timestamp=range(6), _tag=["late"] * 6),
        ("count", "names"): lambda _: pa.table({"code": ["x", "y"]}),
        ("count", "mail"): _mail,
        ("count", "loop"): lambda i: pa.table(
            {
                "_sender": pa.array([0, 0, 1], pa.int32()),
                "_receiver": pa.array([i] * 3, pa.int32()),
                "_seq": [0, 1, 0],
                "n": [7, 8, 9],
            }
        ),
        ("count", "progress"): lambda i: pa.table(
            {"_edge": ["read-count", "count-count"], "_watermark": [1000 + i, -(2**63)], "_ended": [False, False]}
        ),
        ("write", "prepared"): lambda i: pa.table({"file": [f"part-{i}"]}),
    }


def wide_job() -> Job:
    return Job("corpus", wide_graph(), wide_states(), wide_rows())


DELTA = pa.table(
    {"word": ["ann", "bob", "gil"], "n": pa.array([100, None, 7], pa.int64()), "_op": pa.array([0, 1, 0], pa.int8())}
)


def layered(store: CheckpointStore, options: WriteOptions | None = None) -> CommitPermit:
    """A base and a delta: ann has another n, bob is deleted, gil is new."""
    job = small_job()
    more = {} if options is None else {"options": options}
    first = job.publish(store, None, **more)
    return job.publish(store, first, deltas={("count", "sums"): lambda i: owned(DELTA, ["word"], COUNT, i)}, **more)


def finished(store: CheckpointStore) -> None:
    """The source has finished, one subtask of the counter is finishing, its sink's committables
    stay.
    """
    graph = JobGraph((LINES, Operator("count", 2, MAX)), (edge("lines", "count", Partitioner.HASH, "word"),))
    states = (COUNTS, declare.committables_state("count", "prepared", columns={"file": pa.string()}))
    rows = {**SMALL_ROWS, ("count", "prepared"): lambda i: pa.table({"file": [f"part-{i}"]})}
    Job("corpus", graph, states, rows).publish(store, None, finished={"lines": [0, 1]}, finishing={"count": [1]})


def evolved(store: CheckpointStore) -> None:
    """A base in one schema and a delta in the next: ``n`` was widened and renamed, ``at`` has a
    default, ``old`` is gone.
    """
    before = declare.value_state("count", "sums", keys=KEYS, values={"n": pa.int32(), "old": pa.string()})
    values = pa.schema([pa.field("total", pa.int64()), pa.field("at", pa.int64(), nullable=False)])
    after = declare.value_state(
        "count", "sums", keys=KEYS, values=values, previous=before, renames={"n": "total"}, defaults={"at": "-1"}
    )
    base = pa.table({"word": WORDS, "n": pa.array(range(6), pa.int32()), "old": WORDS})
    delta = pa.table({"word": ["ann"], "total": [2**40], "at": [5], "_op": pa.array([0], pa.int8())})
    first = Job(
        "corpus", SMALL_GRAPH, (before,), {("count", "sums"): lambda i: owned(base, ["word"], COUNT, i)}
    ).publish(store, None)
    Job("corpus", SMALL_GRAPH, (after,)).publish(
        store, first, deltas={("count", "sums"): lambda i: owned(delta, ["word"], COUNT, i)}
    )


def crossed(store: CheckpointStore) -> None:
    """Records of one channel in two segments of one subtask, in turn: only ``_seq`` tells their
    order.
    """
    graph = JobGraph(
        (Operator("read", 2, MAX), Operator("count", 2, MAX)), (edge("read", "count", Partitioner.REBALANCE),)
    )
    state = declare.in_flight_state("count", "mail", edge="read-count", columns={"n": pa.int64()})

    def rows(i: int) -> pa.Table:
        numbers = [i, i + 2, i + 4]
        sender, receiver = (pa.array([value] * 3, pa.int32()) for value in (1, 0))
        return pa.table({"_sender": sender, "_receiver": receiver, "_seq": numbers, "n": numbers})

    Job("corpus", graph, (state, COUNTS), {**SMALL_ROWS, ("count", "mail"): rows}).publish(store, None)
    rescale_newest(store, 1)


def _published(job: Callable[[], Job], **more: Any) -> Callable[[CheckpointStore], None]:
    def publish(store: CheckpointStore) -> None:
        job().publish(store, None, **more)

    return publish


def history(store: CheckpointStore, count: int = 4) -> None:
    permit = None
    for _ in range(count):
        permit = small_job().publish(store, permit)


def repaired(store: CheckpointStore) -> None:
    """A damaged newest record, 3, over which checkpoint 4 was published with the content of 2."""
    history(store, 3)
    record = "checkpoints/00000000000000000003.json"
    store.storage.delete([record])
    with store.storage.open_output(record) as output:
        output.write(b"{")
    store.repair()


def _rescaled(store: CheckpointStore) -> None:
    wide_job().publish(store, None)
    rescale_newest(store, 3)


BASES: dict[str, tuple[str, Callable[[CheckpointStore], Any]]] = {
    "small": ("One keyed state of two subtasks, its segments inline in the manifest.", _published(small_job)),
    "objects": ("The same, its segments objects of the store.", _published(small_job, options=OBJECTS)),
    "wide": ("Every mode and every kind of state, all subtasks running.", _published(wide_job)),
    "layers": ("A base and a delta with an upsert, a delete and a new key (section 5.4).", layered),
    "layers-in-objects": (
        "The same in objects; the delta lies under its own checkpoint.",
        lambda store: layered(store, OBJECTS),
    ),
    "finished": ("A fully finished source and a partially finished sink with committables (section 3.4).", finished),
    "evolved": ("A base in an older schema than its delta (section 5.7).", evolved),
    "rescaled": (
        "Every mode dealt out to three subtasks: handles are cuts of segments (sections 4.3, 6.4).",
        _rescaled,
    ),
    "crossed": ("Two segments of one subtask hold records of one channel in turn (section 5.2).", crossed),
    "history": ("A chain of four checkpoints (section 8.1).", history),
    "repaired": (
        "Record 3 was damaged; checkpoint 4 was published over it with the content of 2 (section 8.4).",
        repaired,
    ),
    "expiring": ("Rows that expire, of which three have (section 6.5); `rows.json` has every row.", expiring),
    "waking": ("Timers of processing time beside those of event time (section 6.6).", waking),
    "stopped": (
        "A checkpoint at which the job stops, with properties.",
        _published(small_job, stop=sf.Stop(sf.StopMode.DRAIN, "0" * 32), properties={"owner": "ann"}),
    ),
}
"""By name: what the store is, and what publishes it."""


def objects_of(storage: MemoryStorage) -> dict[str, bytes]:
    folders = ("checkpoints/", "manifests/", "segments/")
    return {item.path: bytes(storage.read(item.path)) for folder in folders for item in storage.list(folder)}


def base(name: str) -> dict[str, bytes]:
    place = f"corpus-{name}"
    with same_bytes():
        BASES[name][1](sf.open(f"memory://{place}"))
    found = objects_of(MemoryStorage(place))
    MemoryStorage.reset(place)
    return found

"""Small stores with something of everything in them, built through the library: for any test that
needs a checkpoint.

:func:`flights_store` is the job that the demo runs, on a few made-up rows: every mode, every kind
of keyed state, finished and finishing subtasks, layers, records in flight, committables.
:func:`counts_store` is the smallest useful one. All rows are arithmetic on their index, so a test
can say what it expects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pytest

from stateformat.backends.rewrite.rewrite import publish_rescaled
from stateformat.errors import CheckpointError
from stateformat.graph import Edge, JobGraph, Operator, OperatorId, Partitioner
from stateformat.keys import hash_keys, key_groups, subtask_of_key_group
from stateformat.model import Mode, State
from stateformat.publication import CommitPermit
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store

Error = TypeVar("Error", bound=CheckpointError)

PARALLELISM = 4
MAX_PARALLELISM = 128
PLANES = 60
KEYS = {"tailnum": pa.string()}


def operator(uid: str, parallelism: int = PARALLELISM, **more: Any) -> Operator:
    """An operator with the sizes that all examples have."""
    return Operator(OperatorId(uid), parallelism, MAX_PARALLELISM, **more)


def edge(source: str, target: str, partitioner: Partitioner, *keys: str, **more: Any) -> Edge:
    """An edge named after its ends."""
    return Edge(f"{source}-{target}", OperatorId(source), OperatorId(target), partitioner, key_columns=keys, **more)


def owned(table: pa.Table, keys: Sequence[str], at: Operator, subtask: int) -> pa.Table:
    """The rows whose key one subtask owns."""
    assert at.max_parallelism is not None
    groups = key_groups(hash_keys([table[name] for name in keys]), at.max_parallelism)
    owner = subtask_of_key_group(groups, parallelism=at.parallelism, max_parallelism=at.max_parallelism)
    return table.filter(pa.array(owner == subtask))


def refused(error: type[Error], call: Callable[[], Any], words: str | None = None, kind: Any = None) -> Error:
    """The error of a call, with these words in its message, and of this kind."""
    with pytest.raises(error, match=words) as caught:
        call()
    assert kind in (None, caught.value.kind)
    return caught.value


def tail(number: int) -> str:
    """The key of a plane."""
    return f"N{number:03d}"


@dataclass(frozen=True)
class Job:
    """A job whose checkpoints are written from a table of rows per state: ``rows(subtask)`` gives
    what is written.
    """

    job_id: str
    graph: JobGraph
    states: tuple[State, ...]
    rows: Mapping[tuple[str, str], Callable[[int], pa.Table]] = field(default_factory=dict)
    name: str = "Flights"

    def publish(
        self,
        store: CheckpointStore,
        parent: CommitPermit | None,
        *,
        finished: Mapping[str, Sequence[int]] | None = None,
        finishing: Mapping[str, Sequence[int]] | None = None,
        deltas: Mapping[tuple[str, str], Callable[[int], pa.Table]] | None = None,
        **more: Any,
    ) -> CommitPermit:
        """Write one checkpoint: every state whole, save those with ``deltas``, which get a layer on
        top.
        """
        finished, finishing, deltas = finished or {}, finishing or {}, deltas or {}
        pending = store.begin(
            job_id=self.job_id, graph=self.graph, states=self.states, parent=parent, job_name=self.name, **more
        )
        for at in self.graph.operators:
            states = [state for state in self.states if state.operator == at.uid]
            ended = set(finished.get(at.uid, ()))
            pending.mark_finished(at.uid, ended)
            for subtask in sorted(set(range(at.parallelism)) - ended):
                ending = subtask in finishing.get(at.uid, ())
                with pending.context.subtask(at.uid, subtask, finishing=ending) as writer:
                    for state in states:
                        self._write(writer, state, subtask, ending=ending, delta=deltas.get((at.uid, state.name)))
                pending.add(writer)
            if any(state.mode is Mode.COORDINATOR for state in states) and len(ended) < at.parallelism:
                with pending.context.coordinator(at.uid) as writer:
                    for state in states:
                        if state.mode is Mode.COORDINATOR:
                            writer.write(state.name, self.rows[at.uid, state.name](-1))
                pending.add(writer)
        return pending.publish()

    def _write(self, writer: Any, state: State, subtask: int, *, ending: bool, delta: Any) -> None:
        if state.mode is Mode.COORDINATOR or (ending and state.mode is not Mode.COMMITTABLES):
            return
        if delta is not None:
            writer.write(state.name, delta(subtask), delta=True)
        else:
            writer.write(state.name, self.rows[state.operator, state.name](subtask))


def counts_job(parallelism: int = 2, keys: int = 20) -> Job:
    """One source and one counter, a value state ``counts`` by ``word``: (``w<i>``, i)."""
    counter = operator("counter", parallelism)
    graph = JobGraph((operator("lines", parallelism), counter), (edge("lines", "counter", Partitioner.HASH, "word"),))
    state = declare.value_state("counter", "counts", keys={"word": pa.string()}, values={"n": pa.int64()})
    table = pa.table({"word": [f"w{i}" for i in range(keys)], "n": pa.array(range(keys), pa.int64())})
    return Job("counts", graph, (state,), {("counter", "counts"): lambda i: owned(table, ["word"], counter, i)})


def counts_store(url: str, checkpoints: int = 1, **job: int) -> CheckpointStore:
    """A store with ``checkpoints`` checkpoints of :func:`counts_job`."""
    store, permit = open_store(url), None
    for _ in range(checkpoints):
        permit = counts_job(**job).publish(store, permit)
    return store


def rescale_newest(store: CheckpointStore, parallelism: int) -> CommitPermit:
    """Publish the newest at another parallelism, by metadata alone, as ``ckpt rescale`` does."""
    source = store.open()
    return publish_rescaled(source, source.graph.at(parallelism), store=store)


def flights_graph() -> JobGraph:
    """Four sources into ``delays``, a sink behind it, and a loop."""
    return JobGraph(
        (
            operator("planes"),
            operator("flights", coordinator=True),
            operator("airlines"),
            operator("rates"),
            operator("delays", name="Delays per plane"),
            operator("alerts", 2),
            operator("sink"),
        ),
        (
            edge("planes", "delays", Partitioner.HASH, "tailnum"),
            edge("flights", "delays", Partitioner.HASH, "tailnum", input=1),
            edge("airlines", "delays", Partitioner.BROADCAST, input=2),
            edge("rates", "delays", Partitioner.BROADCAST, input=3),
            edge("delays", "alerts", Partitioner.REBALANCE),
            edge("alerts", "delays", Partitioner.HASH, "tailnum", feedback=True, input=4),
            edge("delays", "sink", Partitioner.REBALANCE),
        ),
    )


def flights_states() -> tuple[State, ...]:
    """Every mode, and every kind of keyed state."""
    values = {"n": pa.int64(), "minutes": pa.float64()}
    return (
        declare.even_split_state("planes", "splits", columns={"path": pa.string(), "position": pa.int64()}),
        declare.even_split_state("flights", "positions", columns={"path": pa.string(), "position": pa.int64()}),
        declare.coordinator_state("flights", "unassigned", columns={"path": pa.string()}),
        declare.broadcast_state("airlines", "names", columns={"carrier": pa.string(), "name": pa.string()}),
        declare.union_state("rates", "limits", columns={"source": pa.int32(), "per_second": pa.float64()}),
        declare.value_state("delays", "sums", keys=KEYS, values=values),
        declare.map_state("delays", "by_month", keys=KEYS, map_key=pa.int8(), values=values),
        declare.list_state("delays", "last", keys=KEYS, values={"route": pa.list_(pa.string()), "raw": pa.binary()}),
        declare.timers("delays", "wake", keys=KEYS),
        declare.progress_state("delays"),
        declare.in_flight_state(
            "delays", "overtaken", edge="flights-delays", keys=KEYS, columns={"minutes": pa.float64()}
        ),
        declare.in_flight_state("alerts", "overtaken", edge="delays-alerts", columns={"text": pa.string()}),
        declare.committables_state("sink", "prepared", columns={"file": pa.string()}),
    )


def _keyed(columns: Mapping[str, Any]) -> Callable[[int], pa.Table]:
    table = pa.table(columns)
    return lambda subtask: owned(table, ["tailnum"], operator("delays"), subtask)


def flights_rows() -> dict[tuple[str, str], Callable[[int], pa.Table]]:
    """What each subtask writes of each state, by (operator, state)."""
    planes = [tail(i) for i in range(PLANES)]
    twice = [name for name in planes for _ in range(2)]
    even = np.arange(2 * PLANES) % 2
    sums = {"tailnum": planes, "n": np.arange(PLANES), "minutes": np.arange(PLANES) / 4}
    flight = {"tailnum": planes[:9], "_sender": np.arange(9, dtype=np.int32) % 4, "_seq": np.arange(9)}
    return {
        ("planes", "splits"): lambda i: pa.table({"path": [f"planes-{i}.csv"], "position": [i * 100]}),
        ("flights", "positions"): lambda i: pa.table(
            {"path": [f"flights-{i}-{k}.csv" for k in range(i + 1)], "position": list(range(i + 1))}
        ),
        ("flights", "unassigned"): lambda _: pa.table({"path": ["flights-8.csv", "flights-9.csv"]}),
        ("airlines", "names"): lambda _: pa.table({"carrier": ["AA", "B6"], "name": ["American", "JetBlue"]}),
        ("rates", "limits"): lambda i: pa.table({"source": pa.array([i], pa.int32()), "per_second": [1.5 * i]}),
        ("delays", "sums"): _keyed(sums),
        ("delays", "by_month"): _keyed(
            {"tailnum": twice, "_map_key": pa.array(even + 1, pa.int8()), "n": even, "minutes": even / 2}
        ),
        ("delays", "last"): _keyed(
            {
                "tailnum": twice,
                "_index": even,
                "route": [["EWR", "IAH"] if i % 2 else None for i in range(2 * PLANES)],
                "raw": [bytes([i, 255]) for i in range(2 * PLANES)],
            }
        ),
        ("delays", "wake"): _keyed(
            {"tailnum": planes, "_timestamp": np.arange(PLANES) * 1_000_000, "_tag": ["late"] * PLANES}
        ),
        ("delays", "progress"): lambda i: pa.table(
            {"_edge": ["planes-delays", "flights-delays"], "_watermark": [2**63 - 1, 1000 + i], "_ended": [True, False]}
        ),
        ("delays", "overtaken"): lambda i: _in_flight(flight, i),
        ("alerts", "overtaken"): lambda i: pa.table(
            {
                "_sender": pa.array([0, 0, 3], pa.int32()),
                "_receiver": pa.array([i] * 3, pa.int32()),
                "_seq": [0, 1, 0],
                "text": ["late", "later", "gone"],
            }
        ),
        ("sink", "prepared"): lambda i: pa.table({"file": [f"out-{i}.parquet"] if i % 2 else []}, _FILES),
    }


_FILES = pa.schema([pa.field("file", pa.string())])


def _in_flight(columns: Mapping[str, Any], subtask: int) -> pa.Table:
    mine = owned(pa.table(columns), ["tailnum"], operator("delays"), subtask)
    receiver = pa.array([subtask] * mine.num_rows, pa.int32())
    minutes = pa.array([float(subtask)] * mine.num_rows, pa.float64())
    return mine.append_column("_receiver", receiver).append_column("minutes", minutes)


def flights_job() -> Job:
    """The job of :func:`flights_store`."""
    return Job("flights-job", flights_graph(), flights_states(), flights_rows())


def flights_store(url: str) -> CheckpointStore:
    """Two checkpoints. 1: all running. 2: ``planes`` has finished, ``flights`` and ``airlines`` in
    part; ``sums`` has a delta.

    The delta of ``sums``: the first ten planes have n = 1000 + i, the eleventh is gone.
    """
    store, job = open_store(url), flights_job()
    first = job.publish(store, None, properties={"owner": "ann", "purpose": "nightly run"})
    names = [tail(i) for i in range(11)]
    delta = {
        "tailnum": names,
        "_op": pa.array([0] * 10 + [1], pa.int8()),
        "n": pa.array([*range(1000, 1010), None], pa.int64()),
        "minutes": pa.array([0.5] * 10 + [None], pa.float64()),
    }
    job.publish(
        store,
        first,
        finished={"planes": range(4), "flights": [0, 1, 2], "airlines": [0]},
        finishing={"airlines": [2]},
        deltas={("delays", "sums"): _keyed(delta)},
        properties={"owner": "ann", "purpose": "nightly run"},
    )
    return store

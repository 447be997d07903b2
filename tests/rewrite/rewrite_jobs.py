"""Small checkpoints for the tests of rewriting, and their content as plain Python values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from stateformat.graph import Edge, JobGraph, Operator, OperatorId, Partitioner
from stateformat.model import Mode, State
from stateformat.publication import CommitPermit
from stateformat.reading import Checkpoint
from stateformat.schema import segment_schema
from stateformat.snapshot import SnapshotWriter
from stateformat.states import declare
from stateformat.storage import open_storage
from stateformat.store import CheckpointStore

JOB = "orders"
MAX_PARALLELISM = 16
KEYS = [None, "", "a", "ä", *(f"k{i}" for i in range(60))]


def new_store(path: Path) -> CheckpointStore:
    return CheckpointStore(open_storage(str(path)), sleep=lambda _: None)


def graph(parallelism: int = 3) -> JobGraph:
    """``lookup`` has finished; subtask 2 of ``source`` and ``names`` has; the rest runs."""

    def operator(uid: str, **facts: Any) -> Operator:
        return Operator(OperatorId(uid), parallelism, MAX_PARALLELISM, **facts)

    def edge(name: str, source: str, target: str, partitioner: Partitioner, **facts: Any) -> Edge:
        return Edge(name, OperatorId(source), OperatorId(target), partitioner, **facts)

    return JobGraph(
        (
            operator("lookup", name="Lookup"),
            operator("source", coordinator=True),
            *map(operator, ("names", "sums", "sink")),
        ),
        (
            edge("lookup-sums", "lookup", "sums", Partitioner.BROADCAST),
            edge("source-names", "source", "names", Partitioner.FORWARD),
            edge("names-sums", "names", "sums", Partitioner.HASH, input=1, key_columns=("key",)),
            edge("sums-sink", "sums", "sink", Partitioner.REBALANCE),
        ),
    )


def states() -> list[State]:
    """One of every mode and kind."""
    key, amount = {"key": pa.string()}, {"amount": pa.int64()}
    return [
        declare.even_split_state("source", "positions", columns={"split": pa.string(), "offset": pa.int64()}),
        declare.coordinator_state("source", "splits", columns={"split": pa.string()}),
        declare.broadcast_state("names", "table", columns={"code": pa.string()}),
        declare.value_state("sums", "total", keys=key, values=amount),
        declare.map_state("sums", "per_day", keys=key, map_key=pa.date32(), values=amount),
        declare.list_state("sums", "last", keys=key, values=amount),
        declare.timers("sums", "timers", keys=key),
        declare.union_state("sums", "seen", columns={"shard": pa.int32()}),
        declare.progress_state("sums"),
        declare.in_flight_state("sums", "overtaken", edge="names-sums", columns=amount, keys=key),
        declare.in_flight_state("sink", "queued", edge="sums-sink", columns=amount),
        declare.committables_state("lookup", "left", columns={"file": pa.string()}),
        declare.committables_state("sink", "prepared", columns={"file": pa.string()}),
    ]


def keyed_rows() -> dict[str, list[dict[str, Any]]]:
    """The rows of the keyed states of ``sums``, over all subtasks."""
    return {
        "total": [{"key": key, "amount": i} for i, key in enumerate(KEYS)],
        "per_day": [
            {"key": key, "_map_key": day, "amount": i * 10 + day} for i, key in enumerate(KEYS) for day in range(i % 3)
        ],
        "last": [{"key": key, "_index": j, "amount": i + j} for i, key in enumerate(KEYS) for j in range(i % 4)],
        "timers": [{"key": key, "_timestamp": i * 1000, "_tag": "t"} for i, key in enumerate(KEYS) if i % 2],
    }


def table(state: State, rows: list[dict[str, Any]]) -> pa.Table:
    """Rows with the columns of a state, the key group left to the writer."""
    schema = segment_schema(state)
    names = [name for name in schema.names if name not in ("_key_group", "_checkpoint_id", "_attempt_id")]
    return pa.Table.from_pylist(
        [{name: row[name] for name in names} for row in rows], pa.schema([schema.field(name) for name in names])
    )


def write_keyed(writer: SnapshotWriter, context: Any, state: State, rows: list[dict[str, Any]], subtask: int) -> None:
    """Write those of the rows that this subtask owns."""
    data = table(state, rows)
    owners = context.owners(state.operator, state.name, data)
    writer.write(state.name, data.filter(pa.array(owners == subtask)))


def publish(store: CheckpointStore, parallelism: int = 3, *, ended: tuple[int, ...] = (2,)) -> CommitPermit:
    """Publish the job as the next checkpoint of the store."""
    declared = {state.name: state for state in states()}
    pending = store.begin(job_id=JOB, graph=graph(parallelism), states=declared.values(), parent=store.start(JOB))
    context = pending.context
    for uid, finished in (("lookup", range(parallelism)), ("source", ended), ("names", ended)):
        pending.mark_finished(uid, finished)

    def write(operator: str, subtask: int, /, **rows: list[dict[str, Any]]) -> None:
        """Rows by state; of keyed ones those that the subtask owns."""
        with context.subtask(operator, subtask) as writer:
            for name, values in rows.items():
                if declared[name].key_columns:
                    write_keyed(writer, context, declared[name], values, subtask)
                else:
                    writer.write(name, table(declared[name], values))
        pending.add(writer)

    for i in range(parallelism):
        if i not in ended:
            write("source", i, positions=[{"split": f"s{i}-{j}", "offset": j} for j in range(i + 2)])
            write("names", i, table=[{"code": code} for code in "xyz"])
        write(
            *("sums", i),
            **keyed_rows(),
            seen=[{"shard": i * 10 + j} for j in range(2)],
            progress=[
                {"_edge": "lookup-sums", "_watermark": 2**63 - 1, "_ended": True},
                {"_edge": "names-sums", "_watermark": 100 + i, "_ended": False},
            ],
            overtaken=[
                {"_sender": s, "_receiver": i, "_seq": n, "key": key, "amount": n}
                for s in range(2)
                for n, key in enumerate(KEYS[:20])
            ],
        )
        write(
            *("sink", i),
            queued=[
                {"_sender": s, "_receiver": i, "_seq": n, "amount": 100 * i + 10 * s + n}
                for s in range(parallelism)
                for n in range(s + 1)
            ],
            prepared=[{"file": f"part-{i}"}] if i else [],
        )
    with context.coordinator("source") as writer:
        writer.write("splits", table(declared["splits"], [{"split": "rest-1"}, {"split": "rest-2"}]))
    pending.add(writer)
    return pending.publish()


def restored(
    checkpoint: Checkpoint, parallelism: int | None
) -> dict[tuple[str, str, int | None], list[tuple[Any, ...]]]:
    """What every new subtask gets of every state at a parallelism (None: as it is): rows as tuples.

    List-like modes keep their order, the others are sorted; ``_key_group`` is left out. Rows in
    flight are sorted by channel and sequence number, so a lost or repeated one shows and an
    interleaving of channels does not.
    """
    plan = checkpoint.plan_restore(checkpoint.graph.at(parallelism))
    plan.check()
    found: dict[tuple[str, str, int | None], list[tuple[Any, ...]]] = {}
    for operator in plan.topology.operators:
        for subtask in (None, *range(operator.parallelism)):
            for name, task in checkpoint.restore(plan, operator.uid, subtask).items():
                rows = plain(task.table().drop_columns([c for c in ["_key_group"] if c in task.table().column_names]))
                ordered = task.state.mode in (Mode.EVEN_SPLIT, Mode.UNION)
                found[operator.uid, name, subtask] = rows if ordered else sorted(rows, key=repr)
    return found


def plain(data: pa.Table) -> list[tuple[Any, ...]]:
    """Rows as tuples of Python values."""
    return list(zip(*(column.to_pylist() for column in data.columns), strict=True))


def all_rows(checkpoint: Checkpoint, operator: str, state: str) -> Counter[tuple[Any, ...]]:
    """Every stored row of a state with its count, without the key group."""
    data = checkpoint.read(operator, state).table()
    return Counter(plain(data.drop_columns([name for name in ("_key_group",) if name in data.column_names])))


def handles_of(record_or_checkpoint: Checkpoint) -> list[Mapping[str, Any]]:
    """The planning columns of all handles as dictionaries."""
    rows: list[Mapping[str, Any]] = record_or_checkpoint.handles.to_pylist()
    return rows

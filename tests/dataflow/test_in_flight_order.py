"""Records in flight come in the order in which they were sent, however many segments hold them
(SPEC.md section 5.2).
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stateformat.backends.rewrite import RewriteSpec, rewrite
from stateformat.graph import Edge, JobGraph, Operator, Partitioner
from stateformat.keys import hash_keys, key_groups, subtask_of_key_group
from stateformat.reading import scan as reading
from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store
from stateformat.tables import merge_sorted
from stateformat.validation import validate
from tests.ckpt.ckpt_runs import run as ckpt

Record = tuple[int, int, int, int]
"""Sender, receiver, number, key."""
MAX = 16


def publish(store: CheckpointStore, partitioner: Partitioner, records: Sequence[Record], options: WriteOptions) -> None:
    """One checkpoint of ``p`` (2) → ``c`` (the receivers that there are), with records in
    flight.
    """
    receivers = 1 + max(receiver for _, receiver, _, _ in records)
    keyed = partitioner is Partitioner.HASH
    graph = JobGraph(
        (Operator("p", 2, MAX), Operator("c", receivers, MAX)),
        (Edge("e", "p", "c", partitioner, key_columns=("k",) if keyed else ()),),
    )
    columns = {"name": pa.string()} if keyed else {"k": pa.int64(), "name": pa.string()}
    state = declare.in_flight_state("c", "mail", edge="e", columns=columns, keys={"k": pa.int64()} if keyed else {})
    pending = store.begin(job_id="j", graph=graph, states=[state], parent=None, options=options)
    for subtask in range(receivers):
        mine = [record for record in records if record[1] == subtask]
        table = pa.table(
            {
                "_sender": pa.array([record[0] for record in mine], pa.int32()),
                "_receiver": pa.array([record[1] for record in mine], pa.int32()),
                "_seq": pa.array([record[2] for record in mine], pa.int64()),
                "k": pa.array([record[3] for record in mine], pa.int64()),
                "name": [f"record {record[2]}" for record in mine],
            }
        )
        with pending.context.subtask("c", subtask) as writer:
            writer.write("mail", table)
        pending.add(writer)
    pending.publish()


def records_for(partitioner: Partitioner, receivers: int, seed: int = 0, count: int = 60) -> list[Record]:
    """Records from two senders; on a hash edge each to the subtask that owns its key."""
    draw, found, numbers = random.Random(seed), [], defaultdict[tuple[int, int], int](int)
    for _ in range(count):
        sender, receiver, key = draw.randrange(2), draw.randrange(receivers), draw.randrange(7)
        if partitioner is Partitioner.HASH:
            group = key_groups(hash_keys([pa.array([key])]), MAX)
            receiver = int(subtask_of_key_group(group, parallelism=receivers, max_parallelism=MAX)[0])
        numbers[sender, receiver] += draw.randrange(1, 3)
        found.append((sender, receiver, numbers[sender, receiver], key))
    return found


def check_order(rows: list[dict[str, Any]], *, by_key: bool) -> None:
    """In each channel, on a hash edge of each key of it, the numbers ascend."""
    channels: dict[Any, list[int]] = defaultdict(list)
    for row in rows:
        assert row["name"] == f"record {row['_seq']}"
        channels[row["_sender"], row["_receiver"], row["k"] if by_key else None].append(row["_seq"])
    for numbers in channels.values():
        assert numbers == sorted(numbers)


def test_the_record_that_was_sent_first_comes_first_after_a_rewrite(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    publish(store, Partitioner.REBALANCE, [(1, 0, number, 0) for number in range(4)], WriteOptions())
    rewrite(store, store.open(), RewriteSpec(per_operator={"c": 2}))
    checkpoint = store.open()
    plan = checkpoint.plan_restore(checkpoint.graph.at(per_operator={"c": 1}))
    task = checkpoint.restore(plan, "c", 0)["mail"]
    assert task.table()["_seq"].to_pylist() == [0, 1, 2, 3]
    assert [row for batch in task.batches(batch_rows=1) for row in batch["_seq"].to_pylist()] == [0, 1, 2, 3]


@pytest.mark.parametrize("bytes_max", [reading.CHUNK_BYTES_MAX, 200], ids=["whole pieces", "small windows"])
@pytest.mark.parametrize(
    "options", [WriteOptions(), WriteOptions(inline_bytes_max=0, row_group_rows=3)], ids=["inline", "objects"]
)
@pytest.mark.parametrize("partitioner", [Partitioner.REBALANCE, Partitioner.HASH])
def test_channels_keep_their_order_through_rewrites_at_other_parallelisms(
    tmp_path: Path, partitioner: Partitioner, options: WriteOptions, bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_key = partitioner is Partitioner.HASH
    for n, (receivers, rewrites) in enumerate([(1, (3, 2)), (3, (2, 5))]):
        store = open_store(tmp_path / f"store-{n}", durable=False)
        sent = records_for(partitioner, receivers, seed=n)
        publish(store, partitioner, sent, options)
        for parallelism in rewrites:
            rewrite(store, store.open(), RewriteSpec(per_operator={"c": parallelism}, options=options))
        checkpoint = store.open()
        assert validate(store, level="full").ok
        with monkeypatch.context() as small:
            small.setattr(reading, "CHUNK_BYTES_MAX", bytes_max)
            for parallelism in (1, 4):
                plan = checkpoint.plan_restore(checkpoint.graph.at(per_operator={"c": parallelism}))
                got = []
                for subtask in range(parallelism):
                    task = checkpoint.restore(plan, "c", subtask)["mail"]
                    rows = task.table().to_pylist()
                    check_order(rows, by_key=by_key)
                    assert [row for batch in task.batches(batch_rows=7) for row in batch.to_pylist()] == rows
                    got += [(row["_sender"], row["_receiver"], row["_seq"], row["k"]) for row in rows]
                assert sorted(got) == sorted(sent)


def test_an_export_has_the_order_of_the_channels_too(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", durable=False)
    publish(store, Partitioner.REBALANCE, [(1, 0, number, 0) for number in range(4)], WriteOptions())
    rewrite(store, store.open(), RewriteSpec(per_operator={"c": 2}))
    done = ckpt("rescale", str(tmp_path / "store"), "--operator-parallelism", "c=1")
    assert done.status == 0, done.err
    done = ckpt("export", str(tmp_path / "store"), "--operator", "c", "--state", "mail", "--to", "-", "--as", "csv")
    assert [line.split(",")[2] for line in done.out.splitlines()[1:]] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("seed", range(20))
def test_merged_streams_are_sorted_and_no_more_than_a_table_of_each_is_held(seed: int) -> None:
    draw = random.Random(seed)
    rows = [(draw.randrange(4), draw.randrange(6), n) for n in range(draw.randrange(1, 200))]
    streams: list[list[tuple[int, int, int]]] = [[] for _ in range(draw.randrange(1, 6))]
    for row in sorted(rows):
        draw.choice(streams).append(row)
    size, taken = draw.randrange(1, 30), []

    def tables(mine: list[tuple[int, int, int]]) -> Any:
        for start in range(0, len(mine), size):
            part = mine[start : start + size]
            yield pa.table({name: pa.array([row[i] for row in part], pa.int64()) for i, name in enumerate("abn")})
        yield pa.table({name: pa.array([], pa.int64()) for name in "abn"})

    for table in merge_sorted([tables(mine) for mine in streams], ["a", "b"]):
        assert 0 < table.num_rows <= size * len(streams)
        taken += list(zip(*(table[name].to_pylist() for name in "abn"), strict=True))
    assert [row[:2] for row in taken] == [row[:2] for row in sorted(rows)]
    assert sorted(taken) == sorted(rows)


def test_streams_that_are_not_sorted_lose_no_row() -> None:
    draw = np.random.default_rng(3)
    parts = [draw.integers(0, 9, (7, 11)) for _ in range(3)]
    streams = [iter([pa.table({"a": chunk}) for chunk in part]) for part in parts]
    found = sorted(value for table in merge_sorted(streams, ["a"]) for value in table["a"].to_pylist())
    assert found == sorted(np.concatenate(parts).ravel().tolist())

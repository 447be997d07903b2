"""What plans need of a manifest is what the whole of it says, whatever its row groups are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

import stateformat as sf
from stateformat.backends.rewrite import publish_rescaled
from stateformat.errors import DamagedCheckpoint
from stateformat.manifest import decode_manifest, decode_outline, handles_table, manifest_ref
from stateformat.manifest.codec import PLANNING_SCHEMA
from stateformat.model import ManifestRef
from stateformat.redistribution import plan_restore
from stateformat.schema import MANIFEST_SCHEMA
from stateformat.states import broadcast_state, even_split_state, in_flight_state, union_state, value_state

OPERATORS, SUBTASKS = 7, 5
MODES = ("keyed", "in_flight", "union", "broadcast", "even_split")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> sf.CheckpointStore:
    """Every operator has one state of each mode; records in flight share segments."""
    store = sf.open(str(tmp_path_factory.mktemp("outline") / "store"), durable=False)
    operators = [sf.Operator(f"op{number}", 1, 64) for number in range(OPERATORS)]
    loops = [
        sf.Edge(f"loop{number}", f"op{number}", f"op{number}", "rebalance", feedback=True)
        for number in range(OPERATORS)
    ]
    columns = {"value": pa.int64()}
    states = []
    for number in range(OPERATORS):
        uid = f"op{number}"
        states += [
            value_state(uid, "keyed", keys={"key": pa.int64()}, values=columns),
            in_flight_state(uid, "in_flight", edge=f"loop{number}", columns=columns),
            union_state(uid, "union", columns=columns),
            broadcast_state(uid, "broadcast", columns=columns),
            even_split_state(uid, "even_split", columns=columns),
        ]
    graph = sf.JobGraph(tuple(operators), tuple(loops))
    pending = store.begin(job_id="job", graph=graph, states=states, parent=None)
    numbers = np.arange(200)
    sender = np.zeros(200, np.int32)
    for operator in operators:
        with pending.context.subtask(operator.uid, 0) as writer:
            writer.write("keyed", pa.table({"key": numbers, "value": numbers}))
            writer.write(
                "in_flight", pa.table({"_sender": sender, "_receiver": sender, "_seq": numbers, "value": numbers})
            )
            for name in MODES[2:]:
                writer.write(name, pa.table({"value": numbers}))
        pending.add(writer)
    pending.publish()
    checkpoint = store.open()
    publish_rescaled(checkpoint, checkpoint.graph.at(SUBTASKS), store=store)
    return store


def stored(handles: pa.Table, row_group_size: int) -> tuple[pa.Buffer, ManifestRef]:
    sink = pa.BufferOutputStream()
    pq.write_table(
        handles.cast(MANIFEST_SCHEMA),
        sink,
        compression="zstd",
        row_group_size=row_group_size,
        write_page_checksum=True,
        store_schema=False,
    )
    return sink.getvalue(), manifest_ref("manifests/m", sink.getvalue())


@pytest.mark.parametrize("row_group_size", [1, 3, 64, 1000])
def test_an_outline_says_what_the_handles_say(store: sf.CheckpointStore, row_group_size: int) -> None:
    data, ref = stored(store.open().manifest.full(), row_group_size)
    whole = decode_manifest(data, ref).handles

    found = decode_outline(data, ref)

    names = [name for name in found.column_names if name != "path"]
    plain = pa.schema([PLANNING_SCHEMA.field(name).with_nullable(True) for name in names])
    assert found.select(names).cast(plain).to_pylist() == whole.select(names).to_pylist()
    moved = [mode == "in_flight" for mode in whole["mode"].to_pylist()]
    paths = [path if is_moved else None for path, is_moved in zip(whole["path"].to_pylist(), moved, strict=True)]
    assert found["path"].to_pylist() == paths


@pytest.mark.parametrize("parallelism", [1, 3, 5, 64])
@pytest.mark.parametrize("row_group_size", [7, 1000])
def test_a_plan_to_show_is_the_plan_of_a_restore(
    store: sf.CheckpointStore, parallelism: int, row_group_size: int
) -> None:
    checkpoint = store.open()
    data, ref = stored(checkpoint.manifest.full(), row_group_size)
    outlined = SimpleNamespace(record=checkpoint.record, handles=decode_outline(data, ref))
    topology = checkpoint.graph.at(parallelism)

    assert plan_restore(outlined, topology).to_json() == checkpoint.plan_restore(topology).to_json()
    assert store.open().plan_restore(topology, to_show=True).to_json() == checkpoint.plan_restore(topology).to_json()


def swapped(handles: pa.Table) -> pa.Table:
    rows = [*range(len(handles))]
    rows[3], rows[4] = rows[4], rows[3]
    return handles.take(rows)


def of_no_rows(handles: pa.Table) -> pa.Table:
    at = handles.schema.get_field_index("segment_rows")
    return handles.set_column(at, handles.schema.field(at), pa.array(np.zeros(len(handles), np.int64)))


@pytest.mark.parametrize("damage", [swapped, of_no_rows])
@pytest.mark.parametrize("row_group_size", [1, 2, 4, 1000])
def test_what_is_wrong_is_told_as_of_the_whole(
    store: sf.CheckpointStore, damage: Callable[[pa.Table], pa.Table], row_group_size: int
) -> None:
    data, ref = stored(damage(store.open().manifest.full()), row_group_size)

    with pytest.raises(DamagedCheckpoint) as whole:
        decode_manifest(data, ref)
    with pytest.raises(DamagedCheckpoint) as outline:
        decode_outline(data, ref)
    assert str(outline.value) == str(whole.value)


def test_bytes_that_are_no_manifest_are_told_as_such() -> None:
    data, ref = stored(handles_table([]), 10)
    assert decode_outline(data, ref).num_rows == 0
    torn = pa.py_buffer(data.to_pybytes()[:-4] + b"nono")
    with pytest.raises(DamagedCheckpoint, match="digest"):
        decode_outline(torn, ref)
    with pytest.raises(DamagedCheckpoint, match="cannot be read as Parquet"):
        decode_outline(torn, replace(ref, digest=xxhash.xxh3_128_hexdigest(torn)))


def test_only_the_restore_keeps_the_manifest(store: sf.CheckpointStore) -> None:
    checkpoint = store.open()
    checkpoint.plan_restore(checkpoint.graph.at(2), to_show=True)
    assert checkpoint._manifest is None
    checkpoint.plan_restore(checkpoint.graph.at(2))
    assert checkpoint._manifest is not None

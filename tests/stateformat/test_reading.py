"""Slices read back: the rows that were written, from no more bytes than they take, or an error that
names the object.

Segments are opened several at a time where the storage says that reads wait, in the order of the
rows. A storage that remembers what was read in some folders, and nothing else.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier, Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import stateformat as sf
from stateformat.backends.storage.local import LocalStorage
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import CheckpointError, DamagedCheckpoint, ErrorKind, InvalidInput
from stateformat.manifest import Manifest, handles_table
from stateformat.model import Handle, SchemaVersion, State
from stateformat.reading import ReadTask
from stateformat.reading.scan import SliceReader
from stateformat.schema import segment_schema
from stateformat.segments import WriteOptions
from stateformat.segments.write import digest
from stateformat.states import declare
from stateformat.storage import instrumented, remembered, stats_of
from stateformat.tables import prefetch
from tests.worlds.segments import OBJECTS, CountingStorage, read, record, slices, whole_slices, write
from tests.worlds.stores import counts_job

VALUE = declare.value_state("op", "counts", keys={"k": pa.int64()}, values={"v": pa.int64()})
OTHER = declare.value_state("op", "other", keys={"k": pa.int64()}, values={"v": pa.int64()})
MAP = declare.map_state("op", "map", keys={"k": pa.string()}, map_key=pa.float64(), values={"v": pa.string()})
LIST = declare.list_state("op", "list", keys={"k": pa.string()}, values={"v": pa.int32()})
TIMERS = declare.timers("op", "timers", keys={"k": pa.string()})
SPLIT = declare.even_split_state("op", "offsets", columns={"entry": pa.int64()})
PROGRESS = declare.progress_state("op")
FLIGHT = declare.in_flight_state("op", "flight", edge="e", columns={"v": pa.int64()})
SMALL_ROW_GROUPS = WriteOptions(row_group_rows=500, inline_bytes_max=0)


@pytest.fixture
def storage() -> Iterator[CountingStorage]:
    yield CountingStorage("reading")
    MemoryStorage.reset("reading")


def numbered(count: int, first: int = 0) -> pa.Table:
    numbers = pa.array(range(first, first + count), pa.int64())
    return pa.table({"k": numbers, "v": numbers})


def pairs(rows: pa.Table) -> list[tuple[Any, Any]]:
    return sorted(zip(rows["k"].to_pylist(), rows["v"].to_pylist(), strict=True))


def rows_of_groups(handle: Handle, first: int, last: int) -> tuple[int, int]:
    """First row, and number of rows, of a range of key groups of a handle."""
    counts = handle.rows_per_group or []
    low, high = first - (handle.first_group or 0), last + 1 - (handle.first_group or 0)
    return sum(counts[:low]), sum(counts[low:high])


def reader(storage: CountingStorage, state: State, *handles: Handle) -> SliceReader:
    return SliceReader(storage, record(state), Manifest(handles_table(handles)), whole_slices(handles))


def part(handle: Handle, first: int, last: int) -> pa.Table:
    return slices([(0, handle, *rows_of_groups(handle, first, last))])


def is_sorted(rows: pa.Table) -> bool:
    groups = rows["_key_group"].to_pylist()
    return groups == sorted(groups)


# ---- what was written ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [WriteOptions(), OBJECTS, WriteOptions(codec="zstd", encoding="plain")])
def test_rows_come_back_from_an_object_and_from_the_manifest(storage: CountingStorage, options: WriteOptions) -> None:
    rows = [{"k": k, "v": None if k % 7 == 0 else k} for k in range(-50, 50)]
    found = read(storage, VALUE, [write(storage, VALUE, rows, options)])
    assert found.schema.equals(segment_schema(VALUE))
    assert sorted(found.select(["k", "v"]).to_pylist(), key=lambda row: row["k"]) == rows
    assert is_sorted(found)


TIMES = [("", 5), ("x", 5), ("y", -(2**63))]


@pytest.mark.parametrize(
    ("state", "own"),
    [
        (MAP, [{"_map_key": 0.0, "v": "zero"}, {"_map_key": None, "v": ""}, {"_map_key": 1.5, "v": None}]),
        (LIST, [{"_index": 0, "v": 1}, {"_index": 2**40, "v": None}]),
        (TIMERS, [{"_timestamp": at, "_tag": tag} for tag, at in TIMES]),
    ],
)
def test_every_kind_of_keyed_state_comes_back(storage: CountingStorage, state: State, own: list[Any]) -> None:
    rows = [{"k": key} | values for key in ("a", "", None, "ä") for values in own]
    found = read(storage, state, [write(storage, state, rows)]).drop_columns(["_key_group"])
    wanted = [repr({name: row.get(name) for name in found.column_names}) for row in rows]
    assert sorted(map(repr, found.to_pylist())) == sorted(wanted)


def test_entries_come_back_in_the_order_of_the_slices(storage: CountingStorage) -> None:
    handles = [write(storage, SPLIT, [{"entry": 10 * n + i} for i in range(5)], subtask=n) for n in range(3)]
    chosen = slices([(2, handles[2], 1, 3), (0, handles[0], 4, 1), (1, handles[1], 0, 2)])
    assert read(storage, SPLIT, handles, chosen)["entry"].to_pylist() == [21, 22, 23, 4, 10, 11]


def test_records_in_flight_can_be_read_in_part(storage: CountingStorage) -> None:
    rows = [{"_sender": sender, "_receiver": 0, "_seq": seq, "v": seq} for sender in (1, 3) for seq in range(10)]
    handle = write(storage, FLIGHT, rows)
    # A slice of records in flight may be a part of one sender's.
    found = read(storage, FLIGHT, [handle], slices([(0, handle, 7, 6)]))
    assert found.to_pylist() == rows[7:13]


def test_progress_is_merged_per_edge_over_all_handles(storage: CountingStorage) -> None:
    reports = [
        [("left", 5, True), ("right", 2**63 - 1, True)],
        [("left", 9, True), ("right", -(2**63), False)],
        [("left", 7, False)],
    ]
    handles = [
        write(storage, PROGRESS, [{"_edge": e, "_watermark": w, "_ended": x} for e, w, x in rows], subtask=n)
        for n, rows in enumerate(reports)
    ]
    found = read(storage, PROGRESS, handles)
    assert found.schema.equals(segment_schema(PROGRESS))
    assert found.to_pylist() == [
        {"_edge": "left", "_watermark": 5, "_ended": False},
        {"_edge": "right", "_watermark": -(2**63), "_ended": False},
    ]
    assert read(storage, PROGRESS, handles[:1])["_ended"].to_pylist() == [True, True]


def test_slices_without_rows_give_no_batches(storage: CountingStorage) -> None:
    handle = write(storage, VALUE, [])
    assert read(storage, VALUE, [handle]).num_rows == 0
    assert list(reader(storage, VALUE, handle).batches()) == []
    assert storage.reads == 0


def test_keyed_rows_of_several_old_subtasks_are_one_stream_in_the_order_of_groups(storage: CountingStorage) -> None:
    whole = read(storage, VALUE, [write(storage, VALUE, numbered(2000))])
    handles = [
        write(storage, VALUE, whole.filter(pc.field("_key_group").isin(range(32 * n, 32 * n + 32))), subtask=n)
        for n in range(4)
    ]
    chosen = slices([(n, handles[n]._replace(subtask=9), 0, handles[n].rows) for n in (2, 0, 3, 1)])
    found = read(storage, VALUE, handles, chosen)
    assert pairs(found) == [(k, k) for k in range(2000)]
    assert is_sorted(found)


@pytest.mark.parametrize("batch_rows", [1, 100, 1000, 131_072])
def test_batches_are_at_most_as_long_as_asked(storage: CountingStorage, batch_rows: int) -> None:
    handles = [write(storage, SPLIT, [{"entry": 40 * n + i} for i in range(40)], subtask=n) for n in range(10)]
    batches = list(reader(storage, SPLIT, *handles).batches(batch_rows))
    assert [entry for batch in batches for entry in batch["entry"].to_pylist()] == list(range(400))
    assert max(map(len, batches)) <= batch_rows
    # Small pieces are joined.
    assert len(batches) == {1: 400, 100: 10, 1000: 1, 131_072: 1}[batch_rows]


# ---- layers --------------------------------------------------------------------------------------


def model_of(layers: Sequence[Sequence[dict[str, Any]]]) -> dict[Any, Any]:
    state: dict[Any, Any] = {}
    for layer in layers:
        for row in layer:
            if row.get("_op") == 2:
                state = {key: v for key, v in state.items() if key[0] != row["k"]}
        for row in layer:
            if row.get("_op", 0) == 0:
                state[row["k"], row["_map_key"]] = row["v"]
            elif row["_op"] == 1:
                state.pop((row["k"], row["_map_key"]), None)
    return state


def random_layers(seed: int) -> list[list[dict[str, Any]]]:
    rng = np.random.default_rng(seed)
    layers: list[list[dict[str, Any]]] = []
    for number in range(4):
        picked = {(f"key{rng.integers(60)}", float(rng.integers(9))) for _ in range(300)}
        layers.append([{"k": k, "_map_key": m, "v": f"{number}-{k}-{m}"} for k, m in sorted(picked)])
        if number:
            layers[-1] = [row | {"_op": int(rng.integers(2))} for row in layers[-1]]
            layers[-1] += [{"k": f"key{n}", "_op": 2} for n in sorted(set(rng.integers(0, 60, 5).tolist()))]
    return layers


PIECEWISE = {"reading.scan.MERGED_BYTES_MAX": 0, "reading.overlay.HELD_BYTES": 0}


@pytest.mark.parametrize(
    "bounds",
    [
        {"reading.scan.PIECE_ROWS_MAX": 1},
        {"reading.scan.PIECE_ROWS_MAX": 50},
        {},
        {"reading.scan.MERGED_BYTES_MAX": 0, "segments.reader.PIECE_ROWS_MAX": 3},
        PIECEWISE,
        {**PIECEWISE, "reading.overlay._BUCKET_BYTES": 500, "reading.overlay._LARGE_BUCKET": 1},
    ],
)
@pytest.mark.parametrize("options", [WriteOptions(), WriteOptions(row_group_rows=20, inline_bytes_max=0)])
def test_layers_are_merged_whatever_is_read_at_a_time(
    storage: CountingStorage, options: WriteOptions, bounds: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bounds.items():
        monkeypatch.setattr(f"stateformat.{name}", value)
    layers = random_layers(1)
    handles = [write(storage, MAP, rows, options, layer=number) for number, rows in enumerate(layers)]
    found = read(storage, MAP, handles)
    assert found.schema.equals(segment_schema(MAP))
    assert {(row["k"], row["_map_key"]): row["v"] for row in found.to_pylist()} == model_of(layers)
    assert found.num_rows == len(model_of(layers))
    assert is_sorted(found)


def test_a_part_of_the_key_groups_of_every_layer_is_the_part_of_the_state(storage: CountingStorage) -> None:
    layers = random_layers(2)
    options = WriteOptions(row_group_rows=20, inline_bytes_max=0)
    handles = [write(storage, MAP, rows, options, layer=number) for number, rows in enumerate(layers)]
    parts = []
    for first, last in ((0, 41), (42, 84), (85, 127)):
        cut = [(n, h, *rows_of_groups(h, max(first, h.first_group or 0), last)) for n, h in enumerate(handles)]
        parts.append(read(storage, MAP, handles, slices(cut)))
        assert all(first <= group <= last for group in parts[-1]["_key_group"].to_pylist())
    assert pa.concat_tables(parts).equals(read(storage, MAP, handles))


def test_layers_of_different_subtasks_have_nothing_to_do_with_each_other(storage: CountingStorage) -> None:
    # The same keys under two subtasks, as no checkpoint has them: a delete of one must not reach
    # the other.
    rows = [{"k": "a", "_map_key": 1.0, "v": "x"}]
    handles = [
        write(storage, MAP, rows, subtask=0),
        write(storage, MAP, rows, subtask=1),
        write(storage, MAP, [rows[0] | {"_op": 1, "v": None}], subtask=1, layer=1),
    ]
    assert read(storage, MAP, handles).num_rows == 1


def test_deltas_without_a_base_give_what_they_write(storage: CountingStorage) -> None:
    rows = [{"_op": 0, "k": 1, "v": 1}, {"_op": 1, "k": 2}, {"_op": 2, "k": 3}]
    handles = [write(storage, VALUE, [], subtask=0), write(storage, VALUE, rows, layer=1)]
    assert pairs(read(storage, VALUE, handles)) == [(1, 1)]


# ---- evolution -----------------------------------------------------------------------------------


def test_three_layers_of_three_ages_are_read_with_the_newest_schema(storage: CountingStorage) -> None:
    def declared(values: Any, **changes: Any) -> State:
        return declare.value_state("op", "s", keys={"k": pa.int64()}, values=values, **changes)

    first = declared({"n": pa.int32(), "gone": pa.string(), "f": pa.float32(), "d": pa.decimal128(5, 2)})
    second = declared({"d": pa.decimal128(9, 2), "n": pa.int64(), "f": pa.float64()}, previous=first)
    columns = {"count": pa.int64(), "d": pa.decimal128(20, 2), "f": pa.float64(), "gone": pa.string()}
    values = pa.schema([*columns.items(), pa.field("unit", pa.string(), nullable=False)])
    newest = declared(values, renames={"n": "count"}, defaults={"unit": "pieces"}, previous=second)
    d = pa.scalar(None, pa.decimal128(5, 2)).as_py()
    handles = [
        write(storage, first, [{"k": k, "n": k, "gone": "g", "f": 0.5, "d": d} for k in range(6)]),
        write(storage, second, [{"_op": 0, "k": 1, "n": 2**40, "f": 0.1}, {"_op": 1, "k": 2}], layer=1),
        write(
            storage,
            newest,
            [{"_op": 0, "k": 3, "count": 33, "gone": "back", "unit": "kg"}, {"_op": 2, "k": 4}],
            layer=2,
        ),
    ]
    assert [handle.schema_id for handle in handles] == [1, 2, 3]
    found = read(storage, newest, handles)
    assert found.schema.equals(segment_schema(newest))
    rows = sorted(found.drop_columns(["_key_group", "d"]).to_pylist(), key=lambda row: row["k"])
    assert rows == [
        {"k": 0, "count": 0, "f": 0.5, "gone": None, "unit": "pieces"},
        {"k": 1, "count": 2**40, "f": 0.1, "gone": None, "unit": "pieces"},
        {"k": 3, "count": 33, "f": None, "gone": "back", "unit": "kg"},
        {"k": 5, "count": 5, "f": 0.5, "gone": None, "unit": "pieces"},
    ]


def test_rows_can_be_read_with_a_schema_of_the_readers_own(storage: CountingStorage) -> None:
    handle = write(storage, VALUE, [{"k": 1, "v": 2}])
    found = read(storage, VALUE, [handle], as_schema=SchemaVersion(1, (VALUE.current.fields[0],)))
    assert found.column_names == ["_key_group", "k"]


# ---- how much is read ----------------------------------------------------------------------------


def test_a_whole_segment_is_one_read(storage: CountingStorage) -> None:
    handle = write(storage, VALUE, numbered(50_000))
    assert read(storage, VALUE, [handle]).num_rows == 50_000
    assert (storage.reads, storage.bytes_read) == (1, handle.size_bytes)


def test_a_slice_reads_its_row_groups_and_the_footer_and_no_more(storage: CountingStorage) -> None:
    rng = np.random.default_rng(0)
    given = pa.table({"k": np.arange(600_000), "v": rng.integers(0, 2**62, 600_000)})
    handle = write(storage, VALUE, given)
    total = 0
    for first, last in ((0, 20), (21, 63), (64, 127)):
        storage.bytes_read = 0
        start, rows = rows_of_groups(handle, first, last)
        found = read(storage, VALUE, [handle], slices([(0, handle, start, rows)]))
        assert set(found["_key_group"].to_pylist()) == set(range(first, last + 1))
        # Row groups are whole key groups, about four each here: those at the borders are read by
        # both neighbours.
        assert storage.bytes_read <= 1.05 * handle.size_bytes * (rows + 2 * 20_000) / handle.rows
        total += found.num_rows
    assert total == 600_000


def test_only_needed_row_groups_are_read_where_borders_fall_between_them(storage: CountingStorage) -> None:
    given = pa.table({"k": np.arange(2_000_000), "v": np.random.default_rng(0).integers(0, 2**62, 2_000_000)})
    handle = write(storage, VALUE, given)
    file = pq.ParquetFile(pa.BufferReader(storage.bytes_of(handle.path or "")))
    # About 15,600 rows a key group, so two of them a row group.
    borders = np.cumsum([0] + [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]).tolist()
    start, stop = borders[10], borders[30]
    stored = sum(file.metadata.row_group(i).column(c).total_compressed_size for i in range(10, 30) for c in range(3))
    storage.bytes_read = 0
    assert read(storage, VALUE, [handle], slices([(0, handle, start, stop - start)])).num_rows == stop - start
    assert stored < storage.bytes_read <= 1.05 * stored + handle.footer_bytes


def test_a_large_segment_is_read_in_ranges_even_as_a_whole(
    storage: CountingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = write(storage, VALUE, numbered(50_000), SMALL_ROW_GROUPS)
    monkeypatch.setattr("stateformat.reading.scan.WHOLE_BYTES_MAX", 100_000)
    monkeypatch.setattr("stateformat.segments.reader.PIECE_ROWS_MAX", 10_000)
    assert pairs(read(storage, VALUE, [handle])) == [(k, k) for k in range(50_000)]
    assert storage.reads >= 6
    assert storage.bytes_read < 1.05 * handle.size_bytes


def test_nothing_is_read_before_it_is_asked_for(storage: CountingStorage) -> None:
    handle = write(storage, VALUE, numbered(10))
    batches = reader(storage, VALUE, handle).batches()
    assert storage.reads == 0
    assert len(next(batches)) == 10


def test_a_reader_that_stops_early_stops_reading(storage: CountingStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stateformat.segments.reader.PIECE_ROWS_MAX", 500)
    handle = write(storage, VALUE, numbered(50_000), SMALL_ROW_GROUPS)
    monkeypatch.setattr("stateformat.reading.scan.WHOLE_BYTES_MAX", 100_000)
    batches = reader(storage, VALUE, handle).batches(500)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert storage.bytes_read < handle.size_bytes / 5


# ---- damage --------------------------------------------------------------------------------------


def damage(storage: CountingStorage, handle: Handle, data: bytes) -> None:
    assert handle.path
    storage.changed[handle.path] = data


def test_an_inline_segment_is_verified_too(storage: CountingStorage) -> None:
    handle = write(storage, VALUE, numbered(40), WriteOptions())
    assert handle.inline
    for bad in (handle.inline[:-1], handle.inline[:50] + b"!" + handle.inline[51:], b""):
        with pytest.raises(DamagedCheckpoint, match="in the manifest is damaged"):
            read(storage, VALUE, [handle._replace(inline=bad)])


def test_a_flipped_bit_in_a_page_is_found_by_its_checksum(storage: CountingStorage) -> None:
    handle = write(storage, VALUE, numbered(100_000))
    good = storage.bytes_of(handle.path or "")
    metadata = pq.read_metadata(pa.BufferReader(good))
    chunk = metadata.row_group(1).column(2)
    bad = bytearray(good)
    bad[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 4
    damage(storage, handle, bytes(bad))
    with pytest.raises(DamagedCheckpoint, match=r"(?i)crc") as raised:
        read(storage, VALUE, [handle], part(handle, 0, 126))
    assert raised.value.__cause__ is not None


@pytest.mark.parametrize("whole", [True, False])
def test_an_object_that_is_cut_short_swapped_or_gone_is_named(storage: CountingStorage, whole: bool) -> None:
    handle = write(storage, VALUE, numbered(100_000))
    other = write(storage, VALUE, numbered(100_000, first=1))
    chosen = part(handle, 0, 127 if whole else 90)
    good = storage.bytes_of(handle.path or "")
    for data, kinds in (
        (good[:-1], {ErrorKind.OBJECT_SIZE_DIFFERS}),
        (good[: len(good) // 2], {ErrorKind.OBJECT_SIZE_DIFFERS}),
        (b"", {ErrorKind.OBJECT_SIZE_DIFFERS}),
        (storage.bytes_of(other.path or ""), {ErrorKind.OBJECT_SIZE_DIFFERS, ErrorKind.OBJECT_DIGEST_DIFFERS}),
    ):
        damage(storage, handle, data)
        with pytest.raises(DamagedCheckpoint, match=handle.path) as raised:
            read(storage, VALUE, [handle], chosen)
        assert raised.value.kind in kinds
    storage.changed.clear()
    storage.delete([handle.path or ""])
    with pytest.raises(DamagedCheckpoint) as raised:
        read(storage, VALUE, [handle], chosen)
    assert raised.value.kind is ErrorKind.OBJECT_MISSING
    assert raised.value.details["path"] == handle.path


def forged(storage: CountingStorage, handle: Handle, data: bytes) -> Handle:
    """The handle of other bytes under the same path, with digests that are right."""
    damage(storage, handle, data)
    footer_bytes = int.from_bytes(data[-8:-4], "little") + 8
    metadata = pq.read_metadata(pa.BufferReader(data))
    return handle._replace(
        size_bytes=len(data),
        footer_bytes=footer_bytes,
        uncompressed_bytes=sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)),
        digest=digest(data),
        footer_digest=digest(data[-footer_bytes:]),
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"state": OTHER}, "state 'other'"),
        ({"checkpoint": 8}, "checkpoint_id b'8', and checkpoint 7"),
        ({"layer": 1}, "its columns are"),
    ],
)
def test_a_segment_of_another_place_is_refused_though_its_digest_is_right(
    storage: CountingStorage, other: dict[str, Any], message: str
) -> None:
    handle = write(storage, VALUE, [{"k": 1, "v": 1}])
    state = other.pop("state", VALUE)
    rows = [{"k": 1, "v": 1} | ({"_op": 0} if "layer" in other else {})]
    stranger = write(storage, state, rows, **other)
    with pytest.raises(DamagedCheckpoint, match=message):
        read(storage, VALUE, [forged(storage, handle, storage.bytes_of(stranger.path or ""))])


def rewritten(storage: CountingStorage, handle: Handle, **changes: Any) -> bytes:
    """The segment, written again by Arrow alone with changes."""
    good = pq.ParquetFile(pa.BufferReader(storage.bytes_of(handle.path or "")))
    rows = changes.pop("rows", good.read())
    metadata = dict(good.metadata.metadata) | changes.pop("metadata", {})
    sink = pa.BufferOutputStream()
    options = {"store_schema": False, "use_dictionary": False} | changes
    with pq.ParquetWriter(sink, rows.schema, **options) as writer:
        writer.write_table(rows)
        writer.add_key_value_metadata({name: value for name, value in metadata.items() if value is not None})
    data: bytes = sink.getvalue().to_pybytes()
    return data


def test_a_foreign_writers_segment_is_read_if_it_keeps_the_rules(storage: CountingStorage) -> None:
    handle = write(storage, VALUE, numbered(500))
    for options in (
        {"use_dictionary": True, "compression": "snappy"},
        {"data_page_version": "2.0", "compression": "zstd"},
        {"column_encoding": {"k": "DELTA_BINARY_PACKED"}, "compression": "none"},
    ):
        found = read(storage, VALUE, [forged(storage, handle, rewritten(storage, handle, **options))])
        assert pairs(found) == [(k, k) for k in range(500)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compression": "gzip"}, "GZIP"),
        ({"store_schema": True}, "ARROW:schema"),
        ({"metadata": {b"stateformat.job_id": b"another job"}}, "job_id 'another job'"),
        ({"metadata": {b"stateformat.operator": b"op2"}}, "operator 'op2'"),
        ({"metadata": {b"stateformat.version": b"2"}}, "version '2'"),
        ({"metadata": {b"stateformat.schema_id": None}}, "schema_id 'none'"),
        ({"metadata": {b"stateformat.checkpoint_id": b"-1"}}, "checkpoint_id"),
    ],
)
def test_a_foreign_writers_segment_is_refused_where_it_breaks_a_rule(
    storage: CountingStorage, changes: dict[str, Any], message: str
) -> None:
    handle = write(storage, VALUE, numbered(500))
    with pytest.raises(DamagedCheckpoint, match=message):
        read(storage, VALUE, [forged(storage, handle, rewritten(storage, handle, **changes))])


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.set_column(2, "v", rows["v"].cast(pa.int32())),
        lambda rows: rows.rename_columns(["_key_group", "k", "w"]),
        lambda rows: rows.select(["_key_group", "v", "k"]),
        lambda rows: rows.append_column("x", rows["v"]),
        lambda rows: rows.drop_columns(["v"]),
    ],
)
def test_columns_of_another_type_name_or_order_are_refused(storage: CountingStorage, change: Any) -> None:
    handle = write(storage, VALUE, numbered(500))
    rows = change(pq.read_table(pa.BufferReader(storage.bytes_of(handle.path or ""))))
    with pytest.raises(DamagedCheckpoint, match="its columns are"):
        read(storage, VALUE, [forged(storage, handle, rewritten(storage, handle, rows=rows))])


@pytest.mark.parametrize("whole", [True, False])
def test_a_manifest_that_says_other_counts_than_the_rows_is_noticed(
    storage: CountingStorage, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateformat.reading.scan._SMALL_BYTES", 0)
    handle = write(storage, VALUE, numbered(5000), SMALL_ROW_GROUPS)
    counts = list(handle.rows_per_group or [])
    moved = [counts[0] + 1, counts[1] - 1, *counts[2:]]
    rows = handle.rows if whole else sum(counts[:60])
    for lying, message in (
        (handle._replace(rows_per_group=moved), "the manifest says"),
        (handle._replace(first_group=1, last_group=128), "has _key_group 0, the manifest says 1"),
        (handle._replace(segment_rows=handle.rows + 1), "its footer says 5,000 rows, the manifest 5,001"),
        (handle._replace(uncompressed_bytes=1), "uncompressed bytes, the manifest 1"),
        (handle._replace(rows_per_group=counts[:-1]), "(does not say how many|plan again)"),
    ):
        with pytest.raises((DamagedCheckpoint, InvalidInput), match=message):
            read(storage, VALUE, [lying], slices([(0, lying, 0, rows)]))


def test_slices_that_are_none_of_the_manifest_are_the_callers_fault(storage: CountingStorage) -> None:
    handle = write(storage, VALUE, numbered(500))
    chosen = whole_slices([handle])
    for name, value, message in (
        ("rows", 501, "plan again"),
        ("row_start", 1, "plan again"),
        ("last_group", 5, "plan again"),
        ("handle", 1, "handles up to 1 of 1"),
        ("state", "other", "slices name states"),
    ):
        field = chosen.schema.field(name)
        wrong = chosen.set_column(chosen.schema.get_field_index(name), field, pa.array([value], field.type))
        with pytest.raises(InvalidInput, match=message):
            read(storage, VALUE, [handle], wrong)
    with pytest.raises(InvalidInput, match="batch_rows"):
        read(storage, VALUE, [handle], batch_rows=0)


def test_special_keys_come_back_as_they_are_stored(storage: CountingStorage) -> None:
    rows = [{"k": "", "_map_key": -0.0, "v": "a"}, {"k": None, "_map_key": math.nan, "v": None}]
    found = read(storage, MAP, [write(storage, MAP, rows)]).to_pylist()
    by_key = {row["k"]: row for row in found}
    assert math.copysign(1, by_key[""]["_map_key"]) == 1
    assert math.isnan(by_key[None]["_map_key"])


# ---- work ahead ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 10])
def test_work_ahead_keeps_the_order(count: int, workers: int) -> None:
    assert list(prefetch((partial(int, n) for n in range(count)), workers=workers, depth=3)) == list(range(count))


def test_work_ahead_is_bounded_and_its_error_comes_in_its_place() -> None:
    begun: list[int] = []
    closed = []

    def work(number: int) -> int:
        if number == 10:
            raise RuntimeError("ten")
        begun.append(number)
        return number

    def calls() -> Iterator[Any]:
        try:
            for number in range(100):
                yield partial(work, number)
        finally:
            closed.append(True)

    taken = []
    results = prefetch(calls(), depth=2)  # type: ignore[arg-type]
    for _ in range(10):
        taken.append(next(results))
        assert len(begun) <= len(taken) + 2
    with pytest.raises(RuntimeError, match="ten"):
        next(results)
    assert taken == list(range(10))
    assert closed == [True]
    # The next one may have begun; none after it has.
    assert begun in ([*range(10)], [*range(10), 11])


SEGMENTS, TOGETHER = 12, 4


class Waiting(LocalStorage):
    """Counts the reads under way; with a barrier it ends none before so many have begun."""

    def __init__(self, root: Path, reads_at_once: int | None, barrier: Barrier | None = None) -> None:
        super().__init__(str(root), durable=False)
        if reads_at_once is not None:
            self.reads_at_once = reads_at_once
        self.barrier = barrier
        self.lock = Lock()
        self.now = self.most = 0

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            if self.barrier is not None:
                self.barrier.wait(60)
            return super().read_range(path, offset, length)
        finally:
            with self.lock:
                self.now -= 1


@pytest.fixture
def task(tmp_path: Path) -> ReadTask:
    store = sf.open(str(tmp_path), durable=False)
    job = counts_job(parallelism=SEGMENTS, keys=400)
    job.publish(store, None, options=WriteOptions(inline_bytes_max=0))
    return store.open().read("counter", "counts")


@pytest.mark.parametrize("together", [TOGETHER, None])
def test_so_many_segments_are_opened_at_a_time_as_the_storage_says(
    task: ReadTask, tmp_path: Path, together: int | None
) -> None:
    # Of twelve, four have to come together each time: with fewer the barrier would break.
    storage = Waiting(tmp_path, together, Barrier(together) if together else None)
    assert replace(task, storage=storage).table().equals(task.table())
    assert storage.most == (together or 1)


def test_an_object_that_is_missing_ends_the_rows_before_its_own_and_leaves_no_read_under_way(
    task: ReadTask, tmp_path: Path
) -> None:
    paths, whole = task.handles["path"].to_pylist(), task.table()
    (tmp_path / paths[5]).unlink()
    storage = Waiting(tmp_path, TOGETHER)
    seen: list[pa.RecordBatch] = []
    with pytest.raises(CheckpointError, match=paths[5]):
        seen.extend(replace(task, storage=storage).batches(batch_rows=1))
    assert len(seen) <= sum(task.handles["rows"].to_pylist()[:5])
    assert pa.Table.from_batches(seen, whole.schema).equals(whole.slice(0, len(seen)))
    assert storage.now == 0


SEGMENT, RECORD = "segments/1/a.parquet", "checkpoints/1.json"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    storage = LocalStorage(tmp_path, durable=False)
    for path in (SEGMENT, RECORD):
        storage.create(path, bytes(range(100)))
    return str(tmp_path)


def test_a_part_of_a_segment_is_read_once_and_anything_else_each_time(folder: str) -> None:
    counted = instrumented(LocalStorage(folder))
    storage = remembered(counted)
    for _ in range(3):
        assert storage.read_range(SEGMENT, 10, 5).to_pybytes() == bytes(range(10, 15))
        assert storage.read_range(RECORD, 0, 2).to_pybytes() == b"\0\1"
    assert stats_of(counted)["read_range"].calls == 1 + 3
    assert storage.read_range(SEGMENT, 10, 6).to_pybytes() == bytes(range(10, 16)), "another part"
    assert stats_of(counted)["read_range"].calls == 1 + 3 + 1


def test_an_object_that_was_read_to_its_end_answers_for_each_of_its_beginnings(folder: str) -> None:
    counted = instrumented(LocalStorage(folder))
    storage = remembered(counted, ("checkpoints/",))
    for length in (1000, 100, 7, 2000):
        assert storage.read_range(RECORD, 0, length).to_pybytes() == bytes(range(min(length, 100)))
    assert stats_of(counted)["read_range"].calls == 1


def test_what_was_read_longest_ago_is_forgotten_first_and_what_is_too_large_at_once(folder: str) -> None:
    counted = instrumented(LocalStorage(folder))
    storage = remembered(counted, most_bytes=20)

    def reads(offset: int) -> int:
        before = stats_of(counted)["read_range"].calls
        assert storage.read_range(SEGMENT, offset, 8).to_pybytes() == bytes(range(offset, offset + 8))
        return stats_of(counted)["read_range"].calls - before

    assert [reads(offset) for offset in (0, 8, 0, 16, 0, 8)] == [1, 1, 0, 1, 0, 1]
    assert storage.read_range(SEGMENT, 0, 21).size == 21
    assert [reads(offset) for offset in (0, 8)] == [0, 0], "it has pushed nothing out"


def test_a_copy_is_the_storage_itself(folder: str) -> None:
    storage = remembered(LocalStorage(folder))
    assert storage.url == LocalStorage(folder).url
    assert type(pickle.loads(pickle.dumps(storage))) is LocalStorage
    with pytest.raises(FileNotFoundError):
        storage.read_range("segments/1/none.parquet", 0, 1)

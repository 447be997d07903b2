"""What a scan reads: of a key the row groups of its key group in each layer, of some columns their
column chunks, by as few requests as there can be; and damage there is noticed.

Slices cut to key groups and into parts, against their rows one by one. Many small states of one
checkpoint, read whole: each is what it is alone, in any order.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import stateformat as sf
from stateformat import parquet
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import DamagedCheckpoint
from stateformat.keys import DEFAULT_KEY_HASH, hash_keys, key_groups
from stateformat.manifest import Manifest, handles_table
from stateformat.model import Handle, State
from stateformat.reading import Checkpoint, SegmentTask, StateRows, StoreCheckpoint
from stateformat.reading.cutting import cut_to_groups, split_between_owners, split_slices
from stateformat.schema import SLICE_SCHEMA
from stateformat.segments import WriteOptions, groups_of_keys
from stateformat.states import declare, value_state
from stateformat.storage import Storage, instrumented, open_storage
from stateformat.store import open as open_store
from tests.servers.server import BUCKET, S3Server
from tests.worlds.data import data_store, expected, same_rows
from tests.worlds.segments import CountingStorage, record, whole_slices, write
from tests.worlds.stores import counts_job, refused

COLUMNS = [f"v{i}" for i in range(12)]
WIDE = declare.value_state("op", "wide", keys={"k": pa.int64()}, values=dict.fromkeys(COLUMNS, pa.int64()))
ENTRIES = declare.even_split_state("op", "entries", columns=dict.fromkeys(COLUMNS, pa.int64()))
ROWS = 80_000
ROW_GROUPS = WriteOptions(row_group_rows=10_000, inline_bytes_max=0)
SMALL_ROW_GROUPS = WriteOptions(row_group_rows=1_000, inline_bytes_max=0)


class Ranges(CountingStorage):
    """Keeps which bytes of which object were read; ``reads_at_once`` as a storage says it."""

    def __init__(self, name: str, at_once: int = 1) -> None:
        super().__init__(name)
        self.ranges: list[tuple[str, int, int]] = []
        self.reads_at_once = at_once
        self.barrier: Barrier | None = None

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        if self.barrier is not None:
            self.barrier.wait(30)
        data = super().read_range(path, offset, length)
        self.ranges.append((path, offset, offset + data.size))
        return data


@pytest.fixture(params=[1, 8], ids=["local", "remote"])
def storage(request: pytest.FixtureRequest) -> Iterator[Ranges]:
    yield Ranges("rows-reads", request.param)
    MemoryStorage.reset("rows-reads")


def wide(keys: range, seed: int) -> pa.Table:
    numbers = np.random.default_rng(seed)
    values = {name: numbers.integers(-(2**62), 2**62, len(keys)) for name in COLUMNS}
    return pa.table({"k": pa.array(keys, pa.int64()), **values})


def rows_of(storage: Storage, state: State, handles: list[Handle]) -> StateRows:
    return StateRows.of(SegmentTask(storage, record(state), handles_table(handles), whole_slices(handles)))


def layered(storage: Storage) -> tuple[StateRows, list[Handle], pa.Table]:
    """A base and two deltas of many row groups, and one that is inline; what stands."""
    layers = [wide(range(ROWS), 0), wide(range(0, ROWS, 2), 1), wide(range(0, ROWS, 10), 2), wide(range(5), 3)]
    handles = [write(storage, WIDE, layers[0], SMALL_ROW_GROUPS)]
    for number, rows in enumerate(layers[1:], 1):
        delta = rows.add_column(0, pa.field("_op", pa.int8()), [pa.array(np.zeros(len(rows), np.int8))])
        options = WriteOptions() if number == 3 else SMALL_ROW_GROUPS
        handles.append(write(storage, WIDE, delta, options, layer=number))
    standing: dict[Any, dict[str, Any]] = {}
    for rows in layers:
        standing |= {row["k"]: row for row in rows.to_pylist()}
    return rows_of(storage, WIDE, handles), handles, pa.Table.from_pylist(list(standing.values()), layers[0].schema)


def chunks(storage: Ranges, handle: Handle, groups: set[int], columns: set[str]) -> list[tuple[str, int, int]]:
    """Where pyarrow says that these columns lie, in the row groups with these key groups; joined
    where they touch.
    """
    file = pq.ParquetFile(pa.BufferReader(storage.bytes_of(handle.path or "")))
    spans = []
    for number in range(file.num_row_groups):
        if not groups.isdisjoint(file.read_row_group(number, ["_key_group"])["_key_group"].to_pylist()):
            of_group = file.metadata.row_group(number)
            for at in range(of_group.num_columns):
                chunk = of_group.column(at)
                if chunk.path_in_schema in columns:
                    start = chunk.dictionary_page_offset or chunk.data_page_offset
                    spans.append((start, start + chunk.total_compressed_size))
    return joined((handle.path or "", start, stop) for start, stop in spans)


def joined(spans: Iterable[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Spans that touch as one, sorted; they must not overlap."""
    found: list[tuple[str, int, int]] = []
    for path, start, stop in sorted(spans):
        if found and found[-1][0] == path and found[-1][2] >= start:
            assert found[-1][2] == start, "read twice"
            found[-1] = path, found[-1][1], stop
        else:
            found.append((path, start, stop))
    return found


def footer(handle: Handle) -> tuple[str, int, int]:
    return handle.path or "", handle.size_bytes - handle.footer_bytes, handle.size_bytes


ALL = {"_key_group", "_op", "k", *COLUMNS}


def test_a_key_costs_footer_and_row_groups_of_its_key_group_in_each_layer(storage: Ranges) -> None:
    rows, handles, standing = layered(storage)
    assert [handle.size_bytes > 1 << 18 for handle in handles] == [True, True, True, False]
    assert handles[3].inline is not None
    for key in (1, 40, 777):
        group = int(key_groups(hash_keys([pa.chunked_array([pa.array([key])])]), 128)[0])
        storage.ranges.clear()
        found = rows.at_keys({"k": key})
        assert storage.ranges == []
        assert same_rows(found.table(), standing.filter(pc.equal(standing["k"], key)))
        wanted = [span for handle in handles[:3] for span in (footer(handle), *chunks(storage, handle, {group}, ALL))]
        assert sorted(storage.ranges) == sorted(wanted)
        assert len(storage.ranges) == 6


def test_threads_of_arrow_never_let_go_of_a_file_of_ours(storage: Ranges, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does so while Python shuts down ends the process by SIGABRT."""
    rows, _, standing = layered(storage)
    threads: list[str] = []

    class Watched(parquet.PartialFile):
        def __del__(self) -> None:
            threads.append(threading.current_thread().name)

    monkeypatch.setattr(parquet, "PartialFile", Watched)
    for _ in range(30):
        assert len(rows.select(["k", "v3"]).table()) == len(standing)
    assert len(threads) >= 30
    # So Python names threads that it has not begun.
    assert not [name for name in threads if name.startswith("Dummy")]


def test_many_keys_cost_their_key_groups_together_and_each_footer_once(storage: Ranges) -> None:
    rows, handles, standing = layered(storage)
    keys = [3, 500, 7001, 7002, 2**40]
    groups = {*key_groups(hash_keys([pa.chunked_array([pa.array(keys)])]), 128).tolist()}
    storage.ranges.clear()
    found = rows.at_keys([{"k": key} for key in keys]).table()
    assert same_rows(found, standing.filter(pc.is_in(standing["k"], pa.array(keys))))
    wanted = [span for handle in handles[:3] for span in (footer(handle), *chunks(storage, handle, groups, ALL))]
    assert joined(storage.ranges) == joined(wanted)
    assert [storage.ranges.count(footer(handle)) for handle in handles[:3]] == [1, 1, 1]


def test_a_key_of_a_small_segment_is_one_read(storage: Ranges) -> None:
    handle = write(storage, WIDE, wide(range(300), 0), WriteOptions(inline_bytes_max=0))
    storage.ranges.clear()
    assert rows_of(storage, WIDE, [handle]).at_keys({"k": 7}).table()["k"].to_pylist() == [7]
    assert storage.ranges == [(handle.path, 0, handle.size_bytes)]


def test_a_key_that_no_layer_can_have_costs_nothing(storage: Ranges) -> None:
    handle = write(storage, WIDE, wide(range(1), 0), WriteOptions(inline_bytes_max=0))
    found = rows_of(storage, WIDE, [handle])
    storage.ranges.clear()
    group = key_groups(hash_keys([pa.chunked_array([pa.array(range(50))])]), 128).tolist()
    other = next(key for key in range(1, 50) if group[key] != group[0])
    assert found.at_keys({"k": other}).table().num_rows == 0
    assert storage.ranges == []


@pytest.mark.parametrize("state", [WIDE, ENTRIES], ids=["keyed", "entries"])
def test_some_columns_cost_their_chunks_and_the_footer(storage: Ranges, state: State) -> None:
    data = wide(range(ROWS), 0)
    handle = write(storage, state, data if state is WIDE else data.drop_columns(["k"]), ROW_GROUPS)
    rows = rows_of(storage, state, [handle])
    whole = rows.table()
    for names in (["v9", "v2"], ["v5"], []):
        storage.ranges.clear()
        found = rows.select(names).table()
        assert found.num_rows == ROWS
        assert found.equals(whole.select(names))
        read = sum(stop - start for _, start, stop in storage.ranges) - handle.footer_bytes
        needed = {*names, *(["_key_group"] if state is WIDE else [])} or {"v0"}
        least = sum(stop - start for _, start, stop in columns_of(storage, handle, needed))
        # A hole that is smaller than a request is worth is read as well.
        assert least <= read
        assert read < (0.2 if storage.reads_at_once == 1 else 0.6) * handle.size_bytes
    storage.ranges.clear()
    assert rows.select(whole.column_names[1:]).table().num_rows == ROWS
    assert storage.ranges == [(handle.path, 0, handle.size_bytes)], "most columns: the whole segment, by its digest"


def columns_of(storage: Ranges, handle: Handle, columns: set[str]) -> list[tuple[str, int, int]]:
    metadata = pq.ParquetFile(pa.BufferReader(storage.bytes_of(handle.path or ""))).metadata
    found = []
    for number in range(metadata.num_row_groups):
        for at in range(metadata.num_columns):
            chunk = metadata.row_group(number).column(at)
            if chunk.path_in_schema in columns:
                start = chunk.dictionary_page_offset or chunk.data_page_offset
                found.append((handle.path or "", start, start + chunk.total_compressed_size))
    return found


def test_columns_with_points_in_their_names_and_nested_ones_are_told_apart() -> None:
    storage = Ranges("rows-points")
    pair = pa.struct([pa.field("b", pa.int64()), pa.field("c", pa.list_(pa.string()))])
    values = {"a": pair, "a.b": pa.bool_(), "a.c": pa.map_(pa.string(), pair), "z": pa.int32()}
    state = declare.value_state("op", "nested", keys={"k": pa.int64()}, values=values)
    one = {"b": 1, "c": ["x", None]}
    data = [{"k": n, "a": {"b": n, "c": []}, "a.b": n % 3 == 0, "a.c": [("m", one)], "z": n} for n in range(50)]
    handle = write(storage, state, data, WriteOptions(inline_bytes_max=0, row_group_rows=20, encoding="plain"))
    rows = rows_of(storage, state, [handle])
    whole = rows.table()
    for name in whole.column_names:
        assert rows.select([name]).table().equals(whole.select([name])), name


@pytest.mark.parametrize("name", ["v3", "_key_group"])
def test_a_flipped_byte_in_a_chunk_that_is_read_is_noticed_and_others_do_not_matter(name: str) -> None:
    storage = Ranges("rows-damage")
    handle = write(storage, WIDE, wide(range(ROWS), 0), ROW_GROUPS)
    rows = rows_of(storage, WIDE, [handle])
    wanted = rows.select(["v3"]).table()
    data = bytearray(storage.bytes_of(handle.path or ""))
    path, start, stop = columns_of(storage, handle, {name})[1]
    data[(start + stop) // 2] ^= 4
    storage.changed[path] = bytes(data)
    refused(DamagedCheckpoint, rows.select(["v3"]).table, f"segment {path} in memory://rows-damage is damaged")
    with pytest.raises(pa.ArrowException, match="is damaged"):
        pa.table(rows.select(["v3"]))
    data[(start + stop) // 2] ^= 4
    _, start, stop = columns_of(storage, handle, {"v7"})[0]
    data[(start + stop) // 2] ^= 4
    storage.changed[path] = bytes(data)
    # The column that is damaged is not read; who reads it is told.
    assert rows.select(["v3"]).table().equals(wanted)
    refused(DamagedCheckpoint, rows.select(["v7"]).table, f"segment {path}")


def test_no_flipped_bit_gives_wrong_rows_of_some_columns_or_keys() -> None:
    storage = Ranges("rows-flips")
    handle = write(storage, WIDE, wide(range(20_000), 0), WriteOptions(row_group_rows=2_000, inline_bytes_max=0))
    rows = rows_of(storage, WIDE, [handle])
    assert handle.size_bytes > 1 << 20, "so that it is read in ranges"
    scans = [rows.select(["v3", "v8"]), rows.at_keys({"k": 77}).select(["v5"])]
    wanted = [scan.table() for scan in scans]
    good, path = storage.bytes_of(handle.path or ""), handle.path or ""
    random = np.random.default_rng(13)
    # Headers of the pages that are read, their bodies, the footer, and anywhere.
    starts = [start for _, start, _ in columns_of(storage, handle, {"_key_group", "k", "v3", "v5", "v8"})]
    places = [start + int(random.integers(0, 40)) for start in starts for _ in range(2)]
    places += random.integers(len(good) - handle.footer_bytes, len(good), 30).tolist()
    places += random.integers(0, len(good), 30).tolist()
    noticed = 0
    for place in places:
        data = bytearray(good)
        data[place] ^= 1 << int(random.integers(0, 8))
        storage.changed[path] = bytes(data)
        for scan, right in zip(scans, wanted, strict=True):
            try:
                found = scan.table()
            except DamagedCheckpoint:
                noticed += 1
                continue
            assert found.equals(right), (place, scan)
    assert noticed > len(places) / 2


PAIR = pa.struct([pa.field("x", pa.float64()), pa.field("y", pa.string())])
NAN = float("nan")
ODD_KEYS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"f": pa.float64()}, [{"f": value} for value in (NAN, 0.0, -0.0, None, 1.5, -1.5)]),
    ({"f": pa.float32(), "b": pa.bool_()}, [{"f": f, "b": b} for f in (NAN, -0.0, None) for b in (True, None)]),
    (
        {"p": PAIR},
        [{"p": value} for value in (None, {"x": -0.0, "y": None}, {"x": None, "y": ""}, {"x": NAN, "y": "a"})],
    ),
    ({"d": pa.decimal128(20, 3)}, [{"d": value} for value in (Decimal("1.000"), Decimal("-0.001"), None)]),
]


@pytest.mark.parametrize(
    ("columns", "keys"), ODD_KEYS, ids=lambda item: " ".join(item) if isinstance(item, dict) else ""
)
def test_null_nan_and_negative_zero_are_keys(columns: dict[str, Any], keys: list[dict[str, Any]]) -> None:
    storage = Ranges("rows-odd-keys")
    state = declare.map_state("op", "odd", keys=columns, map_key=pa.int64(), values={"v": pa.int64()})
    # Negative zero is zero: of those two only one is written.
    written = [
        key for number, key in enumerate(keys) if repr(key).replace("-0.0", "0.0") not in map(repr, keys[:number])
    ]
    base = [{**key, "_map_key": entry, "v": number} for number, key in enumerate(written) for entry in range(3)]
    deleted = [{**key, "_op": 1, "_map_key": 1} for key in written]
    handles = [write(storage, state, base), write(storage, state, deleted, layer=1)]
    rows = rows_of(storage, state, handles)
    for number, key in enumerate(written):
        found = rows.at_keys(key).select(["_map_key", "v"]).table().sort_by("_map_key").to_pylist()
        assert found == [{"_map_key": entry, "v": number} for entry in (0, 2)], key
    for key in keys:
        assert rows.at_keys(key).table().num_rows == 2, key
    assert rows.at_keys(keys).table().num_rows == rows.table().num_rows == 2 * len(written)


def test_layers_of_a_key_are_opened_and_read_side_by_side_where_reads_wait() -> None:
    storage = Ranges("rows-together", 8)
    rows, _, _ = layered(storage)
    # Three footers together, then three ranges together: with fewer the barrier would break.
    storage.barrier = Barrier(3)
    assert rows.at_keys({"k": 40}).table().num_rows == 1
    assert len(storage.ranges) == 6


@pytest.mark.s3
def test_requests_on_s3_are_manifest_and_segments(moto: S3Server) -> None:
    data_store(f"s3://{BUCKET}/rows-reads", **moto.options())
    store = open_store(f"s3://{BUCKET}/rows-reads", **moto.options())
    checkpoint = store.open()
    requests = store.stats.operations

    def counted(call: Any) -> dict[str, int]:
        before = {name: counts.calls for name, counts in store.stats.operations.items()}
        call()
        after = {name: counts.calls for name, counts in store.stats.operations.items()}
        return {name: calls - before.get(name, 0) for name, calls in after.items() if calls != before.get(name, 0)}

    assert requests["read_range"].calls == 1, "the record"
    rows = checkpoint.state("totals", "spent")
    found: list[pa.Table] = []
    key = rows.at_keys({"user": "u0018"})
    segments = {path for path in key.task.handles["path"].to_pylist() if key.task.storage.url and path}
    inline = [value for value in key.task.handles["inline"].to_pylist() if value is not None]
    # The manifest has been read by now; small segments are one request each, inline ones none.
    cost = counted(lambda: found.append(key.table()))
    assert cost == {"read_range": len(segments) - len(inline)}
    wanted = expected("totals", "spent")
    assert same_rows(found[0], wanted.filter(pc.equal(wanted["user"], "u0018")))


@pytest.mark.s3
def test_a_key_in_large_segments_on_s3_is_two_requests_a_layer(moto: S3Server) -> None:
    storage = instrumented(open_storage(f"s3://{BUCKET}/rows-large", **moto.options()))
    rows, handles, standing = layered(storage)

    def requests(call: Callable[[], pa.Table]) -> tuple[pa.Table, int]:
        before = sum(counts.calls for counts in storage.stats.operations.values())
        found = call()
        return found, sum(counts.calls for counts in storage.stats.operations.values()) - before

    found, asked = requests(rows.at_keys({"k": 40}).table)
    assert same_rows(found, standing.filter(pc.equal(standing["k"], 40)))
    assert asked == 6
    # All rows of the base: one request for the whole segment, by its digest.
    whole = rows_of(storage, WIDE, handles[:1])
    assert requests(whole.table)[1] == 1


EXPIRED = "checkpoint 1 in .* has expired while it was read .* is gone.; open the newest"


@pytest.mark.parametrize(
    "scan",
    [
        lambda rows, _: rows.table(),
        lambda rows, _: pa.table(rows),
        lambda rows, _: pl.DataFrame(rows),
        lambda rows, _: duckdb.sql("from rows").fetchall(),
        lambda rows, folder: ds.write_dataset(pa.RecordBatchReader.from_stream(rows), folder, format="parquet") or 1,
        lambda rows, _: rows.at_keys({"word": "w7"}).table(),
        lambda rows, _: pa.concat_tables(part.table() for part in pickle.loads(pickle.dumps(rows)).split(3)),
    ],
    ids=["table", "pyarrow", "polars", "duckdb", "dataset", "key", "parts"],
)
def test_a_checkpoint_that_expires_while_it_is_read_is_a_sentence_in_each_tool(scan: Any, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"), durable=False)
    job, options = counts_job(keys=100), WriteOptions(inline_bytes_max=0)
    permit = job.publish(store, None, options=options)
    rows = store.open(1).state("counter", "counts")
    assert scan(rows, tmp_path / "before") is not None
    job.publish(store, permit, options=options)
    store.expire(keep=1)
    with pytest.raises(Exception, match=EXPIRED):
        scan(rows, tmp_path / "after")


def test_asking_for_columns_keys_parts_and_streams_reads_no_segment(tmp_path: Path) -> None:
    store = data_store(str(tmp_path))
    rows = store.open().state("totals", "spent")
    before = store.stats.operations["read_range"].calls
    asked = rows.select(["user"]).at_keys({"user": "u0018"})
    capsules = [part.__arrow_c_stream__() for part in (rows, asked, *rows.split(4))]
    assert asked.schema.names == ["user"]
    for make in (rows.__arrow_c_schema__, partial(repr, rows), partial(pa.RecordBatchReader.from_stream, rows)):
        make()
    assert store.stats.operations["read_range"].calls == before
    del capsules


KEYED = declare.value_state("op", "keyed", keys={"k": pa.int64()}, values={"v": pa.int64()})
CUT_ENTRIES = declare.even_split_state("op", "entries", columns={"v": pa.int64()})
IN_FLIGHT = declare.in_flight_state("op", "flight", edge="e", columns={"v": pa.int64()})


def handle(random: np.random.Generator, state: State, number: int) -> Handle:
    counts = random.integers(0, 4, random.integers(1, 9)).tolist()
    counts[0], counts[-1] = counts[0] + 1, counts[-1] + 1
    first = int(random.integers(0, 12))
    groups: dict[str, Any] = {}
    if state is not CUT_ENTRIES:
        groups = {"first_group": first, "last_group": first + len(counts) - 1, "rows_per_group": counts}
    start = int(random.integers(0, 30))
    return Handle(
        "op", state.name, state.mode, number, number % 3, state.edge, 0, row_start=start, rows=sum(counts), **groups
    )


def groups_of(found: Handle) -> list[int | None]:
    """The group of each row."""
    counts = found.rows_per_group
    if counts is None:
        return [None] * found.rows
    return [group for group, count in enumerate(counts, found.first_group or 0) for _ in range(count)]


def world(seed: int, state: State) -> tuple[list[Handle], pa.Table]:
    """Handles, and slices of whole groups of them for some owners."""
    random = np.random.default_rng(seed)
    handles = [handle(random, state, number) for number in range(int(random.integers(1, 7)))]
    slices = []
    for owner in range(int(random.integers(1, 5))):
        for number, found in enumerate(handles):
            groups = groups_of(found)
            if state is CUT_ENTRIES:
                low, high = sorted(random.integers(0, found.rows + 1, 2).tolist())
            else:
                first, last = sorted(random.choice(np.array(groups), 2).tolist())
                low, high = groups.index(first), found.rows - groups[::-1].index(last)
            if low < high:
                ends = groups[low], groups[high - 1]
                size = int(random.integers(0, 2) * random.integers(1, 900))
                place = (owner, found.layer, number, found.row_start + low, high - low)
                slices.append(("op", state.name, state.mode.value, *place, *ends, size))
    rows = [dict(zip(SLICE_SCHEMA.names, row, strict=True)) for row in slices]
    return handles, pa.Table.from_pylist(rows, SLICE_SCHEMA)


def rows_of_slices(handles: list[Handle], slices: pa.Table) -> list[tuple[int, int, int, int | None]]:
    """(owner, handle, row, group) of every row, in order; slices must tell their groups truly."""
    found = []
    for cut in slices.to_pylist():
        held = handles[cut["handle"]]
        assert cut["rows"] > 0
        groups = groups_of(held)[cut["row_start"] - held.row_start :][: cut["rows"]]
        assert (cut["first_group"], cut["last_group"]) == (groups[0], groups[-1])
        rows = range(cut["row_start"], cut["row_start"] + cut["rows"])
        found += [(cut["subtask"], cut["handle"], row, group) for row, group in zip(rows, groups, strict=True)]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_slices_cut_to_groups_have_the_rows_of_these_groups_and_no_others(seed: int) -> None:
    handles, slices = world(seed, KEYED)
    wanted = np.unique(np.random.default_rng(seed).integers(0, 20, 6))
    cut = cut_to_groups(handles_table(handles), slices, wanted)
    assert rows_of_slices(handles, cut) == [row for row in rows_of_slices(handles, slices) if row[3] in wanted]
    # Where no row of another group lies between, it is one slice.
    assert not {(row["subtask"], row["handle"], row["row_start"]) for row in cut.to_pylist()} & {
        (row["subtask"], row["handle"], row["row_start"] + row["rows"]) for row in cut.to_pylist()
    }


@pytest.mark.parametrize("state", [KEYED, CUT_ENTRIES, IN_FLIGHT], ids=lambda state: state.name)
@pytest.mark.parametrize("seed", range(40))
def test_parts_have_the_rows_once_and_groups_of_an_owner_whole(seed: int, state: State) -> None:
    handles, slices = world(seed, state)
    rows = rows_of_slices(handles, slices)
    for parts in (1, 2, 5, 10_000):
        tables = split_slices(state, handles_table(handles), slices, parts)
        assert 1 <= len(tables) <= max(1, min(parts, len(rows)))
        found = [rows_of_slices(handles, table) for table in tables]
        together = [row for part in found for row in part]
        # A part of keyed state has several layers of its groups: only owners are in order.
        assert (sorted(together) == sorted(rows)) if state is KEYED else (together == rows)
        width = {KEYED.name: 2, IN_FLIGHT.name: 1, CUT_ENTRIES.name: 4}[state.name]
        kept = [{(owner, group, number, row)[:width] for owner, number, row, group in part} for part in found]
        assert sum(map(len, kept)) == len(set[Any]().union(*kept))
        sizes = [sum(table["bytes"].to_pylist()) for table in tables]
        assert (
            sum(slices["bytes"].to_pylist()) - sum(map(len, tables)) <= sum(sizes) <= sum(slices["bytes"].to_pylist())
        )


def test_a_large_slice_is_cut_without_an_overflow_of_its_bytes() -> None:
    rows = 1 << 31
    held = Handle("op", "entries", CUT_ENTRIES.mode, 0, 0, None, 0, rows=rows)
    row = ("op", "entries", "even-split", 0, 0, 0, 0, rows, None, None, (1 << 50) + 7)
    slices = pa.Table.from_pylist([dict(zip(SLICE_SCHEMA.names, row, strict=True))], SLICE_SCHEMA)
    tables = split_slices(CUT_ENTRIES, handles_table([held]), slices, 2)
    assert [table["rows"].to_pylist() for table in tables] == [[rows // 2], [rows // 2]]
    assert [table["bytes"].to_pylist() for table in tables] == [[(1 << 49) + 3]] * 2


def test_no_slices_are_one_part() -> None:
    none = SLICE_SCHEMA.empty_table()
    assert split_slices(KEYED, handles_table([]), none, 3) == [none]
    assert split_between_owners(none, 3) == [none]


STATES = 150
PARALLELISM = 2


def name_of(number: int) -> str:
    return f"s{number:03}"


def numbered_rows(number: int) -> pa.Table:
    """Every tenth state has no rows; most have so few that one subtask has none of some."""
    keys = pa.array(range(number, number + number % 10), pa.int64())
    return pa.table({"k": keys, "v": pc.multiply(keys, number)})


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    states = [
        value_state("op", name_of(number), keys={"k": pa.int64()}, values={"v": pa.int64()}) for number in range(STATES)
    ]
    store = sf.open("memory://whole-states")
    graph = sf.JobGraph((sf.Operator("op", PARALLELISM, 128),))
    pending = store.begin(job_id="states", graph=graph, states=states, parent=None)
    for subtask in range(PARALLELISM):
        with pending.context.subtask("op", subtask) as writer:
            for number in range(STATES):
                rows = numbered_rows(number)
                groups = groups_of_keys([rows["k"]], 128, DEFAULT_KEY_HASH)
                writer.write(name_of(number), rows.filter(pa.array(groups * PARALLELISM // 128 == subtask)))
        pending.add(writer)
    pending.publish()
    return store.open()


def again(checkpoint: Checkpoint, handles: pa.Table | None = None) -> Checkpoint:
    """The checkpoint opened anew, perhaps with other handles."""
    manifest = None if handles is None else Manifest(handles)
    return StoreCheckpoint(checkpoint.storage, checkpoint.record, manifest=manifest)


def found(checkpoint: Checkpoint, number: int) -> pa.Table:
    return checkpoint.state("op", name_of(number)).table().sort_by("k")


@pytest.mark.parametrize("step", [1, -1, 7, 143])
def test_states_are_the_same_in_any_order(checkpoint: Checkpoint, step: int) -> None:
    opened = again(checkpoint)
    for at in range(STATES):
        number = at * step % STATES
        assert found(opened, number).equals(numbered_rows(number)), number


def test_each_subtask_has_its_part(checkpoint: Checkpoint) -> None:
    for number in range(0, STATES, 11):
        parts = [checkpoint.read("op", name_of(number), subtask).table() for subtask in range(PARALLELISM)]
        whole = checkpoint.read("op", name_of(number)).table()
        assert pa.concat_tables(parts).equals(whole)
        assert checkpoint.read("op", name_of(number), PARALLELISM).table().num_rows == 0


def test_a_pickled_task_holds_its_own_handles_only(checkpoint: Checkpoint) -> None:
    task = checkpoint.read("op", name_of(99))
    assert task.handles.num_rows == task.slices.num_rows == PARALLELISM
    alone = task.with_slices(task.slices)
    assert len(pickle.dumps(task)) < 2 * len(pickle.dumps(alone))
    other = pickle.loads(pickle.dumps(task))
    assert (other.handles, other.slices) == (task.handles, task.slices)
    assert other.table().equals(task.table())
    assert alone.table().equals(task.table())


def test_parts_of_a_whole_task_are_not_the_whole(checkpoint: Checkpoint) -> None:
    task = checkpoint.read("op", name_of(99))
    whole = task.table()
    halves = [task.with_slices(task.slices.slice(at, 1)).table() for at in range(PARALLELISM)]
    assert [half.num_rows for half in halves] == task.slices["rows"].to_pylist()
    assert pa.concat_tables(halves).equals(whole)
    assert pa.concat_tables(part.table() for part in task.split(3)).equals(whole)


def _beyond(handles: pa.Table, row: int) -> pa.Table:
    return _changed(handles, "subtask", row, 5)


def _text(handles: pa.Table, row: int) -> pa.Table:
    paths = handles["path"].combine_chunks().cast(pa.binary()).to_pylist()
    paths[row] = b"\xff/" + paths[row]
    data = pa.array(paths, pa.binary())
    return _with(handles, "path", pa.Array.from_buffers(pa.string(), len(data), data.buffers()))


def _unsorted(handles: pa.Table, row: int) -> pa.Table:
    numbers = [*range(handles.num_rows)]
    numbers[row], numbers[row - 1] = numbers[row - 1], numbers[row]
    return handles.take(numbers)


def _again(handles: pa.Table, row: int) -> pa.Table:
    return pa.concat_tables([handles.slice(0, row), handles.slice(row + 1), handles.slice(row, 1)])


def _changed(handles: pa.Table, column: str, row: int, value: object) -> pa.Table:
    values = handles[column].to_pylist()
    values[row] = value
    return _with(handles, column, pa.array(values, handles.schema.field(column).type))


def _with(handles: pa.Table, column: str, values: pa.Array) -> pa.Table:
    at = handles.schema.get_field_index(column)
    return handles.set_column(at, handles.schema.field(at), values)


@pytest.mark.parametrize(("harm", "is_refused"), [(_beyond, True), (_text, True), (_unsorted, False), (_again, False)])
def test_damage_of_one_state_is_its_own(
    checkpoint: Checkpoint, harm: Callable[[pa.Table, int], pa.Table], is_refused: bool
) -> None:
    row = checkpoint.handles["state"].to_pylist().index(name_of(115)) + 1
    opened = again(checkpoint, harm(checkpoint.manifest.full(), row))
    for number in range(100, 130):
        if number == 115 and is_refused:
            with pytest.raises((DamagedCheckpoint, UnicodeDecodeError)):
                found(opened, number)
        else:
            assert found(opened, number).equals(numbered_rows(number)), number

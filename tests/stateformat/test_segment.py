"""Segments as they are written: their bytes read back by Arrow alone, and what is refused."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import ErrorKind, InvalidInput, InvalidState, StorageError
from stateformat.keys import DEFAULT_KEY_HASH
from stateformat.model import Handle, State
from stateformat.reading import rekey
from stateformat.schema import segment_schema
from stateformat.segments import (
    ROW_GROUPS_MAX,
    RowKeyCheck,
    WriteOptions,
    row_groups as row_groups_module,
    write_segment,
)
from stateformat.segments.row_groups import split_groups, split_table
from stateformat.states import declare
from tests.stateformat.murmur3 import hash_one
from tests.worlds.segments import ATTEMPT, OBJECTS, CountingStorage, operator, place, read, table, write

KEY = {"k": pa.int64()}
VALUE = declare.value_state("op", "counts", keys=KEY, values={"v": pa.int64()})
NAMES = declare.value_state("op", "names", keys={"k": pa.string()}, values={"v": pa.int64()})
MAP = declare.map_state("op", "map", keys={"k": pa.string()}, map_key=pa.float64(), values={"v": pa.string()})
LIST = declare.list_state("op", "list", keys={"k": pa.string()}, values={"v": pa.int32()})
TIMERS = declare.timers("op", "timers", keys={"k": pa.string()})
SPLIT = declare.even_split_state("op", "offsets", columns={"entry": pa.int64()})
FLIGHT = declare.in_flight_state("op", "flight", edge="e", columns={"v": pa.int64()}, keys=KEY)
REBALANCED = declare.in_flight_state("op", "flight", edge="e", columns={"v": pa.int64()})
Row = dict[str, Any]


@pytest.fixture
def storage() -> Iterator[CountingStorage]:
    yield CountingStorage("segments")
    MemoryStorage.reset("segments")


def stored(storage: CountingStorage, handle: Handle) -> pq.ParquetFile:
    data = handle.inline if handle.inline is not None else storage.bytes_of(handle.path or "")
    return pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)


def rows_of(storage: CountingStorage, handle: Handle) -> list[Row]:
    found: list[Row] = stored(storage, handle).read().to_pylist()
    return found


def objects(storage: MemoryStorage) -> list[str]:
    return [item.path for item in storage.list("segments/")]


def numbered(count: int) -> pa.Table:
    return pa.table({"k": pa.array(range(count), pa.int64()), "v": pa.array(range(count), pa.int64())})


def clustered(count: int) -> pa.Table:
    return rekey(numbered(count), VALUE, 128, DEFAULT_KEY_HASH)


def batches(given: pa.Table, rows: int) -> Iterator[pa.RecordBatch]:
    return iter(given.to_batches(max_chunksize=rows))


def value_state(**types: Any) -> State:
    return declare.value_state("op", "s", keys=KEY, values=types)


def refuse(storage: CountingStorage, words: str, state: State, data: Any, *more: Any, **of: Any) -> InvalidState:
    """Check that the rows are refused with these words and leave no object."""
    with pytest.raises(InvalidState, match=words) as raised:
        write(storage, state, data, *more, **of)
    assert objects(storage) == []
    return raised.value


# ---- what is in the file -------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [[5, -1, None, 2**62, 0], ["", "a", "key", "longer key", None, "ä"]])
def test_rows_are_stored_by_the_key_group_of_their_hash(storage: CountingStorage, keys: list[Any]) -> None:
    state = VALUE if isinstance(keys[0], int) else NAMES
    handle = write(storage, state, [{"k": key, "v": number} for number, key in enumerate(keys)])
    expected = [{"_key_group": hash_one(key) % 128, "k": key, "v": number} for number, key in enumerate(keys)]
    expected.sort(key=lambda row: row["_key_group"])
    assert rows_of(storage, handle) == expected
    groups = Counter(row["_key_group"] for row in expected)
    assert (handle.first_group, handle.last_group) == (min(groups), max(groups))
    assert handle.rows_per_group == [groups[group] for group in range(min(groups), max(groups) + 1)]


def test_a_handle_says_what_an_independent_look_at_the_bytes_says(storage: CountingStorage) -> None:
    handle = write(storage, VALUE, numbered(100_000), subtask=3, checkpoint=9)
    data = storage.bytes_of(handle.path or "")
    metadata = pq.read_metadata(pa.BufferReader(data))
    footer = data[-(int.from_bytes(data[-8:-4], "little") + 8) :]
    expected = Handle("op", "counts", "keyed", 3, 0, None, 1)._replace(
        rows=100_000,
        segment_rows=100_000,
        size_bytes=len(data),
        uncompressed_bytes=sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)),
        footer_bytes=len(footer),
        digest=xxhash.xxh3_128_digest(data),
        footer_digest=xxhash.xxh3_128_digest(footer),
        first_group=0,
        last_group=127,
    )
    assert handle._replace(path=None, rows_per_group=None) == expected
    assert (handle.path or "").startswith("segments/00000000000000000009/op-counts-3-")


def test_the_footer_binds_the_file_to_its_place_and_columns_to_their_ids(storage: CountingStorage) -> None:
    handle = write(storage, VALUE, [{"k": 1, "v": 2}])
    file = stored(storage, handle)
    said = {key.decode(): value.decode() for key, value in file.metadata.metadata.items()}
    write_id = said.pop("stateformat.write_id")
    place = {
        "version": "1",
        "job_id": "job",
        "checkpoint_id": "7",
        "operator": "op",
        "state": "counts",
        "schema_id": "1",
    }
    assert said == {f"stateformat.{name}": value for name, value in place.items()}
    assert len(write_id) == 32
    assert (handle.path or "").endswith(f"-{write_id}.parquet")
    fields = [(f.name, f.nullable, (f.metadata or {}).get(b"PARQUET:field_id")) for f in file.schema_arrow]
    assert fields == [("_key_group", False, None), ("k", True, b"1"), ("v", True, b"2")]
    assert [file.metadata.row_group(0).column(i).is_stats_set for i in range(3)] == [True, False, False]


FAST = [{"BYTE_STREAM_SPLIT"}, {"PLAIN", "RLE"}, {"BYTE_STREAM_SPLIT", "RLE"}]
PLAIN = [{"PLAIN"}, {"PLAIN", "RLE"}, {"PLAIN", "RLE"}]


@pytest.mark.parametrize(
    ("options", "codec", "encodings"),
    [
        (OBJECTS, "LZ4", FAST),
        (WriteOptions(encoding="plain", codec="snappy"), "SNAPPY", PLAIN),
        (WriteOptions(codec="zstd"), "ZSTD", FAST),
        (WriteOptions(codec="none", encoding="plain"), "UNCOMPRESSED", PLAIN),
    ],
)
def test_options_choose_codec_and_encoding(
    storage: CountingStorage, options: WriteOptions, codec: str, encodings: list[set[str]]
) -> None:
    handle = write(storage, NAMES, [{"k": f"key {i}", "v": i} for i in range(500)], options)
    chunks = [stored(storage, handle).metadata.row_group(0).column(i) for i in range(3)]
    assert {chunk.compression for chunk in chunks} == {codec}
    found = [set(chunk.encodings) - ({"RLE"} - due) for chunk, due in zip(chunks, encodings, strict=True)]
    assert found == encodings
    assert len(rows_of(storage, handle)) == 500


def test_every_type_of_the_format_is_written_and_read_back(storage: CountingStorage) -> None:
    columns: dict[str, tuple[Any, Any]] = {
        "b": (pa.bool_(), True),
        "i8": (pa.int8(), -1),
        "i16": (pa.int16(), 2),
        "i32": (pa.int32(), 3),
        "f": (pa.float32(), 0.5),
        "d": (pa.float64(), 0.25),
        "bin": (pa.binary(), b"\x00"),
        "day": (pa.date32(), 5),
        "ts": (pa.timestamp("us"), 6),
        "utc": (pa.timestamp("us", tz="UTC"), 7),
        "dec": (pa.decimal128(30, 4), None),
        "st": (pa.struct([("x", pa.int64()), ("y", pa.list_(pa.string()))]), {"x": 1, "y": ["a", None]}),
        "li": (pa.list_(pa.struct([("z", pa.float64())])), [{"z": 1.0}, None]),
        "ma": (pa.map_(pa.string(), pa.int64()), [("a", 1), ("b", None)]),
    }
    state = value_state(**{name: kind for name, (kind, _) in columns.items()})
    schema = segment_schema(state)
    arrays = {name: pa.array([value, None] * 50, schema.field(name).type) for name, (_, value) in columns.items()}
    given = pa.table({"k": pa.array(range(100), pa.int64()), **arrays})
    file = stored(storage, write(storage, state, given))
    assert file.schema_arrow.equals(schema)
    assert file.read().drop_columns(["_key_group"]).sort_by("k").to_pylist() == given.to_pylist()


@pytest.mark.parametrize(
    ("nested", "flat"),
    [
        ((pa.struct([("b", pa.int64())]), {"b": 1}), ("a.b", pa.int64(), 2)),
        ((pa.struct([("b", pa.int64())]), {"b": 1}), ("a.b", pa.string(), "two")),
        ((pa.struct([("b", pa.string())]), {"b": "one"}), ("a.b", pa.float64(), 2.0)),
        ((pa.list_(pa.int32()), [1]), ("a.list.element", pa.int32(), 2)),
        ((pa.map_(pa.int64(), pa.int64()), [(1, 1)]), ("a.key_value.value", pa.binary(), b"2")),
    ],
)
def test_a_column_may_have_the_parquet_path_of_a_nested_one(
    storage: CountingStorage, nested: tuple[Any, Any], flat: tuple[str, Any, Any]
) -> None:
    """Both are written plain: to Arrow they have one name, and so one encoding."""
    (nested_kind, one), (name, flat_kind, two) = nested, flat
    state = value_state(**{"a": nested_kind, name: flat_kind, "other": pa.int64()})
    row = {"k": 7, "a": one, name: two, "other": 3}
    handle = write(storage, state, [row])
    [found] = read(storage, state, [handle]).drop_columns(["_key_group"]).to_pylist()
    assert found == row
    group = stored(storage, handle).metadata.row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    split = [column.path_in_schema for column in columns if "BYTE_STREAM_SPLIT" in column.encodings]
    assert {*split} >= {"_key_group", "k", "other"}
    assert name not in split


def test_negative_zero_and_nan_have_one_form_as_keys_and_stay_as_values(storage: CountingStorage) -> None:
    state = declare.value_state("op", "s", keys={"k": pa.float64()}, values={"v": pa.float64()})
    odd_nan = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]
    handle = write(storage, state, [{"k": x, "v": x} for x in (-0.0, odd_nan, 1.5)])
    found = stored(storage, handle).read()
    bits = {int(k): int(v) for k, v in zip(*(found[n].to_numpy().view(np.uint64) for n in "kv"), strict=True)}
    other = struct.unpack("<Q", struct.pack("<d", 1.5))[0]
    assert bits == {0: 1 << 63, 0x7FF8000000000000: 0xFFF8000000000001, other: other}
    assert found["_key_group"].to_pylist() == sorted(hash_one(x) % 128 for x in (0.0, math.nan, 1.5))


@pytest.mark.parametrize("data", [segment_schema(VALUE).empty_table(), [], ()], ids=["table", "rows", "stream"])
def test_no_rows_make_a_handle_without_a_segment(storage: CountingStorage, data: Any) -> None:
    handle = write(storage, VALUE, iter(data) if data == () else data)
    assert handle == Handle("op", "counts", "keyed", 0, 0, None, 1)
    assert objects(storage) == []


def test_a_small_segment_is_inline_below_the_limit_and_makes_no_object(storage: CountingStorage) -> None:
    small = write(storage, VALUE, numbered(100), WriteOptions())
    size = small.size_bytes
    assert small.inline is not None
    assert (len(small.inline), small.digest) == (size, xxhash.xxh3_128_digest(small.inline))
    assert write(storage, VALUE, numbered(100), WriteOptions(inline_bytes_max=size + 1)).inline is not None
    assert objects(storage) == []
    exact = write(storage, VALUE, numbered(100), WriteOptions(inline_bytes_max=size))
    large = write(storage, VALUE, numbered(20_000), WriteOptions())
    assert (exact.inline, large.inline) == (None, None)
    assert objects(storage) == sorted([exact.path or "", large.path or ""])


# ---- order ---------------------------------------------------------------------------------------


def test_rows_of_one_key_group_keep_their_order(storage: CountingStorage) -> None:
    keys = np.random.default_rng(1).permutation(50_000)
    given = pa.table({"k": keys, "v": np.arange(50_000)})
    found = stored(storage, write(storage, VALUE, given)).read().to_pydict()
    for group in (0, 77, 127):
        values = [v for g, v in zip(found["_key_group"], found["v"], strict=True) if g == group]
        assert values == sorted(values)
        assert all(hash_one(int(keys[v])) % 128 == group for v in values)


@pytest.mark.parametrize("max_parallelism", [1, 2, 128, 4096, 5000, 32768])
def test_clustering_works_for_any_number_of_key_groups(storage: CountingStorage, max_parallelism: int) -> None:
    found = rows_of(storage, write(storage, VALUE, numbered(2000), operator=operator(1, max_parallelism)))
    assert [row["_key_group"] for row in found] == sorted(hash_one(k) % max_parallelism for k in range(2000))
    assert sorted((row["k"], row["v"]) for row in found) == [(k, k) for k in range(2000)]


def test_columns_with_nulls_are_gathered_with_their_nulls(storage: CountingStorage) -> None:
    rows = [{"k": k, "v": None if k % 3 else k} for k in range(10_000)]
    found = rows_of(storage, write(storage, VALUE, pa.Table.from_pylist(rows).slice(17)))
    assert sorted((row["k"], row["v"]) for row in found) == sorted((row["k"], row["v"]) for row in rows[17:])


def test_records_in_flight_are_ordered_by_group_sender_and_sequence(storage: CountingStorage) -> None:
    rng = np.random.default_rng(3)
    rows = [
        {"_sender": int(rng.integers(3)), "_receiver": 0, "_seq": int(seq), "k": int(rng.integers(20)), "v": int(seq)}
        for seq in rng.permutation(500)
    ]
    handle = write(storage, FLIGHT, rows)
    expected = [{"_key_group": hash_one(row["k"]) % 128} | row for row in rows]
    expected.sort(key=lambda row: (row["_key_group"], row["_sender"], row["_seq"]))
    assert rows_of(storage, handle) == expected
    assert (handle.edge, sum(handle.rows_per_group or [])) == ("e", 500)
    rows = [{"_sender": sender, "_receiver": 0, "_seq": seq, "v": seq} for seq in (2, 1, 3) for sender in (4, 2)]
    handle = write(storage, REBALANCED, rows)
    assert rows_of(storage, handle) == sorted(rows, key=lambda row: (row["_sender"], row["_seq"]))
    assert (handle.first_group, handle.last_group, handle.rows_per_group) == (2, 4, [3, 0, 3])


def test_other_modes_keep_their_order_and_have_no_groups(storage: CountingStorage) -> None:
    out = declare.committables_state("op", "out", columns={"file": pa.string()})
    older = {"_checkpoint_id": 3, "_attempt_id": "f" * 32, "file": "b"}
    ended = {"_edge": "e", "_watermark": 2**63 - 1, "_ended": True}
    for state, rows, more in (
        (SPLIT, [{"entry": entry} for entry in (5, 3, 3, None, 1)], {}),
        (out, [{"file": "a"}], {"_checkpoint_id": 7, "_attempt_id": ATTEMPT}),
        (out, [older], {}),
        (declare.progress_state("op"), [ended], {}),
    ):
        handle = write(storage, state, rows)
        assert rows_of(storage, handle) == [more | row for row in rows]
        assert (handle.first_group, handle.rows_per_group) == (None, None)


# ---- row groups ----------------------------------------------------------------------------------


def row_groups(storage: CountingStorage, handle: Handle) -> list[Counter[int]]:
    file = stored(storage, handle)
    groups = (file.read_row_group(i, columns=["_key_group"])["_key_group"] for i in range(file.num_row_groups))
    return [Counter(column.to_pylist()) for column in groups]


def group_bytes(file: pq.ParquetFile) -> list[int]:
    return [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_row_group_holds_whole_key_groups_or_a_part_of_a_larger_one(storage: CountingStorage, stream: bool) -> None:
    sizes = {0: 30, 1: 40, 2: 40, 3: 250, 4: 5, 5: 100, 9: 101}
    groups = pa.array(np.repeat(list(sizes), list(sizes.values())), pa.int32())
    given = pa.table({"_key_group": groups, "k": pa.array(range(len(groups)), pa.int64())})
    options = WriteOptions(row_group_rows=100, trust_key_groups=True, inline_bytes_max=0)
    handle = write(storage, VALUE, batches(given, 7) if stream else given, options)
    found = row_groups(storage, handle)
    assert sum(found, Counter()) == sizes
    for counts in found:
        assert counts.total() <= 100
        part_of_larger = len(counts) == 1 and sizes[next(iter(counts))] > 100
        assert part_of_larger or all(counts[group] == sizes[group] for group in counts)
    assert handle.rows_per_group == [sizes.get(group, 0) for group in range(10)]
    # As few as can be: 30 + 40, 40, three parts of 250, 5, 100, two parts of 101.
    assert stream or len(found) == 9


def test_a_file_never_has_more_than_1024_row_groups(storage: CountingStorage) -> None:
    handle = write(storage, VALUE, numbered(3000), WriteOptions(row_group_rows=1, inline_bytes_max=0))
    assert 128 < stored(storage, handle).num_row_groups <= ROW_GROUPS_MAX
    entries = pa.table({"entry": pa.array(range(40_000), pa.int64())})
    stream = batches(entries.slice(0, 6000), 50)
    file = stored(storage, write(storage, SPLIT, stream, WriteOptions(row_group_rows=2, inline_bytes_max=0)))
    assert 512 < file.num_row_groups <= ROW_GROUPS_MAX
    assert file.read()["entry"].to_pylist() == list(range(6000))
    before = objects(storage)
    with pytest.raises(InvalidState, match="1024 row groups") as raised:
        write(storage, SPLIT, batches(entries, 100), WriteOptions(row_group_rows=1, inline_bytes_max=0))
    assert raised.value.kind is ErrorKind.LIMIT_EXCEEDED
    assert objects(storage) == before


def test_row_groups_are_cut_at_group_borders() -> None:
    assert split_groups(np.array([0, 3, 0, 3, 4, 0]), 6) == [6, 10]
    assert split_groups(np.array([13, 1, 1]), 6) == [6, 12, 13, 15]
    assert split_groups(np.array([1, 1, 1]), 6, begun=True) == [1, 3]
    assert len(split_table(np.ones(32_768, np.int64), 1)) == ROW_GROUPS_MAX


def test_large_rows_come_in_fewer_per_row_group(storage: CountingStorage) -> None:
    state = declare.even_split_state("op", "blobs", columns={"blob": pa.binary()})
    blobs = pa.table({"blob": pa.array([bytes(1 << 20)] * 40, pa.binary())})
    sizes = group_bytes(stored(storage, write(storage, state, blobs)))
    assert len(sizes) == 6
    assert max(sizes) <= 9 << 20


def test_one_large_row_among_small_ones_shares_a_row_group_with_few(
    storage: CountingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ROW_GROUP_BYTES", 4096), ("_COLUMN_BYTES", 1), ("SPLIT_BYTES", 8192)):
        monkeypatch.setattr(row_groups_module, name, value)
    state = value_state(v=pa.binary())
    sizes = np.where(np.arange(3000) % 100 == 0, 3000, 1)
    given = pa.table({"k": pa.array(range(3000), pa.int64()), "v": pa.array([bytes(size) for size in sizes])})
    for data in (given, given.slice(0, 1000), rekey(given, state, 128, DEFAULT_KEY_HASH)):
        file = stored(storage, write(storage, state, data, WriteOptions(inline_bytes_max=0, codec="none")))
        assert max(group_bytes(file)) < 12_000
        assert sorted(file.read()["k"].to_pylist()) == sorted(data["k"].to_pylist())


# ---- streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_rows", [1, 700, 100_000])
def test_a_clustered_stream_gives_the_rows_and_counts_of_the_table(storage: CountingStorage, batch_rows: int) -> None:
    given = clustered(3000)
    options = WriteOptions(row_group_rows=64, inline_bytes_max=0)
    handle = write(storage, VALUE, batches(given, batch_rows), options)
    assert stored(storage, handle).read().equals(given.cast(segment_schema(VALUE)))
    assert handle.rows_per_group == write(storage, VALUE, given, options).rows_per_group


def test_a_stream_without_key_groups_is_clustered(storage: CountingStorage) -> None:
    handle = write(storage, VALUE, batches(numbered(3000), 100))
    assert rows_of(storage, handle) == rows_of(storage, write(storage, VALUE, numbered(3000)))


def test_a_stream_whose_key_groups_fall_is_refused(storage: CountingStorage) -> None:
    given = clustered(3000)
    backwards: Iterable[pa.RecordBatch] = [*given.slice(1500).to_batches(), *given.slice(0, 1500).to_batches()]
    refuse(storage, "sorted by it", VALUE, iter(backwards))
    shuffled = given.take(pa.array(np.random.default_rng(0).permutation(3000)))
    refuse(storage, "sorted by it", VALUE, iter(shuffled.to_batches()))


def test_a_stream_is_written_while_it_comes() -> None:
    written_at: list[int] = []
    taken: list[int] = []

    class Watching(CountingStorage):
        def open_output(self, path: str) -> Any:
            written_at.append(len(taken))
            return super().open_output(path)

    def entries() -> Iterator[pa.RecordBatch]:
        rng = np.random.default_rng(0)
        for number in range(30):
            taken.append(number)
            yield pa.record_batch({"entry": rng.integers(0, 2**62, 32_768)})

    assert write(Watching("watching"), SPLIT, entries()).rows == 30 * 32_768
    # The sink passes on a megabyte at a time: four or five row groups of random numbers.
    assert written_at[0] < 10


# ---- row keys ------------------------------------------------------------------------------------

OWN: dict[str, Any] = {
    "map": lambda inner: {"_map_key": inner / 2, "v": "x"},
    "list": lambda inner: {"_index": inner, "v": 1},
    "timers": lambda inner: {"_timestamp": inner // 2, "_tag": str(inner % 2)},
}
TRUSTED = WriteOptions(trust_key_groups=True, inline_bytes_max=0)


@pytest.mark.parametrize("state", [MAP, LIST, TIMERS], ids=lambda state: state.name)
def test_a_key_may_have_many_rows_but_each_row_key_one(storage: CountingStorage, state: State) -> None:
    rows = [{"k": key, **OWN[state.name](inner)} for key in ("a", "", None) for inner in range(50)]
    error = refuse(storage, "stands on 2 rows", state, [*rows, rows[77]])
    assert error.kind is ErrorKind.DUPLICATE_ROW_KEY
    assert error.details["row_key"] == {name: rows[77][name] for name in state.row_key}
    assert write(storage, state, rows).rows == 150


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keys_held", [32 << 20, 40_000])
@pytest.mark.parametrize("distance", [1, 20_000, 69_999])
def test_a_duplicate_is_found_however_far_away_it_is(
    storage: CountingStorage, monkeypatch: pytest.MonkeyPatch, distance: int, stream: bool, keys_held: int
) -> None:
    monkeypatch.setattr("stateformat.segments.sort.KEYS_BYTES_MAX", keys_held)
    # One key group of several row groups.
    keys = np.arange(70_000)
    keys[distance] = keys[0]
    given = pa.table({"_key_group": pa.array(np.zeros(70_000), pa.int32()), "k": keys})
    refuse(storage, r"row key \{'k': 0\} stands on 2", VALUE, batches(given, 999) if stream else given, TRUSTED)


@pytest.mark.parametrize("twice", [None, (99, 100), (10, 9001), (9019, 9020), (16_999, 17_000), (25_707, 25_708)])
def test_row_keys_of_large_key_groups_between_small_ones_are_told_apart_from_a_file(
    storage: CountingStorage, monkeypatch: pytest.MonkeyPatch, twice: tuple[int, int] | None
) -> None:
    monkeypatch.setattr("stateformat.segments.sort.KEYS_BYTES_MAX", 1000)
    counts = [3, 0, 9000, 5, 700, 1, 8000, 8000]
    groups = np.repeat(np.arange(8, dtype=np.int32), counts)
    keys = np.arange(len(groups))
    if twice is not None:
        keys[twice[1]] = keys[twice[0]]
    stream = batches(pa.table({"_key_group": groups, "k": keys}), 777)
    if twice is None:
        assert write(storage, VALUE, stream, TRUSTED).rows_per_group == counts
    else:
        refuse(storage, "stands on 2 rows", VALUE, stream, TRUSTED)


STRUCT = pa.struct([("a", pa.int64()), ("b", pa.string())])
STRUCTS = [None, {"a": None, "b": None}, {"a": 1, "b": None}, {"a": None, "b": ""}]


@pytest.mark.parametrize(
    ("kind", "keys", "again"),
    [
        (pa.float64(), [None, 1.0], None),
        (pa.float64(), [math.nan, 1.0], -math.nan),
        (pa.float64(), [0.0, 1.0], -0.0),
        (STRUCT, STRUCTS, {"a": None, "b": ""}),
    ],
)
def test_keys_that_are_equal_to_the_format_are_duplicates(
    storage: CountingStorage, kind: Any, keys: list[Any], again: Any
) -> None:
    state = declare.value_state("op", "s", keys={"k": kind}, values={})
    refuse(storage, "stands on 2 rows", state, [{"k": key} for key in (*keys, again)])
    assert write(storage, state, [{"k": key} for key in keys]).rows == len(keys)


def test_the_same_32_bit_hash_is_no_duplicate(storage: CountingStorage) -> None:
    twins = ["1501e", "185b6"]
    assert len({hash_one(key) for key in twins}) == 1
    assert write(storage, NAMES, pa.table({"k": [*twins, "other"]})).rows == 3


@pytest.mark.parametrize(("repeated", "named"), [(1, 1), (2, 2), (3, 3), (40, 3)])
def test_up_to_three_repeated_row_keys_are_named_from_all_key_groups(
    storage: CountingStorage, repeated: int, named: int
) -> None:
    rows = [{"k": key, "v": 0} for key in range(60)]
    error = refuse(storage, "stands on 2 rows", VALUE, [*rows, *rows[:repeated]])
    shown = [key["k"] for key in error.details["row_keys"]]
    assert len(set(shown)) == named
    assert set(shown) <= set(range(repeated))
    assert str(error).count(" on 2") == named


def test_unique_keys_can_be_taken_on_trust(storage: CountingStorage) -> None:
    rows = [{"k": 1, "v": 1}, {"k": 1, "v": 2}]
    assert write(storage, VALUE, rows, WriteOptions(check_unique=False)).rows == 2


def test_a_delta_may_clear_a_key_and_write_it_again(storage: CountingStorage) -> None:
    rows = [
        {"_op": 2, "k": "a"},
        {"_op": 0, "k": "a", "_map_key": None, "v": "x"},
        {"_op": 1, "k": "a", "_map_key": 1.0},
    ]
    refuse(storage, "stands on 2 rows", MAP, [*rows, {"_op": 1, "k": "a", "_map_key": None}], layer=1)
    refuse(storage, "stands on 2 rows", MAP, [*rows, rows[0]], layer=1)
    handle = write(storage, MAP, rows, layer=1)
    assert stored(storage, handle).schema_arrow.names == ["_key_group", "_op", "k", "_map_key", "v"]


# ---- what is refused -----------------------------------------------------------------------------

FLOW = {"_sender": None, "_receiver": 0, "_seq": 1, "v": 1}


@pytest.mark.parametrize(
    ("state", "data", "words", "of"),
    [
        (VALUE, pa.table({"k": [1], "v": ["1"]}), "is string and should be int64", {}),
        (VALUE, pa.table({"k": [1], "v": [1.0]}), "is double and should be int64", {}),
        (VALUE, pa.table({"k": [1], "v": pa.array([2**63], pa.uint64())}), "not every value", {}),
        (VALUE, pa.table({"k": [1], "v": [True]}), "is bool and should be int64", {}),
        (VALUE, pa.table({"k": [1], "v": [1], "extra": [1]}), r"columns \['extra'\]", {}),
        (VALUE, pa.table({"v": [1]}), "column 'k' is missing", {}),
        (VALUE, pa.table({"k": [1], "_op": [0]}), r"columns \['_op'\]", {}),
        (VALUE, pa.table({"k": [1], "_key_group": [1]}), "has _key_group 1 and belongs to 29 of 128", {}),
        (
            MAP,
            [{"k": "a", "_map_key": 1.0}],
            "'_op' is missing.*0 upsert, 1 delete this row or 2 clear this key",
            {"layer": 1},
        ),
        (
            MAP,
            [{"_op": 3, "k": "a", "_map_key": 1.0}],
            "_op is 3 to 3; it is 0 upsert, 1 delete this row",
            {"layer": 1},
        ),
        (MAP, [{"_op": 2, "k": "a", "_map_key": 1.0}], "a clear .* holds a value in '_map_key'", {"layer": 1}),
        (LIST, [{"k": "a", "_index": None, "v": 1}], "'_index' is declared without nulls", {}),
        (REBALANCED, [FLOW], "'_sender' is declared without nulls", {}),
        (REBALANCED, [FLOW | {"_sender": -1}], "_sender is -1 to -1", {}),
    ],
)
def test_rows_that_contradict_the_declaration_are_refused(
    storage: CountingStorage, state: State, data: Any, words: str, of: dict[str, Any]
) -> None:
    refuse(storage, words, state, data, **of)


def test_a_column_is_cast_where_no_value_changes(storage: CountingStorage) -> None:
    columns: dict[str, tuple[Any, pa.Array]] = {
        "s": (pa.string(), pa.array(["x"]).dictionary_encode()),
        "b": (pa.binary(), pa.array([b"xy"], pa.binary(2))),
        "f": (pa.float64(), pa.array([0.5], pa.float32())),
        "t": (pa.timestamp("us"), pa.array([1], pa.timestamp("s"))),
        "u": (pa.timestamp("us", tz="UTC"), pa.array([1], pa.timestamp("ms", tz="Europe/Berlin"))),
        "d": (pa.decimal128(20, 2), pa.array([None], pa.decimal128(5, 2))),
        "l": (pa.list_(pa.int64()), pa.array([[1]], pa.large_list(pa.int8()))),
        "n": (pa.string(), pa.nulls(1)),
        "i": (pa.int32(), pa.array([7], pa.int64())),
    }
    state = value_state(**{name: kind for name, (kind, _) in columns.items()})
    given = pa.table({"k": pa.array([1], pa.int16()), **{name: array for name, (_, array) in columns.items()}})
    found = stored(storage, write(storage, state, given)).read()
    assert found.schema.equals(segment_schema(state))
    row = found.select(["k", "s", "b", "f", "d", "l", "n", "i"]).to_pylist()[0]
    assert [*row.values()] == [1, "x", b"xy", 0.5, None, [1], None, 7]
    assert [found[name].cast(pa.int64()).to_pylist() for name in "tu"] == [[1_000_000], [1000]]


REQUIRED = {
    "s": pa.struct([pa.field("x", pa.int64(), nullable=False)]),
    "l": pa.list_(pa.field("element", pa.int64(), nullable=False)),
    "m": pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False)),
}


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ({"s": {"x": 1}, "l": [1], "m": [("a", 1)]}, True),
        ({"s": None, "l": None, "m": None}, True),
        ({"s": {"x": None}, "l": [1], "m": []}, False),
        ({"s": {"x": 1}, "l": [1, None], "m": []}, False),
        ({"s": {"x": 1}, "l": [], "m": [("a", None)]}, False),
    ],
)
def test_nulls_are_refused_where_a_nested_field_allows_none(storage: CountingStorage, value: Row, fits: bool) -> None:
    state = value_state(**REQUIRED)
    # A first row that the table is sliced behind, so that offsets are not zero.
    data = table(state, [{"k": 0, "s": {"x": 9}, "l": [9], "m": [("z", 9)]}, {"k": 1, **value}]).slice(1)
    if fits:
        assert rows_of(storage, write(storage, state, data))[0] == {"_key_group": 29, "k": 1, **value}
    else:
        assert refuse(storage, "declared without nulls", state, data).kind is ErrorKind.NULL_NOT_ALLOWED


def test_the_very_types_that_were_declared_are_taken(storage: CountingStorage) -> None:
    columns = {
        "s": pa.struct([pa.field("x", pa.int64(), nullable=False), pa.field("y", pa.large_string())]),
        "l": pa.large_list(pa.field("item", pa.struct([("z", pa.int8())]), nullable=False)),
        "m": pa.map_(pa.large_string(), pa.field("item", pa.int64(), nullable=False)),
    }
    state = value_state(**columns)
    row = {"s": {"x": 1, "y": "a"}, "l": [{"z": 1}], "m": [("a", 1)]}
    given = pa.Table.from_pylist([row, row], pa.schema(columns)).append_column("k", pa.array([1, 2]))
    found = stored(storage, write(storage, state, given)).read()
    assert found.schema.equals(segment_schema(state))
    assert found.select([*columns]).to_pylist() == [row, row]


def test_a_column_without_nulls_may_have_them_only_in_deletes_and_clears(storage: CountingStorage) -> None:
    values = pa.schema([pa.field("v", pa.int64(), nullable=False)])
    state = declare.value_state("op", "s", keys=KEY, values=values)
    rows = [{"_op": 1, "k": 1, "v": None}, {"_op": 2, "k": 2, "v": None}, {"_op": 0, "k": 3, "v": 3}]
    refuse(storage, "'v' is declared without nulls and holds 1", state, [{"k": 1, "v": None}])
    refuse(storage, "column 'v' is missing", state, [{"k": 1}])
    refuse(storage, "'v' is declared without", state, [*rows, {"_op": 0, "k": 4, "v": None}], layer=2)
    assert write(storage, state, rows, layer=2).rows == 3


def test_trusted_key_groups_are_checked_for_their_range_only(storage: CountingStorage) -> None:
    given = {"_key_group": 5, "k": 1, "v": 1}
    refuse(storage, "0 to 127", VALUE, [given | {"_key_group": 128}], TRUSTED)
    assert write(storage, VALUE, [given], TRUSTED).first_group == 5


@pytest.mark.parametrize(
    "wrong", [{"codec": "gzip"}, {"encoding": "delta"}, {"row_group_rows": 0}, {"inline_bytes_max": -1}]
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        WriteOptions(**wrong)


# ---- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", ["open", "write", "close", "source"])
def test_an_error_comes_through_as_it_is_and_leaves_no_object(fails_at: str) -> None:
    outputs: list[Any] = []
    aborted: list[Any] = []

    class Failing(CountingStorage):
        def open_output(self, path: str) -> Any:
            def fail(*_: Any) -> int:
                raise StorageError("it broke")

            if fails_at == "open":
                fail()
            output = super().open_output(path)
            outputs.append(output)
            abort = output.abort
            output.abort = lambda: aborted.append(output) or abort()  # type: ignore[method-assign]
            if fails_at != "source":
                setattr(output, fails_at, fail)
            return output

    def rows() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"entry": np.random.default_rng(0).integers(0, 2**62, 1_000_000)})
        if fails_at == "source":
            raise StorageError("it broke")

    storage = Failing("failing")
    with pytest.raises(StorageError, match="it broke"):
        write(storage, SPLIT, rows() if fails_at == "source" else pa.Table.from_batches(rows()))
    assert objects(storage) == []
    assert aborted == outputs


def test_two_writes_of_the_same_rows_never_share_a_name(storage: CountingStorage) -> None:
    first, second = (
        write(storage, VALUE, numbered(10)),
        write_segment(storage, place(VALUE), numbered(10).to_batches()[0], OBJECTS),
    )
    assert first.path != second.path
    assert first.uncompressed_bytes == second.uncompressed_bytes
    assert rows_of(storage, first) == rows_of(storage, second)


def test_clustering_copies_nothing_that_is_in_order() -> None:
    once = clustered(1000)
    again = rekey(once, VALUE, 128, DEFAULT_KEY_HASH)
    addresses = [[c.chunk(0).buffers()[1].address for c in found.columns[1:]] for found in (once, again)]
    assert addresses[0] == addresses[1]


def test_a_row_key_that_stands_in_two_batches_of_a_key_group_is_refused() -> None:
    check = RowKeyCheck(declare.value_state("op", "s", keys={"k": pa.string()}, values={"v": pa.int64()}), "it")
    for groups, keys in (([1, 1], ["a", "b"]), ([1, 2], ["a", "c"])):
        check.add(pa.table({"_key_group": pa.array(groups, pa.int32()), "k": keys}))
    with pytest.raises(InvalidState, match=r"row key \{'k': 'a'\} stands on 2 rows") as caught:
        check.finish()
    assert caught.value.kind is ErrorKind.DUPLICATE_ROW_KEY

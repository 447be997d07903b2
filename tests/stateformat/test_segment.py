"""Segments as they are written: their bytes read back by Arrow alone, and what is refused."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterator
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
from stateformat.segments import ROW_GROUPS_MAX, WriteOptions, row_groups as row_groups_module, write_segment
from stateformat.segments.row_groups import split_groups, split_table
from stateformat.states import declare
from tests.segments import ATTEMPT, OBJECTS, CountingStorage, operator, place, table, write

VALUE = declare.value_state("op", "counts", keys={"k": pa.int64()}, values={"v": pa.int64()})
NAMES = declare.value_state("op", "names", keys={"k": pa.string()}, values={"v": pa.int64()})
MAP = declare.map_state("op", "map", keys={"k": pa.string()}, map_key=pa.float64(), values={"v": pa.string()})
LIST = declare.list_state("op", "list", keys={"k": pa.string()}, values={"v": pa.int32()})
TIMERS = declare.timers("op", "timers", keys={"k": pa.string()})
SPLIT = declare.even_split_state("op", "offsets", columns={"entry": pa.int64()})
FLIGHT = declare.in_flight_state("op", "flight", edge="e", columns={"v": pa.int64()}, keys={"k": pa.int64()})
REBALANCED = declare.in_flight_state("op", "flight", edge="e", columns={"v": pa.int64()})
KEYED = [VALUE, NAMES, MAP, LIST, TIMERS]


@pytest.fixture
def storage() -> Iterator[CountingStorage]:
    yield CountingStorage("segments")
    MemoryStorage.reset("segments")


def spark_murmur3(value: int | str | float | None) -> int:
    """Spark's hash of one value, from the words of SPEC.md section 5.3, one integer at a time."""
    if value is None:
        return 42
    data = value.encode() if isinstance(value, str) else struct.pack("<d" if isinstance(value, float) else "<q", value)
    whole = len(data) // 4 * 4
    blocks = [int.from_bytes(data[i : i + 4], "little") for i in range(0, whole, 4)]
    blocks += [byte - 256 if byte > 127 else byte for byte in data[whole:]]
    h = 42
    for block in blocks:
        k = block * 0xCC9E2D51 & 0xFFFFFFFF
        k = ((k << 15) | (k >> 17)) * 0x1B873593 & 0xFFFFFFFF
        h ^= k
        h = (((h << 13) | (h >> 19)) & 0xFFFFFFFF) * 5 + 0xE6546B64 & 0xFFFFFFFF
    h ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h = (h ^ (h >> shift)) * factor & 0xFFFFFFFF
    return h - 2**32 if h > 2**31 - 1 else h


def stored(storage: CountingStorage, handle: Handle) -> pq.ParquetFile:
    data = handle.inline if handle.inline is not None else storage.bytes_of(handle.path or "")
    return pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)


def rows_of(storage: CountingStorage, handle: Handle) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = stored(storage, handle).read().to_pylist()
    return found


def objects(storage: MemoryStorage) -> list[str]:
    return [item.path for item in storage.list("segments/")]


def numbered(count: int, **more: Any) -> pa.Table:
    return pa.table({"k": pa.array(range(count), pa.int64()), "v": pa.array(range(count), pa.int64()), **more})


# ---- what is in the file ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [[5, -1, None, 2**62, 0], ["", "a", "key", "longer key", None, "ä"]])
def test_rows_are_stored_by_the_key_group_of_their_hash(storage: CountingStorage, keys: list[Any]) -> None:
    state = VALUE if isinstance(keys[0], int) else NAMES
    handle = write(storage, state, [{"k": key, "v": number} for number, key in enumerate(keys)])
    expected = sorted(
        ({"_key_group": spark_murmur3(key) % 128, "k": key, "v": number} for number, key in enumerate(keys)),
        key=lambda row: row["_key_group"],
    )
    assert rows_of(storage, handle) == expected
    groups = Counter(row["_key_group"] for row in expected)
    assert (handle.first_group, handle.last_group) == (min(groups), max(groups))
    assert handle.rows_per_group == [groups[group] for group in range(min(groups), max(groups) + 1)]


def test_a_handle_says_what_an_independent_look_at_the_bytes_says(storage: CountingStorage) -> None:
    handle = write(storage, VALUE, numbered(100_000), subtask=3, checkpoint=9)
    data = storage.bytes_of(handle.path or "")
    metadata = pq.read_metadata(pa.BufferReader(data))
    footer = data[-(int.from_bytes(data[-8:-4], "little") + 8) :]
    assert handle._replace(path=None, rows_per_group=None) == Handle(
        operator="op",
        state="counts",
        mode="keyed",
        subtask=3,
        layer=0,
        edge=None,
        schema_id=1,
        rows=100_000,
        segment_rows=100_000,
        size_bytes=len(data),
        uncompressed_bytes=sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)),
        footer_bytes=len(footer),
        digest=bytes.fromhex(xxhash.xxh3_128_hexdigest(data)),
        footer_digest=bytes.fromhex(xxhash.xxh3_128_hexdigest(footer)),
        first_group=0,
        last_group=127,
    )
    assert handle.path
    assert handle.path.startswith("segments/00000000000000000009/op-counts-3-")


def test_the_footer_binds_the_file_to_its_place_and_holds_no_arrow_schema(storage: CountingStorage) -> None:
    handle = write(storage, VALUE, [{"k": 1, "v": 2}])
    metadata = stored(storage, handle).metadata.metadata
    write_id = metadata.pop(b"stateformat.write_id").decode()
    assert metadata == {
        b"stateformat.version": b"1",
        b"stateformat.job_id": b"job",
        b"stateformat.checkpoint_id": b"7",
        b"stateformat.operator": b"op",
        b"stateformat.state": b"counts",
        b"stateformat.schema_id": b"1",
    }
    assert len(write_id) == 32
    assert (handle.path or "").endswith(f"-{write_id}.parquet")


def test_columns_keep_their_field_ids_and_only_key_groups_have_statistics(storage: CountingStorage) -> None:
    file = stored(storage, write(storage, VALUE, [{"k": 1, "v": 2}]))
    assert [(f.name, f.nullable, (f.metadata or {}).get(b"PARQUET:field_id")) for f in file.schema_arrow] == [
        ("_key_group", False, None),
        ("k", True, b"1"),
        ("v", True, b"2"),
    ]
    chunks = [file.metadata.row_group(0).column(i) for i in range(3)]
    assert [chunk.is_stats_set for chunk in chunks] == [True, False, False]


@pytest.mark.parametrize(
    ("options", "codec", "encodings"),
    [
        (OBJECTS, "LZ4", [{"BYTE_STREAM_SPLIT"}, {"PLAIN", "RLE"}, {"BYTE_STREAM_SPLIT", "RLE"}]),
        (
            WriteOptions(encoding="plain", codec="snappy"),
            "SNAPPY",
            [{"PLAIN"}, {"PLAIN", "RLE"}, {"PLAIN", "RLE"}],
        ),
        (
            WriteOptions(codec="zstd"),
            "ZSTD",
            [{"BYTE_STREAM_SPLIT"}, {"PLAIN", "RLE"}, {"BYTE_STREAM_SPLIT", "RLE"}],
        ),
        (WriteOptions(codec="none", encoding="plain"), "UNCOMPRESSED", [{"PLAIN"}, {"PLAIN", "RLE"}, {"PLAIN", "RLE"}]),
    ],
)
def test_options_choose_codec_and_encoding(
    storage: CountingStorage, options: WriteOptions, codec: str, encodings: list[set[str]]
) -> None:
    handle = write(storage, NAMES, [{"k": f"key {i}", "v": i} for i in range(500)], options)
    chunks = [stored(storage, handle).metadata.row_group(0).column(i) for i in range(3)]
    assert {chunk.compression for chunk in chunks} == {codec}
    assert [
        set(chunk.encodings) - {"RLE"} | ({"RLE"} & due) for chunk, due in zip(chunks, encodings, strict=True)
    ] == encodings
    assert len(rows_of(storage, handle)) == 500


def test_every_type_of_the_format_is_written_and_read_back(storage: CountingStorage) -> None:
    columns = {
        "b": pa.bool_(),
        "i8": pa.int8(),
        "i16": pa.int16(),
        "i32": pa.int32(),
        "f": pa.float32(),
        "d": pa.float64(),
        "bin": pa.binary(),
        "day": pa.date32(),
        "ts": pa.timestamp("us"),
        "utc": pa.timestamp("us", tz="UTC"),
        "dec": pa.decimal128(30, 4),
        "st": pa.struct([("x", pa.int64()), ("y", pa.list_(pa.string()))]),
        "li": pa.list_(pa.struct([("z", pa.float64())])),
        "ma": pa.map_(pa.string(), pa.int64()),
    }
    state = declare.value_state("op", "all", keys={"k": pa.int64()}, values=columns)
    schema = segment_schema(state)
    full = {
        "k": 1, "b": True, "i8": -1, "i16": 2, "i32": 3, "f": 0.5, "d": 0.25, "bin": b"\x00", "day": 5, "ts": 6, "utc": 7,
        "dec": None, "st": {"x": 1, "y": ["a", None]}, "li": [{"z": 1.0}, None], "ma": [("a", 1), ("b", None)],
    }  # fmt: skip
    given = pa.table(
        {
            name: pa.array([full[name], None] * 50 if name != "k" else range(100), schema.field(name).type)
            for name in full
        }
    )
    handle = write(storage, state, given)
    file = stored(storage, handle)
    assert file.schema_arrow.equals(schema)
    assert (
        file.read().drop_columns(["_key_group"]).sort_by("k").to_pylist() == given.select(schema.names[1:]).to_pylist()
    )


def test_negative_zero_and_nan_have_one_form_as_keys_and_stay_as_values(storage: CountingStorage) -> None:
    state = declare.value_state("op", "s", keys={"k": pa.float64()}, values={"v": pa.float64()})
    odd_nan = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]
    handle = write(storage, state, [{"k": -0.0, "v": -0.0}, {"k": odd_nan, "v": odd_nan}, {"k": 1.5, "v": 1.5}])
    found = stored(storage, handle).read()
    bits = {int(k): int(v) for k, v in zip(*(found[n].to_numpy().view(np.uint64) for n in "kv"), strict=True)}
    assert bits == {
        0: 1 << 63,
        0x7FF8000000000000: 0xFFF8000000000001,
        struct.unpack("<Q", struct.pack("<d", 1.5))[0]: struct.unpack("<Q", struct.pack("<d", 1.5))[0],
    }
    assert found["_key_group"].to_pylist() == sorted(spark_murmur3(x) % 128 for x in (0.0, math.nan, 1.5))


def test_no_rows_make_a_handle_without_a_segment(storage: CountingStorage) -> None:
    for data in (VALUE_EMPTY, [], iter(())):
        handle = write(storage, VALUE, data)  # type: ignore[arg-type]
        assert handle == Handle("op", "counts", "keyed", 0, 0, None, 1)
    assert objects(storage) == []


VALUE_EMPTY = segment_schema(VALUE).empty_table()


def test_a_small_segment_is_inline_and_makes_no_object(storage: CountingStorage) -> None:
    small = write(storage, VALUE, numbered(100), WriteOptions())
    assert small.inline is not None
    assert (len(small.inline), small.digest) == (small.size_bytes, xxhash.xxh3_128_digest(small.inline))
    assert objects(storage) == []
    large = write(storage, VALUE, numbered(20_000), WriteOptions())
    assert large.inline is None
    assert objects(storage) == [large.path]


def test_inline_ends_exactly_at_the_limit(storage: CountingStorage) -> None:
    size = write(storage, VALUE, numbered(100), WriteOptions()).size_bytes
    assert write(storage, VALUE, numbered(100), WriteOptions(inline_bytes_max=size + 1)).inline is not None
    assert write(storage, VALUE, numbered(100), WriteOptions(inline_bytes_max=size)).inline is None


# ---- order -----------------------------------------------------------------------------------------------------------


def test_rows_of_one_key_group_keep_their_order(storage: CountingStorage) -> None:
    keys = np.random.default_rng(1).permutation(50_000)
    given = pa.table({"k": keys, "v": np.arange(50_000)})
    found = stored(storage, write(storage, VALUE, given)).read().to_pydict()
    for group in (0, 77, 127):
        numbers = [v for g, v in zip(found["_key_group"], found["v"], strict=True) if g == group]
        assert numbers == [i for i, k in enumerate(keys.tolist()) if spark_murmur3(k) % 128 == group]


@pytest.mark.parametrize("max_parallelism", [1, 2, 128, 4096, 5000, 32768])
def test_clustering_works_for_any_number_of_key_groups(storage: CountingStorage, max_parallelism: int) -> None:
    of = operator(1, max_parallelism)
    handle = write(storage, VALUE, numbered(5000), operator=of)
    found = rows_of(storage, handle)
    assert [row["_key_group"] for row in found] == sorted(spark_murmur3(k) % max_parallelism for k in range(5000))
    assert sorted((row["k"], row["v"]) for row in found) == [(k, k) for k in range(5000)]


def test_columns_with_nulls_are_gathered_with_their_nulls(storage: CountingStorage) -> None:
    rows = [{"k": k, "v": None if k % 3 else k} for k in range(10_000)]
    found = rows_of(storage, write(storage, VALUE, pa.Table.from_pylist(rows).slice(17)))
    assert sorted((row["k"], row["v"]) for row in found) == sorted((row["k"], row["v"]) for row in rows[17:])


def test_records_in_flight_on_a_hash_edge_are_ordered_by_group_sender_and_sequence(storage: CountingStorage) -> None:
    rng = np.random.default_rng(3)
    rows = [
        {"_sender": int(rng.integers(3)), "_receiver": 0, "_seq": int(seq), "k": int(rng.integers(20)), "v": int(seq)}
        for seq in rng.permutation(500)
    ]
    handle = write(storage, FLIGHT, rows)
    expected = sorted(
        ({"_key_group": spark_murmur3(row["k"]) % 128} | row for row in rows),
        key=lambda row: (row["_key_group"], row["_sender"], row["_seq"]),
    )
    assert rows_of(storage, handle) == expected
    assert (handle.edge, sum(handle.rows_per_group or [])) == ("e", 500)


def test_records_in_flight_on_another_edge_have_their_senders_as_groups(storage: CountingStorage) -> None:
    rows = [{"_sender": sender, "_receiver": 0, "_seq": seq, "v": seq} for seq in (2, 1, 3) for sender in (4, 2)]
    handle = write(storage, REBALANCED, rows)
    assert rows_of(storage, handle) == sorted(rows, key=lambda row: (row["_sender"], row["_seq"]))
    assert (handle.first_group, handle.last_group, handle.rows_per_group) == (2, 4, [3, 0, 3])


def test_entries_keep_their_order_and_have_no_groups(storage: CountingStorage) -> None:
    rows = [{"entry": entry} for entry in (5, 3, 3, None, 1)]
    handle = write(storage, SPLIT, rows)
    assert rows_of(storage, handle) == rows
    assert (handle.first_group, handle.rows_per_group) == (None, None)


def test_committables_are_stamped_with_the_attempt_that_prepares_them_unless_they_carry_another(
    storage: CountingStorage,
) -> None:
    state = declare.committables_state("op", "out", columns={"file": pa.string()})
    fresh = rows_of(storage, write(storage, state, [{"file": "a"}]))
    assert fresh == [{"_checkpoint_id": 7, "_attempt_id": ATTEMPT, "file": "a"}]
    older = [{"_checkpoint_id": 3, "_attempt_id": "f" * 32, "file": "b"}]
    assert rows_of(storage, write(storage, state, older)) == older


def test_progress_has_the_columns_of_the_format(storage: CountingStorage) -> None:
    rows = [{"_edge": "e", "_watermark": 2**63 - 1, "_ended": True}]
    assert rows_of(storage, write(storage, declare.progress_state("op"), rows)) == rows


# ---- row groups ------------------------------------------------------------------------------------------------------


def row_groups(storage: CountingStorage, handle: Handle) -> list[Counter[int]]:
    file = stored(storage, handle)
    return [
        Counter(file.read_row_group(i, columns=["_key_group"])["_key_group"].to_pylist())
        for i in range(file.num_row_groups)
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_row_group_holds_whole_key_groups_or_a_part_of_a_larger_one(storage: CountingStorage, stream: bool) -> None:
    sizes = {0: 30, 1: 40, 2: 40, 3: 250, 4: 5, 5: 100, 9: 101}
    given = pa.table(
        {
            "_key_group": pa.array(np.repeat(list(sizes), list(sizes.values())), pa.int32()),
            "k": pa.array(range(sum(sizes.values())), pa.int64()),
        }
    )
    options = WriteOptions(row_group_rows=100, trust_key_groups=True, inline_bytes_max=0)
    data: Any = iter(given.to_batches(max_chunksize=7)) if stream else given
    handle = write(storage, VALUE, data, options)
    found = row_groups(storage, handle)
    assert sum(found, Counter()) == sizes
    for counts in found:
        assert counts.total() <= 100
        whole = all(counts[group] == sizes[group] for group in counts)
        part_of_larger = len(counts) == 1 and sizes[next(iter(counts))] > 100
        assert whole or part_of_larger
    assert handle.rows_per_group == [sizes.get(group, 0) for group in range(10)]
    if not stream:
        # As few as can be: 30 + 40, 40, three parts of 250, 5, 100, two parts of 101.
        assert len(found) == 9


def test_a_table_never_has_more_than_1024_row_groups(storage: CountingStorage) -> None:
    handle = write(storage, VALUE, numbered(3000), WriteOptions(row_group_rows=1, inline_bytes_max=0))
    assert 128 < stored(storage, handle).num_row_groups <= ROW_GROUPS_MAX


def test_a_stream_gets_larger_row_groups_before_it_has_too_many(storage: CountingStorage) -> None:
    state = SPLIT
    batches = iter(pa.table({"entry": pa.array(range(6000), pa.int64())}).to_batches(max_chunksize=50))
    handle = write(storage, state, batches, WriteOptions(row_group_rows=2, inline_bytes_max=0))
    file = stored(storage, handle)
    assert 512 < file.num_row_groups <= ROW_GROUPS_MAX
    assert file.read()["entry"].to_pylist() == list(range(6000))


def test_a_stream_that_would_need_too_many_row_groups_is_refused_and_leaves_nothing(storage: CountingStorage) -> None:
    batches = iter(pa.table({"entry": pa.array(range(40_000), pa.int64())}).to_batches(max_chunksize=100))
    with pytest.raises(InvalidState, match="1024 row groups") as raised:
        write(storage, SPLIT, batches, WriteOptions(row_group_rows=1, inline_bytes_max=0))
    assert raised.value.kind is ErrorKind.LIMIT_EXCEEDED
    assert objects(storage) == []


def test_row_groups_are_cut_at_group_borders() -> None:
    assert split_groups(np.array([0, 3, 0, 3, 4, 0]), 6) == [6, 10]
    assert split_groups(np.array([13, 1, 1]), 6) == [6, 12, 13, 15]
    assert split_groups(np.array([1, 1, 1]), 6, begun=True) == [1, 3]
    assert len(split_table(np.ones(32_768, np.int64), 1)) == ROW_GROUPS_MAX


def test_large_rows_come_in_fewer_per_row_group(storage: CountingStorage) -> None:
    state = declare.even_split_state("op", "blobs", columns={"blob": pa.binary()})
    blobs = pa.table({"blob": pa.array([bytes(1 << 20)] * 40, pa.binary())})
    file = stored(storage, write(storage, state, blobs))
    sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
    assert len(sizes) == 6
    assert max(sizes) <= 9 << 20


def test_one_large_row_among_small_ones_shares_a_row_group_with_few(
    storage: CountingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_groups_module, "ROW_GROUP_BYTES", 4096)
    monkeypatch.setattr(row_groups_module, "_COLUMN_BYTES", 1)
    monkeypatch.setattr(row_groups_module, "SPLIT_BYTES", 8192)
    state = declare.value_state("op", "blobs", keys={"k": pa.int64()}, values={"v": pa.binary()})
    sizes = np.where(np.arange(3000) % 100 == 0, 3000, 1)
    given = pa.table({"k": pa.array(range(3000), pa.int64()), "v": pa.array([bytes(size) for size in sizes])})
    for data in (given, given.slice(0, 1000), rekey(given, state, 128, DEFAULT_KEY_HASH)):
        handle = write(storage, state, data, WriteOptions(inline_bytes_max=0, codec="none"))
        file = stored(storage, handle)
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        assert max(group.total_byte_size for group in groups) < 12_000
        assert sorted(file.read()["k"].to_pylist()) == sorted(data["k"].to_pylist())


# ---- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_rows", [1, 700, 100_000])
def test_a_clustered_stream_gives_the_rows_and_counts_of_the_table(storage: CountingStorage, batch_rows: int) -> None:
    given = rekey(numbered(3000), VALUE, 128, DEFAULT_KEY_HASH)
    options = WriteOptions(row_group_rows=64, inline_bytes_max=0)
    handle = write(storage, VALUE, iter(given.to_batches(max_chunksize=batch_rows)), options)
    assert stored(storage, handle).read().equals(given.cast(segment_schema(VALUE)))
    assert handle.rows_per_group == write(storage, VALUE, given, options).rows_per_group


def test_a_stream_without_key_groups_is_clustered(storage: CountingStorage) -> None:
    handle = write(storage, VALUE, iter(numbered(3000).to_batches(max_chunksize=100)))
    assert rows_of(storage, handle) == rows_of(storage, write(storage, VALUE, numbered(3000)))


def test_a_stream_whose_key_groups_fall_is_refused(storage: CountingStorage) -> None:
    given = rekey(numbered(3000), VALUE, 128, DEFAULT_KEY_HASH)
    backwards = [given.slice(1500), given.slice(0, 1500)]
    with pytest.raises(InvalidState, match="sorted by it"):
        write(storage, VALUE, (batch for part in backwards for batch in part.to_batches()))
    shuffled = given.take(pa.array(np.random.default_rng(0).permutation(3000)))
    with pytest.raises(InvalidState, match="sorted by it"):
        write(storage, VALUE, iter(shuffled.to_batches()))
    assert objects(storage) == []


def test_a_stream_is_written_while_it_comes(storage: CountingStorage) -> None:
    written_at: list[int] = []

    class Watching(CountingStorage):
        def open_output(self, path: str) -> Any:
            written_at.append(taken)
            return super().open_output(path)

    taken = 0
    rng = np.random.default_rng(0)

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal taken
        for number in range(100):
            taken = number + 1
            yield pa.record_batch({"entry": rng.integers(0, 2**62, 32_768)})

    handle = write(Watching("watching"), SPLIT, batches())
    assert handle.rows == 100 * 32_768
    # The sink passes on a megabyte at a time: four or five row groups of random numbers.
    assert written_at[0] < 10


# ---- row keys --------------------------------------------------------------------------------------------------------


def key_row(state: State, key: Any, inner: int) -> dict[str, Any]:
    """A row whose row key is (key, inner)."""
    own: dict[str, Any] = {}
    if state is MAP:
        own = {"_map_key": inner / 2, "v": "x"}
    elif state is LIST:
        own = {"_index": inner, "v": 1}
    elif state is TIMERS:
        own = {"_timestamp": inner // 2, "_tag": str(inner % 2)}
    return {"k": key} | own


@pytest.mark.parametrize("state", [MAP, LIST, TIMERS], ids=lambda state: state.name)
def test_a_key_may_have_many_rows_but_each_row_key_one(storage: CountingStorage, state: State) -> None:
    rows = [key_row(state, key, inner) for key in ("a", "", None) for inner in range(50)]
    assert write(storage, state, rows).rows == 150
    with pytest.raises(InvalidState, match="stands on 2 rows") as raised:
        write(storage, state, [*rows, rows[77]])
    assert raised.value.kind is ErrorKind.DUPLICATE_ROW_KEY
    assert raised.value.details["row_key"] == {name: rows[77][name] for name in state.row_key}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keys_held", [32 << 20, 40_000])
@pytest.mark.parametrize("distance", [1, 20_000, 69_999])
def test_a_duplicate_is_found_however_far_away_it_is(
    storage: CountingStorage, monkeypatch: pytest.MonkeyPatch, distance: int, stream: bool, keys_held: int
) -> None:
    monkeypatch.setattr("stateformat.segments.unique_keys.KEYS_BYTES_MAX", keys_held)
    # One key group of several row groups.
    keys = np.arange(70_000)
    keys[distance] = keys[0]
    given = pa.table({"_key_group": pa.array(np.zeros(70_000), pa.int32()), "k": keys})
    options = WriteOptions(trust_key_groups=True, inline_bytes_max=0)
    with pytest.raises(InvalidState, match=r"row key \{'k': 0\} stands on 2 rows"):
        write(storage, VALUE, iter(given.to_batches(max_chunksize=999)) if stream else given, options)
    assert objects(storage) == []


def test_row_keys_of_large_key_groups_between_small_ones_are_told_apart_from_a_file(
    storage: CountingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateformat.segments.unique_keys.KEYS_BYTES_MAX", 1000)
    counts = [3, 0, 9000, 5, 700, 1, 8000, 8000]
    groups = np.repeat(np.arange(8, dtype=np.int32), counts)
    options = WriteOptions(trust_key_groups=True, inline_bytes_max=0)
    for twice in (None, 100, 9000, 9020, 17_000, len(groups) - 1):
        keys = np.arange(len(groups))
        if twice is not None:
            keys[twice] = keys[twice - 1]
        given = pa.table({"_key_group": groups, "k": keys})
        stream = iter(given.to_batches(max_chunksize=777))
        if twice is None:
            assert write(storage, VALUE, stream, options).rows_per_group == counts
        else:
            with pytest.raises(InvalidState, match="stands on 2 rows"):
                write(storage, VALUE, stream, options)


@pytest.mark.parametrize(("one", "other"), [(None, None), (math.nan, -math.nan), (0.0, -0.0)])
def test_keys_that_are_equal_to_the_format_are_duplicates(storage: CountingStorage, one: Any, other: Any) -> None:
    state = declare.value_state("op", "s", keys={"k": pa.float64()}, values={})
    assert write(storage, state, [{"k": one}, {"k": 1.0}]).rows == 2
    with pytest.raises(InvalidState, match="stands on 2 rows"):
        write(storage, state, [{"k": one}, {"k": other}])


def test_the_same_32_bit_hash_is_no_duplicate(storage: CountingStorage) -> None:
    keys = [f"{number:x}" for number in range(150_000)]
    hashes = Counter(map(spark_murmur3, keys))
    assert max(hashes.values()) > 1
    assert write(storage, NAMES, pa.table({"k": keys})).rows == len(keys)


def test_a_null_struct_is_another_key_than_a_struct_of_nulls(storage: CountingStorage) -> None:
    state = declare.value_state("op", "s", keys={"k": pa.struct([("a", pa.int64()), ("b", pa.string())])}, values={})
    keys = [None, {"a": None, "b": None}, {"a": 1, "b": None}, {"a": None, "b": ""}]
    assert write(storage, state, [{"k": key} for key in keys]).rows == 4
    with pytest.raises(InvalidState, match="stands on 2 rows"):
        write(storage, state, [{"k": key} for key in [*keys, {"a": None, "b": ""}]])


def test_unique_keys_can_be_taken_on_trust(storage: CountingStorage) -> None:
    rows = [{"k": 1, "v": 1}, {"k": 1, "v": 2}]
    assert write(storage, VALUE, rows, WriteOptions(check_unique=False)).rows == 2


def test_a_delta_may_clear_a_key_and_write_it_again(storage: CountingStorage) -> None:
    rows = [
        {"_op": 2, "k": "a"},
        {"_op": 0, "k": "a", "_map_key": None, "v": "x"},
        {"_op": 1, "k": "a", "_map_key": 1.0},
    ]
    handle = write(storage, MAP, rows, layer=1)
    assert stored(storage, handle).schema_arrow.names == ["_key_group", "_op", "k", "_map_key", "v"]
    with pytest.raises(InvalidState, match="stands on 2 rows"):
        write(storage, MAP, [*rows, {"_op": 1, "k": "a", "_map_key": None}], layer=1)
    with pytest.raises(InvalidState, match="stands on 2 rows"):
        write(storage, MAP, [*rows, rows[0]], layer=1)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array(["1"]), "is string and should be int64"),
        (pa.array([1.0]), "is double and should be int64"),
        (pa.array([2**63], pa.uint64()), "not every value"),
        (pa.array([True]), "is bool and should be int64"),
    ],
)
def test_a_column_is_not_cast_where_a_value_could_change(
    storage: CountingStorage, column: pa.Array, message: str
) -> None:
    with pytest.raises(InvalidState, match=message):
        write(storage, VALUE, pa.table({"k": [1], "v": column}))


def test_a_column_is_cast_where_no_value_changes(storage: CountingStorage) -> None:
    columns = {
        "s": pa.string(), "b": pa.binary(), "f": pa.float64(), "t": pa.timestamp("us"), "u": pa.timestamp("us", tz="UTC"),
        "d": pa.decimal128(20, 2), "l": pa.list_(pa.int64()), "n": pa.string(), "i": pa.int32(),
    }  # fmt: skip
    state = declare.value_state("op", "s", keys={"k": pa.int64()}, values=columns)
    given = pa.table(
        {
            "k": pa.array([1], pa.int16()),
            "s": pa.array(["x"]).dictionary_encode(),
            "b": pa.array([b"xy"], pa.binary(2)),
            "f": pa.array([0.5], pa.float32()),
            "t": pa.array([1], pa.timestamp("s")),
            "u": pa.array([1], pa.timestamp("ms", tz="Europe/Berlin")),
            "d": pa.array([None], pa.decimal128(5, 2)),
            "l": pa.array([[1]], pa.large_list(pa.int8())),
            "n": pa.nulls(1),
            "i": pa.array([7], pa.int64()),
        }
    )
    found = stored(storage, write(storage, state, given)).read()
    assert found.schema.equals(segment_schema(state))
    row = found.to_pylist()[0]
    assert {name: row[name] for name in ("k", "s", "b", "f", "d", "l", "n", "i")} == {
        "k": 1, "s": "x", "b": b"xy", "f": 0.5, "d": None, "l": [1], "n": None, "i": 7,
    }  # fmt: skip
    assert (row["t"].timestamp(), row["u"].timestamp()) == (pytest.approx(row["t"].timestamp()), 0.001)
    assert found["t"].cast(pa.int64()).to_pylist() == [1_000_000]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"k": 1, "v": 1, "extra": 1}], r"columns \['extra'\]"),
        ([{"v": 1}], "column 'k' is missing"),
        ([{"k": 1, "_op": 0}], r"columns \['_op'\]"),
        ([{"k": 1, "_key_group": 1}], "has _key_group 1 and belongs to 29 of 128"),
    ],
)
def test_rows_that_contradict_the_declaration_are_refused(
    storage: CountingStorage, rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(InvalidState, match=message):
        write(storage, VALUE, pa.Table.from_pylist(rows))
    assert objects(storage) == []


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"k": "a", "_map_key": 1.0}], "'_op' is missing"),
        ([{"_op": 3, "k": "a", "_map_key": 1.0}], "_op is 3 to 3"),
        ([{"_op": 2, "k": "a", "_map_key": 1.0}], "a clear .* holds a value in '_map_key'"),
    ],
)
def test_a_delta_that_makes_no_sense_is_refused(
    storage: CountingStorage, rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(InvalidState, match=message):
        write(storage, MAP, rows, layer=1)


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
def test_nulls_are_refused_where_a_nested_field_allows_none(
    storage: CountingStorage, value: dict[str, Any], fits: bool
) -> None:
    columns = pa.schema(
        [
            pa.field("s", pa.struct([pa.field("x", pa.int64(), nullable=False)])),
            pa.field("l", pa.list_(pa.field("element", pa.int64(), nullable=False))),
            pa.field("m", pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False))),
        ]
    )
    state = declare.value_state("op", "s", keys={"k": pa.int64()}, values=columns)
    # A first row that the table is sliced behind, so that offsets are not zero.
    data = table(state, [{"k": 0, "s": {"x": 9}, "l": [9], "m": [("z", 9)]}, {"k": 1, **value}]).slice(1)
    if fits:
        assert rows_of(storage, write(storage, state, data))[0] == {"_key_group": 29, "k": 1, **value}
    else:
        with pytest.raises(InvalidState) as raised:
            write(storage, state, data)
        assert raised.value.kind is ErrorKind.NULL_NOT_ALLOWED


def test_the_very_types_that_were_declared_are_taken(storage: CountingStorage) -> None:
    columns = pa.schema(
        [
            pa.field("s", pa.struct([pa.field("x", pa.int64(), nullable=False), pa.field("y", pa.large_string())])),
            pa.field("l", pa.large_list(pa.field("item", pa.struct([("z", pa.int8())]), nullable=False))),
            pa.field("m", pa.map_(pa.large_string(), pa.field("item", pa.int64(), nullable=False))),
        ]
    )
    state = declare.value_state("op", "s", keys={"k": pa.int64()}, values=columns)
    row = {"s": {"x": 1, "y": "a"}, "l": [{"z": 1}], "m": [("a", 1)]}
    given = pa.Table.from_pylist([row, row], schema=columns).append_column("k", pa.array([1, 2]))
    found = stored(storage, write(storage, state, given)).read()
    assert found.schema.equals(segment_schema(state))
    assert found.select(["s", "l", "m"]).to_pylist() == [row, row]


def test_a_column_without_nulls_may_have_them_only_in_deletes_and_clears(storage: CountingStorage) -> None:
    values = pa.schema([pa.field("v", pa.int64(), nullable=False)])
    state = declare.value_state("op", "s", keys={"k": pa.int64()}, values=values)
    with pytest.raises(InvalidState, match="'v' is declared without nulls and holds 1"):
        write(storage, state, [{"k": 1, "v": None}])
    with pytest.raises(InvalidState, match="column 'v' is missing"):
        write(storage, state, [{"k": 1}])
    rows = [{"_op": 1, "k": 1, "v": None}, {"_op": 2, "k": 2, "v": None}, {"_op": 0, "k": 3, "v": 3}]
    assert write(storage, state, rows, layer=2).rows == 3
    with pytest.raises(InvalidState, match="'v' is declared without nulls"):
        write(storage, state, [*rows, {"_op": 0, "k": 4, "v": None}], layer=2)


def test_own_columns_hold_no_null(storage: CountingStorage) -> None:
    rows = [{"_sender": None, "_receiver": 0, "_seq": 1, "v": 1}]
    with pytest.raises(InvalidState, match="'_sender' is declared without nulls"):
        write(storage, REBALANCED, rows)
    with pytest.raises(InvalidState, match="_sender is -1 to -1"):
        write(storage, REBALANCED, [rows[0] | {"_sender": -1}])


def test_trusted_key_groups_are_checked_for_their_range_only(storage: CountingStorage) -> None:
    trusting = WriteOptions(trust_key_groups=True)
    given = [{"_key_group": 5, "k": 1, "v": 1}]
    assert write(storage, VALUE, given, trusting).first_group == 5
    with pytest.raises(InvalidState, match="0 to 127"):
        write(storage, VALUE, [given[0] | {"_key_group": 128}], trusting)


def test_options_that_cannot_be_are_refused() -> None:
    for wrong in ({"codec": "gzip"}, {"encoding": "delta"}, {"row_group_rows": 0}, {"inline_bytes_max": -1}):
        with pytest.raises(InvalidInput):
            WriteOptions(**wrong)  # type: ignore[arg-type]


# ---- failures --------------------------------------------------------------------------------------------------------


def test_rows_that_fail_half_way_leave_no_object(storage: CountingStorage) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"entry": np.random.default_rng(0).integers(0, 2**62, 1_000_000)})
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        write(storage, SPLIT, batches())
    assert objects(storage) == []


@pytest.mark.parametrize("fails_at", ["open", "write", "close"])
def test_an_error_of_the_storage_comes_through_as_it_is(fails_at: str) -> None:
    class Failing(CountingStorage):
        def open_output(self, path: str) -> Any:
            if fails_at == "open":
                raise StorageError("no space left")
            output = super().open_output(path)

            def fail(*_: Any) -> int:
                raise StorageError("no space left")

            setattr(output, fails_at, fail)
            return output

    storage = Failing("failing")
    big = pa.table({"entry": np.random.default_rng(0).integers(0, 2**62, 1_000_000)})
    with pytest.raises(StorageError, match="no space left"):
        write(storage, SPLIT, big)
    assert objects(storage) == []


def test_two_writes_of_the_same_rows_never_share_a_name(storage: CountingStorage) -> None:
    first, second = (write(storage, VALUE, numbered(10)) for _ in range(2))
    assert first.path != second.path
    assert first.uncompressed_bytes == second.uncompressed_bytes


def test_a_record_batch_is_a_table(storage: CountingStorage) -> None:
    batch = numbered(10).to_batches()[0]
    handle = write_segment(storage, place(VALUE), batch, OBJECTS)
    assert rows_of(storage, handle) == rows_of(storage, write(storage, VALUE, numbered(10)))


def test_clustering_copies_nothing_that_is_in_order() -> None:
    once = rekey(numbered(1000), VALUE, 128, DEFAULT_KEY_HASH)
    again = rekey(once, VALUE, 128, DEFAULT_KEY_HASH)
    assert [c.chunk(0).buffers()[1].address for c in again.columns[1:]] == [
        c.chunk(0).buffers()[1].address for c in once.columns[1:]
    ]

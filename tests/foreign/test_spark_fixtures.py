"""Checkpoints that Spark wrote, and the files of their stores."""

from __future__ import annotations

import json
import pickle
import random
import struct
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from stateformat.backends.foreign.byte_strings import ByteStrings, from_arrow
from stateformat.backends.foreign.framing import crc32c
from stateformat.backends.foreign.spark import hdfs_store
from stateformat.backends.foreign.spark.checks import check_source
from stateformat.backends.foreign.spark.edits import edit_commit, edit_offsets, edit_operator, location_like
from stateformat.backends.foreign.spark.hdfs_store import Chain
from stateformat.backends.foreign.spark.logs import recognises
from stateformat.backends.foreign.spark.repartition.run import lies_outside
from stateformat.backends.foreign.spark.repartition.store_files import (
    framed,
    log_file,
    prefixed_keys,
    sorted_by_bytes,
    table_file,
    varints,
)
from stateformat.backends.foreign.spark.schemas import SparkField, has_values, parse_struct
from stateformat.backends.foreign.spark.source import SparkSource, sources
from stateformat.backends.foreign.spark.states import partitions_of, spark_hashes
from stateformat.backends.foreign.sst.merge import newest, read_tables
from stateformat.backends.foreign.sst.table import open_table
from stateformat.errors import DamagedCheckpoint, UnsupportedFormat
from stateformat.keys import DEFAULT_KEY_HASH, hash_keys, key_groups
from stateformat.model import Kind
from stateformat.schema import segment_schema
from stateformat.storage import Storage, open_storage
from tests.foreign.spark_rows import array_of, encode_row, struct_of

FIXTURES = Path(__file__).parent / "fixtures"
PROVIDER = "HDFSBackedStateStoreProvider"


def on_default_store() -> Iterator[str]:
    for path in sorted(FIXTURES.glob("spark-*/*/made.json")):
        newest = path.parent / "checkpoint" / "offsets" / str(json.loads(path.read_text())["newest_commit"])
        if PROVIDER in newest.read_text():
            yield f"{path.parent.parent.name}/{path.parent.name}"


DEFAULT_STORE = list(on_default_store())
every_fixture = pytest.mark.parametrize("name", DEFAULT_STORE)


def folder(name: str) -> Storage:
    found = open_storage(str(FIXTURES / name / "checkpoint")).folder()
    assert found is not None
    return found


def plain(value: Any, kind: pa.DataType) -> Any:
    """A value of ours as the expected files write it."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: plain(value[field.name], field.type) for field in kind}
    if pa.types.is_map(kind):
        pairs = [[plain(k, kind.key_type), plain(v, kind.item_type)] for k, v in value]
        return sorted(pairs, key=lambda pair: json.dumps(pair[0]))
    if pa.types.is_list(kind):
        return [plain(item, kind.value_type) for item in value]
    if pa.types.is_decimal(kind):
        return format(value, "f")
    if pa.types.is_binary(kind):
        return value.hex()
    if pa.types.is_floating(kind) and (value != value or value in (float("inf"), float("-inf"))):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    return value


def as_integers(column: pa.Array) -> pa.Array:
    """Times as µs, days as days, at any depth: Arrow's integers of them."""

    def integers(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_timestamp(kind):
            return pa.int64()
        if pa.types.is_date(kind):
            return pa.int32()
        if pa.types.is_struct(kind):
            return pa.struct([pa.field(field.name, integers(field.type)) for field in kind])
        if pa.types.is_map(kind):
            return pa.map_(integers(kind.key_type), integers(kind.item_type))
        if pa.types.is_list(kind):
            return pa.list_(pa.field("element", integers(kind.value_type)))
        return kind

    return column.cast(integers(column.type))


def rows_of(columns: list[pa.Array]) -> list[list[Any]]:
    lists = [
        [plain(value, found.type) for value in found.to_pylist()] for found in (as_integers(item) for item in columns)
    ]
    return [list(row) for row in zip(*lists, strict=True)]


def kept(row: dict[str, Any], fields: tuple[SparkField, ...]) -> list[Any]:
    return [value for value, item in zip(row.values(), fields, strict=True) if has_values(item.type)]


def lines(rows: Any) -> list[str]:
    return sorted(json.dumps(row, ensure_ascii=False) for row in rows)


def test_there_are_fixtures_of_the_oldest_and_of_the_newest_spark() -> None:
    assert len(DEFAULT_STORE) >= 20
    assert {name.split("/")[0] for name in DEFAULT_STORE} == {"spark-3.5.9", "spark-4.0.5", "spark-4.3.0"}


@every_fixture
def test_every_row_is_what_spark_says(name: str) -> None:
    source = SparkSource(folder(name))
    made = json.loads((FIXTURES / name / "made.json").read_text())
    assert made["newest_commit"] == source.batch
    for (uid, state), store in source.stores.items():
        file = FIXTURES / name / f"expected-{uid.removeprefix('operator-')}-{state}.jsonl"
        expected = [json.loads(line) for line in file.read_text().splitlines()]
        key, value = store.schema.key, store.schema.value
        wanted = [
            [row["partition"], *(kept(row["key"], key) or [0]), *(kept(row["value"], value) or [True])]
            for row in expected
        ]
        parts = [part for part in source.parts if (part.operator, part.state) == (uid, state)]
        found: list[list[Any]] = []
        names = [item.name for item in source.record.state(uid, state).current.fields]
        opaque = names.index("numbers") + 1 if "numbers_2" in names else None
        for part in parts:
            batches = list(source.read(part))
            for batch in batches:
                batch.validate(full=True)
                assert batch.schema.equals(segment_schema(source.record.state(uid, state)), check_metadata=True)
                found += rows_of(batch.columns)
            assert source.group_rows(part).tolist() == [sum(map(len, batches))]
        if opaque:
            # The key column of arrays is bytes, and the first value column what they say.
            typed = names.index("numbers_2") + 1
            found = [[*row[:opaque], row[typed], *row[opaque + 1 : typed], *row[typed + 1 :]] for row in found]
        assert lines(found) == lines(wanted)


@every_fixture
def test_every_key_lies_where_its_hash_says_and_nothing_is_wrong(name: str) -> None:
    source = SparkSource(folder(name))
    done: list[tuple[int, int]] = []
    found = list(check_source(source, "full", lambda now, total: done.append((now, total))))
    uncommitted = [problem for problem in found if "has begun" in problem.message]
    assert len(uncommitted) == name.endswith("uncommitted")
    assert [str(problem) for problem in found if problem not in uncommitted] == []
    assert done[-1][0] == done[-1][1] == sum(part.size_bytes for part in source.parts)
    for part in source.parts:
        state = source.record.state(part.operator, part.state)
        for batch in source.read(part):
            operator = source.record.graph.operator(part.operator)
            assert set(batch.column("_key_group").to_pylist()) == {part.subtask}
            if operator.key_hash == DEFAULT_KEY_HASH:
                groups = key_groups(
                    hash_keys([batch.column(column) for column in state.key_columns]), operator.max_parallelism
                )
                assert set(groups.tolist()) == {part.subtask}


@every_fixture
def test_a_source_is_the_same_after_pickling_and_is_recognised(name: str) -> None:
    assert recognises(folder(name))
    source = SparkSource(folder(name))
    again = pickle.loads(pickle.dumps(source))
    assert again.record == source.record
    assert again.parts == source.parts
    assert again.notes == source.notes


@every_fixture
def test_history_is_every_committed_batch_that_can_be_opened(name: str) -> None:
    source = SparkSource(folder(name))
    ids = [found.record.checkpoint_id for found in sources(folder(name)).sources]
    assert ids == sorted(ids, reverse=True)
    assert ids[0] == source.batch + 1 == source.record.checkpoint_id
    older = SparkSource(folder(name), ids[-1])
    assert older.record.checkpoint_id == ids[-1]
    assert [
        str(found) for found in check_source(older, "full", lambda now, total: None) if found.severity == "error"
    ] == []


def operators(name: str) -> list[str]:
    return [operator.name for operator in SparkSource(folder(name)).record.graph.operators]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("aggregate", ["stateStoreSave"]),
        ("window", ["stateStoreSave"]),
        ("whole", ["stateStoreSave"]),
        ("session", ["sessionWindowStateStoreSaveExec"]),
        ("dedupe", ["dedupe"]),
        ("dedupe-watermark", ["dedupeWithinWatermark"]),
        ("join-outer", ["symmetricHashJoin"]),
    ],
)
def test_what_spark_3_does_not_write_follows_from_stores_and_schemas(query: str, expected: list[str]) -> None:
    assert operators(f"spark-3.5.9/{query}") == operators(f"spark-4.3.0/{query}") == expected


def test_a_join_has_maps_by_index_and_a_session_maps_by_its_start() -> None:
    join = SparkSource(folder("spark-4.3.0/join-outer")).record
    kinds = {state.name: state.kind for state in join.states}
    assert kinds == {
        "left-keyToNumValues": Kind.VALUE,
        "left-keyWithIndexToValue": Kind.MAP,
        "right-keyToNumValues": Kind.VALUE,
        "right-keyWithIndexToValue": Kind.MAP,
    }
    session = SparkSource(folder("spark-4.3.0/session")).record.state("operator-0", "default")
    assert session.kind is Kind.MAP
    assert segment_schema(session).field("_map_key").type == pa.timestamp("us", tz="UTC")


def test_names_that_repeat_get_a_suffix_and_a_note() -> None:
    source = SparkSource(folder("spark-4.3.0/unnamed"))
    state = source.record.states[0]
    assert state.key_columns == ("groupingexpression", "groupingexpression_2")
    assert any(note.kind == "renamed" and "groupingexpression_2" in note.message for note in source.notes)


def test_an_operator_without_keys_has_one_column_and_one_partition() -> None:
    for query in ("whole", "limit"):
        source = SparkSource(folder(f"spark-4.3.0/{query}"))
        assert source.record.states[0].key_columns == ("no_key",)
        assert [part.subtask for part in source.parts] == [0]
        assert any("has no key" in note.message for note in source.notes)


def test_a_key_column_of_arrays_is_kept_as_bytes_beside_what_they_say() -> None:
    source = SparkSource(folder("spark-4.3.0/key-types"))
    state = source.record.states[0]
    schema = segment_schema(state)
    assert (schema.field("numbers").type, schema.field("numbers_2").type.value_type) == (pa.binary(), pa.int32())
    assert "numbers" in state.key_columns
    assert "numbers_2" not in state.key_columns
    assert [note.kind for note in source.notes] == ["renamed", "opaque"]
    assert source.record.graph.operators[0].key_hash == "spark-murmur3-seed42-nested"


def test_the_hash_of_nested_keys_is_that_of_their_items_one_after_another() -> None:
    numbers = pa.array([[1, None, 3], [], None, [2**40]], pa.list_(pa.int64()))
    flat = [pa.array(column, pa.int64()) for column in ([1, None, None, 2**40], [None] * 4, [3, None, None, None])]
    text = pa.array(["a", "b", None, "d"])
    assert spark_hashes([numbers, text]).tolist() == hash_keys([*flat, text]).tolist()
    pairs = pa.array([[("a", 1), ("b", None)], [], None, [("", 7)]], pa.map_(pa.string(), pa.int64()))
    flat_pairs = [
        pa.array(["a", None, None, ""]),
        pa.array([1, None, None, 7], pa.int64()),
        pa.array(["b", None, None, None]),
        pa.nulls(4, pa.int64()),
    ]
    assert spark_hashes([pairs]).tolist() == hash_keys(flat_pairs).tolist()
    inside = pa.StructArray.from_arrays([numbers, text], ["n", "t"], mask=pa.array([False, False, False, True]))
    within = [pa.array([*column.to_pylist()[:3], None], column.type) for column in (*flat, text)]
    assert spark_hashes([inside]).tolist() == hash_keys(within).tolist()
    assert spark_hashes([numbers.slice(3), text.slice(3)]).tolist() == hash_keys([*flat, text]).tolist()[3:]
    assert spark_hashes([numbers.slice(1, 2)]).tolist() == [42, 42]
    assert partitions_of([numbers.slice(0, 0)], 5).tolist() == []


def test_a_batch_that_was_never_committed_is_named() -> None:
    with pytest.raises(LookupError, match="no committed batch 98"):
        SparkSource(folder("spark-4.3.0/aggregate"), 99)


def test_properties_say_where_the_query_was() -> None:
    made = json.loads((FIXTURES / "spark-4.3.0/window/made.json").read_text())
    record = SparkSource(folder("spark-4.3.0/window")).record
    assert record.properties["spark.query_id"] == record.job_id
    assert record.properties["spark.batch"] == str(record.checkpoint_id - 1)
    assert (
        str(made["watermark_ms"] if "watermark_ms" in made else made["watermark"])
        == record.properties["spark.watermark_ms"]
    )
    assert json.loads(record.properties["spark.offsets.0"])


# ---- chains of sized strings are parsed by lanes as a plain loop parses them, or both refuse them

Entry = tuple[bytes, bytes | None]


def encode(entries: list[Entry]) -> bytes:
    parts = []
    for key, value in entries:
        sized = struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value
        parts += [struct.pack(">i", len(key)), key, sized]
    return b"".join(parts) + b"\xff\xff\xff\xff"


def plain_rows(data: bytes, deletes: bool) -> list[Entry] | None:
    """What a loop over entries finds; None for a broken chain."""
    found: list[Entry] = []
    at = 0
    while at + 4 <= len(data):
        (key,) = struct.unpack_from(">i", data, at)
        if key == -1:
            return found if at + 4 == len(data) else None
        if key < 0 or at + 8 + key > len(data):
            return None
        (value,) = struct.unpack_from(">i", data, at + 4 + key)
        body = at + 8 + key
        if value < (-1 if deletes else 0) or body + max(value, 0) > len(data):
            return None
        found.append((data[at + 4 : at + 4 + key], None if value < 0 else data[body : body + value]))
        at = body + max(value, 0)
    return None


def parse(parts: list[bytes], deletes: list[bool]) -> list[Entry]:
    data = np.frombuffer(b"".join(parts), np.uint8)
    ends = np.cumsum([len(part) for part in parts]).astype(np.int64)
    found = hdfs_store.parse_chains(data, ends, np.array(deletes), [f"{i}.delta" for i in range(len(parts))])
    keys, values = found.keys, found.values
    return [
        (
            data[k : k + n].tobytes(),
            None if m < 0 else data[v : v + m].tobytes(),
        )
        for k, n, v, m in zip(
            keys.start.tolist(), keys.length.tolist(), values.start.tolist(), values.length.tolist(), strict=True
        )
    ]


# Rows that look like entries themselves, so that guesses go wrong.
small = st.integers(0, 40)
looking = st.lists(small, max_size=12).map(lambda numbers: struct.pack(f">{len(numbers)}i", *numbers))
key = st.one_of(looking, st.binary(max_size=30), looking.map(lambda some: some[: len(some) // 8 * 8]))
entry = st.tuples(key, st.one_of(st.none(), key))


@given(st.lists(st.lists(entry, max_size=40), min_size=1, max_size=3), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_lanes_find_what_a_loop_finds(parts: list[list[Entry]], lane: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hdfs_store, "_LANE_BYTES", (16, 40, 96, 1 << 13)[lane])
        assert parse([encode(part) for part in parts], [True] * len(parts)) == [e for part in parts for e in part]


@given(st.lists(entry, min_size=1, max_size=30), st.data())
@settings(max_examples=150, deadline=None)
def test_broken_chains_are_refused_as_a_loop_refuses_them(part: list[Entry], data: st.DataObject) -> None:
    whole = bytearray(encode(part))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    cut = bytes(whole[: data.draw(st.integers(1, len(whole)))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hdfs_store, "_LANE_BYTES", 40)
        for broken in (bytes(whole), cut):
            expected = plain_rows(broken, deletes=True)
            if expected is None:
                with pytest.raises(DamagedCheckpoint, match=r"0\.delta"):
                    parse([broken], [True])
            else:
                assert parse([broken], [True]) == expected


@pytest.mark.parametrize("align", [0, 1, 4])
@pytest.mark.parametrize("count", [1, 5_000, 60_000])
def test_large_chains_of_rows_and_of_rows_with_something_before_them(align: int, count: int) -> None:
    numbers = np.arange(count, dtype=np.int64)
    kind = np.dtype([("ks", ">i4"), ("pad", f"V{align}"), ("kn", "<i8"), ("k", "<i8"), ("vs", ">i4"), ("v", "<i8")])
    table = np.zeros(count, kind)
    table["ks"], table["k"], table["vs"], table["v"] = 16 + align, numbers * 7919, 8, numbers % 97
    data = np.frombuffer(table.tobytes() + b"\xff\xff\xff\xff", np.uint8)
    found = hdfs_store.parse_chains(data, np.array([len(data)]), np.array([False]), ["1.snapshot"], (16, 8))
    assert np.array_equal(found.keys.start, numbers * kind.itemsize + 4)
    assert set(found.values.length.tolist()) == {8}


def test_a_deletion_has_no_place_in_a_snapshot() -> None:
    with pytest.raises(DamagedCheckpoint, match="no entry can stand"):
        parse([encode([(b"key", None)])], [False])


@pytest.mark.parametrize("data", [b"", b"\xff\xff", b"\x00\x00\x00\x01"])
def test_no_end_mark(data: bytes) -> None:
    with pytest.raises(DamagedCheckpoint):
        parse([data], [True])


# ---- of several writes of a key the last one counts, whatever hashes of keys do

Write = tuple[bytes, int | None]


def chain(writes: list[Write]) -> Chain:
    keys = [key for key, _ in writes]
    lengths = np.array([len(key) for key in keys], np.int64)
    data = np.frombuffer(b"".join(keys) + bytes(8), np.uint8)
    sizes = np.array([-1 if value is None else value for _, value in writes], np.int64)
    starts = np.cumsum(lengths) - lengths
    return Chain(ByteStrings(data, starts, lengths), ByteStrings(data, np.arange(len(keys)), sizes))


def check(writes: list[Write]) -> None:
    alive: dict[bytes, tuple[int, int]] = {}
    for index, (key, value) in enumerate(writes):
        alive.pop(key, None)
        if value is not None:
            alive[key] = (index, value)
    found = hdfs_store._last_writes(chain(writes))
    got = {
        found.keys.data[start : start + size].tobytes(): (index, value)
        for start, size, index, value in zip(
            found.keys.start.tolist(),
            found.keys.length.tolist(),
            found.values.start.tolist(),
            found.values.length.tolist(),
            strict=True,
        )
    }
    assert got == alive
    assert len(found.keys) == len(alive)


words = st.sampled_from([bytes(8), b"\x01" + bytes(7), bytes(7) + b"\x01", b"abcdefgh"])
rows = st.lists(words, max_size=4).map(b"".join)
keys = st.one_of(rows, st.binary(max_size=20), st.sampled_from([b"", b"a", b"b", bytes(150), bytes(149) + b"x"]))


@given(st.lists(st.tuples(keys, st.one_of(st.none(), st.integers(0, 9))), max_size=60))
@settings(max_examples=200, deadline=None)
def test_the_last_write_of_a_key_wins_and_a_deletion_takes_it_away(writes: list[Write]) -> None:
    check(writes)


@given(st.lists(st.tuples(keys, st.one_of(st.none(), st.integers(0, 9))), max_size=60))
@settings(max_examples=50, deadline=None)
def test_keys_that_share_a_hash_stay_apart(writes: list[Write]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hdfs_store, "_PRIMES", np.zeros(3, np.uint64))
        check(writes)


def test_long_keys_that_differ_in_their_middle_alone_stay_apart() -> None:
    check([(bytes(400) + bytes([number]) + bytes(399), number) for number in (1, 2, 1, 3, 2)])


# ---- which files of a store make a version

KINDS = {
    "numbers": ["long", "integer", "double"],
    "texts first": ["string", "binary", "long"],
    "texts last": ["long", "string", "binary", "string"],
    "long decimals": ["decimal(30,2)", "decimal(10,2)", "decimal(38,0)", "string"],
    "nested": [struct_of(("start", "long"), ("name", "string")), "string", array_of("integer"), "long"],
    "many": ["string", "long"] * 40,
}
VALUES: dict[str, Any] = {
    "long": [0, -1, 1 << 60],
    "integer": [7, -7],
    "double": [0.5, -1e300],
    "string": ["", "a", "eight by", "longer than eight bytes", "雪"],
    "binary": [b"", b"\x00" * 9],
    "decimal(30,2)": [Decimal("-12345678901234567890.12"), Decimal(0)],
    "decimal(10,2)": [Decimal("1.25")],
    "decimal(38,0)": [Decimal(10) ** 37],
}


def value_of(kind: Any, draw: random.Random) -> Any:
    if draw.random() < 0.25:
        return None
    if isinstance(kind, str):
        return draw.choice(VALUES[kind])
    if kind["type"] == "array":
        return [value_of(kind["elementType"], draw) for _ in range(draw.randrange(4))]
    return [value_of(field["type"], draw) for field in kind["fields"]]


@pytest.mark.parametrize("name", KINDS)
def test_a_key_is_cut_as_if_its_parts_were_encoded_by_themselves(name: str) -> None:
    kinds, draw = KINDS[name], random.Random(name)
    fields = parse_struct(json.dumps(struct_of(*((f"c{at}", kind) for at, kind in enumerate(kinds)))), "")
    rows = [[value_of(kind, draw) for kind in kinds] for _ in range(60)]
    whole = from_arrow(pa.array([encode_row(row, kinds) for row in rows], pa.binary()))
    for first in {1, len(kinds) // 2, len(kinds) - 1}:
        found = prefixed_keys(whole, len(kinds), first, [lies_outside(field.type) for field in fields])
        for key, row in zip(found.to_pylist(), rows, strict=True):
            head = b"\x00" + encode_row(row[:first], kinds[:first])
            assert key == struct.pack("<i", len(head)) + head + b"\x00" + encode_row(row[first:], kinds[first:])


def strings(values: list[bytes]) -> ByteStrings:
    return from_arrow(pa.array(values, pa.binary()))


ENTRIES = {
    "one": {b"k": b"v"},
    "empty values": {b"a": b"", b"b": b""},
    "of one width": {struct.pack(">q", (at * 7919) % 5000): struct.pack("<q", at) for at in range(5000)},
    "of any width": {b"key-" * (at % 7) + str(at).encode(): bytes([at % 251]) * (at % 300) for at in range(3000)},
    "larger than a block": {b"a": bytes(50_000), b"b" * 40_000: b"v", b"c": random.Random(1).randbytes(70_000)},
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_table_has_its_entries_in_the_order_of_their_bytes(name: str) -> None:
    entries = ENTRIES[name]
    shuffled = random.Random(1).sample(sorted(entries), len(entries))
    made = table_file(strings(shuffled), strings([entries[key] for key in shuffled]), 3)
    whole = pa.py_buffer(made.data)

    def read(offset: int, length: int) -> pa.Buffer:
        return whole.slice(offset, length)

    run, stones = read_tables([open_table(read, made.size, "table")])
    assert not stones
    assert run.key.to_arrow().to_pylist() == sorted(entries)
    keys, values = newest(run, stones, "table")
    assert dict(zip(keys.to_arrow().to_pylist(), values.to_arrow().to_pylist(), strict=True)) == entries
    assert set(run.stamp.tolist()) == {3 << 8 | 1}
    assert made.smallest == min(entries) + struct.pack("<Q", 3 << 8 | 1)
    assert made.largest == max(entries) + struct.pack("<Q", 3 << 8 | 1)


@pytest.mark.parametrize("width", [1, 8, 9, 24, 200])
def test_strings_of_one_width_are_sorted_as_any_others(width: int) -> None:
    draw = random.Random(width)
    values = sorted({draw.randbytes(width // 2).rjust(width, b"\x80") for _ in range(300)})
    shuffled = draw.sample(values, len(values))
    assert [shuffled[at] for at in sorted_by_bytes(strings(shuffled)).tolist()] == values


def test_numbers_have_seven_bits_a_byte() -> None:
    numbers = [0, 1, 127, 128, 300, 16_383, 16_384, 1 << 40]
    found = varints(np.array(numbers, np.int64)).to_arrow().to_pylist()
    assert [sum((byte & 0x7F) << 7 * at for at, byte in enumerate(one)) for one in found] == numbers
    assert [len(one) for one in found] == [1, 1, 1, 2, 2, 2, 3, 6]


def test_records_of_a_log_are_cut_where_a_block_ends() -> None:
    records = [b"a" * 10, b"b" * 32_738, b"c" * 100_000, b"", b"d"]
    data, found, rest = log_file(records), [], b""
    at = 0
    while at < len(data):
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
            continue
        check, size, kind = struct.unpack_from("<IHB", data, at)
        body = data[at + 7 : at + 7 + size]
        assert at // 32_768 == (at + 6 + size) // 32_768
        plain = int(crc32c(np.frombuffer(bytes([kind]) + body, np.uint8), np.array([size + 1]))[0])
        assert check == ((plain >> 15 | plain << 17) + 0xA282EAD8) & 0xFFFFFFFF
        rest = body if kind in (1, 2) else rest + body
        if kind in (1, 4):
            found.append(rest)
        at += 7 + size
    assert found == records


def test_entries_are_framed_where_they_stand_and_where_they_do_not() -> None:
    pairs = [(b"key", b"value"), (b"", b"x" * 9), (b"other", b"")]
    wanted = [struct.pack(">i", len(k)) + k + struct.pack(">i", len(v)) + v for k, v in pairs]
    apart = framed(strings([k for k, _ in pairs]), strings([v for _, v in pairs]))
    assert apart.to_arrow().to_pylist() == wanted
    data = np.frombuffer(b"".join(wanted), np.uint8)
    ends = np.cumsum([len(one) for one in wanted])
    starts = ends - [len(one) for one in wanted]
    sizes = np.array([[len(k), len(v)] for k, v in pairs])
    keys = ByteStrings(data, starts + 4, sizes[:, 0])
    together = framed(keys, ByteStrings(data, starts + 8 + sizes[:, 0], sizes[:, 1]))
    assert together.data is data
    assert together.to_arrow().to_pylist() == wanted
    order = np.array([2, 0])
    assert bytes(together.take(order).packed()) == wanted[2] + wanted[0]


CONF = '{"batchWatermarkMs":0,  "conf":{"spark.sql.shuffle.partitions" : "4","other":"spark.sql.shuffle.partitions=4"}}'


def test_an_offset_log_keeps_every_other_byte() -> None:
    before = f'v1\n{CONF}\n{{"logOffset":2}}\n-'.encode()
    after = edit_offsets(before, {"spark.sql.shuffle.partitions": "12"}, "offsets/2")
    assert after == before.replace(b'" : "4"', b'" : "12"')


def test_what_cannot_be_edited_alone_is_refused() -> None:
    twice = b'v1\n{"conf":{"a":"1"},"x":{"a":"1"}}\n-'
    with pytest.raises(DamagedCheckpoint, match="names one of them twice"):
        edit_offsets(twice, {"a": "2"}, "offsets/0")
    for broken in (b"v1", b"v1\nnot json\n-", b"v1\n[1]\n-", b"\xff\n{}"):
        with pytest.raises(DamagedCheckpoint, match="offsets/0"):
            edit_offsets(broken, {"a": "2"}, "offsets/0")
    with pytest.raises(UnsupportedFormat, match="version 'v9'"):
        edit_operator(b"v9\n{}", (4, 12), str, "metadata")
    with pytest.raises(DamagedCheckpoint, match="commits/0"):
        edit_commit(b'v1\n{"nextBatchWatermarkMs":0}', {"0": [["a"]]}, "commits/0")


def test_ids_of_a_commit_are_exchanged() -> None:
    before = b'v2\n{"nextBatchWatermarkMs":7,"stateUniqueIds":{"0":[["a"],["b"]]}}'
    after = edit_commit(before, {"0": [["c"], ["d"], ["e"]]}, "commits/0")
    assert after == b'v2\n{"nextBatchWatermarkMs":7,"stateUniqueIds":{"0":[["c"],["d"],["e"]]}}'


def test_schema_files_are_where_spark_will_look_for_them() -> None:
    path = "file:/data/query/state/0/_stateSchema/default/0_1"
    assert location_like(path, "file:///data/a copy") == "file:/data/a copy"
    assert location_like("s3n://old/x", "s3://new/y") == "s3n://new/y"
    assert location_like("", "s3://new/y/") == "s3a://new/y"
    text = json.dumps({"stateStoreInfo": [{"numPartitions": 4, "stateSchemaFilePaths": [path]}]})
    moved = edit_operator(f"v2\n{text}".encode(), (4, 12), lambda one: one.replace("/data/query", "/to"), "metadata")
    (info,) = json.loads(moved.splitlines()[1])["stateStoreInfo"]
    assert info == {"numPartitions": 12, "stateSchemaFilePaths": ["file:/to/state/0/_stateSchema/default/0_1"]}

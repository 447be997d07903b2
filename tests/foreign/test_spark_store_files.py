"""Files of state stores as they are written: rows cut in two against a second encoder, tables of
RocksDB against their reader, log files against the layout."""

from __future__ import annotations

import json
import random
import struct
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stateformat.backends.foreign.byte_strings import ByteStrings, from_arrow
from stateformat.backends.foreign.framing import crc32c
from stateformat.backends.foreign.spark.repartition.logs import edit_commit, edit_offsets, edit_operator, location_like
from stateformat.backends.foreign.spark.repartition.row_parts import prefixed_keys
from stateformat.backends.foreign.spark.repartition.store_files import framed, gathered
from stateformat.backends.foreign.spark.repartition.table_files import log_file, sorted_by_bytes, table_file, varints
from stateformat.backends.foreign.spark.repartition.work import lies_outside
from stateformat.backends.foreign.spark.schemas import parse_struct
from stateformat.backends.foreign.sst.merge import newest, read_tables
from stateformat.backends.foreign.sst.table import open_table
from stateformat.errors import DamagedCheckpoint, UnsupportedFormat
from tests.foreign.spark_rows import array_of, encode_row, struct_of

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
    assert bytes(gathered(together, order)) == wanted[2] + wanted[0]


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

"""Keys and lists as Spark lays them out in RocksDB: against an encoder for one row at a time."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stateformat.backends.foreign.byte_strings import ByteStrings, from_arrow
from stateformat.backends.foreign.framing import crc32c
from stateformat.backends.foreign.spark import rocksdb_keys
from stateformat.backends.foreign.spark.schemas import SparkField, StoreSchema, parse_struct
from stateformat.backends.foreign.spark.stores import Store
from stateformat.errors import DamagedCheckpoint, UnsupportedFormat

CONF = "spark.sql.streaming.stateStore."


def fields(**kinds: str) -> tuple[SparkField, ...]:
    listed = ",".join(
        f'{{"name":"{name}","type":"{kind}","nullable":true,"metadata":{{}}}}' for name, kind in kinds.items()
    )
    return parse_struct(f'{{"type":"struct","fields":[{listed}]}}', "x")


def store(key: Sequence[SparkField], encoder: dict[str, Any] | None = None, **conf: str) -> Store:
    schema = StoreSchema(tuple(key), fields(v="long"), "f", encoder or {})
    return Store(
        0, "f", 1, 1, schema, {CONF + name.replace("_", "."): value for name, value in conf.items()}, family="f"
    )


def strings(some: list[bytes]) -> ByteStrings:
    return from_arrow(pa.array(some, pa.binary()))


def row(*values: int | bytes | None) -> bytes:
    """An UnsafeRow after its version: longs, and bytes behind the fixed part."""
    nulls = sum(1 << at for at, value in enumerate(values) if value is None)
    head, tail = struct.pack("<q", nulls), b""
    for value in values:
        if isinstance(value, bytes):
            head += struct.pack("<q", (8 * (len(values) + 1) + len(tail)) << 32 | len(value))
            tail += value + bytes(-len(value) % 8)
        else:
            head += struct.pack("<q", value or 0)
    return b"\0" + head + tail


def ordered(kind: str, value: Any) -> bytes:
    """A mark and the number, so that bytes sort as numbers do (negative, positive, null)."""
    form = {"byte": ">b", "short": ">h", "integer": ">i", "long": ">q", "float": ">f", "double": ">d"}[kind]
    if value is None:
        return b"\2" + bytes(struct.calcsize(form))
    octets = struct.pack(form, value)
    if kind in ("float", "double") and octets[0] & 0x80:
        return b"\0" + bytes(255 - one for one in octets)
    return (b"\0" if value < 0 else b"\1") + octets


NUMBERS: dict[str, list[Any]] = {
    "byte": [-128, -1, 0, 1, 127, None],
    "short": [-32768, -2, 0, 32767, None],
    "integer": [-(2**31), -1, 0, 2**31 - 1, None],
    "long": [-(2**63), -1, 0, 1, 2**63 - 1, None],
    "float": [-math.inf, -1.5, -0.0, 0.0, 2.5, math.inf, None],
    "double": [-math.inf, -1e300, -0.0, 0.0, 1e-300, math.inf, None],
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_ordered_columns_are_decoded_and_their_bytes_sort_as_they_do(kind: str) -> None:
    octets = [ordered(kind, value) for value in NUMBERS[kind]]
    assert octets == sorted(octets)
    # The ordered column is the second; the first and the third are a row behind it.
    some = store(
        fields(a="long", n=kind, b="long"), {"keyStateEncoderType": rocksdb_keys.RANGE, "orderingOrdinals": [1]}
    )
    keys = [struct.pack("<i", len(row(one))) + row(one) + row(7, None) for one in octets]
    found = [column.to_pylist() for column in rocksdb_keys.key_columns(some, strings(keys), "x")]
    assert found == [[7] * len(octets), NUMBERS[kind], [None] * len(octets)]
    assert [str(value) for value in found[1]] == [str(value) for value in NUMBERS[kind]]


def test_keys_may_be_ordered_by_all_their_columns() -> None:
    some = store(fields(a="long", b="short"), {"keyStateEncoderType": rocksdb_keys.RANGE, "orderingOrdinals": [1, 0]})
    head = row(ordered("short", -4), ordered("long", 9))
    found = rocksdb_keys.key_columns(some, strings([struct.pack("<i", len(head)) + head]), "x")
    assert [column.to_pylist() for column in found] == [[9], [-4]]


def test_keys_with_a_prefix_are_put_together() -> None:
    some = store(fields(a="string", b="long"), {"keyStateEncoderType": rocksdb_keys.PREFIX, "numColsPrefixKey": 1})
    heads = [row(b"long enough"), row(b""), row(None)]
    keys = [struct.pack("<i", len(head)) + head + row(at) for at, head in enumerate(heads)]
    found = rocksdb_keys.key_columns(some, strings(keys), "x")
    assert [column.to_pylist() for column in found] == [["long enough", "", None], [0, 1, 2]]


@pytest.mark.parametrize("encoder", [rocksdb_keys.TIME_FIRST, rocksdb_keys.TIME_LAST])
def test_times_beside_keys_are_decoded(encoder: str) -> None:
    some = store(fields(a="long", at="long"), {"keyStateEncoderType": encoder})
    times = [-(2**63), -1, 0, 1, 2**63 - 1]
    marks = [struct.pack(">Q", time + 2**63) for time in times]
    keys = [mark + row(5) if encoder == rocksdb_keys.TIME_FIRST else row(5) + mark for mark in marks]
    found = rocksdb_keys.key_columns(some, strings(keys), "x")
    assert [column.to_pylist() for column in found] == [[5] * 5, times]


@pytest.mark.parametrize(
    ("encoder", "key", "error", "what"),
    [
        ({"keyStateEncoderType": "Newer"}, b"", UnsupportedFormat, "laid out by Newer"),
        ({"keyStateEncoderType": rocksdb_keys.PREFIX, "numColsPrefixKey": 1}, b"\0\0", DamagedCheckpoint, "two parts"),
        ({"keyStateEncoderType": rocksdb_keys.PREFIX, "numColsPrefixKey": 1}, b"\x7f\0\0\0\0\0", DamagedCheckpoint, "a first part of 127"),
        ({"keyStateEncoderType": rocksdb_keys.PREFIX, "numColsPrefixKey": 1}, b"\1\0\0\0\1\0", UnsupportedFormat, "encoded by version 1"),
        ({"keyStateEncoderType": rocksdb_keys.RANGE, "orderingOrdinals": [2]}, b"", DamagedCheckpoint, "orders keys by columns"),
        ({"keyStateEncoderType": rocksdb_keys.TIME_LAST}, b"\0" * 8, DamagedCheckpoint, "no row and time"),
        (
            {"keyStateEncoderType": rocksdb_keys.RANGE, "orderingOrdinals": [0]},
            struct.pack("<i", len(row(b"\1ab"))) + row(b"\1ab") + row(1),
            DamagedCheckpoint,
            "no mark and 8 bytes",
        ),
    ],
)  # fmt: skip
def test_keys_that_cannot_be_are_refused(
    encoder: dict[str, Any], key: bytes, error: type[Exception], what: str
) -> None:
    with pytest.raises(error, match=what):
        rocksdb_keys.key_columns(store(fields(a="long", b="long"), encoder), strings([key]), "x")


# Lists


def listed(rows: list[bytes], gap: bytes, key: bytes | None = None) -> bytes:
    """Several values of a key, with checksums if a key is given."""
    found = []
    for one in rows:
        framed = struct.pack("<i", len(one)) + one
        if key is not None:
            whole = np.frombuffer(key + framed, np.uint8)
            framed = struct.pack("<Ii", int(crc32c(whole, np.array([len(whole)]))[0]), len(framed)) + framed
        found.append(framed)
    return gap.join(found)


@pytest.mark.parametrize("sums", ["false", "true"])
@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("few", [0, 16])
def test_lists_are_parted(version: str, sums: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocksdb_keys, "_FEW", few)
    some = store(fields(a="long"), rocksdb_mergeOperatorVersion=version, rowChecksum_enabled=sums)
    rng = random.Random(7)
    lists = [[row(rng.randbytes(rng.randrange(40))) for _ in range(rng.randrange(9))] for _ in range(40)]
    lists += [[row(at) for at in range(500)], []]
    keys = [b"key %d" % at for at in range(len(lists))]
    gap = b"," if version == "1" else b""
    values = [listed(rows, gap, key if sums == "true" else None) for key, rows in zip(keys, lists, strict=True)]
    counts, rows = rocksdb_keys.split_values(some, strings(keys), strings(values), "x")
    assert counts.tolist() == [len(one) for one in lists]
    assert rows.to_arrow().to_pylist() == [one[1:] for rows in lists for one in rows]
    for cut in (1, 3, 6):
        torn = [values[0], values[-2][:-cut]]
        with pytest.raises(DamagedCheckpoint):
            rocksdb_keys.split_values(some, strings(keys[:1] + keys[-2:-1]), strings(torn), "x")


def test_values_with_checksums_of_others_are_damaged() -> None:
    some = store(fields(a="long"), rocksdb_mergeOperatorVersion="2", rowChecksum_enabled="true")
    octets = bytearray(listed([row(1), row(2)], b"", b"key"))
    octets[-1] ^= 1
    with pytest.raises(DamagedCheckpoint, match="a checksum of another"):
        rocksdb_keys.split_values(some, strings([b"key"]), strings([bytes(octets)]), "x")


def test_state_in_avro_is_refused() -> None:
    with pytest.raises(UnsupportedFormat, match="encoded as 'avro'"):
        rocksdb_keys.encoder_of(store(fields(a="long"), encodingFormat="avro"))

"""Rows, state files and checkpoints as Spark writes them, encoded value by value in plain Python.

Written otherwise than the decoder, from ``reference/foreign-state.md``: the second oracle.
"""

from __future__ import annotations

import json
import struct
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa
import xxhash

Type = Any
"""A type in Spark's JSON: a name, or an object."""

_FIXED = {
    "boolean": "<?", "byte": "<b", "short": "<h", "integer": "<i", "long": "<q", "float": "<f", "double": "<d",
    "date": "<i", "timestamp": "<q", "timestamp_ntz": "<q", "interval year to month": "<i", "interval day to second": "<q",
}  # fmt: skip


def struct_of(*fields: tuple[str, Type]) -> Type:
    return {
        "type": "struct",
        "fields": [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in fields],
    }


def array_of(kind: Type) -> Type:
    return {"type": "array", "elementType": kind, "containsNull": True}


def map_of(key: Type, value: Type) -> Type:
    return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}


def precision(kind: Type) -> tuple[int, int] | None:
    if isinstance(kind, str) and kind.startswith("decimal"):
        digits, scale = kind[8:-1].split(",")
        return int(digits), int(scale)
    return None


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def _cell(value: Any, kind: Type, end: int) -> tuple[bytes, bytes]:
    """What stands in the slot, and what stands outside of it at ``end``."""
    digits = precision(kind)
    if digits and digits[0] <= 18:
        return struct.pack("<q", 0 if value is None else int(Context(prec=60).multiply(value, 10 ** digits[1]))), b""
    if digits:
        if value is None:
            return struct.pack("<Q", end << 32), bytes(16)
        unscaled = int(Context(prec=60).multiply(value, 10 ** digits[1]))
        size = max(1, (unscaled if unscaled >= 0 else ~unscaled).bit_length() // 8 + 1)
        raw = unscaled.to_bytes(size, "big", signed=True)
        return struct.pack("<Q", end << 32 | len(raw)), raw + bytes(16 - len(raw))
    if value is None:
        return bytes(8), b""
    if isinstance(kind, str) and kind in _FIXED:
        return struct.pack(_FIXED[kind], value), b""
    if kind == "string":
        raw = value.encode()
    elif kind == "binary":
        raw = value
    elif kind == "interval":
        raw = struct.pack("<iiq", *value)
    elif kind["type"] == "struct":
        raw = encode_row(value, [field["type"] for field in kind["fields"]])
    elif kind["type"] == "array":
        raw = encode_array(value, kind["elementType"])
    else:
        keys = encode_array([key for key, _ in value], kind["keyType"])
        raw = struct.pack("<q", len(keys)) + keys + encode_array([item for _, item in value], kind["valueType"])
    return struct.pack("<Q", end << 32 | len(raw)), padded(raw)


def _null_bits(values: list[Any]) -> bytes:
    number = sum(1 << index for index, value in enumerate(values) if value is None)
    return number.to_bytes(8 * ((len(values) + 63) // 64), "little")


def encode_row(values: list[Any], kinds: list[Type]) -> bytes:
    head = _null_bits(values)
    slots, outside = b"", b""
    for value, kind in zip(values, kinds, strict=True):
        slot, more = _cell(value, kind, len(head) + 8 * len(values) + len(outside))
        slots += slot.ljust(8, b"\x00")
        outside += more
    return head + slots + outside


def encode_array(values: list[Any], kind: Type) -> bytes:
    head = struct.pack("<q", len(values)) + _null_bits(values)
    width = struct.calcsize(_FIXED[kind]) if isinstance(kind, str) and kind in _FIXED else 8
    items, outside = b"", b""
    reserved = len(padded(bytes(width * len(values))))
    for value in values:
        slot, more = _cell(value, kind, len(head) + reserved + len(outside))
        items += slot[:width].ljust(width, b"\x00")
        outside += more
    return head + padded(items) + outside


def encode_entries(entries: list[tuple[bytes, bytes | None]]) -> bytes:
    parts = []
    for key, value in entries:
        sized = struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value
        parts += [struct.pack(">i", len(key)), key, sized]
    return b"".join(parts) + b"\xff\xff\xff\xff"


def lz4_stream(data: bytes, frame: int = 1 << 15) -> bytes:
    packed = b""
    for at in range(0, len(data), frame):
        raw = data[at : at + frame]
        body = pa.Codec("lz4_raw").compress(raw, asbytes=True)
        check = xxhash.xxh32_intdigest(raw, 0x9747B28C) & 0x0FFFFFFF
        packed += b"LZ4Block\x25" + struct.pack("<iiI", len(body), len(raw), check) + body
    return packed + b"LZ4Block\x15" + bytes(12)


def schema_file(key: Type, value: Type) -> bytes:
    def utf(text: str) -> bytes:
        return len(text.encode()).to_bytes(2, "big") + text.encode()

    chunks = b"".join(b"\x00\x00\x00\x01" + utf(json.dumps(kind)) for kind in (key, value))
    return utf("v2") + chunks


def checkpoint(
    key: Type,
    value: Type,
    partitions: list[dict[str, bytes]],
    *,
    operator: str = "stateStoreSave",
    batch: int = 0,
    prefix: int = 0,
    conf: dict[str, str] | None = None,
) -> dict[str, bytes]:
    """The files of a query with one operator; of each partition the state files are given."""
    settings = {
        "spark.sql.shuffle.partitions": str(len(partitions)),
        "spark.sql.streaming.statefulOperator.useStrictDistribution": "true",
        **(conf or {}),
    }
    info = {
        "operatorInfo": {"operatorId": 0, "operatorName": operator},
        "stateStoreInfo": [{"storeName": "default", "numColsPrefixKey": prefix, "numPartitions": len(partitions)}],
    }
    files = {
        "metadata": b'{"id":"6a2d4b1c"}',
        "state/0/_metadata/metadata": f"v1\n{json.dumps(info)}".encode(),
        "state/0/0/_metadata/schema": schema_file(key, value),
    }
    for number in range(batch + 1):
        log = {"batchWatermarkMs": 0, "batchTimestampMs": 1_700_000_000_000 + number, "conf": settings}
        files[f"offsets/{number}"] = f'v1\n{json.dumps(log)}\n{{"logOffset":{number}}}'.encode()
        files[f"commits/{number}"] = b'v1\n{"nextBatchWatermarkMs":0}'
        files[f"sources/0/{number}"] = b"v1\n{}"
    for number, some in enumerate(partitions):
        files |= {f"state/0/{number}/{name}": data for name, data in some.items()}
    return files


def as_decimal(unscaled: int, scale: int) -> Decimal:
    return Context(prec=60).scaleb(Decimal(unscaled), -scale)

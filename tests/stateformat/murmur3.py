"""The default key hash as SPEC.md section 5.3 tells it: one value, one type, one seed at a time."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import struct
from typing import Any

import pyarrow as pa

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def hash_rows(columns: list[list[Any]], types: list[Any]) -> list[int]:
    """The signed hash of each row of these columns."""
    hashes = []
    for row in zip(*columns, strict=True):
        h = 42
        for value, type_ in zip(row, types, strict=True):
            h = _value(value, type_, h)
        hashes.append(h - 2**32 if h >= 2**31 else h)
    return hashes


def hash_one(value: int | str | float | None) -> int:
    """The hash of a key of one int64, string or double column."""
    kind = {str: pa.string(), float: pa.float64()}.get(type(value), pa.int64())
    return hash_rows([[value]], [kind])[0]


def float_bits(value: float, code: str) -> int:
    """The bits of a float (``f``) or double (``d``) with one zero and one NaN."""
    if math.isnan(value):
        return 0x7FC00000 if code == "f" else 0x7FF8000000000000
    return int.from_bytes(struct.pack(f"<{code}", value if value else 0.0), "little")


def _value(value: Any, type_: Any, seed: int) -> int:
    if value is None:
        return seed
    if pa.types.is_struct(type_):
        for field in type_:
            seed = _value(value[field.name], field.type, seed)
        return seed
    if pa.types.is_decimal(type_):
        unscaled = int(value.scaleb(type_.scale, decimal.Context(prec=60)))
        if type_.precision <= 18:
            return _long(unscaled, seed)
        shortest = next(n for n in range(1, 17) if -(2 ** (8 * n - 1)) <= unscaled < 2 ** (8 * n - 1))
        return _bytes(unscaled.to_bytes(shortest, "big", signed=True), seed)
    match value:
        case bool():
            return _blocks([int(value)], 4, seed)
        case int():
            return _long(value, seed) if type_ == pa.int64() else _blocks([value], 4, seed)
        case float():
            single = type_ == pa.float32()
            return _blocks([float_bits(value, "f")], 4, seed) if single else _long(float_bits(value, "d"), seed)
        case str():
            return _bytes(value.encode(), seed)
        case bytes():
            return _bytes(value, seed)
        case dt.datetime():
            since = value.replace(tzinfo=dt.UTC) - EPOCH
            return _long((since.days * 86400 + since.seconds) * 10**6 + since.microseconds, seed)
        case dt.date():
            return _blocks([value.toordinal() - EPOCH.toordinal()], 4, seed)
    raise AssertionError(f"the oracle does not know {type_}")


def _rotl(value: int, count: int) -> int:
    return ((value << count) | (value >> (32 - count))) % 2**32


def _blocks(blocks: list[int], length: int, seed: int) -> int:
    h = seed
    for block in blocks:
        k = _rotl(block % 2**32 * 0xCC9E2D51 % 2**32, 15) * 0x1B873593 % 2**32
        h = (_rotl(h ^ k, 13) * 5 + 0xE6546B64) % 2**32
    h ^= length
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def _bytes(data: bytes, seed: int) -> int:
    whole, rest = divmod(len(data), 4)
    blocks = [*struct.unpack(f"<{whole}i", data[: 4 * whole]), *struct.unpack(f"{rest}b", data[4 * whole :])]
    return _blocks(blocks, len(data), seed)


def _long(value: int, seed: int) -> int:
    return _blocks([value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF], 8, seed)

"""The default key hash against ``hash(...)`` of Spark SQL itself, for every type of key columns.

All values go to Spark in one Parquet file, which keeps every bit, and come back in one query.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from decimal import Context, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stateformat.keys import hash_keys, normalize_key_column

pytestmark = pytest.mark.spark

ROWS = 4500
RANDOM = random.Random(20)
NULL_EVERY = 11


def filled(extremes: list[Any], draw: Callable[[], Any]) -> list[Any]:
    """The extremes, then drawn values up to ROWS, every eleventh a null."""
    drawn = [draw() if index % NULL_EVERY != NULL_EVERY - 1 else None for index in range(len(extremes), ROWS)]
    return extremes + drawn


def integers(bits: int, type_: Any) -> Any:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    values = filled([low, low + 1, -1, 0, 1, high - 1, high], lambda: RANDOM.randint(low, high))
    plain = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[bits]
    return pa.array(values, plain).cast(type_)


def floating(bits: int, type_: Any) -> Any:
    word, mantissa = (np.uint32, 23) if bits == 32 else (np.uint64, 52)
    sign, infinity = 1 << (bits - 1), ((1 << (bits - 1 - mantissa)) - 1) << mantissa
    payloads = (1, 2, 1 << (mantissa - 1), (1 << (mantissa - 1)) + 5, (1 << mantissa) - 1)
    special = [0, sign, infinity, sign | infinity, 1, sign | 1, infinity - 1, 1 << mantissa]
    special += [infinity | payload for payload in payloads]
    special += [sign | value for value in special if value > infinity]
    values = special + [RANDOM.getrandbits(bits) for _ in range(ROWS - len(special))]
    mask = np.arange(ROWS) % NULL_EVERY == NULL_EVERY - 1
    mask[: len(special)] = False
    bitmap = pa.py_buffer(np.packbits(~mask, bitorder="little"))
    return pa.Array.from_buffers(type_, ROWS, [bitmap, pa.py_buffer(np.array(values, word))])


def decimals(precision: int, scale: int) -> Any:
    limit = 10**precision - 1
    powers = [2 ** (8 * k - 1) for k in range(1, 17)]
    edges = [edge for power in powers for edge in (power - 1, power, power + 1, 2 * power) if edge < limit]
    extremes = [0, 1, -1, limit, -limit, *edges, *(-edge for edge in edges)]

    def draw() -> int:
        return RANDOM.choice((1, -1)) * RANDOM.randint(0, 10 ** RANDOM.randint(0, precision) - 1)

    context = Context(prec=60)
    values = [None if v is None else Decimal(v).scaleb(-scale, context) for v in filled(extremes, draw)]
    return pa.array(values, pa.decimal128(precision, scale))


def texts() -> Any:
    alphabet = string.ascii_letters + "äßéñøЖשم中文字🙂𝄞\x00 "
    of_all_lengths = ["".join(RANDOM.choices(string.printable, k=length)) for length in range(41) for _ in range(3)]
    extremes = ["", "\x00", "é", "🙂", "中文", "x" * 5000, "é" * 777, *of_all_lengths]
    return pa.array(filled(extremes, lambda: "".join(RANDOM.choices(alphabet, k=RANDOM.randint(0, 20)))), pa.string())


def binaries() -> Any:
    of_all_lengths = [RANDOM.randbytes(length) for length in range(41) for _ in range(10)]
    extremes = [b"", b"\x80", b"\xff" * 3, b"\x7f\x80\xff\x00\x80", RANDOM.randbytes(9001), *of_all_lengths]
    return pa.array(filled(extremes, lambda: RANDOM.randbytes(RANDOM.randint(0, 40))), pa.binary())


def structs(**fields: Any) -> Any:
    mask = pa.array([RANDOM.random() < 0.15 for _ in range(ROWS)])
    return pa.StructArray.from_arrays(list(fields.values()), list(fields), mask=mask)


def build() -> pa.Table:
    columns = {
        "bool": pa.array(filled([True, False], lambda: RANDOM.random() < 0.5), pa.bool_()),
        "int8": integers(8, pa.int8()),
        "int16": integers(16, pa.int16()),
        "int32": integers(32, pa.int32()),
        "int64": integers(64, pa.int64()),
        "date32": integers(32, pa.date32()),
        "timestamp": integers(64, pa.timestamp("us")),
        "timestamp_tz": integers(64, pa.timestamp("us", "UTC")),
        "float": floating(32, pa.float32()),
        "double": floating(64, pa.float64()),
        "utf8": texts(),
        "binary": binaries(),
    }
    for of in [(5, 0), (5, 2), (18, 0), (18, 7), (19, 0), (19, 4), (38, 0), (38, 18)]:
        columns["decimal_{}_{}".format(*of)] = decimals(*of)
    columns["struct"] = structs(a=columns["int64"], b=columns["utf8"], c=columns["decimal_38_0"])
    columns["struct_floats"] = structs(x=columns["double"], y=columns["float"], z=columns["bool"])
    columns["nested"] = structs(s=columns["struct"], t=columns["struct_floats"], u=columns["date32"])
    return pa.table({"row": pa.array(range(ROWS), pa.int64()), **columns})


TABLE = build()
COMPOSITE = [
    ("int64", "utf8"),
    ("utf8", "int64"),
    ("int32", "int32"),
    ("date32", "binary", "bool"),
    ("double", "timestamp", "decimal_19_4"),
    ("nested", "int8", "float"),
    ("int16", "struct", "decimal_5_2", "timestamp_tz"),
    ("utf8", "binary", "utf8", "decimal_38_18"),
]
KEYS = [(name,) for name in TABLE.column_names if name != "row"] + COMPOSITE
FLOATING = [("float",), ("double",), ("struct_floats",), ("nested", "int8", "float")]


@pytest.fixture(scope="module")
def hashes_of_spark(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """One column per key of KEYS, named by its columns, in the order of the rows."""
    path = tmp_path_factory.mktemp("keys") / "keys.parquet"
    pq.write_table(TABLE, path)
    payloads = pq.read_table(path)["double"].combine_chunks().to_numpy(zero_copy_only=False).view(np.uint64)[:20]
    assert len(np.unique(payloads & np.uint64(2**52 - 1))) > 5, "NaN payloads were lost on the way to Spark"
    hashes = (f"hash({', '.join(f'`{c}`' for c in key)}) AS `{'+'.join(key)}`" for key in KEYS)
    return spark.read.parquet(str(path)).selectExpr("row", *hashes).toArrow().sort_by("row")


@pytest.mark.parametrize("key", KEYS, ids="+".join)
def test_keys_hash_as_in_spark_sql(hashes_of_spark: pa.Table, key: tuple[str, ...]) -> None:
    expected = hashes_of_spark["+".join(key)].to_numpy()
    assert len(expected) == ROWS
    assert len(set(expected.tolist())) > 1
    wrong = np.flatnonzero(hash_keys([TABLE[column] for column in key]) != expected)
    assert wrong.tolist() == [], [TABLE.select(key).slice(row, 1).to_pylist() for row in wrong[:3].tolist()]


@pytest.mark.parametrize("key", FLOATING, ids="+".join)
def test_normalized_keys_hash_as_the_keys_did_in_spark(hashes_of_spark: pa.Table, key: tuple[str, ...]) -> None:
    normal = [normalize_key_column(TABLE[column]) for column in key]
    assert any(column is not TABLE[name] for column, name in zip(normal, key, strict=True))
    assert hash_keys(normal).tolist() == hashes_of_spark["+".join(key)].to_pylist()

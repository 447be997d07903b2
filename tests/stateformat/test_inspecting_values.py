"""When two values are equal: by their bits, with one NaN, in nested types too."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stateformat.inspecting.comparing.rows import equal_values, value_buckets, value_codes

NAN = float(np.array([0x7FF8000000000001], np.uint64).view(np.float64)[0])
POINT = pa.struct([pa.field("x", pa.float64()), pa.field("names", pa.list_(pa.string()))])
COUNTS = pa.map_(pa.string(), pa.int64())

CASES: list[tuple[pa.DataType, Any, Any, bool]] = [
    (pa.float64(), 0.0, -0.0, False),
    (pa.float64(), math.nan, NAN, True),
    (pa.float32(), math.nan, -math.nan, True),
    (pa.float32(), -0.0, -0.0, True),
    (pa.float64(), None, None, True),
    (pa.float64(), None, 0.0, False),
    (pa.bool_(), True, False, False),
    (pa.int64(), None, 0, False),
    (pa.string(), "", None, False),
    (pa.binary(), b"\x00", b"\x00", True),
    (pa.decimal128(5, 2), Decimal("1.10"), Decimal("1.1"), True),
    (pa.list_(pa.int64()), [], None, False),
    (pa.list_(pa.int64()), [1, None], [1, None], True),
    (pa.list_(pa.int64()), [1, 2], [2, 1], False),
    (pa.list_(pa.float64()), [math.nan, 0.0], [NAN, 0.0], True),
    (pa.list_(pa.float64()), [-0.0], [0.0], False),
    (pa.list_(pa.list_(pa.string())), [["a"], []], [["a"], None], False),
    (pa.list_(pa.list_(pa.string())), [["a"], ["b"]], [["a", "b"]], False),
    (POINT, {"x": None, "names": None}, None, False),
    (POINT, {"x": math.nan, "names": ["a", None]}, {"x": NAN, "names": ["a", None]}, True),
    (COUNTS, [("a", 1), ("b", 2)], [("b", 2), ("a", 1)], False),
    (COUNTS, [("a", 1)], [("a", None)], False),
    (COUNTS, [("a", 1)], [("a", 1)], True),
]


@pytest.mark.parametrize(("kind", "left", "right", "equal"), CASES)
@pytest.mark.parametrize("sliced", [False, True])
def test_values_are_equal_by_their_bits(kind: pa.DataType, left: Any, right: Any, equal: bool, sliced: bool) -> None:
    before, after = pa.array([left, left, None], kind), pa.array([right, left, None], kind)
    wanted = [equal, True, True]
    if sliced:
        # What is hidden before a slice must not be seen.
        before, after, wanted = before.slice(1), after.slice(1), wanted[1:]
    assert equal_values(before, after).tolist() == wanted
    codes = value_codes([pa.chunked_array([before, after])])
    assert (codes[: len(before)] == codes[len(before) :]).tolist() == wanted
    buckets = value_buckets([pa.chunked_array([before, after])], 1 << 20, 0)
    assert all(buckets[row] == buckets[len(before) + row] for row in range(len(before)) if wanted[row])


def test_buckets_tell_lists_of_one_length_apart() -> None:
    nested = [[[number, 1], [1, number]] for number in range(1000)]
    lists = [[number, 1] for number in range(1000)]
    for rows, kind in ((nested, pa.list_(pa.list_(pa.int64()))), (lists, pa.list_(pa.int64()))):
        column = pa.chunked_array([pa.array(rows, kind)])
        counts = np.bincount(value_buckets([column], 16, 1), minlength=16)
        assert counts.min() > 0

"""Many byte strings in one buffer: gathered as they lie, of any length and in any order."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as some

from stateformat.backends.foreign.byte_strings import ByteStrings, from_arrow
from stateformat.errors import ErrorKind, UnsupportedFormat


@settings(max_examples=200, deadline=None)
@given(
    data=some.binary(max_size=60), cuts=some.lists(some.tuples(some.integers(0, 60), some.integers(0, 60)), max_size=9)
)
def test_strings_are_gathered_from_where_they_lie(data: bytes, cuts: list[tuple[int, int]]) -> None:
    places = [(min(start, len(data)), min(start + length, len(data))) for start, length in cuts]
    start = np.array([first for first, _ in places], np.int64)
    length = np.array([last - first for first, last in places], np.int64)
    found = ByteStrings(np.frombuffer(data, np.uint8), start, length).to_arrow()
    found.validate(full=True)
    assert found.to_pylist() == [data[first:last] for first, last in places]


@settings(max_examples=100, deadline=None)
@given(values=some.lists(some.binary(max_size=20), max_size=9))
def test_strings_of_arrow_come_back(values: list[bytes]) -> None:
    assert from_arrow(pa.array(values, pa.binary())).to_arrow().to_pylist() == values


@pytest.mark.parametrize("dtype", ["<i8", ">u2", "u1", ">f4"])
def test_numbers_are_taken_at_an_offset_of_each(dtype: str) -> None:
    octets = np.arange(40, dtype=np.uint8)
    strings = ByteStrings(octets, np.array([0, 3, 20]), np.array([20, 20, 20]))
    wanted = [np.frombuffer(octets.tobytes(), dtype, 1, int(start) + 5)[0] for start in strings.start]
    assert strings.fixed(5, dtype).tolist() == [item.item() for item in wanted]
    assert ByteStrings(octets, np.zeros(0, np.int64), np.zeros(0, np.int64)).fixed(0, dtype).tolist() == []


def test_more_bytes_than_a_column_holds_are_refused_before_they_are_gathered() -> None:
    octets = np.zeros(1 << 20, np.uint8)
    strings = ByteStrings(octets, np.zeros(4096, np.int64), np.full(4096, 1 << 20, np.int64))
    with pytest.raises(UnsupportedFormat, match="4294967296 bytes are to be read at once") as caught:
        strings.to_arrow()
    assert caught.value.kind is ErrorKind.LIMIT_EXCEEDED

"""Key groups of Flink's, against Java's definition of hash codes and what Flink has stored."""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from stateformat.backends.foreign.flink import FLINK_KEY_HASH, USER_KEY_HASH
from stateformat.backends.foreign.flink.key_hash import is_hashable, java_hash_codes, murmur
from stateformat.errors import ErrorKind, InvalidInput
from stateformat.keys import hash_keys, key_groups


def signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def code_of(value: object) -> int:
    """Java's ``hashCode``, one value at a time."""
    if value is None:
        return 0
    if isinstance(value, bool):
        return 1231 if value else 1237
    if isinstance(value, str):
        code = 0
        for unit in np.frombuffer(value.encode("utf-16-le"), "<u2").tolist():
            code = (31 * code + unit) & 0xFFFFFFFF
        return signed(code)
    if isinstance(value, dict):
        code = 0
        for item in value.values():
            code = (31 * code + code_of(item)) & 0xFFFFFFFF
        return signed(code)
    (bits,) = (
        struct.unpack(">Q", struct.pack(">d", value)) if isinstance(value, float) else (int(value) & (1 << 64) - 1,)
    )  # type: ignore[call-overload]
    return signed(bits ^ bits >> 32)


def murmur_of(code: int) -> int:
    mask = 0xFFFFFFFF
    k = code * 0xCC9E2D51 & mask
    k = ((k << 15 | k >> 17) & mask) * 0x1B873593 & mask
    h = (k << 13 | k >> 19) & mask
    h = (h * 5 + 0xE6546B64) & mask ^ 4
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    h = signed(h ^ h >> 16)
    return 0 if h == -(1 << 31) else abs(h)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LONGS = st.integers(-(1 << 63), (1 << 63) - 1)


@settings(max_examples=80, deadline=None)
@given(values=st.lists(st.one_of(st.none(), TEXTS), max_size=30), skipped=st.integers(0, 3))
def test_texts_are_polynomials_of_their_utf_16_units(values, skipped):
    found = java_hash_codes(pa.array(values, pa.string()).slice(skipped))
    assert found.tolist() == [code_of(value) for value in values[skipped:]]


@settings(max_examples=40, deadline=None)
@given(values=st.lists(LONGS, max_size=30))
def test_longs_fold_their_halves(values):
    assert java_hash_codes(pa.array(values, pa.int64())).tolist() == [code_of(value) for value in values]


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.floats(allow_nan=False), max_size=30))
def test_doubles_fold_their_bits(values):
    assert java_hash_codes(pa.array(values, pa.float64())).tolist() == [code_of(value) for value in values]


def test_every_nan_is_the_same_and_negative_zero_is_another_to_java():
    nans = np.array([0x7FF8 << 48, 0xFFF8 << 48, (0x7FF8 << 48) + 5], np.uint64).view(np.float64)
    assert set(java_hash_codes(pa.array(nans)).tolist()) == {signed(0x7FF80000)}
    zeros = java_hash_codes(pa.array([0.0, -0.0]))
    assert zeros.tolist() == [0, signed(0x80000000)]
    # Our hashes never tell them apart.
    assert len(set(hash_keys([pa.array([0.0, -0.0])], FLINK_KEY_HASH).tolist())) == 1


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([True, False, None], pa.bool_()),
        ([{"f0": 1, "f1": "a"}, {"f0": None, "f1": ""}], pa.struct([("f0", pa.int64()), ("f1", pa.string())])),
        ([{"f0": {"f0": "x"}, "f1": 2}], pa.struct([("f0", pa.struct([("f0", pa.string())])), ("f1", pa.int32())])),
    ],
)
def test_booleans_and_tuples(values, dtype):
    assert java_hash_codes(pa.array(values, dtype)).tolist() == [code_of(value) for value in values]


@pytest.mark.parametrize("dtype", [pa.int8(), pa.int16(), pa.int32()])
def test_small_numbers_are_their_own_codes(dtype):
    assert java_hash_codes(pa.array([-5, 0, 100], dtype)).tolist() == [-5, 0, 100]


@settings(max_examples=50, deadline=None)
@given(codes=st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=30))
def test_the_murmur_is_never_negative(codes):
    assert murmur(np.array(codes, np.int32)).tolist() == [murmur_of(code) for code in codes]


def test_a_long_text_in_many_blocks(monkeypatch):
    values = ["x" * 1000 + str(number) for number in range(50)]
    whole = java_hash_codes(pa.array(values))
    monkeypatch.setattr("stateformat.backends.foreign.flink.key_hash._BLOCK", 777)
    assert java_hash_codes(pa.array(values)).tolist() == whole.tolist() == [code_of(value) for value in values]


def test_key_groups_are_those_that_flink_computed():
    # Of the fixture core-hashmap-canonical: keys with the key groups that Flink gave them.
    longs, texts = pa.array([-9, -7, 12000000084, 1000000007]), pa.array(["nul \0 inside", "key-10", "key-7"])
    assert key_groups(hash_keys([longs], FLINK_KEY_HASH), 128).tolist() == [15, 18, 23, 96]
    assert key_groups(hash_keys([texts], FLINK_KEY_HASH), 128).tolist() == [40, 97, 74]


def test_what_only_java_knows_is_refused_by_name():
    assert not is_hashable(pa.binary())
    assert not is_hashable(pa.struct([("at", pa.date32())]))
    with pytest.raises(InvalidInput, match="rehash") as caught:
        hash_keys([pa.array([b"x"])], FLINK_KEY_HASH)
    assert caught.value.kind is ErrorKind.UNSUPPORTED_KEY_TYPE
    with pytest.raises(InvalidInput, match="unknown key hash 'flink-user-hashcode'"):
        hash_keys([pa.array([1])], USER_KEY_HASH)

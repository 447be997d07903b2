"""Key hashes against a scalar Murmur3 on Python integers and bytes (SPEC.md section 5.3).

Key-group arithmetic, exhaustively for small numbers and against the formulas in fractions.
"""

from __future__ import annotations

import datetime as dt
import decimal
import math
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from stateformat import keys, keys as hashing
from stateformat.errors import ErrorKind, InvalidInput
from stateformat.keys import check_key_types, hash_keys, key_hash, normalize_key_column, register_key_hash
from tests.stateformat.murmur3 import float_bits, hash_rows

# What hypothesis draws: a type, then values of it.


def decimals(precision: int, scale: int) -> st.SearchStrategy[Any]:
    limit = 10**precision - 1
    powers = [2 ** (8 * k - 1) for k in range(1, 17)]
    near = [value for power in powers for value in (power, -power, power - 1) if abs(value) <= limit]
    unscaled = st.one_of(st.integers(-limit, limit), st.sampled_from([*near, 0, -1, limit, -limit]))
    return unscaled.map(lambda value: decimal.Decimal(value).scaleb(-scale, decimal.Context(prec=60)))


TIMESTAMPS = st.datetimes(dt.datetime.fromisoformat("1600-01-01"), dt.datetime.fromisoformat("2400-01-01"))
SIMPLE: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-(2**7), 2**7 - 1)),
    (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.date32(), st.dates()),
    (pa.timestamp("us"), TIMESTAMPS),
    (pa.timestamp("us", "Europe/Berlin"), TIMESTAMPS.map(lambda value: value.replace(tzinfo=dt.UTC))),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats()),
    (pa.string(), st.text(max_size=24)),
    (pa.large_string(), st.text(max_size=12)),
    (pa.binary(), st.binary(max_size=40)),
    (pa.large_binary(), st.binary(max_size=9)),
    *((pa.decimal128(*of), decimals(*of)) for of in [(1, 0), (5, 2), (18, 0), (18, 18), (19, 3), (38, 0), (38, 10)]),
]


@st.composite
def typed(draw: Any, depth: int = 2) -> tuple[Any, st.SearchStrategy[Any]]:
    if depth and draw(st.integers(0, 3)) == 0:
        inner = draw(st.lists(typed(depth - 1), min_size=1, max_size=3))
        type_ = pa.struct([(f"f{index}", field) for index, (field, _) in enumerate(inner)])
        values = st.fixed_dictionaries({f"f{index}": st.none() | value for index, (_, value) in enumerate(inner)})
        return type_, values
    return draw(st.sampled_from(SIMPLE))


@st.composite
def key_columns(draw: Any) -> tuple[list[list[Any]], list[Any], list[Any]]:
    """Values, types, and the same as Arrow columns: sliced out of longer arrays and cut into chunks
    at random.
    """
    rows = draw(st.integers(0, 40))
    before, after = draw(st.integers(0, 11)), draw(st.integers(0, 5))
    values, types, arrays = [], [], []
    for type_, value in draw(st.lists(typed(), min_size=1, max_size=3)):
        nullable = st.none() | value if draw(st.booleans()) else value
        size = before + rows + after
        drawn = draw(st.lists(nullable, min_size=size, max_size=size))
        array = pa.array(drawn, type_).slice(before, rows)
        if draw(st.booleans()):
            cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=4)))
            edges = list(zip([0, *cuts], [*cuts, rows], strict=True))
            array = pa.chunked_array([array.slice(start, stop - start) for start, stop in edges], type=type_)
        values.append(drawn[before : before + rows])
        types.append(type_)
        arrays.append(array)
    return values, types, arrays


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(key_columns())
def test_any_key_hashes_as_the_scalar_hash_says_whatever_its_slices_and_chunks(drawn: Any) -> None:
    values, types, arrays = drawn
    hashes = hash_keys(arrays)
    assert hashes.dtype == np.int32
    assert hashes.tolist() == hash_rows(values, types)


@pytest.mark.parametrize(("type_", "strategy"), SIMPLE, ids=[str(type_) for type_, _ in SIMPLE])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_type_is_hashed_as_the_scalar_hash_says(type_: Any, strategy: Any, data: Any) -> None:
    values = data.draw(st.lists(st.none() | strategy, min_size=1, max_size=30))
    assert hash_keys([pa.array(values, type_)]).tolist() == hash_rows([values], [type_])


def test_known_values_of_spark() -> None:
    # hash(1), hash(1L), and the example of Spark's manual: hash('Spark', array(123), 2).
    assert hash_keys([pa.array([1], pa.int32())]).tolist() == [-559580957]
    assert hash_keys([pa.array([1], pa.int64())]).tolist() == [-1712319331]
    columns = [pa.array(["Spark"]), pa.array([123], pa.int32()), pa.array([2], pa.int32())]
    assert hash_keys(columns).tolist() == [-1321691492]


# Beside the path that hypothesis takes: many rows, chunk borders, long values.


def strings(lengths: list[int], seed: int = 3) -> tuple[list[bytes], Any]:
    random = np.random.default_rng(seed)
    values = [random.integers(0, 256, length, np.uint8).tobytes() for length in lengths]
    return values, pa.array(values, pa.binary())


@pytest.mark.parametrize(
    ("lengths", "chunk_bytes"),
    [
        ([length for length in range(130) for _ in range(40)], None),
        # More blocks than a byte can count.
        ([length for length in (0, 3, 1021, 1024, 1030, 2050) for _ in range(40)], None),
        ([5, 0, 16] * 50 + [100_003] + [7, 33] * 60, None),
        ([900, 3, 0, 41, 0, 77] * 100, 500),
    ],
    ids=["all lengths", "many blocks", "one huge", "more bytes than are copied at once"],
)
def test_strings_of_many_lengths_hash_right(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], chunk_bytes: int | None
) -> None:
    values, array = strings(lengths)
    if chunk_bytes is not None:
        monkeypatch.setattr(hashing, "_CHUNK_BYTES", chunk_bytes)
    assert hash_keys([array]).tolist() == hash_rows([values], [pa.binary()])


@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
def test_rows_over_many_chunks_hash_as_in_one(monkeypatch: pytest.MonkeyPatch, chunk_rows: int) -> None:
    words, text = strings([index % 23 for index in range(1000)])
    numbers = [None if index % 9 == 0 else index * 7**19 % 2**62 for index in range(1000)]
    monkeypatch.setattr(hashing, "_CHUNK_ROWS", chunk_rows)
    hashes = hash_keys([pa.array(numbers, pa.int64()), text])
    assert hashes.tolist() == hash_rows([numbers, words], [pa.int64(), pa.binary()])


def test_more_rows_than_one_chunk_has_hash_right() -> None:
    count = 2 * 65_536 + 5
    numbers = np.arange(count, dtype=np.int64) * 1_000_003
    picked = [0, 1, 65_535, 65_536, 131_071, 131_072, count - 1]
    assert hash_keys([pa.array(numbers)])[picked].tolist() == hash_rows([numbers[picked].tolist()], [pa.int64()])


def test_columns_with_different_tiny_and_empty_chunks_line_up() -> None:
    first = pa.chunked_array([[1], [], [2, 3], []], pa.int64())
    second = pa.chunked_array([[], ["a", "bc"], [], ["def"]], pa.string())
    expected = hash_rows([[1, 2, 3], ["a", "bc", "def"]], [pa.int64(), pa.string()])
    assert hash_keys([first, second]).tolist() == expected
    words = [str(index) for index in range(9000)]
    column = pa.chunked_array([words[:4500], [], words[4500:]], pa.string())
    assert hash_keys([column]).tolist() == hash_rows([words], [pa.string()])
    numbers = pa.array(range(5000), pa.int64())
    tiny = pa.chunked_array([numbers.slice(start, 2) for start in range(0, 5000, 2)])
    assert hash_keys([tiny]).tolist() == hash_keys([numbers]).tolist()


@pytest.mark.parametrize(
    "column",
    [pa.array([], pa.string()), pa.chunked_array([], pa.int64()), pa.array([], pa.struct([("a", pa.int8())]))],
)
def test_no_rows_have_no_hashes(column: Any) -> None:
    hashes = hash_keys([column])
    assert (hashes.dtype, hashes.shape) == (np.int32, (0,))


def test_what_a_null_struct_hides_does_not_count() -> None:
    hidden = pa.StructArray.from_arrays(
        [pa.array([1, 2, None, 4, 5]), pa.array(["a", "b", "c", None, "e"])],
        ["n", "s"],
        mask=pa.array([False, True, True, False, True]),
    )
    outer = pa.StructArray.from_arrays([hidden], ["in"], mask=pa.array([False, False, True, False, True])).slice(1, 3)
    seen = [{"in": None}, None, {"in": {"n": 4, "s": None}}]
    assert hash_keys([outer]).tolist() == hash_rows([seen], [outer.type])
    assert hash_keys([outer]).tolist()[:2] == [42, 42]


def test_buffers_that_are_neither_aligned_nor_padded_are_read_as_they_are() -> None:
    raw = np.frombuffer(b"?" + np.arange(9, dtype=np.int64).tobytes(), np.uint8)
    numbers = pa.Array.from_buffers(pa.int64(), 9, [None, pa.py_buffer(raw[1:])])
    assert hash_keys([numbers]).tolist() == hash_rows([list(range(9))], [pa.int64()])
    offsets = pa.py_buffer(np.array([0, 5, 6, 13], np.int32))
    text = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"abcdefghijklm")])
    assert hash_keys([text]).tolist() == hash_rows([["abcde", "f", "ghijklm"]], [pa.string()])


def test_hashing_in_several_threads_at_once_gives_what_one_gives() -> None:
    columns = [strings([index % 31 for index in range(4000)], seed)[1] for seed in range(8)]
    alone = [hash_keys([column]).tolist() for column in columns]
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(lambda column: hash_keys([column]).tolist(), columns * 5)] == alone * 5


# Floats: one zero, one NaN.

F32 = [0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x80000000, 0, 0x7F800000, 0xFF800000, 0x3F800000, 1]
F64 = [value << 32 for value in F32]
F64 += [0x7FF8000000000001, 0xFFF8000000000000, 0x7FF0000000000001, 0x7FF0 << 48, 0x7FF8 << 48]


def floats(bits: list[int], type_: Any) -> Any:
    word = np.uint32 if type_ == pa.float32() else np.uint64
    return pa.Array.from_buffers(type_, len(bits), [None, pa.py_buffer(np.array(bits, word))])


def bits_of(array: Any) -> list[int]:
    word = np.uint32 if array.type == pa.float32() else np.uint64
    return np.frombuffer(array.buffers()[1], word)[array.offset : array.offset + len(array)].tolist()


def normal_bits(bits: list[int], type_: Any) -> list[int]:
    width, code = (4, "f") if type_ == pa.float32() else (8, "d")
    return [float_bits(struct.unpack(f"<{code}", value.to_bytes(width, "little"))[0], code) for value in bits]


@pytest.mark.parametrize(("type_", "bits"), [(pa.float32(), F32), (pa.float64(), F64)])
def test_zeros_and_nans_hash_and_normalize_as_one(type_: Any, bits: list[int]) -> None:
    array = floats(bits, type_)
    expected = normal_bits(bits, type_)
    normal = normalize_key_column(array)
    assert bits_of(normal) == expected
    normal.validate(full=True)
    assert hash_keys([array]).tolist() == hash_keys([normal]).tolist()
    assert bits_of(array) == bits, "the input was changed"
    sliced = normalize_key_column(array.slice(3, 5))
    assert bits_of(sliced) == expected[3:8]


def test_normalizing_keeps_nulls_and_slices() -> None:
    array = pa.array([None, 1.5, -0.0, None, -0.0, 2.0, None, -0.0, 3.0, None, -0.0]).slice(2, 8)
    normal = normalize_key_column(array)
    assert normal.to_pylist() == [0.0, None, 0.0, 2.0, None, 0.0, 3.0, None]
    assert [math.copysign(1, value) for value in normal.to_pylist() if value is not None] == [1.0] * 5


NESTED = pa.struct([("x", pa.float64()), ("y", pa.struct([("z", pa.float32())]))])


@pytest.mark.parametrize(
    "same",
    [
        pa.array([1.0, None, float("inf"), float("nan")]),
        pa.array(["a", None]),
        pa.array([1, 2]),
        pa.array([[-0.0]]),
        pa.array([], pa.float32()),
        pa.chunked_array([[1.0], [2.0]]),
        pa.chunked_array([], pa.float64()),
        pa.array([{"x": 1.0, "y": {"z": None}}, None], NESTED),
    ],
    ids=lambda same: str(same.type),
)
def test_normalizing_returns_the_very_object_where_nothing_changes(same: Any) -> None:
    assert normalize_key_column(same) is same


def test_normalizing_copies_only_the_chunks_that_change() -> None:
    column = pa.chunked_array([[1.0, 2.0], [-0.0]])
    normal = normalize_key_column(column)
    assert normal.chunk(0).buffers()[1].address == column.chunk(0).buffers()[1].address
    assert bits_of(normal.chunk(1)) == [0]
    values = np.ones(200_000)
    values[[70_000, 199_999]] = -0.0
    expected = np.where(values == 0, 0.0, values)
    assert bits_of(normalize_key_column(pa.array(values))) == expected.view(np.uint64).tolist()


def test_normalizing_reaches_into_structs_and_keeps_their_nulls_and_types() -> None:
    inner = pa.struct([pa.field("x", pa.float64(), nullable=False)])
    type_ = pa.struct([pa.field("k", pa.int32()), pa.field("s", inner)])
    floats = [1.0, None, None, -0.0, float("nan")]
    values = [None if i == 1 else {"k": i, "s": None if x is None else {"x": x}} for i, x in enumerate(floats)]
    array = pa.array(values, type_).slice(1, 4)
    normal = normalize_key_column(array)
    normal.validate(full=True)
    assert normal.type == type_
    assert normal.slice(0, 3).to_pylist() == [None, {"k": 2, "s": None}, {"k": 3, "s": {"x": 0.0}}]
    assert bits_of(normal.field(1).field(0))[2:] == [0, 0x7FF8000000000000]
    assert hash_keys([normal]).tolist() == hash_keys([array]).tolist()


# What is refused.

REFUSED = [
    *(pa.list_(pa.int32()), pa.large_list(pa.int32()), pa.list_(pa.int32(), 2), pa.map_(pa.string(), pa.int32())),
    *(pa.time32("ms"), pa.time64("us"), pa.date64(), pa.duration("us"), pa.month_day_nano_interval()),
    *(pa.timestamp("s"), pa.timestamp("ms", "UTC"), pa.timestamp("ns")),
    *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), pa.float16(), pa.decimal256(40, 2), pa.decimal256(5, 2)),
    *(pa.dictionary(pa.int32(), pa.string()), pa.binary(16), pa.string_view(), pa.binary_view(), pa.null()),
    pa.struct([]),
]


@pytest.mark.parametrize("type_", REFUSED, ids=str)
def test_other_types_are_refused_by_column_and_type(type_: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_key_types([pa.field("fine", pa.int64()), pa.field("bad", type_)])
    assert caught.value.kind is ErrorKind.UNSUPPORTED_KEY_TYPE
    assert f"'bad' of type {type_}" in str(caught.value)
    assert "decimal128" in str(caught.value)
    assert "fine" not in str(caught.value)
    with pytest.raises(InvalidInput, match="cannot be hashed"):
        hash_keys([pa.chunked_array([], type_)])


def test_every_column_at_fault_is_named_also_inside_structs() -> None:
    nested = pa.struct([("ok", pa.int8()), ("deep", pa.struct([("t", pa.time64("us"))]))])
    with pytest.raises(InvalidInput) as caught:
        check_key_types([pa.field("a", nested), pa.field("b", pa.uint8())])
    assert caught.value.details["columns"] == {"a.deep.t": "time64[us]", "b": "uint8"}


def test_every_key_type_passes() -> None:
    check_key_types([pa.field(str(type_), type_) for type_, _ in SIMPLE])
    check_key_types([pa.field("s", pa.struct([("a", pa.struct([("b", pa.string())]))]))])


def test_columns_of_different_lengths_or_none_at_all_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"\[2, 1\]"):
        hash_keys([pa.array([1, 2]), pa.array([1])])
    with pytest.raises(InvalidInput, match="at least one"):
        hash_keys([])


# The registry.


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    copy = dict(hashing._registry)
    monkeypatch.setattr(hashing, "_registry", copy)
    return copy


def test_an_unknown_hash_is_refused_with_the_names_that_are_known() -> None:
    with pytest.raises(InvalidInput, match="spark-murmur3-seed42") as caught:
        hash_keys([pa.array([1])], "crc32")
    assert caught.value.kind is ErrorKind.UNKNOWN_KEY_HASH
    assert "crc32" in str(caught.value)


def test_a_registered_hash_is_used_and_its_name_cannot_be_taken(registry: dict[str, Any]) -> None:
    def lengths(columns: Any) -> Any:
        return np.full(len(columns[0]), len(columns), np.int32)

    register_key_hash("lengths", lengths)
    register_key_hash("lengths", lengths)
    assert key_hash("lengths") is lengths
    assert hash_keys([pa.array([1, 2]), pa.array(["x", "y"])], "lengths").tolist() == [2, 2]
    for name, function in [("lengths", len), (hashing.DEFAULT_KEY_HASH, lengths), ("", lengths)]:
        with pytest.raises(InvalidInput, match="another"):
            register_key_hash(name, function)  # type: ignore[arg-type]
    assert registry["lengths"] is lengths


@pytest.mark.parametrize(
    "answer", [np.zeros(2, np.int64), np.zeros(1, np.int32), np.zeros((2, 1), np.int32), [0, 0]], ids=repr
)
def test_a_registered_hash_that_gives_the_wrong_shape_or_type_is_named(registry: dict[str, Any], answer: Any) -> None:
    register_key_hash("wrong", lambda columns: answer)
    with pytest.raises(InvalidInput, match="'wrong' must give a numpy int32 array of 2 rows"):
        hash_keys([pa.array([1, 2])], "wrong")


SMALL = [{"parallelism": p, "max_parallelism": limit} for limit in range(1, 65) for p in range(1, limit + 1)]
LARGE = [(1, 32768), (3, 32768), (32767, 32768), (32768, 32768), (4999, 30011), (7, 128)]


def test_ranges_bounds_and_owners_of_all_groups_follow_the_rule_for_small_numbers() -> None:
    for numbers in SMALL:
        p, limit = numbers["parallelism"], numbers["max_parallelism"]
        owners = [math.floor(Fraction(group * p, limit)) for group in range(limit)]
        found = keys.subtask_of_key_group(np.arange(limit, dtype=np.int32), **numbers)
        assert (found.tolist(), found.dtype) == (owners, np.int64)
        bounds = keys.range_bounds(p, limit)
        assert bounds.dtype == np.int64
        assert bounds.tolist() == [owners.index(subtask) for subtask in range(p)] + [limit]
        ranges = [keys.key_group_range(subtask, **numbers) for subtask in range(p)]
        for subtask, (first, last) in enumerate(ranges):
            assert [group for group, owner in enumerate(owners) if owner == subtask] == list(range(first, last + 1))
        sizes = {last - first + 1 for first, last in ranges}
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("p", "limit"), LARGE)
def test_large_numbers_follow_the_formulas_without_overflow(p: int, limit: int) -> None:
    bounds = [math.ceil(Fraction(i * limit, p)) for i in range(p + 1)]
    assert keys.range_bounds(p, limit).tolist() == bounds
    assert keys.key_group_range(p - 1, parallelism=p, max_parallelism=limit) == (bounds[-2], limit - 1)
    groups = np.array([0, limit // 2, limit - 1], np.int32)
    owners = keys.subtask_of_key_group(groups, parallelism=p, max_parallelism=limit)
    assert owners.tolist() == [math.floor(Fraction(int(g) * p, limit)) for g in groups]


def test_owner_of_a_single_group_is_a_plain_int() -> None:
    owner = keys.subtask_of_key_group(127, parallelism=6, max_parallelism=128)
    assert (owner, type(owner)) == (5, int)


@pytest.mark.parametrize("max_parallelism", [1, 2, 3, 7, 128, 130, 32767, 32768])
def test_key_group_is_the_floor_mod_of_the_signed_hash(max_parallelism: int) -> None:
    hashes = [-(2**31), -(2**31) + 1, -max_parallelism, -1, 0, 1, max_parallelism, 2**31 - 1]
    hashes += np.random.default_rng(7).integers(-(2**31), 2**31, 2000).tolist()
    groups = keys.key_groups(np.array(hashes, np.int32), max_parallelism)
    assert groups.dtype == np.int32
    # Python's % on ints is the floor-mod.
    assert groups.tolist() == [value % max_parallelism for value in hashes]
    assert keys.key_groups(np.empty(0, np.int32), max_parallelism).tolist() == []


def test_default_max_parallelism_is_the_clamped_least_power_of_two_with_room_for_half_as_many_again() -> None:
    found = {p: keys.default_max_parallelism(p) for p in (1, 85, 86, 170, 171, 172, 21845, 21846, 32768)}
    assert [*found.values()] == [128, 128, 256, 256, 256, 512, 32768, 32768, 32768]
    for parallelism in range(1, 2000):
        least = next(2**n for n in range(20) if 2**n >= parallelism + parallelism // 2)
        assert keys.default_max_parallelism(parallelism) == max(128, min(least, 32768))


@pytest.mark.parametrize(
    ("p", "limit", "sentence"),
    [
        (0, 128, "parallelism 0 of operator 'count' is below 1"),
        (-3, 128, "parallelism -3"),
        (129, 128, "parallelism 129 of operator 'count' is above its max parallelism 128"),
        (1, 0, "max parallelism 0 of operator 'count'"),
        (1, keys.MAX_PARALLELISM_LIMIT + 1, "max parallelism 32769 of operator 'count'"),
    ],
)
def test_impossible_parallelisms_are_refused_by_name(p: int, limit: int, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence) as caught:
        keys.check_parallelism(p, limit, operator="count")
    assert (caught.value.kind, caught.value.details["parallelism"]) == (ErrorKind.INVALID_PARALLELISM, p)
    for refused in (
        lambda: keys.range_bounds(p, limit),
        lambda: keys.key_group_range(0, parallelism=p, max_parallelism=limit),
        lambda: keys.subtask_of_key_group(0, parallelism=p, max_parallelism=limit),
    ):
        with pytest.raises(InvalidInput):
            refused()


@pytest.mark.parametrize(("p", "limit"), [(1, 1), (32768, 32768), (1, 32768)])
def test_bounds_of_parallelism_are_inclusive(p: int, limit: int) -> None:
    keys.check_parallelism(p, limit)
    assert len(keys.range_bounds(p, limit)) == p + 1


FOUR = {"parallelism": 4, "max_parallelism": 128}


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: keys.key_group_range(-1, **FOUR), "no subtask -1"),
        (lambda: keys.key_group_range(4, **FOUR), "no subtask 4"),
        (lambda: keys.subtask_of_key_group(np.array([0, -1]), **FOUR), "128"),
        (lambda: keys.subtask_of_key_group(np.array([0, 128]), **FOUR), "128"),
        (lambda: keys.default_max_parallelism(0), "below 1"),
        (lambda: keys.default_max_parallelism(32769), "above"),
        (lambda: keys.key_groups(np.array([1], np.int32), 0), "max parallelism 0"),
        (lambda: keys.key_groups(np.array([1], np.int32), 32769), "max parallelism 32769"),
        (lambda: keys.key_groups(np.array([1], np.uint32), 128), "uint32"),
    ],
)
def test_what_does_not_exist_is_refused(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        call()

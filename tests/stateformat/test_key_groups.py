"""Key-group arithmetic, exhaustively for small numbers and against the formulas in fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.keys import (
    MAX_PARALLELISM_LIMIT,
    check_parallelism,
    default_max_parallelism,
    key_group_range,
    key_groups,
    range_bounds,
    subtask_of_key_group,
)

SMALL = [(p, limit) for limit in range(1, 65) for p in range(1, limit + 1)]
LARGE = [(1, 32768), (3, 32768), (32767, 32768), (32768, 32768), (4999, 30011), (7, 128)]


def owners_by_definition(parallelism: int, max_parallelism: int) -> list[int]:
    """The owner of each group, from the rule floor(g * p / max) in exact fractions."""
    return [math.floor(Fraction(group * parallelism, max_parallelism)) for group in range(max_parallelism)]


def test_ranges_are_disjoint_cover_every_group_and_differ_in_size_by_at_most_one() -> None:
    for parallelism, max_parallelism in SMALL:
        ranges = [
            key_group_range(subtask, parallelism=parallelism, max_parallelism=max_parallelism)
            for subtask in range(parallelism)
        ]
        owned = [group for first, last in ranges for group in range(first, last + 1)]
        assert owned == list(range(max_parallelism)), (parallelism, max_parallelism)
        sizes = {last - first + 1 for first, last in ranges}
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1


def test_owner_of_a_group_and_ranges_and_bounds_tell_the_same() -> None:
    for parallelism, max_parallelism in SMALL:
        expected = owners_by_definition(parallelism, max_parallelism)
        groups = np.arange(max_parallelism, dtype=np.int32)
        owners = subtask_of_key_group(groups, parallelism=parallelism, max_parallelism=max_parallelism)
        assert owners.tolist() == expected
        assert owners.dtype == np.int64
        bounds = range_bounds(parallelism, max_parallelism)
        assert bounds.dtype == np.int64
        assert bounds.tolist() == [expected.index(subtask) for subtask in range(parallelism)] + [max_parallelism]
        for subtask in range(parallelism):
            first, last = key_group_range(subtask, parallelism=parallelism, max_parallelism=max_parallelism)
            assert [group for group, owner in enumerate(expected) if owner == subtask] == list(range(first, last + 1))


@pytest.mark.parametrize(("parallelism", "max_parallelism"), LARGE)
def test_large_numbers_follow_the_formulas_without_overflow(parallelism: int, max_parallelism: int) -> None:
    bounds = range_bounds(parallelism, max_parallelism)
    assert bounds.tolist() == [math.ceil(Fraction(i * max_parallelism, parallelism)) for i in range(parallelism + 1)]
    last = parallelism - 1
    assert key_group_range(last, parallelism=parallelism, max_parallelism=max_parallelism) == (
        math.ceil(Fraction(last * max_parallelism, parallelism)),
        max_parallelism - 1,
    )
    groups = np.array([0, max_parallelism // 2, max_parallelism - 1], np.int32)
    owners = subtask_of_key_group(groups, parallelism=parallelism, max_parallelism=max_parallelism)
    assert owners.tolist() == [math.floor(Fraction(int(g) * parallelism, max_parallelism)) for g in groups]


def test_owner_of_a_single_group_is_a_plain_int() -> None:
    owner = subtask_of_key_group(127, parallelism=6, max_parallelism=128)
    assert owner == 5
    assert type(owner) is int


@pytest.mark.parametrize("max_parallelism", [1, 2, 3, 7, 128, 130, 32767, 32768])
def test_key_group_is_the_floor_mod_of_the_signed_hash(max_parallelism: int) -> None:
    extremes = [-(2**31), -(2**31) + 1, -max_parallelism, -1, 0, 1, max_parallelism, 2**31 - 1]
    random = np.random.default_rng(7).integers(-(2**31), 2**31, 2000).tolist()
    groups = key_groups(np.array(extremes + random, np.int32), max_parallelism)
    assert groups.dtype == np.int32
    # Python's % on ints is the floor-mod.
    assert groups.tolist() == [value % max_parallelism for value in extremes + random]


def test_key_groups_refuse_hashes_that_are_not_signed_32_bit() -> None:
    with pytest.raises(InvalidInput, match="uint32"):
        key_groups(np.array([1], np.uint32), 128)


def test_no_hashes_have_no_key_groups() -> None:
    assert key_groups(np.empty(0, np.int32), 100).tolist() == []


@pytest.mark.parametrize(
    ("parallelism", "expected"),
    [
        (1, 128),
        (85, 128),
        (86, 256),
        (170, 256),
        (171, 256),
        (172, 512),
        (21845, 32768),
        (21846, 32768),
        (32768, 32768),
    ],
)
def test_default_max_parallelism_leaves_room_for_half_as_many_again(parallelism: int, expected: int) -> None:
    assert default_max_parallelism(parallelism) == expected


def test_default_max_parallelism_is_the_clamped_least_power_of_two_for_every_parallelism() -> None:
    powers = [2**exponent for exponent in range(20)]
    for parallelism in range(1, 2000):
        least = next(power for power in powers if power >= parallelism + parallelism // 2)
        assert default_max_parallelism(parallelism) == max(128, min(least, 32768))


@pytest.mark.parametrize(
    ("parallelism", "max_parallelism", "sentence"),
    [
        (0, 128, "parallelism 0 of operator 'count' is below 1"),
        (-3, 128, "parallelism -3"),
        (129, 128, "parallelism 129 of operator 'count' is above its max parallelism 128"),
        (1, 0, "max parallelism 0 of operator 'count'"),
        (1, MAX_PARALLELISM_LIMIT + 1, "max parallelism 32769 of operator 'count'"),
    ],
)
def test_impossible_parallelisms_are_refused_by_name(parallelism: int, max_parallelism: int, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence) as caught:
        check_parallelism(parallelism, max_parallelism, operator="count")
    assert caught.value.kind is ErrorKind.INVALID_PARALLELISM
    assert caught.value.details["parallelism"] == parallelism
    for refused in (
        lambda: range_bounds(parallelism, max_parallelism),
        lambda: key_group_range(0, parallelism=parallelism, max_parallelism=max_parallelism),
        lambda: subtask_of_key_group(0, parallelism=parallelism, max_parallelism=max_parallelism),
    ):
        with pytest.raises(InvalidInput):
            refused()


def test_bounds_of_parallelism_are_inclusive() -> None:
    for parallelism, max_parallelism in [(1, 1), (32768, 32768), (1, 32768)]:
        check_parallelism(parallelism, max_parallelism)
        assert len(range_bounds(parallelism, max_parallelism)) == parallelism + 1


def test_subtasks_and_groups_that_do_not_exist_are_refused() -> None:
    for subtask in (-1, 4):
        with pytest.raises(InvalidInput, match=f"no subtask {subtask}"):
            key_group_range(subtask, parallelism=4, max_parallelism=128)
    for group in (-1, 128):
        with pytest.raises(InvalidInput, match="128"):
            subtask_of_key_group(np.array([0, group]), parallelism=4, max_parallelism=128)


def test_default_of_an_impossible_parallelism_is_refused() -> None:
    for parallelism in (0, 32769):
        with pytest.raises(InvalidInput):
            default_max_parallelism(parallelism)


def test_key_groups_refuse_a_max_parallelism_out_of_range() -> None:
    for max_parallelism in (0, 32769):
        with pytest.raises(InvalidInput):
            key_groups(np.array([1], np.int32), max_parallelism)

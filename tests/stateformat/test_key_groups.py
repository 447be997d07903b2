"""Key-group arithmetic, exhaustively for small numbers and against the formulas in fractions."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from stateformat import keys
from stateformat.errors import ErrorKind, InvalidInput

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

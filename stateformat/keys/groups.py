"""Key-group arithmetic: the key group of a hash, and its owner, as in Flink (SPEC.md section
5.3).
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import ErrorKind, InvalidInput
from ..graph import Operator

MAX_PARALLELISM_LIMIT: Final = 32_768
"""The greatest max parallelism, and so the greatest parallelism (SPEC.md section 3.4)."""

_MIN_DEFAULT: Final = 128

Groups = TypeVar("Groups", int, npt.NDArray[Any])


def check_parallelism(parallelism: int, max_parallelism: int, *, operator: str = "") -> None:
    """Raise ``InvalidInput`` unless 1 ≤ parallelism ≤ max parallelism ≤ 32768."""
    of = f" of operator {operator!r}" if operator else ""
    if not 1 <= max_parallelism <= MAX_PARALLELISM_LIMIT:
        problem = f"max parallelism {max_parallelism}{of} is not between 1 and {MAX_PARALLELISM_LIMIT}; choose another"
    elif parallelism < 1:
        problem = f"parallelism {parallelism}{of} is below 1; choose 1 to {max_parallelism}, its max parallelism"
    elif parallelism > max_parallelism:
        problem = (
            f"parallelism {parallelism}{of} is above its max parallelism {max_parallelism}; "
            "choose a lower parallelism, or rewrite the state with a higher max parallelism"
        )
    else:
        return
    raise InvalidInput(
        problem,
        kind=ErrorKind.INVALID_PARALLELISM,
        operator=operator,
        parallelism=parallelism,
        max_parallelism=max_parallelism,
    )


def default_max_parallelism(parallelism: int) -> int:
    """Return Flink's default: the least power of two ≥ 1.5 × ``parallelism``, in 128 … 32768."""
    check_parallelism(parallelism, MAX_PARALLELISM_LIMIT)
    power = 1 << (parallelism + parallelism // 2 - 1).bit_length()
    return min(max(power, _MIN_DEFAULT), MAX_PARALLELISM_LIMIT)


def key_group_count(operator: Operator) -> int:
    """Return the operator's number of key groups: its max parallelism, or the default."""
    if operator.max_parallelism is not None:
        return operator.max_parallelism
    return default_max_parallelism(operator.parallelism)


def key_groups(
    hashes: npt.NDArray[Any], max_parallelism: int, *, out: npt.NDArray[np.int32] | None = None
) -> npt.NDArray[np.int32]:
    """Return the key group of each int32 hash: floor-mod by ``max_parallelism``, into ``out``."""
    check_parallelism(1, max_parallelism)
    if hashes.dtype != np.int32:
        raise InvalidInput(f"hashes are {hashes.dtype}; key groups are defined on signed values: give int32")
    if max_parallelism & (max_parallelism - 1) == 0:
        # In two's complement the low bits are the floor-mod, many times cheaper than a division.
        groups: npt.NDArray[np.int32] = np.bitwise_and(hashes, np.int32(max_parallelism - 1), out=out)
    else:
        groups = np.remainder(hashes, np.int32(max_parallelism), out=out)
    return groups


def key_group_range(subtask: int, *, parallelism: int, max_parallelism: int) -> tuple[int, int]:
    """Return the first and last key group of one subtask, both inclusive; at least one group."""
    check_parallelism(parallelism, max_parallelism)
    if not 0 <= subtask < parallelism:
        raise InvalidInput(
            f"there is no subtask {subtask} at parallelism {parallelism}; subtasks are 0 to {parallelism - 1}",
            kind=ErrorKind.INVALID_PARALLELISM,
        )
    first = -(-subtask * max_parallelism // parallelism)
    return first, -(-(subtask + 1) * max_parallelism // parallelism) - 1


def range_bounds(parallelism: int, max_parallelism: int) -> npt.NDArray[np.int64]:
    """Return the first key group of each subtask, then ``max_parallelism``; int64, ascending."""
    check_parallelism(parallelism, max_parallelism)
    return -(-np.arange(parallelism + 1, dtype=np.int64) * max_parallelism // parallelism)


def subtask_of_key_group(group: Groups, *, parallelism: int, max_parallelism: int) -> Groups:
    """Return the owner of a key group: an int, or for an array of groups an int64 array."""
    check_parallelism(parallelism, max_parallelism)
    groups = np.asarray(group, np.int64)
    if groups.size and not (groups.min() >= 0 and groups.max() < max_parallelism):
        raise InvalidInput(
            f"key groups {groups.min()} to {groups.max()} do not all exist at max parallelism {max_parallelism}, which "
            f"has 0 to {max_parallelism - 1}; hash the keys with the max parallelism of their operator",
            kind=ErrorKind.INVALID_PARALLELISM,
        )
    subtasks: npt.NDArray[Any] = groups * parallelism // max_parallelism
    return subtasks if isinstance(group, np.ndarray) else int(subtasks)

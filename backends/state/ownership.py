"""The keys that a subtask may have: those of its key groups (SPEC.md section 5.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from stateformat.errors import ErrorKind, InvalidState
from stateformat.graph import Operator
from stateformat.keys import key_group_count, key_group_range, subtask_of_key_group


@dataclass(frozen=True)
class OwnedKeys:
    """The keys that one subtask owns, for one of its keyed states."""

    operator: Operator
    subtask: int
    state: str
    columns: tuple[str, ...]
    """The key columns of the state."""
    key_by: tuple[tuple[str, ...], ...]
    """The key columns of each keyed input of the operator."""

    @cached_property
    def _range(self) -> tuple[int, int]:
        count = key_group_count(self.operator)
        return key_group_range(self.subtask, parallelism=self.operator.parallelism, max_parallelism=count)

    def foreign(self, groups: npt.NDArray[Any]) -> int | None:
        """Return the first position with a key group of another subtask, or None."""
        first, last = self._range
        if self.operator.parallelism == 1 or (groups.min() >= first and groups.max() <= last):
            return None
        return int(np.argmax((groups < first) | (groups > last)))

    def error(self, row_key: Sequence[Any], group: int) -> InvalidState:
        """Return the error for a row key (key columns first) in another subtask's key group."""
        key = tuple(row_key[: len(self.columns)])
        shown = repr(key[0]) if len(key) == 1 else repr(key)
        owner = subtask_of_key_group(
            group, parallelism=self.operator.parallelism, max_parallelism=key_group_count(self.operator)
        )
        keyed = " and ".join(f"key_by({', '.join(map(repr, columns))})" for columns in dict.fromkeys(self.key_by))
        return InvalidState(
            f"operator {self.operator.uid!r} puts key {shown} ({', '.join(self.columns)}) into state {self.state!r} "
            f"in subtask {self.subtask}, but that key belongs to subtask {owner}. Its input comes by "
            f"{keyed or 'no key'}: put the values of those columns from a record, or key the input by what the state "
            "is keyed by.",
            kind=ErrorKind.STATE_NOT_ALLOWED,
            operator=self.operator.uid,
            state=self.state,
            subtask=self.subtask,
        )

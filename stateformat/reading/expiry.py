"""Leave out the rows of a state that had expired when its checkpoint was made (SPEC.md 6.5)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import pyarrow as pa

from ..model import SchemaVersion, State
from ..tables import SizedCall
from ..ttl import NO_TIME_US, Ttl

_EXTRA: Final = "_ttl"
"""The name of the time column while rows are read into a schema that does not have it."""


@dataclass(frozen=True)
class Hidden:
    """Which rows are left out, and what must be read to tell which."""

    ttl: Ttl
    now_us: int
    column: str
    """The column of the last access in ``target``."""
    target: SchemaVersion
    """The schema that rows are converted to, with that column."""

    @classmethod
    def of(cls, state: State, target: SchemaVersion) -> Hidden | None:
        """Return what to leave out of a state read as ``target``; None for nothing."""
        ttl, now_us, times = state.ttl, state.ttl_now_us, state.ttl_field
        if ttl is None or times is None or now_us is None or now_us <= NO_TIME_US:
            return None
        # By now another column may have this name.
        column = next((item.name for item in target.fields if item.id == times.id), None)
        if column is None:
            column = _EXTRA
            target = replace(target, fields=(*target.fields, replace(times, name=column)))
        return cls(ttl, now_us, column, target)

    def left_out(self, calls: Generator[SizedCall[pa.Table], None, None]) -> Generator[SizedCall[pa.Table], None, None]:
        """Yield the calls, each without the rows that had expired."""
        with closing(calls):
            for call in calls:
                yield SizedCall(partial(self._rest, call), call.size_bytes)

    def _rest(self, call: SizedCall[pa.Table]) -> pa.Table:
        rows = call()
        expired = self.ttl.expired(rows[self.column], self.now_us)
        return rows.filter(pa.array(~expired)) if expired.any() else rows

"""Rows that expire (SPEC.md section 6.5): how long they live, and which have expired.

:meth:`Ttl.expired` is the one place that says so. Readers, running state and tools call it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from .errors import InvalidInput
from .words import duration

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

TTL_COLUMN: Final = "ttl_last_access"
"""The column of the last access: timestamp_us, not nullable, the last of the values."""

CLOCKS: Final = ("event_time", "processing_time")
REFRESHES: Final = ("write", "read_and_write")

TIME_MAX_US: Final = 2**53 - 1
NO_TIME_US: Final = -TIME_MAX_US
"""The clock had no time yet: event time before the first watermark. As a last access: the row does
not expire until it gets one."""


@dataclass(frozen=True, slots=True)
class Ttl:
    """How long a row lives after its last access.

    ``duration_us`` is in microseconds. ``clock`` is ``"event_time"`` (the operator's watermark) or
    ``"processing_time"``. ``refresh`` says what counts as an access: ``"write"``, or
    ``"read_and_write"``, where a read writes the row with its new time. Raises ``InvalidInput`` for
    other values.
    """

    duration_us: int
    clock: Literal["event_time", "processing_time"] = "event_time"
    refresh: Literal["write", "read_and_write"] = "write"

    def __post_init__(self) -> None:
        whole = isinstance(self.duration_us, int) and not isinstance(self.duration_us, bool)
        if not whole or not 1 <= self.duration_us <= TIME_MAX_US:
            raise InvalidInput(
                f"a time to live of {self.duration_us!r} is not a whole number of microseconds from 1 to 2**53 - 1; an "
                "hour is 3_600_000_000"
            )
        for what, given, known in (("clock", self.clock, CLOCKS), ("refresh", self.refresh, REFRESHES)):
            if given not in known:
                raise InvalidInput(f"the {what} of a time to live is {given!r}; choose {known[0]!r} or {known[1]!r}")

    def __str__(self) -> str:
        after = "its last access" if self.refresh == "read_and_write" else "it was written"
        return f"{duration(self.duration_us)} after {after}, by {self.clock.replace('_', ' ')}"

    def expired(self, last_access: pa.Array | pa.ChunkedArray | NDArray[np.int64], now_us: int) -> NDArray[np.bool_]:
        """Return the mask of rows expired at ``now_us``: last access + duration <= now.

        ``last_access`` is a column of timestamps, or their int64 microseconds. Nothing expires
        while the clock has no time, nor does a row whose last access has none.
        """
        import numpy as np

        times = last_access if isinstance(last_access, np.ndarray) else _microseconds(last_access)
        now_us = clock_us(now_us)
        if now_us == NO_TIME_US:
            return np.zeros(len(times), bool)
        found: NDArray[np.bool_] = times <= now_us - self.duration_us
        return found & (times > NO_TIME_US) if found.any() else found


def clock_us(time_us: int) -> int:
    """Return a time as the format keeps it: a watermark before the first is :data:`NO_TIME_US`."""
    return max(NO_TIME_US, min(time_us, TIME_MAX_US))


def _microseconds(column: Any) -> NDArray[np.int64]:
    import pyarrow as pa
    import pyarrow.compute as pc

    numbers = pc.fill_null(column.cast(pa.int64()), NO_TIME_US)
    found: NDArray[np.int64] = (
        numbers.to_numpy() if isinstance(numbers, pa.ChunkedArray) else numbers.to_numpy(zero_copy_only=False)
    )
    return found

"""The cost of a job's failures: time, and rows that are read again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

from stateformat.model import FAILURES_PROPERTY

_TOLD_MAX: Final = 2**53 - 1


@dataclass(frozen=True)
class FailureCost:
    """The cost of all failures since the program began to run the job."""

    failures: int = 0
    """Runs that were lost, and tries of epochs on Spark."""
    lost_us: int = 0
    """From the newest checkpoint, or the beginning of a failed try, until the job went on."""
    rows_again: int = 0
    """Rows that were read after the newest checkpoint, as far as known."""

    def plus(self, lost_us: int, rows_again: int, failures: int = 1) -> FailureCost:
        """Return the cost with one more failure."""
        return FailureCost(self.failures + failures, self.lost_us + lost_us, self.rows_again + rows_again)

    @property
    def words(self) -> str:
        """Return the cost in words; empty without a failure."""
        if not self.failures:
            return ""
        count = "1 failure" if self.failures == 1 else f"{self.failures:,} failures"
        again = "1 row" if self.rows_again == 1 else f"{self.rows_again:,} rows"
        return f"{count} cost {self.lost_us / 1e6:.1f} s and {again} read again"

    @property
    def properties(self) -> dict[str, str]:
        """Return the property of the records that follow a failure."""
        return {FAILURES_PROPERTY: json.dumps(asdict(self), separators=(",", ":"))} if self.failures else {}


def cost_in(properties: dict[str, str]) -> FailureCost:
    """The cost that a record tells; none where it tells nothing, or nothing that can be read."""
    try:
        found = json.loads(properties.get(FAILURES_PROPERTY, "{}"))
        told = [found[name] for name in ("failures", "lost_us", "rows_again")]
    except (ValueError, TypeError, KeyError, RecursionError):
        return FailureCost()
    # A property is text that anybody may have written.
    sound = all(type(number) is int and 0 <= number <= _TOLD_MAX for number in told)
    return FailureCost(*told) if sound else FailureCost()

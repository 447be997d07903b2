"""What a store does, in numbers: calls, objects, bytes and seconds of each operation; retries and
waits.

Counters only go up. Every thread has its own counters, and readers add them up, so no lock slows an
operation or survives a fork. One operation's counts are replaced as a whole.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import reduce
from threading import get_ident
from typing import Any, Final, NamedTuple

OPERATIONS: Final = (
    *("exists", "read", "read_range", "open_input", "size", "open_output"),
    *("create", "list", "delete", "leftovers", "discard", "make_durable", "link_from"),
)
"""The methods of ``storage.Storage``, and further methods that some storages have."""

EVENTS: Final = ("retries", "waits", "wait_seconds", "conflicts", "unknown_outcomes", "history_restarts")
"""What took more than one try: the attributes of :class:`Stats` with these names."""


class Counts(NamedTuple):
    """The counts of one operation."""

    calls: int = 0
    objects: int = 0
    """Objects read, opened, created, listed or deleted; missing ones do not count."""
    size_bytes: int = 0
    """Content transferred, also by calls that failed."""
    seconds: float = 0.0
    """Wall-clock time, summed over threads."""
    failures: int = 0
    """Calls that raised anything but ``FileNotFoundError``."""

    def plus(self, other: Counts, sign: int = 1) -> Counts:
        """Return the sums, or with ``sign`` −1 the differences."""
        return Counts._make(mine + sign * theirs for mine, theirs in zip(self, other, strict=True))


_NONE: Final = Counts()


class Stats:
    """The counters of a store since this process opened it. Thread-safe; pickles as a copy."""

    def __init__(self) -> None:
        self._cells: dict[int, dict[str, Counts]] = {}
        self._events: dict[int, dict[str, float]] = {}

    def count(
        self,
        operation: str,
        *,
        calls: int = 1,
        objects: int = 0,
        size_bytes: int = 0,
        seconds: float = 0.0,
        failures: int = 0,
    ) -> None:
        """Add to an operation. With ``calls`` 0, add to a call that was counted when it began."""
        cell = self._cells.setdefault(get_ident(), {})
        was = cell.get(operation, _NONE)
        cell[operation] = Counts(
            was[0] + calls, was[1] + objects, was[2] + size_bytes, was[3] + seconds, was[4] + failures
        )

    def event(self, **amounts: float) -> None:
        """Add to :data:`EVENTS`: ``event(waits=1, wait_seconds=0.05)``."""
        cell = self._events.setdefault(get_ident(), {})
        for name, amount in amounts.items():
            cell[name] = cell.get(name, 0) + amount

    def include(self, other: Stats) -> None:
        """Add the counters of a worker or of another store."""
        for operation, counts in other.operations.items():
            self.count(operation, **counts._asdict())
        self.event(**{name: other._sum(name) for name in EVENTS})

    def __getitem__(self, operation: str) -> Counts:
        """Return the counts of one operation; zero if it was never used. Raises ``KeyError``."""
        if operation not in OPERATIONS:
            raise KeyError(f"{operation!r} is no operation of a storage; these are: {', '.join(OPERATIONS)}")
        # list() of a dictionary's values is atomic, so other threads may start counting meanwhile.
        return reduce(Counts.plus, (cell.get(operation, _NONE) for cell in list(self._cells.values())), _NONE)

    @property
    def operations(self) -> dict[str, Counts]:
        return {operation: self[operation] for operation in OPERATIONS}

    @property
    def total(self) -> Counts:
        return reduce(Counts.plus, self.operations.values())

    def _sum(self, event: str) -> float:
        return sum(cell.get(event, 0) for cell in list(self._events.values()))

    @property
    def retries(self) -> int:
        """Requests that were sent again, and publication steps that were repeated."""
        return int(self._sum("retries"))

    @property
    def waits(self) -> int:
        """Pauses before :attr:`retries`."""
        return int(self._sum("waits"))

    @property
    def wait_seconds(self) -> float:
        """The requested length of the pauses, in seconds."""
        return float(self._sum("wait_seconds"))

    @property
    def conflicts(self) -> int:
        """Creates that found an object: another run's, or this one's after a lost response."""
        return int(self._sum("conflicts"))

    @property
    def unknown_outcomes(self) -> int:
        """Creates without a response that says whether they were done."""
        return int(self._sum("unknown_outcomes"))

    @property
    def history_restarts(self) -> int:
        """Reads of the history that started over because the newest checkpoint had changed."""
        return int(self._sum("history_restarts"))

    def copy(self) -> Stats:
        return self.since(Stats())

    def since(self, earlier: Stats) -> Stats:
        """Return what was counted since ``earlier``, a :meth:`copy` of this one."""
        operations = {operation: now.plus(earlier[operation], -1) for operation, now in self.operations.items()}
        return _rebuild(operations, {name: self._sum(name) - earlier._sum(name) for name in EVENTS})

    def as_dict(self) -> dict[str, Any]:
        """Return ``{"operations": {"read": {"calls": …, …}, …}, "retries": …, …}``, complete."""
        return {
            "operations": {operation: counts._asdict() for operation, counts in self.operations.items()},
            **{name: getattr(self, name) for name in EVENTS},
        }

    def __str__(self) -> str:
        """Return a table of at most 80 columns: the operations that were used, and a line of
        events.
        """
        asked = [(operation, counts) for operation, counts in self.operations.items() if any(counts)]
        if not asked:
            return "no storage calls were made"
        rows = [*asked, ("all", self.total)] if len(asked) > 1 else asked
        lines = [f"{'operation':<12} {'calls':>9} {'objects':>11} {'bytes':>17} {'seconds':>10} {'failures':>9}"]
        lines += [
            f"{name:<12} {c.calls:>9,} {c.objects:>11,} {c.size_bytes:>17,} {c.seconds:>10.4f} {c.failures:>9,}"
            for name, c in rows
        ]
        lines.append(
            f"retries {self.retries}, waits {self.waits} ({self.wait_seconds:.2f} s), conflicts {self.conflicts}, "
            f"unknown {self.unknown_outcomes}, restarts {self.history_restarts}"
        )
        return "\n".join(lines)

    def __repr__(self) -> str:
        total = self.total
        return f"Stats({total.calls} calls, {total.objects} objects, {total.size_bytes} bytes, {self.retries} retries)"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (dict(self.operations), {name: self._sum(name) for name in EVENTS}))


def _rebuild(operations: dict[str, Counts], events: dict[str, float]) -> Stats:
    stats = Stats()
    for operation, counts in operations.items():
        stats.count(operation, **counts._asdict())
    stats.event(**events)
    return stats


current_stats: Final[ContextVar[Stats | None]] = ContextVar("under_way", default=None)
"""The counters of the current operation in this context; set by ``observed.Observed``."""


def retried(pause_seconds: float) -> None:
    """Count a request that is sent again after a pause. For storages, inside an operation."""
    stats = current_stats.get()
    if stats is not None:
        stats.event(retries=1, waits=1, wait_seconds=pause_seconds)


def stats_of(storage: object) -> Stats:
    """Return the counters of an observed storage; new ones for any other."""
    found = getattr(storage, "stats", None)
    return found if isinstance(found, Stats) else Stats()

"""What a store does, in numbers: calls, objects, bytes and seconds of each operation, and what did not go at once.

Theory of operation. A :class:`Stats` is filled by ``observed.Observed``, which stands in front of a storage and sees every
operation of the protocol, and by the few places of the library that try again, wait or start over. It only ever counts up;
a phase is the difference of two copies (:meth:`Stats.since`), so any number of readers can look without disturbing one
another, and whoever exports counters to a metrics system has what that wants.

Every thread counts in a cell of its own, and whoever reads adds the cells up. So no lock is taken on the way of an
operation, none can be copied by a fork in its locked state, and no count is lost. The line of one operation is replaced as
a whole: a reader sees a call with its bytes or without neither.
"""

from __future__ import annotations

from contextvars import ContextVar
from threading import get_ident
from typing import Any, Final, NamedTuple

OPERATIONS: Final = (
    "exists",
    "read",
    "read_range",
    "open_input",
    "size",
    "open_output",
    "create",
    "list",
    "delete",
    "leftovers",
    "discard",
    "make_durable",
)
"""What a storage is asked: the methods of ``storage.Storage`` and of what some storages have besides, by their names."""

EVENTS: Final = ("retries", "waits", "wait_seconds", "conflicts", "unknown_outcomes", "history_restarts")
"""What did not go at once: the attributes of :class:`Stats` with these names."""


class Counts(NamedTuple):
    """One operation in numbers.

    ``calls``: how often it was asked. ``objects``: read, opened, created, listed or deleted; an object that is not there is
    an answer and none of them. ``size_bytes``: content that was moved, to or fro, also by calls that failed. ``seconds``:
    in the storage, by the clock, summed over threads, so that it may be more than has passed. ``failures``: calls that
    raised anything but ``FileNotFoundError``.
    """

    calls: int = 0
    objects: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    failures: int = 0

    def plus(self, other: Counts, sign: int = 1) -> Counts:
        """The sums, or with ``sign`` −1 the differences, of all five."""
        return Counts(
            self.calls + sign * other.calls,
            self.objects + sign * other.objects,
            self.size_bytes + sign * other.size_bytes,
            self.seconds + sign * other.seconds,
            self.failures + sign * other.failures,
        )


_NONE: Final = Counts()


class Stats:
    """The counters of a store, from when it was opened in this process. Thread-safe; picklable, as a copy of the numbers.

    Beside the operations:

    - ``retries``: requests that a storage sent again (:func:`retried`), and steps of a publication that were repeated,
      because the storage did not answer or answered in vain;
    - ``waits``, ``wait_seconds``: the pauses before these, and their length as it was asked for;
    - ``conflicts``: creates that met an object (the record of another run, or our own after an answer that was lost);
    - ``unknown_outcomes``: creates of which the storage did not say whether they were done;
    - ``history_restarts``: readings of the history that started over because the newest checkpoint had changed.

    What a client repeats without telling shows in the seconds of its operation only.
    """

    def __init__(self) -> None:
        self._cells: dict[int, dict[str, Counts]] = {}
        self._events: dict[int, dict[str, float]] = {}

    # ---- counting ----------------------------------------------------------------------------------------------------

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
        """Add to an operation. ``calls`` 0 adds to a call that was counted when it began."""
        cell = self._cells.setdefault(get_ident(), {})
        was = cell.get(operation, _NONE)
        cell[operation] = Counts(
            was[0] + calls, was[1] + objects, was[2] + size_bytes, was[3] + seconds, was[4] + failures
        )

    def event(self, **amounts: float) -> None:
        """Add to what did not go at once: ``event(waits=1, wait_seconds=0.05)``; names are those of :data:`EVENTS`."""
        cell = self._events.setdefault(get_ident(), {})
        for name, amount in amounts.items():
            cell[name] = cell.get(name, 0) + amount

    def include(self, other: Stats) -> None:
        """Add the counters of another: those that a worker has sent, those of a second store."""
        for operation, counts in other.operations.items():
            self.count(operation, **counts._asdict())
        self.event(**{name: other._sum(name) for name in EVENTS})

    # ---- reading -----------------------------------------------------------------------------------------------------

    def __getitem__(self, operation: str) -> Counts:
        """One operation; all zero where it was never asked. ``KeyError`` for what is none."""
        if operation not in OPERATIONS:
            raise KeyError(f"{operation!r} is no operation of a storage; these are: {', '.join(OPERATIONS)}")
        found = _NONE
        # list() of a dictionary's values is one step, so threads may begin to count meanwhile.
        for cell in list(self._cells.values()):
            found = found.plus(cell.get(operation, _NONE))
        return found

    @property
    def operations(self) -> dict[str, Counts]:
        """Every operation of :data:`OPERATIONS`, in that order."""
        return {operation: self[operation] for operation in OPERATIONS}

    @property
    def total(self) -> Counts:
        """The sum over all operations."""
        found = _NONE
        for counts in self.operations.values():
            found = found.plus(counts)
        return found

    def _sum(self, event: str) -> float:
        return sum(cell.get(event, 0) for cell in list(self._events.values()))

    @property
    def retries(self) -> int:
        """Requests that were sent again, and steps of a publication that were repeated."""
        return int(self._sum("retries"))

    @property
    def waits(self) -> int:
        """Pauses before tries."""
        return int(self._sum("waits"))

    @property
    def wait_seconds(self) -> float:
        """The length of these pauses, in seconds."""
        return float(self._sum("wait_seconds"))

    @property
    def conflicts(self) -> int:
        """Creates that met an object."""
        return int(self._sum("conflicts"))

    @property
    def unknown_outcomes(self) -> int:
        """Creates of which nobody knows whether they were done."""
        return int(self._sum("unknown_outcomes"))

    @property
    def history_restarts(self) -> int:
        """Readings of the history that started over."""
        return int(self._sum("history_restarts"))

    def copy(self) -> Stats:
        """The numbers as they are now: what :meth:`since` is given later."""
        return self.since(Stats())

    def since(self, earlier: Stats) -> Stats:
        """What has been counted since ``earlier``, a :meth:`copy` of this one, was taken. It stands still."""
        found, cell = Stats(), {}
        for operation, now in self.operations.items():
            cell[operation] = now.plus(earlier[operation], -1)
        found._cells = {0: cell}
        found._events = {0: {name: self._sum(name) - earlier._sum(name) for name in EVENTS}}
        return found

    def as_dict(self) -> dict[str, Any]:
        """``{"operations": {"read": {"calls": …, …}, …}, "retries": …, …}``: always every member, all of them numbers."""
        return {
            "operations": {operation: counts._asdict() for operation, counts in self.operations.items()},
            **{name: getattr(self, name) for name in EVENTS},
        }

    def __str__(self) -> str:
        """A table of at most 80 columns: the operations that were asked, and a line of what did not go at once."""
        asked = [(operation, counts) for operation, counts in self.operations.items() if any(counts)]
        if not asked:
            return "no storage was asked for anything"
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
"""Whose operation is being carried out in this context; set by ``observed.Observed``."""


def retried(pause_seconds: float) -> None:
    """Count that a request is sent again, after a pause. For storages, to be called inside of an operation.

    The operation's store is known by the context, which ``asyncio.run_coroutine_threadsafe`` hands on to an event loop in
    another thread. Where there is none, nobody counts.
    """
    stats = current_stats.get()
    if stats is not None:
        stats.event(retries=1, waits=1, wait_seconds=pause_seconds)


def stats_of(storage: object) -> Stats:
    """The counters of a storage that is observed; where it is not, new ones, which nobody will look at."""
    found = getattr(storage, "stats", None)
    return found if isinstance(found, Stats) else Stats()


__all__ = ["EVENTS", "OPERATIONS", "Counts", "Stats", "current_stats", "retried", "stats_of"]

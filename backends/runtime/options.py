"""How a job runs, whichever executor runs it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, TypedDict

from stateformat.errors import InvalidInput
from stateformat.storage import absolute, as_url, check_no_secrets, checkpoint_address

from ..dataflow.coordinator import LOOP_ROUNDS_MAX

KEPT_BY_DEFAULT: Final = 10


def check_whole(options: object, **least: int) -> None:
    """Raise ``InvalidInput`` unless a field is None or a whole number of at least its minimum."""
    for name, at_least in least.items():
        value = getattr(options, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < at_least):
            raise InvalidInput(f"{name} is {value!r}; it is a whole number, at least {at_least}")


class Keep(Enum):
    """The value of ``keep`` where the user has set none."""

    DEFAULT = f"default, {KEPT_BY_DEFAULT}"

    def __repr__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Schedule:
    """When and how a job takes checkpoints. Times are in µs of the executor's clock; None: never.

    A checkpoint that would say what the newest one says is not published.

    Raises ``InvalidInput`` for invalid values.
    """

    checkpoint_interval_us: int | None = 10_000_000
    """A checkpoint begins this long after the last one, or earlier by ``checkpoint_rows``."""
    checkpoint_rows: int | None = None
    """A checkpoint begins after sources have read this many rows."""
    timeout_us: int | None = 600_000_000
    """A checkpoint that takes longer is aborted."""
    unaligned_after_us: int | None = None
    """Barriers of an unaligned job start aligned, and overtake records after this time.

    None: from the start.
    """
    requests_every_us: int | None = 1_000_000
    """How often the store is read for stop requests."""
    tolerable_failures: int = 0
    """How many failed checkpoints in a row do not fail the job."""
    keep: int | Keep | None = Keep.DEFAULT
    """How many checkpoints are kept; None: all.

    By default 10 in a store that the job begins. A store that holds more and was begun without a
    limit keeps all, with a warning.
    """
    keep_for_us: int | None = None
    """Younger checkpoints are kept, too; None: age does not matter.

    Checked ten times in that period, by the system's clock and the times in the records. With
    ``keep`` None, all but the newest may expire.
    """
    savepoint_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Storage options of a savepoint's store."""
    savepoints_below: str | os.PathLike[str] | Collection[str | os.PathLike[str]] | None = None
    """Directories or URLs in which savepoints may be asked for, beside its ``savepoints/``.

    None: wherever the program may write, except where its sources and sinks read and write.
    """
    loop_rounds_max: int = LOOP_ROUNDS_MAX
    """The run fails after this many rounds of a loop whose input has ended."""
    loop_bytes_max: int = 256 << 20
    """How many bytes of feedback may wait at one subtask of a loop's head.

    From half of it on, the head takes no other input; above it, the run fails.
    """

    def __post_init__(self) -> None:
        check_whole(
            self,
            checkpoint_interval_us=1,
            checkpoint_rows=1,
            timeout_us=1,
            unaligned_after_us=0,
            requests_every_us=1,
            tolerable_failures=0,
            loop_rounds_max=1,
            loop_bytes_max=1,
            keep_for_us=0,
        )
        if self.keep is not Keep.DEFAULT:
            check_whole(self, keep=1)
        if (given := self.savepoints_below) is not None:
            several = given if isinstance(given, Collection) and not isinstance(given, (str, bytes)) else (given,)
            places = tuple(absolute(as_url(place)) for place in several)
            for place in places:
                check_no_secrets(place, "savepoints_below")
            object.__setattr__(self, "savepoints_below", places)


@dataclass(frozen=True)
class Options:
    """How a runtime runs a job. Raises ``InvalidInput`` for invalid values."""

    parallelism: int | None = None
    """Overrides the dataflow's. If neither is set, the checkpoint's is used."""
    per_operator: Mapping[str, int] = field(default_factory=dict)
    """Parallelism by uid; overrides any other."""
    unaligned: bool = False
    """Barriers overtake records on hash and rebalance edges."""
    resume: bool = False
    """Resume after a stop without drain."""
    drop: Collection[str] = ()
    """State to discard at this start, as for ``plan_restore``; restarts discard nothing."""
    max_restarts: int = 3
    """The job fails after more than this many failures without ten checkpoints in between."""
    restart_delay_us: int = 100_000
    """The wait before a restart, in µs; it doubles each time."""
    seed: int = 0
    """The seed of the order in which things happen."""
    start_from: str | None = None
    """URL of a savepoint or another store, or ``URL@ID``: an empty store begins with its content.
    """
    start_from_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Storage options of ``start_from``."""
    claim: bool = False
    """Run in a savepoint's own store. The savepoint then expires like any checkpoint of the job."""
    program: str | None = None
    """The program that records name: a script, a notebook, ``file.py:function`` or
    ``module:function``, without its folder.

    None: the script or module of this process.
    """
    origin: bool = False
    """Whether records also name the host and user of this process."""
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        check_whole(self, max_restarts=0, restart_delay_us=0)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidInput(f"seed is {self.seed!r}; it is a whole number")
        if self.start_from is not None:
            address = as_url(self.start_from)
            check_no_secrets(address, "start_from")
            checkpoint_address(address)
            object.__setattr__(self, "start_from", address)
        for name in ("unaligned", "resume", "claim", "origin"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidInput(f"{name} is {value!r}; it is True or False")
        if self.program is not None and (not isinstance(self.program, str) or not self.program):
            raise InvalidInput(f"program is {self.program!r}; it is a name, such as 'flights.py:flights'")
        if not isinstance(self.drop, Collection) or not all(isinstance(name, str) for name in self.drop):
            raise InvalidInput(
                f"drop is {self.drop!r}; it is a list of names, each 'operator', 'operator/state' or "
                "'operator/state.column'"
            )
        if self.schedule.unaligned_after_us is not None and not self.unaligned:
            raise InvalidInput(
                f"unaligned_after_us is {self.schedule.unaligned_after_us}, but the job is aligned, so no barrier "
                "ever overtakes. Give unaligned=True as well, or leave unaligned_after_us out."
            )


class ScheduleOptions(TypedDict, total=False):
    """The fields of :class:`Schedule`, as keyword arguments."""

    checkpoint_interval_us: int | None
    checkpoint_rows: int | None
    timeout_us: int | None
    unaligned_after_us: int | None
    requests_every_us: int | None
    tolerable_failures: int
    keep: int | Keep | None
    keep_for_us: int | None
    savepoint_options: Mapping[str, Any]
    savepoints_below: str | os.PathLike[str] | Collection[str | os.PathLike[str]] | None
    loop_rounds_max: int
    loop_bytes_max: int


class RuntimeOptions(ScheduleOptions, total=False):
    """The keyword arguments of runtimes: the fields of :class:`Options` and :class:`Schedule`."""

    parallelism: int | None
    per_operator: Mapping[str, int]
    unaligned: bool
    resume: bool
    drop: Collection[str]
    max_restarts: int
    restart_delay_us: int
    seed: int
    start_from: str | None
    start_from_options: Mapping[str, Any]
    claim: bool
    program: str | None
    origin: bool
    schedule: Schedule

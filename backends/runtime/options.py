"""How a job runs, whichever executor runs it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, TypedDict

from stateformat.errors import InvalidInput
from stateformat.storage import as_url, check_no_secrets, checkpoint_address

from ..dataflow.coordinator import LOOP_ROUNDS_MAX
from .checks import check_whole

KEPT_BY_DEFAULT: Final = 10


class Keep(Enum):
    """What ``keep`` is where nobody has set it."""

    DEFAULT = f"default, {KEPT_BY_DEFAULT}"

    def __repr__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Schedule:
    """When what is due, and what goes with it. Times in µs of the executor's clock; None: never.

    A checkpoint begins ``checkpoint_interval_us`` after the last one, or after ``checkpoint_rows`` rows that sources have read,
    whichever comes first; ``timeout_us`` after its begin it is given up. ``unaligned_after_us``: the barriers of an unaligned job
    begin aligned and overtake so long after the checkpoint's begin; None: they overtake from the begin. The store is looked at for requests every
    ``requests_every_us``. ``tolerable_failures`` in a row are no failure of the job.
    ``keep``: so many checkpoints are kept, None for all; by default 10 in stores that the job begins, and all in a store that
    holds more and was begun without a limit (a warning says so). ``savepoint_options``: with what the store of a savepoint is opened.
    ``loop_rounds_max``: how often a loop whose input has ended is turned before the run fails.
    """

    checkpoint_interval_us: int | None = 10_000_000
    checkpoint_rows: int | None = None
    timeout_us: int | None = 600_000_000
    unaligned_after_us: int | None = None
    requests_every_us: int | None = 1_000_000
    tolerable_failures: int = 0
    keep: int | Keep | None = Keep.DEFAULT
    savepoint_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    loop_rounds_max: int = LOOP_ROUNDS_MAX

    def __post_init__(self) -> None:
        """Raises ``InvalidInput`` for a value that means nothing."""
        check_whole(
            self,
            checkpoint_interval_us=1,
            checkpoint_rows=1,
            timeout_us=1,
            unaligned_after_us=0,
            requests_every_us=1,
            tolerable_failures=0,
            loop_rounds_max=1,
        )
        if self.keep is not Keep.DEFAULT:
            check_whole(self, keep=1)


@dataclass(frozen=True)
class Options:
    """How a job runs here.

    ``parallelism`` replaces that of the dataflow, ``per_operator`` goes before both. ``unaligned``: barriers overtake records on
    hash and rebalance edges. ``resume``: go on after a stop without drain. ``drop``: state of the checkpoint that the job starts
    from which is given up, as ``plan_restore`` takes it; a restart after a failure gives up nothing. ``max_restarts``: after more
    failures without ten checkpoints in between the job fails; it starts again after ``restart_delay_us``, and after twice as long
    each time. ``seed``: of the order in which things happen.

    ``start_from``: the URL of a savepoint or of any other store, or ``URL@ID`` for one of its checkpoints, with whose content
    the job begins its store if that is empty; it is only read. ``start_from_options``: with what it is opened. ``claim``: run
    in a savepoint's own store; it is the job's then, and expires like any other checkpoint.
    """

    parallelism: int | None = None
    per_operator: Mapping[str, int] = field(default_factory=dict)
    unaligned: bool = False
    resume: bool = False
    drop: Collection[str] = ()
    max_restarts: int = 3
    restart_delay_us: int = 100_000
    seed: int = 0
    start_from: str | None = None
    start_from_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    claim: bool = False
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        """Raises ``InvalidInput`` for a value that means nothing."""
        check_whole(self, max_restarts=0, restart_delay_us=0)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidInput(f"seed is {self.seed!r}; it is a whole number")
        if self.start_from is not None:
            address = as_url(self.start_from)
            check_no_secrets(address, "start_from")
            checkpoint_address(address)
            object.__setattr__(self, "start_from", address)
        for name in ("unaligned", "resume", "claim"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidInput(f"{name} is {value!r}; it is True or False")
        if not isinstance(self.drop, Collection) or not all(isinstance(name, str) for name in self.drop):
            raise InvalidInput(
                f"drop is {self.drop!r}; it is a list of names, each 'operator', 'operator/state' or 'operator/state.column'"
            )
        if self.schedule.unaligned_after_us is not None and not self.unaligned:
            raise InvalidInput(
                f"unaligned_after_us is {self.schedule.unaligned_after_us}, but the job is aligned, so no barrier ever overtakes. "
                "Give unaligned=True as well, or leave unaligned_after_us out."
            )


class ScheduleOptions(TypedDict, total=False):
    """The fields of :class:`Schedule`, as keyword arguments of a runtime."""

    checkpoint_interval_us: int | None
    checkpoint_rows: int | None
    timeout_us: int | None
    unaligned_after_us: int | None
    requests_every_us: int | None
    tolerable_failures: int
    keep: int | Keep | None
    savepoint_options: Mapping[str, Any]
    loop_rounds_max: int


class RuntimeOptions(ScheduleOptions, total=False):
    """The keyword arguments of every runtime: the fields of :class:`Options` and of :class:`Schedule`."""

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
    schedule: Schedule


__all__ = ["KEPT_BY_DEFAULT", "Keep", "Options", "RuntimeOptions", "Schedule", "ScheduleOptions"]

"""How a job runs on Spark."""

from __future__ import annotations

from dataclasses import dataclass

from backends.running.checks import check_whole
from backends.running.options import Options, RuntimeOptions
from stateformat.errors import InvalidInput


@dataclass(frozen=True)
class SparkOptions(Options):
    """As :class:`~backends.running.options.Options`; every epoch ends in a checkpoint.

    So ``checkpoint_interval_us`` is how long sources read in an epoch at most, and ``checkpoint_rows`` how many rows all of them
    together; an epoch ends before where nothing more is there. The next begins at once, or ``least_epoch_us`` after that one began,
    where nothing but rows is waited for. ``idle_us``: how long it waits when an epoch has found nothing to do. ``cache_bytes``: how much state a Python worker keeps in memory; more lies on the executor's local disk.
    """

    least_epoch_us: int = 0
    idle_us: int = 1_000_000
    cache_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        """Raises ``InvalidInput`` for a number that means nothing, and for what does not exist on Spark."""
        super().__post_init__()
        check_whole(self, least_epoch_us=0, idle_us=0, cache_bytes=0)
        if self.unaligned:
            raise InvalidInput(
                "unaligned has no meaning on Spark: nothing lies in a channel when an epoch ends; leave it out"
            )


class SparkRuntimeOptions(RuntimeOptions, total=False):
    """The keyword arguments of ``SparkRuntime``: the fields of :class:`SparkOptions` and of ``Schedule``."""

    least_epoch_us: int
    idle_us: int
    cache_bytes: int


__all__ = ["SparkOptions", "SparkRuntimeOptions"]

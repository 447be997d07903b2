"""How a job runs on Spark."""

from __future__ import annotations

from dataclasses import dataclass

from stateformat.errors import InvalidInput

from ..runtime import Options, RuntimeOptions, check_whole


@dataclass(frozen=True)
class SparkOptions(Options):
    """:class:`~stateformat.backends.runtime.options.Options` for Spark.

    Every epoch ends in a checkpoint, unless nothing has changed in it. So
    ``checkpoint_interval_us`` limits how long sources read in an epoch, and ``checkpoint_rows``
    limits the rows of all sources together. An epoch ends earlier if there are no more rows. The
    next epoch begins at once if there is work other than rows.
    """

    least_epoch_us: int = 0
    """The least time in µs from the start of one epoch to the next, if only rows are awaited."""
    idle_us: int = 1_000_000
    """How long the job waits after an epoch that found nothing to do, in µs."""
    cache_bytes: int = 2 << 30
    """How many bytes of state a Python worker keeps in memory. The rest is on local disk."""

    def __post_init__(self) -> None:
        """Raise ``InvalidInput`` for invalid numbers, and for options that Spark does not have."""
        super().__post_init__()
        check_whole(self, least_epoch_us=0, idle_us=0, cache_bytes=0)
        if self.unaligned:
            raise InvalidInput(
                "unaligned has no meaning on Spark: no channel holds anything when an epoch ends. Leave it out."
            )


class SparkRuntimeOptions(RuntimeOptions, total=False):
    """The keyword arguments of ``SparkRuntime``: fields of ``SparkOptions`` and ``Schedule``."""

    least_epoch_us: int
    idle_us: int
    cache_bytes: int


__all__ = ["SparkOptions", "SparkRuntimeOptions"]

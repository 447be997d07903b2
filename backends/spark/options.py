"""How a job runs on Spark."""

from __future__ import annotations

from dataclasses import dataclass

from stateformat.errors import InvalidInput

from ..runtime import Options, RuntimeOptions, check_whole


@dataclass(frozen=True)
class SparkOptions(Options):
    """As :class:`~stateformat.backends.runtime.options.Options`; every epoch ends in a checkpoint.

    So ``checkpoint_interval_us`` bounds the time for which sources read in an epoch, and
    ``checkpoint_rows`` the rows of all sources together. An epoch ends earlier if no more rows are
    there. The next epoch begins at once if there is work besides rows.
    """

    least_epoch_us: int = 0
    """How long after one epoch began the next may begin, if only rows are waited for."""
    idle_us: int = 1_000_000
    """How long the job waits after an epoch that found nothing to do."""
    cache_bytes: int = 2 << 30
    """How much state a Python worker keeps in memory; more lies on the executor's local disk."""

    def __post_init__(self) -> None:
        """``InvalidInput`` for a number that means nothing, and for what Spark does not have."""
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

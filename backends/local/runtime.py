"""Running a dataflow in this process to its end."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from backends.local.run import LocalRun
from backends.running.restore import Restored
from backends.running.runtime import Runtime


class LocalRuntime(Runtime[LocalRun]):
    """Runs dataflows on a store, in one thread. Keyword arguments: see :class:`~backends.running.runtime.Runtime`."""

    def _make_run(self, restored: Restored, retries: Mapping[str, pa.Table]) -> LocalRun:
        options = self.options
        seed = options.seed + 1_000_003 * (self._runs - 1)
        return LocalRun(self.store, restored, options.schedule, retries, seed=seed, clock=self._clock)


__all__ = ["LocalRuntime"]

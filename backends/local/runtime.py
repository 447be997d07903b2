"""The runtime of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Unpack

import pyarrow as pa

from stateformat.errors import InvalidInput
from stateformat.store import CheckpointStore

from ..dataflow.api import Source
from ..runtime import Clock, Options, Progress, Restored, Runtime, RuntimeOptions
from .run import LocalRun


class LocalRuntime(Runtime[LocalRun]):
    """Runs dataflows on a store, in one thread. Keyword arguments: see :class:`.Runtime`."""

    def __init__(
        self,
        store: CheckpointStore,
        *,
        clock: Clock | None = None,
        progress: Callable[[Progress], None] | None = None,
        **options: Unpack[RuntimeOptions],
    ) -> None:
        super().__init__(store, clock=clock, progress=progress, **options)

    def _make_run(self, restored: Restored, options: Options, retries: Mapping[str, pa.Table]) -> LocalRun:
        _check_sources(restored)
        seed = options.seed + 1_000_003 * (self._runs - 1)
        return LocalRun(self.store, restored, options.schedule, retries, seed=seed, clock=self._clock, soon=self._soon)


def _check_sources(restored: Restored) -> None:
    """Refuse sources of another executor, which would make the run wait for ever."""
    for vertex in restored.job.vertices:
        if vertex.is_source and vertex.id not in restored.finished:
            source = restored.job.logic(vertex.id)
            read_by = source.read_by if isinstance(source, Source) else None
            if read_by not in (None, LocalRuntime.__name__):
                raise InvalidInput(
                    f"source {vertex.id!r} is a {type(source).__name__}, which only {read_by} reads. "
                    f"Run the dataflow with {read_by}.",
                    operator=vertex.id,
                )

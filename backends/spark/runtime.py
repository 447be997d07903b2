"""Running a dataflow on Spark to its end: ``SparkRuntime(spark, store).run(flow)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Unpack

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.store import CheckpointStore

from ..runtime import Clock, Options, Progress, Restored, Runtime
from .run import SparkRun
from .sessions import SparkOptions, SparkRuntimeOptions, check, forward_sigterm, job_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkRuntime(Runtime[SparkRun]):
    """Runs dataflows on a store, in epochs of one Spark job each. Spark Classic only.

    ``spark``: the session of ``local_session()``, or of a cluster whose executors can import this
    package and reach the store. Keyword arguments: the fields of
    :class:`~stateformat.backends.spark.sessions.SparkOptions` and
    :class:`~stateformat.backends.runtime.options.Schedule`.
    """

    options_class = SparkOptions

    def __init__(
        self,
        spark: SparkSession,
        store: CheckpointStore,
        *,
        clock: Clock | None = None,
        progress: Callable[[Progress], None] | None = None,
        **options: Unpack[SparkRuntimeOptions],
    ) -> None:
        super().__init__(store, clock=clock, progress=progress, **options)
        if store.url.startswith("memory:"):
            raise InvalidInput(
                f"{store.url} exists in this process only, and Spark's workers are others. Open a store that they "
                "reach.",
                kind=ErrorKind.INVALID_URL,
            )
        self._spark = check(spark)

    def forward_sigterm(self, heard: Callable[[], None]) -> Callable[[], None]:
        return forward_sigterm(self._spark, heard)

    def _spark_application(self) -> str | None:
        return str(self._spark.sparkContext.applicationId)

    def _make_run(self, restored: Restored, options: Options, retries: Mapping[str, pa.Table]) -> SparkRun:
        assert isinstance(options, SparkOptions)
        # The session is made here, so that it has the views and functions that the user's session
        # has when the run begins.
        return SparkRun(
            job_session(check(self._spark)), self.store, restored, options, retries, self._clock, self._soon
        )


__all__ = ["SparkRuntime"]

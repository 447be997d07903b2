"""The foreign formats included with stateformat, as the entry points of ``stateformat.formats``."""

from __future__ import annotations

from stateformat.formats import Outside
from stateformat.storage import Storage

from .advice import FLINK, SPARK
from .checkpoint import ForeignFolder, ForeignFormat


def spark(folder: Storage, outside: Outside | None) -> ForeignFolder | None:
    """Return the checkpoint of a Structured Streaming query; None if the folder has none."""
    from .spark.checks import check_source
    from .spark.logs import recognises
    from .spark.source import SparkSource, sources

    form = ForeignFormat(
        SPARK,
        recognises,
        sources=lambda folder, _: sources(folder),
        source=lambda folder, checkpoint_id, _: SparkSource(folder, checkpoint_id),
        check=check_source,
    )
    return form.found(folder, outside)


def flink(folder: Storage, outside: Outside | None) -> ForeignFolder | None:
    """Return a savepoint or checkpoints of Flink; None if the folder has none."""
    from .flink import FlinkSource, check_source, recognises, sources

    form = ForeignFormat(FLINK, recognises, sources=sources, source=FlinkSource, check=check_source)
    return form.found(folder, outside)

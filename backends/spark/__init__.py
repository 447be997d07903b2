"""Dataflows on Spark: ``SparkRuntime`` runs them, ``SparkSource`` reads DataFrames.

``data_source`` goes the other way: ``spark.read.format("stateformat")`` reads state.
``bootstrap`` begins a job with DataFrames as its state.

Needs the extra ``spark``. Importing this package does not import pyspark. To follow an epoch, read
``run``, ``epoch``, ``messages``, ``frames``, then ``task_run``. Sources (``source``, ``offsets``,
``files``) and ``rewrite`` are separate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stateformat._lazy import lazy

if TYPE_CHECKING:
    from ..runtime import stop_soon_on_sigterm as stop_soon_on_sigterm
    from .bootstrapping import bootstrap as bootstrap
    from .data_source import register_data_source as register_data_source
    from .files import DirectoryFrames as DirectoryFrames
    from .offsets import Offsets as Offsets, OffsetTable as OffsetTable, Position as Position
    from .runtime import SparkRuntime as SparkRuntime
    from .sessions import (
        SparkOptions as SparkOptions,
        configure as configure,
        lent_session as lent_session,
        local_session as local_session,
        session as session,
    )
    from .source import SparkSource as SparkSource
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "..runtime": "stop_soon_on_sigterm",
            ".data_source": "register_data_source",
            ".bootstrapping": "bootstrap",
            ".runtime": "SparkRuntime",
            ".sessions": "SparkOptions configure lent_session local_session session",
            ".files": "DirectoryFrames",
            ".offsets": "OffsetTable Offsets Position",
            ".source": "SparkSource",
        },
    )

"""Dataflows on Spark: ``SparkRuntime`` runs them, ``SparkSource`` reads DataFrames.

``data_source`` goes the other way: ``spark.read.format("stateformat")`` reads state.
``bootstrap`` begins a job with DataFrames as its state.

Needs the extra ``spark``. Importing this package does not import pyspark. To follow an epoch, read
``driver``, then ``protocol``, then ``worker``. ``sources`` and ``rewrite`` are separate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stateformat._lazy import lazy

if TYPE_CHECKING:
    from ..runtime import stop_soon_on_sigterm as stop_soon_on_sigterm
    from .bootstrapping import bootstrap as bootstrap
    from .data_source import register_data_source as register_data_source
    from .options import SparkOptions as SparkOptions
    from .runtime import SparkRuntime as SparkRuntime
    from .sessions import (
        configure as configure,
        lent_session as lent_session,
        local_session as local_session,
        session as session,
    )
    from .sources.files import DirectoryFrames as DirectoryFrames
    from .sources.offset_table import OffsetTable as OffsetTable
    from .sources.offsets import Offsets as Offsets, Position as Position
    from .sources.source import SparkSource as SparkSource
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "..runtime": "stop_soon_on_sigterm",
            ".data_source": "register_data_source",
            ".bootstrapping": "bootstrap",
            ".options": "SparkOptions",
            ".runtime": "SparkRuntime",
            ".sessions": "configure lent_session local_session session",
            ".sources.files": "DirectoryFrames",
            ".sources.offset_table": "OffsetTable",
            ".sources.offsets": "Offsets Position",
            ".sources.source": "SparkSource",
        },
    )

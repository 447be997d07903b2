"""Checkpoints of other systems, read like stateformat's: those of Flink and Structured Streaming.

Pure functions from bytes to Arrow; no JVM, no pyspark. Read ``source`` (what every format
provides), ``checkpoint`` (a source as users see it), ``formats`` (which formats there are), then
``byte_strings``, ``framing``, ``cursor``, ``sst`` (bytes), and ``spark`` or ``flink`` (a format).
``advice`` has what commands advise for such folders, and the versions that are read.
`docs/foreign.md` says what is read, kept opaque and refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stateformat._lazy import lazy

if TYPE_CHECKING:
    from .advice import advice_for as advice_for
    from .checkpoint import (
        ForeignCheckpoint as ForeignCheckpoint,
        ForeignFolder as ForeignFolder,
        ForeignFormat as ForeignFormat,
    )
    from .source import ForeignSource as ForeignSource, Note as Note, Part as Part
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".advice": "advice_for",
            ".checkpoint": "ForeignCheckpoint ForeignFolder ForeignFormat",
            ".source": "ForeignSource Note Part",
        },
        moved={"..importing": "ImportSpec Imported import_checkpoint"},
        leaves_in="0.3",
    )

"""Which versions of other systems are read and tested; messages and docs/foreign.md name these."""

from __future__ import annotations

from typing import Final

FLINK_VERSIONS: Final = "Flink 1.13 to 2.3"
SPARK_VERSIONS: Final = "Spark 3.5 to 4.3"

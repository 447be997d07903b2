"""The engines that rewrite on Spark: ``engine`` runs on the driver, ``executor`` in workers.

``repartition`` has both parts for the checkpoints of Structured Streaming queries.
"""

from .engine import SparkEngine, check_reachable, collect, task_count
from .executor import FRAME_SCHEMA, RESULT_SCHEMA, Batches, Stage, frames_of, gather_targets, reported
from .repartition import SparkRepartition

__all__ = [
    "FRAME_SCHEMA",
    "RESULT_SCHEMA",
    "Batches",
    "SparkEngine",
    "SparkRepartition",
    "Stage",
    "check_reachable",
    "collect",
    "frames_of",
    "gather_targets",
    "reported",
    "task_count",
]

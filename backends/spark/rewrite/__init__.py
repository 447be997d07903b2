"""The engines that rewrite on Spark: ``engine`` runs on the driver, ``executor`` in workers;
``repartition`` does both for the checkpoints of Structured Streaming queries.
"""

from .engine import SparkEngine
from .repartition import SparkRepartition

__all__ = ["SparkEngine", "SparkRepartition"]

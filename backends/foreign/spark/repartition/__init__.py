"""A Structured Streaming checkpoint written at another number of partitions, without Spark.

Read in this order: ``plan`` (what is read and written, from logs and listings), ``work`` (the two
functions that every engine runs), ``run`` (both, and the order of writing). Below them: ``logs``
(Spark's logs, edited), ``store_files`` and ``table_files`` (files of state stores and of RocksDB,
written), ``row_parts`` (rows cut in two, as RocksDB's keys are).
"""

from __future__ import annotations

from .logs import location_like
from .plan import PROVIDERS, RepartitionPlan, Source, Target, Unit, check_query, plan_repartition
from .run import Engine, LocalEngine, Outcome, Progress, Result, check_target, repartition
from .work import Piece, Written, deal, write_partition

__all__ = [
    "PROVIDERS",
    "Engine",
    "LocalEngine",
    "Outcome",
    "Piece",
    "Progress",
    "RepartitionPlan",
    "Result",
    "Source",
    "Target",
    "Unit",
    "Written",
    "check_query",
    "check_target",
    "deal",
    "location_like",
    "plan_repartition",
    "repartition",
    "write_partition",
]

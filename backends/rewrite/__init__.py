"""Writing a checkpoint's data anew: the plan, the tasks, and an engine that runs them in threads.

Users call ``rewrite`` with a ``RewriteSpec``, which may have a ``Transform`` for a state, and an
``Engine``; ``stateformat.backends.spark.rewrite`` has the engine for Spark, which uses the other
names. Read ``transforming`` (what may be requested), ``planning``, ``rewrite``; ``queries`` is for
those of Spark.
"""

from .planning import Place, RewritePlan, Transformed, is_hashable, plan_rewrite
from .queries import plan_query_rewrite
from .rewrite import (
    DISTRIBUTE_BYTES,
    Engine,
    Rewritten,
    Seen,
    ThreadEngine,
    TransformedRows,
    by_owner,
    carry_out,
    check_provable,
    counted,
    gathered,
    prove_rewrite,
    publish_rescaled,
    rewrite,
    run_plan,
    segment_place,
)
from .transforming import ColumnChange, RewriteSpec, Transform, Transformation

__all__ = [
    "DISTRIBUTE_BYTES",
    "ColumnChange",
    "Engine",
    "Place",
    "RewritePlan",
    "RewriteSpec",
    "Rewritten",
    "Seen",
    "ThreadEngine",
    "Transform",
    "Transformation",
    "Transformed",
    "TransformedRows",
    "by_owner",
    "carry_out",
    "check_provable",
    "counted",
    "gathered",
    "is_hashable",
    "plan_query_rewrite",
    "plan_rewrite",
    "prove_rewrite",
    "publish_rescaled",
    "rewrite",
    "run_plan",
    "segment_place",
]


def __dir__() -> list[str]:
    return __all__

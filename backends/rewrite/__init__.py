"""Writing a checkpoint's data anew: the plan, the tasks, and an engine that runs them in threads.

Users call ``rewrite`` with a ``RewriteSpec``, which may have a ``Transform`` for a state, and an
``Engine``; ``stateformat.backends.spark.rewrite`` has the engine for Spark, which uses the other
names. Read ``transforming`` (what may be requested), ``planning``, ``rewrite``.
"""

from .planning import Move, Place, RehashSource, RewritePlan, Transformed, is_hashable, plan_rewrite
from .rewrite import (
    DISTRIBUTE_BYTES,
    Engine,
    Rewritten,
    Seen,
    ThreadEngine,
    TransformedRows,
    Workers,
    by_owner,
    carry_out,
    check_provable,
    counted,
    distribute,
    gathered,
    prove_rewrite,
    publish_rescaled,
    rewrite,
    segment_place,
    write_move,
    write_target,
)
from .transforming import ColumnChange, RewriteSpec, Transform, Transformation

__all__ = [
    "DISTRIBUTE_BYTES",
    "ColumnChange",
    "Engine",
    "Move",
    "Place",
    "RehashSource",
    "RewritePlan",
    "RewriteSpec",
    "Rewritten",
    "Seen",
    "Transform",
    "Transformation",
    "Transformed",
    "TransformedRows",
    "carry_out",
    "check_provable",
    "counted",
    "ThreadEngine",
    "Workers",
    "by_owner",
    "distribute",
    "gathered",
    "is_hashable",
    "plan_rewrite",
    "prove_rewrite",
    "publish_rescaled",
    "rewrite",
    "segment_place",
    "write_move",
    "write_target",
]


def __dir__() -> list[str]:
    return __all__

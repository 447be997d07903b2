"""Writing a checkpoint's data anew: the plan, the tasks, and an engine that runs them in threads.

Users call ``rewrite`` with a ``RewriteSpec``, which may have a ``Transform`` for a state, and an
``Engine``; ``stateformat.backends.spark.rewrite`` has the engine for Spark, which uses the other
names. Read ``spec``, ``transforming``, ``naming``, ``planning``, ``work``, ``threads``,
``rewrite``. ``rescale`` publishes at another parallelism without touching data; ``proving``
compares a result with its source.
"""

from .naming import is_hashable
from .planning import Move, Place, RehashSource, RewritePlan, Transformed, plan_rewrite
from .proving import check_provable, prove_rewrite
from .rescale import publish_rescaled
from .rewrite import Engine, Rewritten, TransformedRows, carry_out, rewrite
from .spec import RewriteSpec, Transform
from .threads import ThreadEngine, Workers
from .transforming import ColumnChange, Transformation, check_own
from .work import (
    DISTRIBUTE_BYTES,
    Seen,
    by_owner,
    distribute,
    gathered,
    segment_place,
    write_move,
    write_target,
)

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
    "check_own",
    "check_provable",
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

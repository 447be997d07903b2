"""Rewriting a checkpoint's data: the plan, the work of one task, and the engine in threads. Knows no Spark.

``rewrite`` is the door; ``stateformat.backends.spark.rewrite`` is the other engine.
"""

from .planning import Move, RewritePlan, Source, plan_rewrite
from .rescale import publish_rescaled
from .rewrite import Engine, Rewritten, rewrite
from .spec import RewriteSpec
from .work import deal, write_move, write_target

__all__ = [
    "Engine",
    "Move",
    "RewritePlan",
    "RewriteSpec",
    "Rewritten",
    "Source",
    "deal",
    "plan_rewrite",
    "publish_rescaled",
    "rewrite",
    "write_move",
    "write_target",
]

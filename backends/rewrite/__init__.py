"""Rewriting a checkpoint's data: the plan, the work of one task, and the engine in threads. Knows no Spark.

``rewrite`` is the door; ``stateformat.backends.spark.rewrite`` is the other engine.
"""

from .planning import RewritePlan, plan_rewrite
from .rewrite import Engine, Rewritten, rewrite
from .spec import RewriteSpec

__all__ = ["Engine", "RewritePlan", "RewriteSpec", "Rewritten", "plan_rewrite", "rewrite"]

"""Rewriting a checkpoint's data: the plan, the work of one task, and the engine in threads. Knows no Spark.

``rewrite`` is the door; ``backends.spark.rewrite`` is the other engine.
"""

from backends.rewrite.planning import RewritePlan, plan_rewrite
from backends.rewrite.run import Engine, Rewritten, rewrite
from backends.rewrite.spec import RewriteSpec

__all__ = ["Engine", "RewritePlan", "RewriteSpec", "Rewritten", "plan_rewrite", "rewrite"]

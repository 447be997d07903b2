"""Writing a checkpoint's data anew: the plan, the tasks, and an engine that runs them in threads.

Users call ``rewrite`` with a ``RewriteSpec`` and an ``Engine``;
``stateformat.backends.spark.rewrite`` has the engine on Spark, which uses the other names. Read
``spec``, ``naming``, ``planning``, ``work``, ``threads``, ``rewrite``. ``rescale`` publishes at
another parallelism without touching data.
"""

from .naming import is_hashable
from .planning import Move, RehashSource, RewritePlan, plan_rewrite
from .rescale import publish_rescaled
from .rewrite import Engine, Rewritten, carry_out, rewrite
from .spec import RewriteSpec
from .threads import ThreadEngine
from .work import distribute, write_move, write_target

__all__ = [
    "Engine",
    "Move",
    "RehashSource",
    "RewritePlan",
    "RewriteSpec",
    "Rewritten",
    "carry_out",
    "ThreadEngine",
    "distribute",
    "is_hashable",
    "plan_rewrite",
    "publish_rescaled",
    "rewrite",
    "write_move",
    "write_target",
]

"""Python's collection of garbage in a worker of Spark.

PySpark's daemon collects all garbage after every task of a worker that it uses again. That looks at
each object of the process, among them some 90,000 of imported modules, and takes 25 to 40 ms: ten
times what a task with a row takes. So modules are put aside once, before the first task has made
anything of its own.
"""

from __future__ import annotations

import gc
import os
from functools import cache


@cache
def ignore_imports() -> None:
    """Let collections ignore what lies in memory now. Only the first call does anything, and none
    outside of workers that are used again.
    """
    if "SPARK_REUSE_WORKER" in os.environ:
        gc.collect()
        gc.freeze()

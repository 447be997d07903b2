"""What runs in Spark's Python workers. Read ``level``, ``task_run``, ``loop_end``.

``task_cache`` and ``operator_pickling`` keep operators from one epoch to the next.
"""

"""One task, as a pure state machine.

Read ``states``, the table of what may happen, then ``task``, which decides what follows. ``guards``
refuses what may not happen; ``inputs``, ``alignment`` and ``loop_buffer`` are parts of the task.
"""

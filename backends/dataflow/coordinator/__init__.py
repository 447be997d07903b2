"""The checkpoint coordinator, as a pure state machine.

Read ``coordinator`` for the rules, then what it keeps: ``barrier``, ``stop``, ``task_tracker``.
``planning`` chooses the tasks that a checkpoint triggers.
"""

"""One task as a state machine: ``states`` is the table, ``guards`` the conditions, ``task`` the machine.

``inputs``, ``alignment`` and ``loop_buffer`` are its parts.
"""

from __future__ import annotations

from .inputs import InputEdge
from .states import TaskState
from .task import Task

__all__ = ["InputEdge", "Task", "TaskState"]

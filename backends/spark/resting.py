"""A task of a run on Spark between two epochs, when its core and its mail are in the driver."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, TypeGuard

from backends.dataflow import events as ev
from backends.dataflow.api import NoSplit
from backends.dataflow.life import TaskState
from backends.dataflow.task import Task
from backends.running.wiring import TaskChannels
from backends.running.worker import Give, Mail, Message
from backends.spark.base import Base

ENDED: Final = (TaskState.WAITING, TaskState.STOPPING, TaskState.ENDED)
"""Where the logic of a task has ended, and its activation with it."""


@dataclass(eq=False)
class Resting:
    """One task. ``base`` None: its activation has ended. ``tokens``: of its accepted reports, with their versions. ``number``: the last
    barrier that it took. Of a reader: whether it ``wants_split``, was ``told_later``, and how many ``splits_ahead`` it is given.
    """

    wired: TaskChannels
    base: Base | None
    mail: deque[Mail] = field(default_factory=deque)
    tokens: dict[bytes, int] = field(default_factory=dict)
    started: bool = False
    number: int = 0
    no_more_splits: bool = False
    wants_split: bool = True
    told_later: bool = False
    splits_ahead: int = 1
    gone: bool = False

    @property
    def core(self) -> Task:
        """What it has decided so far."""
        return self.wired.core

    @property
    def may_read(self) -> bool:
        """Whether it is a source that reads in the next epoch."""
        return self.core.may_read or (self.core.is_source and not self.started)

    @property
    def lives_here(self) -> bool:
        """Whether nothing that may come needs its operators."""
        state = self.core.state
        aborted = any(isinstance(mail, ev.Aborted) for mail in self.mail)
        return state in ENDED or (state is TaskState.STOPPED_AT_BARRIER and not aborted)


def is_work(mail: Mail) -> bool:
    """Whether it lets a task do something; that an epoch is complete, or that no split is there now, does not."""
    if isinstance(mail, ev.Completed):
        return mail.loop is not None
    return not (isinstance(mail, Give) and isinstance(mail.split, NoSplit))


def concerns_the_core(mail: Mail) -> TypeGuard[ev.TaskEvent]:
    """Whether it is for the core alone, and may be delivered without operators."""
    return not isinstance(mail, Give | Message | ev.Triggered)


__all__ = ["ENDED", "Resting", "concerns_the_core", "is_work"]

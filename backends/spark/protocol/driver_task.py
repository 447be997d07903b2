"""What the driver keeps for a task between two epochs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, TypeGuard

from ...dataflow import events as ev
from ...dataflow.api import NoSplit
from ...dataflow.source_reader import Holder
from ...dataflow.task import Task
from ...dataflow.task_states import TaskState
from ...runtime import Mail, MessageToSubtask, SplitAssigned, TaskChannels
from .restore_point import RestorePoint

TOKENS_KEPT: Final = 64
"""How many epochs behind a worker may be and still catch up."""
ENDED: Final = (TaskState.WAITING, TaskState.STOPPING, TaskState.ENDED)
"""The states of a task whose logic has ended, and with it its chain."""


@dataclass(eq=False)
class DriverTask:
    """One task between two epochs."""

    wired: TaskChannels
    restore_point: RestorePoint | None
    """None if its chain has ended."""
    mail: deque[Mail] = field(default_factory=deque)
    tokens: dict[bytes, int] = field(default_factory=dict)
    """The tokens of its last accepted reports, with their versions."""
    copies: dict[bytes, int] = field(default_factory=dict)
    """The tokens, with versions, of accepted reports that left a copy which can still catch up."""
    started: bool = False
    number: int = 0
    """The last barrier that it took (``Worker.snapshot_taken``)."""
    wakes_at_us: int | None = None
    """The processing time at which a timer is due, or its reader becomes idle."""
    holder: Holder | None = None
    """The split of its reader that was behind the others at the end of its last epoch."""
    active: dict[str, int] = field(default_factory=dict)
    """When its reader, and each split, last had rows."""
    gone: bool = False
    no_more_splits: bool = False
    wants_split: bool = True
    was_deferred: bool = False
    """Whether its reader was told that a split may come later."""
    splits_ahead: int = 1
    """How many splits its reader is given at once."""

    def forget_tokens(self) -> None:
        while len(self.tokens) > TOKENS_KEPT:
            del self.tokens[next(iter(self.tokens))]

    def know_copies(self, token: bytes | None, version: int) -> None:
        """Add a copy, if there is a token, and forget those that can no longer catch up."""
        if token is not None:
            self.copies[token] = version
        point = self.restore_point
        usable = [token for token, of in self.copies.items() if point is not None and point.can_catch_up(of)]
        self.copies = {token: self.copies[token] for token in usable[-TOKENS_KEPT:]}

    @property
    def core(self) -> Task:
        return self.wired.core

    @property
    def may_read(self) -> bool:
        return self.core.may_read or (self.core.is_source and not self.started)

    @property
    def needs_no_operators(self) -> bool:
        """Whether the driver can deliver its mail: its logic has ended, or a stop holds it."""
        state = self.core.state
        aborted = any(isinstance(mail, ev.Aborted) for mail in self.mail)
        return state in ENDED or (state is TaskState.STOPPED_AT_BARRIER and not aborted)


def is_work(mail: Mail) -> bool:
    """Return whether mail gives a task work. The end of an epoch and the lack of a split do not."""
    if isinstance(mail, ev.Completed):
        return mail.loop is not None
    return not isinstance(mail, ev.Aborted) and not (
        isinstance(mail, SplitAssigned) and isinstance(mail.split, NoSplit)
    )


def is_for_core(mail: Mail) -> TypeGuard[ev.TaskEvent]:
    """Return whether mail is only for the core, so that it can be delivered without operators."""
    return not isinstance(mail, SplitAssigned | MessageToSubtask | ev.Triggered)

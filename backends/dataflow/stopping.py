"""A stop with a savepoint, as far as it has come.

=========  =========================================  ==================================================================
phase      until                                      if anything fails
=========  =========================================  ==================================================================
ASKED      the checkpoint in flight has ended         the request has failed, and the failure is what it would have been
DRAINING   the logic of every task has ended; loops   the run is discarded: ``StopFailed``, ``Restart``, uncounted
           are turned by rounds. Drain only
SAVING     the savepoint is published                 drain: as above. No drain: given up, and the job goes on as if
                                                      nothing had been asked; only a failed task restarts the run, counted
SAVED      every task has ended                       the stop stands: ``Restart``, uncounted, finds it in the record
=========  =========================================  ==================================================================

While the savepoint is being published nobody knows whether it exists. A run that breaks off then says neither that the stop has
succeeded nor that it has failed: the restart finds the truth in the newest record, and the request is answered by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from backends.dataflow.events import Purpose, StopOf
from stateformat.model import StopMode


class StopPhase(Enum):
    """See the table."""

    ASKED = auto()
    DRAINING = auto()
    SAVING = auto()
    SAVED = auto()


@dataclass
class StopProgress:
    """The stop that was asked for."""

    of: StopOf
    phase: StopPhase = StopPhase.ASKED

    @property
    def drains(self) -> bool:
        """Whether everything is flushed first."""
        return self.of.mode is StopMode.DRAIN

    @property
    def purpose(self) -> Purpose:
        """What its barrier is for."""
        return Purpose.STOP_DRAIN if self.drains else Purpose.STOP_NO_DRAIN

    @property
    def no_way_back(self) -> bool:
        """Whether logic was told to end, so that this run cannot go on as if nothing had been asked."""
        return self.phase is StopPhase.SAVED or (self.drains and self.phase is not StopPhase.ASKED)

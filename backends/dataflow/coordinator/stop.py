"""How far a stop with a savepoint has come.

========  ===================================  =================================================
phase     until                                if anything fails
========  ===================================  =================================================
ASKED     the checkpoint in flight has ended   the request fails; the failure counts as it would
DRAINING  every logic has ended; rounds turn   ``StopFailed`` and ``Restart``, uncounted
          the loops. Drain only
SAVING    the savepoint is published           drain: as above. No drain: the job goes on as if
                                               nothing had been asked; only a failed task
                                               restarts the run, counted
SAVED     every task has ended                 the stop stands: ``Restart``, uncounted
========  ===================================  =================================================

While the savepoint is being published it is unknown whether it exists. A run that ends abruptly
then does not answer the request: the restart reads the newest record and answers accordingly.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from stateformat.model import StopMode

from ..events import BarrierKind, StopOf


class StopPhase(Enum):
    """See the table."""

    ASKED = auto()
    DRAINING = auto()
    SAVING = auto()
    SAVED = auto()


@dataclass
class StopProgress:
    """The requested stop."""

    of: StopOf
    phase: StopPhase = StopPhase.ASKED

    @property
    def drains(self) -> bool:
        """Whether everything is flushed first."""
        return self.of.mode is StopMode.DRAIN

    @property
    def purpose(self) -> BarrierKind:
        """What its barrier is for."""
        return BarrierKind.STOP_DRAIN if self.drains else BarrierKind.STOP_NO_DRAIN

    @property
    def no_way_back(self) -> bool:
        """Whether tasks were told to end, so this run cannot go on."""
        return self.phase is StopPhase.SAVED or (self.drains and self.phase is not StopPhase.ASKED)

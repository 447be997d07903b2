"""The layers of a task's keyed states, in the newest checkpoint and in the one in flight.

Nothing refers to what an aborted checkpoint has written: the next one writes all changes since the
newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stateformat.snapshot import Snapshot

from ..runtime import OperatorState, layers_of, merge_snapshot
from ..state import SubtaskStates

_FIRST_VERSION = 1


class TaskLayers:
    """The layers of the states of one task.

    Made before these are restored: it begins their versions.
    """

    def __init__(self, states: Mapping[str, SubtaskStates], restored: Mapping[str, OperatorState]) -> None:
        self._states = states
        self._newest = dict(restored)
        self._taken: dict[str, OperatorState] = {}
        self._number = 0
        for uid, of_operator in states.items():
            of_operator.begin(_FIRST_VERSION)
            of_operator.layers = layers_of(self._newest[uid]) if uid in self._newest else {}

    def take(self, number: int, snapshots: Sequence[Snapshot]) -> list[Snapshot]:
        """Return the snapshots of a barrier, with the layers that stay below."""
        self._number, self._taken = number, {}
        for snapshot in snapshots:
            states = self._states.get(snapshot.operator)
            if states is not None and not snapshot.finishing:
                before = self._newest.get(snapshot.operator)
                self._taken[snapshot.operator] = merge_snapshot(snapshot, states.layers_kept, before, states.version)
        return [self._taken[each.operator].snapshot if each.operator in self._taken else each for each in snapshots]

    def complete(self, number: int) -> None:
        """Note that a barrier's checkpoint is published: the next deltas go on top of it."""
        if number != self._number:
            return
        self._newest.update(self._taken)
        for uid, state in self._taken.items():
            self._states[uid].layers = layers_of(state)
        self._taken = {}

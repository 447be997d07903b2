"""In which steps the rows of a state in two checkpoints are compared, and what is not read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..keys import DEFAULT_KEY_HASH
from ..model import Mode, State
from ..reading import ReadTask
from .comparing import ByStreams, Step
from .differences import ByKey, ByRow
from .subjects import declared_in

if TYPE_CHECKING:
    from ..reading import Checkpoint


def planned(old: Checkpoint, new: Checkpoint, state: State) -> tuple[Step, ...]:
    """The steps, in order. Reads the manifests."""
    before, after = _task(old, state), _task(new, state)
    if before is None and after is None:
        return ()
    if state.mode is not Mode.KEYED:
        return (ByStreams(before, after, ByRow(), grouped=False),)
    grouped = len({_layout(checkpoint, state) for checkpoint in (old, new)} - {None}) == 1
    return (ByStreams(before, after, ByKey(state.row_key), grouped),)


def _task(checkpoint: Checkpoint, state: State) -> ReadTask | None:
    declared = declared_in(checkpoint, state)
    return None if declared is None else checkpoint.state(declared).task


def _layout(checkpoint: Checkpoint, state: State) -> tuple[int | None, str] | None:
    """What makes a key's group: the number of groups and the hash; None where the state is not."""
    if declared_in(checkpoint, state) is None:
        return None
    operator = checkpoint.graph.operator(state.operator)
    return operator.max_parallelism, operator.key_hash or DEFAULT_KEY_HASH

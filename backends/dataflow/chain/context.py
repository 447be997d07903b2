"""What an operator may ask of its subtask."""

from __future__ import annotations

from collections.abc import Callable

from stateformat import graph
from stateformat.errors import InvalidInput, InvalidState

from ...state import SubtaskStates
from ..events import MIN_WATERMARK


class Context:
    """Implements ``OperatorContext``. Its owner sets ``restored`` and ``watermark``."""

    def __init__(
        self, operator: graph.Operator, subtask: int, states: SubtaskStates, send: Callable[[str, bytes], None]
    ) -> None:
        self._operator = operator
        self._send = send
        self.subtask = subtask
        self.uid: str = operator.uid
        self.parallelism = operator.parallelism
        self.max_parallelism: int = operator.max_parallelism or 0
        self.restored = False
        self.watermark = MIN_WATERMARK
        self.value_state = states.value
        self.map_state = states.map
        self.list_state = states.list
        self.timers = states.timers
        self.entries = states.entries

    def send_to_coordinator(self, message: bytes) -> None:
        """Send to the operator's coordinator. ``InvalidInput`` if it has none."""
        if not self._operator.coordinator:
            raise InvalidInput(
                f"operator {self.uid!r} has no coordinator to send to; give it one (Operator.coordinator)"
            )
        self._send(self.uid, checked_message(f"operator {self.uid!r}", message))


def checked_message(who: str, message: object) -> bytes:
    """A message, as a checkpoint keeps it. ``InvalidState`` unless it is bytes."""
    if not isinstance(message, bytes):
        raise InvalidState(f"{who} sent {type(message).__name__}; a message is bytes, so encode it")
    return message

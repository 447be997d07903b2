"""What a task hears: its edges and channels, how far time has come on each, and what of it has ended.

Theory of operation. Three ends are kept apart. A *channel's data* has ended with ``EndOfData``, drained or stopped; the channel
itself with ``EndOfPartition``. An *input* (one or more edges with the same index) has ended, in the sense of ``end_input``, when
the data of all its channels has ended drained. Time on an edge is the least of its channels', but never falls behind what a
checkpoint said; a channel whose data has drained, and an edge of which nobody sends any more, have come to the end of time. A
stopped channel stays where it was. Feedback channels have no time and no end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from backends.dataflow.events import MAX_WATERMARK, MIN_WATERMARK, Channel, EndOfData


class InputEdge(NamedTuple):
    """An edge into a task, as one subtask sees it.

    ``channels``: from the senders that run; none where the whole predecessor has finished. ``overtakable``: unaligned barriers pass
    what lies in its channels. ``inside``: not a feedback edge, but it comes from another vertex of the loop that this is a
    head of. ``watermark`` and ``ended``: what the restored checkpoint's ``progress`` says of it.
    """

    id: str
    input: int
    channels: tuple[Channel, ...]
    feedback: bool = False
    overtakable: bool = False
    inside: bool = False
    watermark: int = MIN_WATERMARK
    ended: bool = False


@dataclass
class _Heard:
    """What came on a channel. ``drained`` None: its data has not ended."""

    edge: InputEdge
    watermark: int = MIN_WATERMARK
    drained: bool | None = None
    gone: bool = False


class Inputs:
    """Everything that one task has heard."""

    def __init__(self, edges: Sequence[InputEdge]) -> None:
        self.edges = tuple(edge for edge in edges if not edge.feedback)
        self.feedback = tuple(edge for edge in edges if edge.feedback)
        self._heard = {channel: _Heard(edge) for edge in edges for channel in edge.channels}
        self.ended = {edge.input for edge in self.edges} - {edge.input for edge in self.edges if not edge.ended}
        """Inputs of which ``end_input`` was called, before the checkpoint or since."""

    def __contains__(self, channel: Channel) -> bool:
        return channel in self._heard

    @property
    def are_none(self) -> bool:
        """Whether there is no edge at all: a source."""
        return not self.edges and not self.feedback

    def is_feedback(self, channel: Channel) -> bool:
        """Whether a channel belongs to a feedback edge."""
        return self._heard[channel].edge.feedback

    def is_overtakable(self, channel: Channel) -> bool:
        """Whether an unaligned barrier passes what lies in a channel."""
        return self._heard[channel].edge.overtakable

    # What comes ---------------------------------------------------------------------------------------------------------

    def advance(self, channel: Channel, timestamp: int) -> None:
        """A watermark came. One that falls back has no effect."""
        heard = self._heard[channel]
        heard.watermark = max(heard.watermark, timestamp)

    def end_data(self, channel: Channel, element: EndOfData) -> None:
        """The data of a channel has ended."""
        self._heard[channel].drained = element.drain

    def end_partition(self, channel: Channel) -> None:
        """A channel has ended."""
        self._heard[channel].gone = True

    # What follows from it -----------------------------------------------------------------------------------------------

    def data_has_ended(self, channel: Channel) -> bool:
        """Whether no record may follow on a channel."""
        return self._heard[channel].drained is not None

    def is_gone(self, channel: Channel) -> bool:
        """Whether nothing may follow on a channel."""
        return self._heard[channel].gone

    @property
    def channels(self) -> list[Channel]:
        """Those that count, in order of edges: without feedback."""
        return [channel for edge in self.edges for channel in edge.channels]

    @property
    def silent(self) -> list[Channel]:
        """Channels whose data has ended."""
        return [channel for channel in self.channels if self._heard[channel].drained is not None]

    @property
    def all_data_ended(self) -> bool:
        """Whether no record will come, drained or stopped."""
        return len(self.silent) == len(self.channels)

    @property
    def all_gone(self) -> bool:
        """Whether every sender has left."""
        return all(self._heard[channel].gone for channel in self.channels)

    def drained(self, edges: Sequence[InputEdge]) -> bool:
        """Whether the data of all channels of these edges has ended, drained."""
        return all(self._heard[channel].drained for edge in edges for channel in edge.channels)

    @property
    def drained_inputs(self) -> list[int]:
        """Inputs that have ended drained, in order."""
        return [
            number
            for number in sorted({edge.input for edge in self.edges})
            if self.drained([edge for edge in self.edges if edge.input == number])
        ]

    def watermark_of(self, edge: InputEdge) -> int:
        """How far time has come on an edge."""
        times = (
            MAX_WATERMARK if heard.drained else heard.watermark
            for heard in (self._heard[channel] for channel in edge.channels)
        )
        return max(edge.watermark, min(times, default=MAX_WATERMARK))

    @property
    def watermark(self) -> int:
        """How far time has come on all edges."""
        return min((self.watermark_of(edge) for edge in self.edges), default=MIN_WATERMARK)

    @property
    def restored_watermark(self) -> int:
        """How far it had come at the restored checkpoint."""
        return min((edge.watermark for edge in self.edges), default=MIN_WATERMARK)

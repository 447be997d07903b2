"""Frames: what the tasks of an epoch send each other through Spark's shuffle.

An exchange carries payloads of bytes, each with the slot that receives it. A payload begins with
the level that reads it, followed by a frame or a report. A frame is a run of elements from one task
to another, over all channels between the two, in the order in which they were sent: a pickled
header, then record batches as Arrow IPC messages without their schemas. It has about four megabytes
at most.

Each frame names its sender, the token of the sender's attempt, and a number. A receiver takes the
frames of a sender in order, and refuses a gap, a repeated number and a second token: a map task
that Spark ran again may have sent something other than what was read before. Reports say how many
frames a task sent to each receiver and consumed from each sender. The driver compares the two.

The rows of a DataFrame reach the readers of their source as frames too (:class:`DataFrameInput`).
Every Spark partition of a range sends its batches to the subtasks in turn, whatever their event
time. At the end it sends all subtasks the greatest event time it has seen, and reports like a task.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import CheckpointError
from stateformat.tables import rebatch

from ..dataflow import events as ev
from ..dataflow.chained_operator import OperatorError
from .arrow import to_arrow
from .source import Range

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Sent = tuple[int, bytes]
"""The slot that receives a payload, and its bytes."""
REPORT: Final = 2**30
"""The level of reports, which only the driver reads."""
FRAME_BYTES_MAX: Final = 4 << 20
_PREFIX: Final = struct.Struct("<ii")
"""The level and the size of the header."""
_ALIGNMENT: Final = 64
_FRAME_ROWS_MAX: Final = 1 << 20
_FLUSH_BYTES: Final = 16 << 20


Address = ev.TaskId | str
"""A sender: a task, or the name of one partition of a DataFrame."""
Entries = tuple[tuple[ev.Channel, ev.Element | int], ...]
"""Channels, each with an element, or with how many batches of it follow in the frame."""


class EpochBroken(CheckpointError):
    """Senders and receivers of an epoch disagree, so the epoch must run again."""


class Header(NamedTuple):
    """What precedes the batches of a frame."""

    sender: Address
    receiver: ev.TaskId
    token: bytes
    number: int
    entries: Entries


def pack(level: int, header: Header, batches: Iterable[pa.RecordBatch]) -> bytes:
    """Return a frame for a level. Batches are aligned, so that they can be used without a copy."""
    head = pickle.dumps(header, protocol=5)
    parts = [_PREFIX.pack(level, len(head)), head, _padding(_PREFIX.size + len(head))]
    for batch in batches:
        data = batch.serialize()
        parts += [data.size.to_bytes(_ALIGNMENT, "little"), data, _padding(data.size)]
    return b"".join(parts)


def keyed(sent: Iterable[Sent]) -> Iterator[bytes]:
    """Yield what Spark's exchange reads: before each payload its slot, as a Java long."""
    for target, payload in sent:
        yield target.to_bytes(8, "big")
        yield payload


def _padding(size: int) -> bytes:
    return bytes(-size % _ALIGNMENT)


def unpack(payload: bytes) -> tuple[Header, pa.Buffer]:
    """Return the header of a frame and the bytes that follow it."""
    _, size = _PREFIX.unpack_from(payload)
    end = _PREFIX.size + size
    header: Header = pickle.loads(memoryview(payload)[_PREFIX.size : end])  # noqa: S301 - sent by our own tasks
    return header, pa.py_buffer(payload).slice(end + -end % _ALIGNMENT)


def level_of(payload: bytes) -> int:
    """Return the level at which a frame is read, or :data:`REPORT`."""
    return int(_PREFIX.unpack_from(payload)[0])


def pack_report(report: object) -> bytes:
    """Return a report as a payload, which every level passes on."""
    return _PREFIX.pack(REPORT, 0) + pickle.dumps(report, protocol=5)


def unpack_report(payload: bytes) -> Any:
    """Return the report that :func:`pack_report` packed."""
    return pickle.loads(memoryview(payload)[_PREFIX.size :])  # noqa: S301 - from our own workers


def elements(
    header: Header, rest: pa.Buffer, schemas: Mapping[str, pa.Schema]
) -> Iterator[tuple[ev.Channel, ev.Element]]:
    """Yield the elements of a frame in order. ``schemas``: the schemas of edges, by id."""
    position = 0
    for channel, element in header.entries:
        if not isinstance(element, int):
            yield channel, element
            continue
        for _ in range(element):
            size = int.from_bytes(rest.slice(position, _ALIGNMENT), "little")
            message = rest.slice(position + _ALIGNMENT, size)
            position += _ALIGNMENT + size + -size % _ALIGNMENT
            yield channel, ev.Records(pa.ipc.read_record_batch(message, schemas[channel.edge]))


_Waiting = list[tuple[ev.Channel, ev.Element | list[pa.RecordBatch]]]


class Outbox:
    """Collects what one sender sends in one attempt of an epoch."""

    def __init__(self, sender: Address, token: bytes) -> None:
        self.sent: dict[ev.TaskId, int] = defaultdict(int)
        self.sent_bytes = 0
        self._sender = sender
        self._token = token
        # The head of a loop reads at its own level and at the last. One sender may send to both.
        self._waiting: dict[tuple[ev.TaskId, int], _Waiting] = defaultdict(list)
        self._numbers: dict[tuple[ev.TaskId, int], int] = defaultdict(int)
        self._size = 0

    def put(self, receiver: ev.TaskId, level: int, channel: ev.Channel, element: ev.Element) -> None:
        """Send an element on a channel, for the receiver to read at ``level``."""
        waiting = self._waiting[receiver, level]
        if not isinstance(element, ev.Records):
            waiting.append((channel, element))
            return
        last = waiting[-1] if waiting else None
        if last is not None and last[0] == channel and isinstance(last[1], list):
            last[1].append(element.batch)
        else:
            waiting.append((channel, [element.batch]))
        self._size += element.batch.nbytes

    @property
    def is_large(self) -> bool:
        return self._size >= _FLUSH_BYTES

    def flush(self) -> Iterator[Sent]:
        waiting, self._waiting, self._size = self._waiting, defaultdict(list), 0
        for (receiver, level), elements_of_receiver in waiting.items():
            for entries, batches in _frames(elements_of_receiver):
                number = self._numbers[receiver, level]
                self._numbers[receiver, level] += 1
                self.sent[receiver] += 1
                payload = pack(level, Header(self._sender, receiver, self._token, number, entries), batches)
                self.sent_bytes += len(payload)
                yield receiver.subtask, payload


def _frames(waiting: _Waiting) -> Iterator[tuple[Entries, list[pa.RecordBatch]]]:
    entries: list[tuple[ev.Channel, ev.Element | int]] = []
    batches: list[pa.RecordBatch] = []
    size = 0
    for channel, element in waiting:
        if not isinstance(element, list):
            entries.append((channel, element))
            continue
        for batch in _pieces(element):
            if size and size + batch.nbytes > FRAME_BYTES_MAX:
                yield tuple(entries), batches
                entries, batches, size = [], [], 0
            entries.append((channel, 1))
            batches.append(batch)
            size += batch.nbytes
    if entries:
        yield tuple(entries), batches


def _pieces(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one channel's batches in pieces, neither tiny nor larger than a frame."""
    if not batches[0].num_columns:
        yield from batches
        return
    tables = (pa.Table.from_batches([batch]) for batch in batches)
    yield from rebatch(tables, batches[0].schema, _FRAME_ROWS_MAX, FRAME_BYTES_MAX)


class Inbox:
    """Puts the frames of one receiver into the order in which each sender sent them."""

    def __init__(self, receiver: ev.TaskId) -> None:
        self.consumed: dict[Address, tuple[bytes, int]] = {}
        """By sender, the token of its attempt and how many frames were taken."""
        self._receiver = receiver
        self._early: dict[Address, dict[int, tuple[Header, pa.Buffer]]] = defaultdict(dict)

    def take(self, header: Header, rest: pa.Buffer) -> Iterator[tuple[Header, pa.Buffer]]:
        """Take a frame, and yield those that can be read now. May raise :class:`EpochBroken`."""
        token, count = self.consumed.setdefault(header.sender, (header.token, 0))
        if token != header.token:
            raise EpochBroken(f"{self._receiver} got frames of two attempts of {header.sender}")
        early = self._early[header.sender]
        if header.number < count or header.number in early:
            raise EpochBroken(f"{self._receiver} got frame {header.number} of {header.sender} twice")
        early[header.number] = (header, rest)
        while count in early:
            yield early.pop(count)
            count += 1
            self.consumed[header.sender] = (token, count)

    def check(self) -> None:
        """Raise :class:`EpochBroken` if a frame is missing before others. Call it at the end."""
        for sender, early in self._early.items():
            if early:
                raise EpochBroken(f"{self._receiver} misses a frame of {sender} before number {min(early)}")


def compare(
    reports: Mapping[Address, tuple[bytes, Mapping[ev.TaskId, int]]],
    consumed: Mapping[ev.TaskId, Mapping[Address, tuple[bytes, int]]],
) -> None:
    """Raise :class:`EpochBroken` unless every frame of the reported attempts was consumed.

    ``reports``: by sender, its token and how many frames it sent to each receiver. ``consumed``: by
    receiver and sender, a token and how many frames were taken.
    """
    for sender, (token, sent) in reports.items():
        for receiver, count in sent.items():
            found = consumed.get(receiver, {}).get(sender)
            if found != (token, count):
                frames = "nothing" if found is None else f"{found[1]} frames"
                attempt = "" if found is None or found[0] == token else " of another attempt"
                raise EpochBroken(f"{sender} sent {count} frames to {receiver}, which consumed {frames}{attempt}")
    for receiver, senders in consumed.items():
        for sender in senders:
            if sender not in reports or receiver not in reports[sender][1]:
                raise EpochBroken(f"{receiver} consumed frames of {sender}, which reports none")


PARTS: Final = pa.schema([("part", pa.binary())])


class InputReport(NamedTuple):
    """The last thing that a partition sends: its token, and how many frames each task gets."""

    name: str
    token: bytes
    sent: dict[ev.TaskId, int]


def input_channel(uid: str, subtask: int) -> ev.Channel:
    """Return the channel that brings Spark's rows to a reader. It belongs to no edge of the job."""
    return ev.Channel(f"rows of {uid}", 0, subtask)


@dataclass(frozen=True)
class InputEncoder:
    """Turns the rows of one partition into frames."""

    uid: str
    parallelism: int
    event_time: str | None
    schema: pa.Schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Turn batches, with columns ordered as ``schema``, into rows of ``keyed``."""
        for sent in self._sent(batches):
            yield pa.record_batch([pa.array([*keyed(sent)], pa.binary())], schema=PARTS)

    def _sent(self, batches: Iterator[pa.RecordBatch]) -> Iterator[list[Sent]]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        partition = context.partitionId()
        name, token = f"{self.uid}, partition {partition}", os.urandom(16)
        outbox = Outbox(name, token)
        newest_us: int | None = None
        filled = (batch.rename_columns(self.schema.names) for batch in batches if batch.num_rows)
        for turn, batch in enumerate(filled, start=partition):
            records = to_arrow(batch, self.schema)
            self._put(outbox, turn % self.parallelism, ev.Records(records))
            if self.event_time is not None:
                found = pc.max(records.column(self.event_time)).cast(pa.int64()).as_py()
                if found is not None:
                    newest_us = found if newest_us is None else max(found, newest_us)
            if outbox.is_large:
                yield [*outbox.flush()]
        if newest_us is not None:
            for subtask in range(self.parallelism):
                self._put(outbox, subtask, ev.Watermark(newest_us))
        sent = [*outbox.flush()]
        report = InputReport(name, token, dict(outbox.sent))
        yield [*sent, (partition % self.parallelism, pack_report(report))]

    def _put(self, outbox: Outbox, subtask: int, element: ev.Element) -> None:
        outbox.put(ev.TaskId(self.uid, subtask), 0, input_channel(self.uid, subtask), element)


@dataclass(frozen=True)
class DataFrameInput:
    """The range that one source reads in one epoch."""

    range: Range
    encoder: InputEncoder

    def frame(self, spark: SparkSession) -> DataFrame:
        """Return the frames of its rows (:data:`PARTS`), built again for each try.

        Raises ``OperatorError`` for errors of the user's code; errors of Spark stay as they are.
        """
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException

        try:
            rows = self.range.frame(spark)
        except (CheckpointError, PySparkException, Py4JError):
            raise
        except Exception as error:
            raise OperatorError.of(error, operator=self.encoder.uid, subtask=None, hook="the range") from error
        # PySpark looks up columns by unquoted names, in which a dot would mean a field.
        numbered = rows.toDF(*(f"c{number}" for number in range(len(rows.columns))))
        return numbered.mapInArrow(self.encoder, "part binary")

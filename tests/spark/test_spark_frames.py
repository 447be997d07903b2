"""Frames between tasks: none lost, none twice, none of two attempts, in order."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.dataflow import events as ev
from stateformat.backends.spark.protocol import frames as mail

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])
SCHEMAS = {"a": SCHEMA, "b": SCHEMA}
SENDER, RECEIVER, ANOTHER = ev.TaskId("up", 0), ev.TaskId("down", 3), ev.TaskId("down", 1)
ONE, TWO = b"one attempt", b"another one"
A, B = ev.Channel("a", 0, 3), ev.Channel("b", 0, 3)


def records(*numbers: int, width: int = 3) -> ev.Records:
    texts = ["x" * width] * len(numbers)
    return ev.Records(pa.record_batch([pa.array(numbers, pa.int64()), pa.array(texts)], schema=SCHEMA))


def payloads(sent: Iterator[mail.Sent]) -> list[bytes]:
    return [payload for _, payload in sent]


def heard(frames: Sequence[bytes]) -> list[tuple[ev.Channel, Any]]:
    """What a receiver hears: of records their numbers, joined; else the element."""
    found: list[tuple[ev.Channel, Any]] = []
    inbox = mail.Inbox(RECEIVER)
    for frame in frames:
        for header, rest in inbox.take(*mail.unpack(frame)):
            for where, element in mail.elements(header, rest, SCHEMAS):
                if not isinstance(element, ev.Records):
                    found.append((where, element))
                elif found and found[-1][0] == where and isinstance(found[-1][1], list):
                    found[-1][1].extend(element.batch["n"].to_pylist())
                else:
                    found.append((where, element.batch["n"].to_pylist()))
    inbox.check()
    return found


def sent(*elements: tuple[ev.Channel, ev.Element], flush_every: int = 1000) -> tuple[mail.Outbox, list[bytes]]:
    outbox, frames = mail.Outbox(SENDER, ONE), []
    for number, (where, element) in enumerate(elements, start=1):
        outbox.put(RECEIVER, 2, where, element)
        if number % flush_every == 0:
            frames += payloads(outbox.flush())
    return outbox, frames + payloads(outbox.flush())


def test_elements_of_several_channels_are_heard_in_the_order_in_which_they_were_sent() -> None:
    barrier, end = ev.Barrier(4), ev.EndOfData(drain=True)
    others = [(B, barrier), (A, barrier), (B, end), (B, ev.EndOfPartition())]
    _, frames = sent((A, records(1, 2)), (B, records(10)), (A, ev.Watermark(5)), (A, records(3)), *others)
    assert len(frames) == 1
    assert heard(frames) == [(A, [1, 2]), (B, [10]), (A, ev.Watermark(5)), (A, [3]), *others]


def test_small_batches_that_follow_one_another_on_a_channel_travel_as_one() -> None:
    _, frames = sent(*((A, records(n)) for n in range(100)), (B, records(7)), (A, records(100)))
    header, rest = mail.unpack(frames[0])
    assert header.entries == ((A, 1), (B, 1), (A, 1))
    first = next(iter(mail.elements(header, rest, SCHEMAS)))[1]
    assert isinstance(first, ev.Records)
    assert first.batch["n"].to_pylist() == list(range(100))
    assert heard(frames) == [(A, list(range(100))), (B, [7]), (A, [100])]


def test_nothing_is_put_together_over_what_stands_between() -> None:
    _, frames = sent((A, records(1)), (A, ev.Watermark(1)), (A, records(2)), (A, ev.Barrier(1)))
    assert heard(frames) == [(A, [1]), (A, ev.Watermark(1)), (A, [2]), (A, ev.Barrier(1))]


def test_a_large_batch_is_cut_into_frames_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "FRAME_BYTES_MAX", 10_000)
    outbox, frames = sent((A, records(*range(1000), width=100)), (A, ev.Barrier(1)))
    assert len(frames) >= 11
    assert max(len(frame) for frame in frames) < 12_000
    assert heard(frames) == [(A, list(range(1000))), (A, ev.Barrier(1))]
    assert (outbox.sent, outbox.sent_bytes) == ({RECEIVER: len(frames)}, sum(len(frame) for frame in frames))


def test_a_row_that_is_larger_than_a_frame_travels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "FRAME_BYTES_MAX", 1000)
    _, frames = sent((A, records(1, 2, 3, width=5000)))
    assert len(frames) == 3
    assert heard(frames) == [(A, [1, 2, 3])]


def test_an_outbox_is_large_when_much_waits_and_not_when_it_was_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "_FLUSH_BYTES", 10_000)
    outbox = mail.Outbox(SENDER, ONE)
    outbox.put(RECEIVER, 1, A, records(1, width=4000))
    outbox.put(RECEIVER, 1, A, ev.Watermark(1))
    large = [outbox.is_large]
    outbox.put(ANOTHER, 1, A, records(1, width=7000))
    large.append(outbox.is_large)
    list(outbox.flush())
    assert [*large, outbox.is_large] == [False, True, False]
    assert list(outbox.flush()) == []


def test_each_receiver_has_frames_of_its_own_with_its_slot_and_level() -> None:
    outbox = mail.Outbox(SENDER, ONE)
    outbox.put(RECEIVER, 2, A, records(1))
    outbox.put(ANOTHER, 5, B, ev.Barrier(1))
    found = {(slot, mail.level_of(payload)) for slot, payload in outbox.flush()}
    assert found == {(3, 2), (1, 5)}
    assert outbox.sent == {RECEIVER: 1, ANOTHER: 1}


def test_a_slice_is_sent_without_what_it_was_cut_from() -> None:
    outbox, frames = sent((A, ev.Records(records(*range(10_000)).batch.slice(5000, 2))))
    assert heard(frames) == [(A, [5000, 5001])]
    assert outbox.sent_bytes < 5000


@pytest.mark.parametrize("seed", range(5))
def test_frames_are_heard_in_order_however_they_come(seed: int) -> None:
    _, frames = sent(*((A, ev.Watermark(n) if n % 3 else records(n)) for n in range(30)), flush_every=2)
    assert len(frames) == 15
    random.Random(seed).shuffle(frames)
    assert heard(frames) == [(A, ev.Watermark(n) if n % 3 else [n]) for n in range(30)]


def take(inbox: mail.Inbox, number: int, *, token: bytes = ONE, sender: mail.Address = SENDER) -> list[int]:
    """Take one frame in; the numbers of those that can be read now."""
    header = mail.Header(sender, RECEIVER, token, number, ((A, ev.Watermark(number)),))
    frame = mail.unpack(mail.pack(1, header, ()))
    return [header.number for header, _ in inbox.take(*frame)]


def test_a_frame_that_waits_for_one_before_it_is_not_read_and_its_absence_is_told() -> None:
    inbox = mail.Inbox(RECEIVER)
    assert [take(inbox, 2), take(inbox, 0)] == [[], [0]]
    with pytest.raises(mail.EpochBroken, match=r"down\[3\] misses a frame of up\[0\] before number 2"):
        inbox.check()
    assert take(inbox, 1) == [1, 2]
    inbox.check()
    assert inbox.consumed == {SENDER: (ONE, 3)}


@pytest.mark.parametrize(
    ("before", "number", "token", "words"),
    [
        ((0, 2), 0, ONE, r"got frame 0 of up\[0\] twice"),
        ((0, 2), 2, ONE, r"got frame 2 of up\[0\] twice"),
        ((0,), 1, TWO, r"two attempts of up\[0\]"),
        ((1,), 0, TWO, r"two attempts of up\[0\]"),
    ],
    ids=["read", "waiting", "another attempt", "another attempt before what waits"],
)
def test_a_frame_of_another_attempt_is_refused(before: Sequence[int], number: int, token: bytes, words: str) -> None:
    inbox = mail.Inbox(RECEIVER)
    for each in before:
        take(inbox, each)
    with pytest.raises(mail.EpochBroken, match=words):
        take(inbox, number, token=token)


def test_senders_are_counted_apart() -> None:
    inbox = mail.Inbox(RECEIVER)
    senders: dict[mail.Address, bytes] = {SENDER: ONE, ANOTHER: TWO, "rows, partition 0": ONE}
    for sender, number in itertools.product(senders, (0, 1)):
        assert take(inbox, number, token=senders[sender], sender=sender) == [number]
    assert inbox.consumed == {sender: (token, 2) for sender, token in senders.items()}


def test_an_epoch_is_whole_when_everything_that_was_sent_was_consumed() -> None:
    mail.compare(
        {SENDER: (ONE, {RECEIVER: 2, ANOTHER: 1}), "rows": (TWO, {RECEIVER: 1}), RECEIVER: (TWO, {})},
        {RECEIVER: {SENDER: (ONE, 2), "rows": (TWO, 1)}, ANOTHER: {SENDER: (ONE, 1)}, SENDER: {}},
    )


@pytest.mark.parametrize(
    ("consumed", "words"),
    [
        ({}, "which consumed nothing"),
        ({SENDER: (ONE, 1)}, "which consumed 1 frames$"),
        ({SENDER: (ONE, 3)}, "which consumed 3 frames$"),
        ({SENDER: (TWO, 2)}, "which consumed 2 frames of another attempt"),
        ({SENDER: (ONE, 2), ANOTHER: (ONE, 1)}, r"down\[3\] consumed frames of down\[1\], which reports none"),
    ],
)
def test_an_epoch_is_broken_where_what_was_consumed_is_not_what_was_sent(consumed: Any, words: str) -> None:
    with pytest.raises(mail.EpochBroken, match=words):
        mail.compare({SENDER: (ONE, {RECEIVER: 2}), RECEIVER: (TWO, {}), ANOTHER: (TWO, {})}, {RECEIVER: consumed})


def test_what_an_exchange_carries_stands_behind_its_slot_as_a_long_of_java() -> None:
    sent = [(3, b"frame"), (2**31 - 1, b"")]
    assert [*mail.keyed(sent)] == [struct.pack(">q", 3), b"frame", struct.pack(">q", 2**31 - 1), b""]


def test_a_report_is_read_at_no_level() -> None:
    report = mail.pack_report({"what": "all is well"})
    assert mail.level_of(report) == mail.REPORT
    assert mail.unpack_report(report) == {"what": "all is well"}


@pytest.mark.parametrize("name", ["a", "a name of another length"])
def test_batches_lie_aligned_in_what_came(name: str) -> None:
    outbox = mail.Outbox(ev.TaskId(name, 0), ONE)
    outbox.put(RECEIVER, 2, A, records(*range(5)))
    (payload,) = payloads(outbox.flush())
    ((_, element),) = mail.elements(*mail.unpack(payload), SCHEMAS)
    assert isinstance(element, ev.Records)
    start = pa.py_buffer(payload).address
    for column in element.batch.columns:
        for buffer in filter(None, column.buffers()):
            assert buffer.address % 8 == 0
            assert start <= buffer.address < start + len(payload)

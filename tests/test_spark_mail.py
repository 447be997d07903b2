"""Frames between the tasks of an epoch: nothing lost, nothing twice, nothing of two attempts, each channel in its order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.dataflow import events as ev
from stateformat.backends.spark.protocol import EpochBroken, compare, frames as mail, pack
from stateformat.backends.spark.protocol.frames import Header, Inbox, Outbox, elements, row, unpack

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])
SCHEMAS = {"a": SCHEMA, "b": SCHEMA}
SENDER, RECEIVER, ANOTHER = ev.TaskId("up", 0), ev.TaskId("down", 3), ev.TaskId("down", 1)
ONE, TWO = b"one attempt", b"another one"


def channel(edge: str, sender: int = 0, receiver: int = 3) -> ev.Channel:
    return ev.Channel(edge, sender, receiver)


def batch(*numbers: int, width: int = 3) -> pa.RecordBatch:
    return pa.record_batch([pa.array(numbers, pa.int64()), pa.array(["x" * width] * len(numbers))], schema=SCHEMA)


def payloads(rows: Iterator[pa.RecordBatch]) -> list[pa.Buffer]:
    return [payload.as_buffer() for some in rows for payload in some.column("payload")]


def heard(frames: Sequence[pa.Buffer]) -> list[tuple[ev.Channel, Any]]:
    """What a receiver hears: of records their numbers, of all else what it is; batches of one channel that lie together as one."""
    found: list[tuple[ev.Channel, Any]] = []
    inbox = Inbox(RECEIVER)
    for frame in frames:
        for header, rest in inbox.take(*unpack(frame)):
            for where, element in elements(header, rest, SCHEMAS):
                if not isinstance(element, ev.Records):
                    found.append((where, element))
                elif found and found[-1][0] == where and isinstance(found[-1][1], list):
                    found[-1][1].extend(element.batch["n"].to_pylist())
                else:
                    found.append((where, element.batch["n"].to_pylist()))
    inbox.check()
    return found


def sent(*elements: tuple[ev.Channel, ev.Element], flush_every: int = 1000) -> tuple[Outbox, list[pa.Buffer]]:
    outbox, frames = Outbox(SENDER, ONE), []
    for number, (where, element) in enumerate(elements, start=1):
        outbox.put(RECEIVER, 2, where, element)
        if number % flush_every == 0:
            frames += payloads(outbox.flush())
    return outbox, frames + payloads(outbox.flush())


# What is sent is heard -------------------------------------------------------------------------------------------------------


def test_elements_of_several_channels_are_heard_in_the_order_in_which_they_were_sent() -> None:
    a, b = channel("a"), channel("b", 1)
    barrier = ev.Barrier(4)
    _, frames = sent(
        (a, ev.Records(batch(1, 2))),
        (b, ev.Records(batch(10))),
        (a, ev.Watermark(5)),
        (a, ev.Records(batch(3))),
        (b, barrier),
        (a, barrier),
        (b, ev.EndOfData(drain=True)),
        (b, ev.EndOfPartition()),
    )
    assert len(frames) == 1
    assert heard(frames) == [
        (a, [1, 2]),
        (b, [10]),
        (a, ev.Watermark(5)),
        (a, [3]),
        (b, barrier),
        (a, barrier),
        (b, ev.EndOfData(drain=True)),
        (b, ev.EndOfPartition()),
    ]


def test_small_batches_that_follow_one_another_on_a_channel_travel_as_one() -> None:
    a, b = channel("a"), channel("b")
    _, frames = sent(
        *((a, ev.Records(batch(n))) for n in range(100)), (b, ev.Records(batch(7))), (a, ev.Records(batch(100)))
    )
    header, rest = unpack(frames[0])
    assert header.entries == ((a, 1), (b, 1), (a, 1))
    first = next(iter(elements(header, rest, SCHEMAS)))[1]
    assert isinstance(first, ev.Records)
    assert first.batch["n"].to_pylist() == list(range(100))
    assert heard(frames) == [(a, list(range(100))), (b, [7]), (a, [100])]


def test_nothing_is_put_together_over_what_stands_between() -> None:
    a = channel("a")
    _, frames = sent((a, ev.Records(batch(1))), (a, ev.Watermark(1)), (a, ev.Records(batch(2))), (a, ev.Barrier(1)))
    assert heard(frames) == [(a, [1]), (a, ev.Watermark(1)), (a, [2]), (a, ev.Barrier(1))]


def test_a_large_batch_is_cut_into_frames_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "FRAME_BYTES_MAX", 10_000)
    a = channel("a")
    outbox, frames = sent((a, ev.Records(batch(*range(1000), width=100))), (a, ev.Barrier(1)))
    assert len(frames) >= 11
    assert max(len(frame) for frame in frames) < 12_000
    assert heard(frames) == [(a, list(range(1000))), (a, ev.Barrier(1))]
    assert outbox.sent == {RECEIVER: len(frames)}
    assert outbox.sent_bytes == sum(len(frame) for frame in frames)


def test_a_row_that_is_larger_than_a_frame_travels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "FRAME_BYTES_MAX", 1000)
    _, frames = sent((channel("a"), ev.Records(batch(1, 2, 3, width=5000))))
    assert len(frames) == 3
    assert heard(frames) == [(channel("a"), [1, 2, 3])]


def test_an_outbox_is_large_when_much_waits_and_not_when_it_was_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "_FLUSH_BYTES", 10_000)
    outbox = Outbox(SENDER, ONE)
    outbox.put(RECEIVER, 1, channel("a"), ev.Records(batch(1, width=4000)))
    outbox.put(RECEIVER, 1, channel("a"), ev.Watermark(1))
    told = [outbox.is_large]
    outbox.put(ANOTHER, 1, channel("a", receiver=1), ev.Records(batch(1, width=7000)))
    told.append(outbox.is_large)
    list(outbox.flush())
    assert [*told, outbox.is_large] == [False, True, False]
    assert list(outbox.flush()) == []


def test_each_receiver_has_rows_of_its_own_with_its_slot_and_level() -> None:
    outbox = Outbox(SENDER, ONE)
    outbox.put(RECEIVER, 2, channel("a"), ev.Records(batch(1)))
    outbox.put(ANOTHER, 5, channel("b", receiver=1), ev.Barrier(1))
    found = {(some["target"][0].as_py(), some["level"][0].as_py()) for some in outbox.flush()}
    assert found == {(3, 2), (1, 5)}
    assert outbox.sent == {RECEIVER: 1, ANOTHER: 1}


def test_a_slice_is_sent_without_what_it_was_cut_from() -> None:
    large = batch(*range(10_000))
    outbox, frames = sent((channel("a"), ev.Records(large.slice(5000, 2))))
    assert heard(frames) == [(channel("a"), [5000, 5001])]
    assert outbox.sent_bytes < 5000


# Frames in any order ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_frames_are_heard_in_order_however_they_come(seed: int) -> None:
    a = channel("a")
    wanted = [(a, ev.Watermark(n)) if n % 3 else (a, ev.Records(batch(n))) for n in range(30)]
    _, frames = sent(*wanted, flush_every=2)
    assert len(frames) == 15
    random.Random(seed).shuffle(frames)
    assert heard(frames) == [(a, ev.Watermark(n)) if n % 3 else (a, [n]) for n in range(30)]


def frame(number: int, *, token: bytes = ONE, sender: mail.Address = SENDER) -> tuple[Header, pa.Buffer]:
    return unpack(
        pa.py_buffer(pack(Header(sender, RECEIVER, token, number, ((channel("a"), ev.Watermark(number)),)), ()))
    )


def test_a_frame_that_waits_for_one_before_it_is_not_read_and_its_absence_is_told() -> None:
    inbox = Inbox(RECEIVER)
    assert list(inbox.take(*frame(2))) == []
    assert [header.number for header, _ in inbox.take(*frame(0))] == [0]
    with pytest.raises(EpochBroken, match=r"down\[3\] misses a frame of up\[0\] before number 2"):
        inbox.check()
    assert [header.number for header, _ in inbox.take(*frame(1))] == [1, 2]
    inbox.check()
    assert inbox.consumed == {SENDER: (ONE, 3)}


@pytest.mark.parametrize("again", [0, 2])
def test_a_frame_that_comes_twice_is_refused_whether_it_was_read_or_waits(again: int) -> None:
    inbox = Inbox(RECEIVER)
    for number in (0, 2):
        list(inbox.take(*frame(number)))
    with pytest.raises(EpochBroken, match=rf"got frame {again} of up\[0\] twice"):
        list(inbox.take(*frame(again)))


@pytest.mark.parametrize("first", [0, 1])
def test_frames_of_two_attempts_are_refused_though_the_first_one_waits(first: int) -> None:
    inbox = Inbox(RECEIVER)
    list(inbox.take(*frame(first)))
    with pytest.raises(EpochBroken, match=r"two attempts of up\[0\]"):
        list(inbox.take(*frame(1 - first, token=TWO)))


def test_senders_are_counted_apart() -> None:
    inbox = Inbox(RECEIVER)
    senders: tuple[mail.Address, ...] = (SENDER, ANOTHER, "rows, partition 0")
    for sender, number in itertools.product(senders, (0, 1)):
        token = TWO if sender == ANOTHER else ONE
        assert [header.sender for header, _ in inbox.take(*frame(number, token=token, sender=sender))] == [sender]
    assert inbox.consumed == {SENDER: (ONE, 2), ANOTHER: (TWO, 2), "rows, partition 0": (ONE, 2)}


# What the driver compares ----------------------------------------------------------------------------------------------------


def test_an_epoch_is_whole_when_everything_that_was_sent_was_consumed() -> None:
    compare(
        {SENDER: (ONE, {RECEIVER: 2, ANOTHER: 1}), "rows": (TWO, {RECEIVER: 1}), RECEIVER: (TWO, {})},
        {RECEIVER: {SENDER: (ONE, 2), "rows": (TWO, 1)}, ANOTHER: {SENDER: (ONE, 1)}, SENDER: {}},
    )


@pytest.mark.parametrize(
    ("consumed", "told"),
    [
        ({}, "which consumed nothing"),
        ({SENDER: (ONE, 1)}, "which consumed 1 frames$"),
        ({SENDER: (ONE, 3)}, "which consumed 3 frames$"),
        ({SENDER: (TWO, 2)}, "which consumed 2 frames of another attempt"),
        ({SENDER: (ONE, 2), ANOTHER: (ONE, 1)}, r"down\[3\] consumed frames of down\[1\], which reports none"),
    ],
)
def test_an_epoch_is_broken_where_what_was_consumed_is_not_what_was_sent(consumed: Any, told: str) -> None:
    with pytest.raises(EpochBroken, match=told):
        compare({SENDER: (ONE, {RECEIVER: 2}), RECEIVER: (TWO, {}), ANOTHER: (TWO, {})}, {RECEIVER: consumed})


def test_rows_of_an_exchange_have_the_columns_that_spark_is_told() -> None:
    assert row(1, 2, b"x").schema == mail.ROWS
    spark_type = {"int32": "int", "binary": "binary"}
    assert ", ".join(f"{item.name} {spark_type[str(item.type)]}" for item in mail.ROWS) == mail.DDL

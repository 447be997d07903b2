"""Strings as Flink's serializer writes them, read many at once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as some

from stateformat.backends.foreign.byte_strings import ByteStrings, from_arrow
from stateformat.backends.foreign.flink.lanes import Lanes
from stateformat.backends.foreign.flink.scalars import CHARACTER, TEXT
from stateformat.errors import DamagedCheckpoint, UnsupportedFormat


def number(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def written(text: str | None) -> bytes:
    if text is None:
        return b"\0"
    pairs = text.encode("utf-16-be", "surrogatepass")
    units = [int.from_bytes(pairs[at : at + 2], "big") for at in range(0, len(pairs), 2)]
    return number(len(units) + 1) + b"".join(map(number, units))


def strings(values: list[bytes]) -> ByteStrings:
    return from_arrow(pa.array(values, pa.binary()))


@settings(max_examples=100, deadline=None)
@given(some.lists(some.none() | some.text(some.characters(codec="utf-8"), max_size=300), max_size=20))
def test_strings_are_read_as_they_were_written(texts: list[str | None]) -> None:
    assert TEXT.read_all(strings([written(text) for text in texts])).to_pylist() == texts


@settings(max_examples=100, deadline=None)
@given(some.lists(some.text(some.characters(codec="utf-8"), max_size=9), min_size=1, max_size=9))
def test_skipping_ends_where_reading_ends(texts: list[str]) -> None:
    packed = strings([written(text) * 2 for text in texts])
    read, skipped = Lanes.of(packed), Lanes.of(packed)
    TEXT.read(read)
    TEXT.skip(skipped)
    assert np.array_equal(read.position, skipped.position)
    assert TEXT.read(skipped).to_pylist() == texts
    skipped.finish()


@pytest.mark.parametrize("text", ["a\ud800", "\udc00b", "\udc00\ud800", "\ud800\ud800\udc00"])
def test_half_a_surrogate_pair_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedFormat, match=r"byte \d+ has half a surrogate pair \(U\+D"):
        TEXT.read_all(strings([written("fine"), written(text)]))


@pytest.mark.parametrize("text", ["", "plain", "naïve", "日本語", "a😀b", "x" * 300])
def test_every_truncation_of_a_string_is_an_error(text: str) -> None:
    whole = written(text)
    for size in range(len(whole)):
        for act in (TEXT.read_all, lambda cut: TEXT.skip(Lanes.of(cut))):
            with pytest.raises(DamagedCheckpoint):
                act(strings([whole[:size]]))


@pytest.mark.parametrize(
    "octets", [b"\xff\xff\xff\xff\xff\x01", b"\xff\xff\xff\xff\x7f", b"\x02\xff\xff\x04", b"\x03aab"]
)
def test_a_string_that_cannot_be_is_an_error(octets: bytes) -> None:
    with pytest.raises(DamagedCheckpoint):
        TEXT.read_all(strings([octets]))


def test_characters_are_text_of_one_character() -> None:
    packed = strings([ord(text).to_bytes(2, "big") for text in "aéあ\0"])
    assert CHARACTER.read_all(packed).to_pylist() == ["a", "é", "あ", "\0"]

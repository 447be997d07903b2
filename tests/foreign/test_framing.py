"""Frames of Spark and Flink: what is encoded is decoded. The oracle of checksums is a plain loop,
of streams the bytes as the engines write them.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings, strategies as st

from stateformat.backends.foreign import framing, limits
from stateformat.errors import DamagedCheckpoint, UnsupportedFormat


def slow_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def contents(size: int, spread: int = 4) -> bytes:
    return np.random.default_rng(size).integers(0, spread, size, np.uint8).tobytes()


@pytest.mark.parametrize("codec", ["lz4", "snappy", "zstd", "org.apache.spark.io.LZ4CompressionCodec"])
@pytest.mark.parametrize("size", [0, 1, 7, 32767, 32768, 32769, 200_000])
@pytest.mark.parametrize("spread", [4, 256])
def test_what_is_encoded_for_spark_is_decoded(codec: str, size: int, spread: int) -> None:
    data = contents(size, spread)
    assert framing.spark_decode(codec, framing.spark_encode(codec, data), "x").tobytes() == data


def test_an_lz4_file_of_spark_is_read() -> None:
    # An empty delta of Spark 4.3: the end mark of entries, stored, and the end mark of frames.
    body = b"\xff\xff\xff\xff"
    check = xxhash.xxh32_intdigest(body, 0x9747B28C) & 0x0FFFFFFF
    stored = b"LZ4Block\x15" + struct.pack("<iiI", 4, 4, check) + body + b"LZ4Block\x15" + bytes(12)
    assert framing.spark_decode("lz4", stored, "1.delta").tobytes() == body
    assert framing.spark_encode("lz4", body) == stored


@pytest.mark.parametrize("name", ["lzf", "org.apache.spark.io.LZFCompressionCodec", "com.example.Own"])
def test_other_codecs_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedFormat, match=name.replace(".", r"\.")):
        framing.spark_decode(name, b"", "1.delta")


@pytest.mark.parametrize("codec", ["lz4", "snappy"])
def test_every_truncation_of_a_file_of_spark_is_noticed(codec: str) -> None:
    whole = framing.spark_encode(codec, contents(70_000))
    frames = {len(framing.spark_encode(codec, contents(70_000)[:size])) for size in (0, 32768, 65536)}
    for size in [*range(60), *range(60, len(whole), 97), len(whole) - 1]:
        # The snappy stream has no end mark: cut between frames it is a shorter stream.
        if codec == "lz4" or size not in frames:
            with pytest.raises(DamagedCheckpoint):
                framing.spark_decode(codec, whole[:size], "1.delta")


def test_every_flipped_bit_of_an_lz4_file_is_noticed_or_harmless() -> None:
    data = contents(600)
    whole = framing.spark_encode("lz4", data)
    for bit in range(8 * len(whole)):
        broken = bytearray(whole)
        broken[bit >> 3] ^= 1 << (bit & 7)
        try:
            found = framing.spark_decode("lz4", bytes(broken), "1.delta").tobytes()
        except DamagedCheckpoint:
            continue
        # The size of blocks, which only bounds a frame, may be another.
        assert found == data


def test_a_frame_that_declares_more_than_its_bytes_can_hold_takes_no_memory() -> None:
    head = b"LZ4Block\x2f" + struct.pack("<iiI", 3, 1 << 25, 7) + b"abc"
    with pytest.raises(DamagedCheckpoint, match="declares 3 bytes for 33554432"):
        framing.spark_decode("lz4", head, "1.delta")


def test_a_zstd_file_that_unpacks_to_thousands_of_times_its_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DECODED_FLOOR", 1 << 20)
    whole = framing.spark_encode("zstd", bytes(1 << 24))
    assert 2048 * len(whole) < 1 << 24
    with pytest.raises(UnsupportedFormat, match=r"1.delta: what it holds, decompressed, would take .* at most"):
        framing.spark_decode("zstd", whole, "1.delta")


@pytest.mark.parametrize("size", [0, 1, 5, 127, 128, 129, 65535, 65536, 65537, 300_000])
def test_framed_snappy_is_what_it_was(size: int) -> None:
    for spread in (3, 256):
        data = contents(size, spread)
        assert framing.snappy_frames_decode(framing.snappy_frames_encode(data), "x").tobytes() == data


def test_streams_in_one_buffer_are_decoded_together() -> None:
    pieces = [contents(size) for size in (0, 10, 70_000, 3)]
    streams = [framing.snappy_frames_encode(piece) for piece in pieces]
    ends = np.cumsum([len(stream) for stream in streams])
    whole, bounds = framing.snappy_streams_decode(b"".join(streams), [0, *ends[:-1].tolist()], ends.tolist(), "x")
    assert whole.tobytes() == b"".join(pieces)
    assert bounds.tolist() == np.cumsum([len(piece) for piece in pieces]).tolist()


def test_every_flipped_bit_of_framed_snappy_is_noticed() -> None:
    data = contents(300)
    whole = framing.snappy_frames_encode(data)
    for bit in range(8 * len(whole)):
        broken = bytearray(whole)
        broken[bit >> 3] ^= 1 << (bit & 7)
        # A kind of 0x80 and above may be skipped: then nothing is left, which is not the data.
        try:
            found = framing.snappy_frames_decode(bytes(broken), "x").tobytes()
        except DamagedCheckpoint:
            continue
        assert found in (b"", data)


@given(st.lists(st.binary(max_size=700), max_size=6))
@settings(max_examples=40, deadline=None)
def test_checksums_by_lanes_are_those_of_a_plain_loop(strings: list[bytes]) -> None:
    sizes = np.array([len(string) for string in strings], np.int64)
    found = framing.crc32c(np.frombuffer(b"".join(strings), np.uint8), sizes)
    assert found.tolist() == [slow_crc32c(string) for string in strings]


def test_the_checksum_is_crc32c() -> None:
    digits = np.frombuffer(b"123456789", np.uint8)
    assert framing.crc32c(digits, np.array([9])).tolist() == [0xE3069283]


@pytest.mark.parametrize(
    ("text", "stored"),
    [("", b""), ("a\x00b", b"a\xc0\x80b"), ("é€", "é€".encode()), ("\U0001f600", b"\xed\xa0\xbd\xed\xb8\x80")],
)
def test_modified_utf8(text: str, stored: bytes) -> None:
    assert framing.encode_modified_utf8(text) == stored
    assert framing.modified_utf8(stored, "x") == text


@pytest.mark.parametrize("stored", [b"\x00", b"\xf0\x9f\x98\x80", b"\xc3", b"\xff"])
def test_bytes_that_are_no_modified_utf8(stored: bytes) -> None:
    with pytest.raises(DamagedCheckpoint, match="no text"):
        framing.modified_utf8(stored, "x")

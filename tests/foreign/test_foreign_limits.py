"""What is read of other systems is bounded, however it is framed."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import struct
import time
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from foreign import hostile_flink as hostile, rocks_tables
from hypothesis import given, settings, strategies as some, strategies as st

from stateformat.backends.foreign import formats, framing, limits
from stateformat.backends.foreign.byte_strings import ByteStrings, from_arrow
from stateformat.backends.foreign.spark import hdfs_store, schemas
from stateformat.backends.foreign.sst import merge
from stateformat.errors import CheckpointError, DamagedCheckpoint, ErrorKind, UnsupportedFormat
from stateformat.formats import foreign_checkpoints
from stateformat.schema import segment_schema
from stateformat.storage import open_storage
from stateformat.tools.ckpt.exit_status import failure_of
from tests.fuzz.foreign_targets import FIXTURES, DictFolder, files_of, read_all

SECONDS_MAX = 60.0
"""Of processor time. A quiet machine takes one or two; what is wrong takes for ever."""


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    begin = time.process_time()
    yield
    assert time.process_time() - begin < SECONDS_MAX


def flink(files: dict[str, bytes]) -> Any:
    folder: Any = DictFolder(files)
    opened = formats.flink(folder, None)
    assert opened is not None
    return opened


def savepoint(*snapshots: bytes) -> Any:
    """A canonical savepoint of value states without rows."""
    header = hostile.header([(f"s{at}", one) for at, one in enumerate(snapshots)])
    return flink(hostile.files(header, [0]))


@pytest.mark.parametrize("levels", [2, 6, 12, 30, 60, 200])
@pytest.mark.parametrize("shape", sorted(hostile.SHAPES))
def test_types_that_name_one_another_many_times_are_kept_as_bytes_or_refused(shape: str, levels: int) -> None:
    opened = savepoint(hostile.SHAPES[shape](levels))
    report = opened.validate(None, "full", None)
    assert {problem.kind for problem in report.problems} <= {ErrorKind.LIMIT_EXCEEDED}
    if not report.problems:
        checkpoint = opened.open()
        (state,) = checkpoint.states
        # Whatever prints, compares or hashes a type must be able to.
        assert len(str(segment_schema(state))) < 1 << 20
        read_all(checkpoint)


def test_types_that_share_a_little_are_columns_as_ever() -> None:
    checkpoint = savepoint(hostile.shared_rows(3, 3), hostile.shared_records(4, 3)).open()
    rows, records = (leaves(segment_schema(state).field("value").type) for state in checkpoint.states)
    assert rows == 27 + 1  # With the kind of the row.
    assert records == 1 + 3 + 9 + 27


def leaves(kind: pa.DataType) -> int:
    """How many columns a type has that have no fields."""
    return sum(leaves(kind.field(at).type) for at in range(kind.num_fields)) if kind.num_fields else 1


def test_many_small_types_of_one_header_share_one_limit() -> None:
    checkpoint = savepoint(*[hostile.shared_rows(12, 2)] * 60).open()
    assert len(checkpoint.states) == 60
    assert sum(len(str(segment_schema(state))) for state in checkpoint.states) < 60 * (1 << 15)


def test_the_time_that_a_header_takes_grows_with_its_states_and_not_with_their_square() -> None:
    few, many = savepoint(*[hostile.LONG] * 2_000), savepoint(*[hostile.LONG] * 20_000)
    least = min(opening(few) for _ in range(3))
    assert opening(many) < 25 * least or opening(many) < 25 * least


def opening(opened: Any) -> float:
    begin = time.process_time()
    assert len(opened.open().states) >= 2_000
    return time.process_time() - begin


def spark_schema(text: str) -> bytes:
    raw = text.encode()
    pieces = [raw[at : at + 60_000] for at in range(0, len(raw), 60_000)]
    chunks = struct.pack(">i", len(pieces)) + b"".join(struct.pack(">H", len(piece)) + piece for piece in pieces)
    return struct.pack(">H", 2) + b"v2" + 2 * chunks


def test_a_schema_of_too_many_columns_is_refused_by_the_limit() -> None:
    column = json.dumps({"name": "c", "type": "long", "nullable": True, "metadata": {}})
    text = f'{{"type":"struct","fields":[{",".join([column] * 70_000)}]}}'
    with pytest.raises(
        UnsupportedFormat, match=r"state/0: its types would take 65,537 columns.*at most 65,536"
    ) as caught:
        schemas.parse_schema_file(spark_schema(text), "state/0")
    assert caught.value.kind is ErrorKind.LIMIT_EXCEEDED


def test_columns_of_one_name_are_told_apart_in_time() -> None:
    column = json.dumps({"name": "c", "type": "long", "nullable": True, "metadata": {}})
    text = f'{{"type":"struct","fields":[{",".join([column] * 30_000)}]}}'
    (schema,) = schemas.parse_schema_file(spark_schema(text), "state/0")
    names = [field.name for field in schemas.arrow_fields(schema.key)]
    assert names[:3] == ["c", "c_2", "c_3"]
    assert len(set(names)) == 30_000


SPARSE = 1 << 39
"""Bytes that a file says it has, of which none is stored."""
LONG_FILES = [
    ("spark-4.3.0/aggregate/checkpoint", "*.delta"),
    ("spark-4.3.0/aggregate/checkpoint", "*/schema"),
    ("spark-4.3.0/aggregate/checkpoint", "offsets/*"),
    ("spark-4.3.0/aggregate/checkpoint", "commits/*"),
    ("spark-4.3.0/aggregate/checkpoint", "metadata"),
    ("spark-4.3.0/aggregate-rocksdb/checkpoint", "*.zip"),
    ("spark-4.3.0/aggregate-rocksdb/checkpoint", "*.sst"),
    ("spark-4.3.0/aggregate-rocksdb-ids/checkpoint", "*.changelog"),
]


def outcome(folder: str) -> list[Any]:
    """The problems of a folder, of which every state is read as well; only errors of the tree."""
    opened = foreign_checkpoints(open_storage(folder))
    assert opened is not None
    with suppress(CheckpointError):
        read_all(opened.open())
    return list(opened.validate(None, "full", None).problems)


@pytest.mark.parametrize(("place", "pattern"), LONG_FILES)
def test_a_file_of_any_size_is_refused_before_it_is_read(place: str, pattern: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / place, tmp_path / "query")
    found = [path for path in folder.rglob("*") if path.is_file() and path.match(pattern)]
    assert found
    for path in found:
        os.truncate(path, SPARSE)
    problems = outcome(str(folder))
    assert problems
    assert all(problem.kind is not None and problem.message for problem in problems)
    named = [problem for problem in problems if problem.kind is ErrorKind.LIMIT_EXCEEDED]
    assert "sst" in pattern or named, problems
    for problem in named:
        assert re.search(r"would take [\d,]+ bytes, and at most [\d,]+ are read", problem.message)
        assert problem.path


@pytest.mark.parametrize("name", ["_metadata", "stream"])
def test_a_file_of_flink_of_any_size_is_refused_before_it_is_read(name: str, tmp_path: Path) -> None:
    header = hostile.header([("s", hostile.LONG)])
    group = hostile.pack("ihi", 0, 0, 0)
    for path, data in hostile.files(header + group, [len(header)], SPARSE).items():
        (tmp_path / path).write_bytes(data)
    os.truncate(tmp_path / "stream", SPARSE)
    if name == "_metadata":
        os.truncate(tmp_path / name, SPARSE)
    problems = outcome(str(tmp_path))
    assert [problem.kind for problem in problems if problem.path == name] == [ErrorKind.LIMIT_EXCEEDED] * len(problems)
    assert problems
    assert f"would take {SPARSE:,}" in problems[0].message or name == "stream"


@pytest.mark.parametrize("floor", [1 << 22, 1 << 24])
def test_blocks_are_decompressed_to_what_their_bytes_may_hold(floor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DECODED_FLOOR", floor)
    monkeypatch.setattr(limits, "DECODED_RATIO", 4)
    records = [(b"%02d" % number, 1, rocks_tables.PUT, bytes(1 << 20)) for number in range(10)]
    packed = rocks_tables.table(records, per_block=1, compression=7)
    assert len(packed) < 1 << 13
    if floor > 10 << 20:
        assert len(merge.merged([rocks_tables.opened(packed)])[0]) == 10
        return
    with pytest.raises(UnsupportedFormat, match=r"what it holds, decompressed, would take 4,\d+,\d+ bytes") as caught:
        merge.merged([rocks_tables.opened(packed)])
    assert caught.value.kind is ErrorKind.LIMIT_EXCEEDED


ZIPS = {
    "a table 20,000 times": "lists a table file twice",
    "20,000 entries": "at most 10,000 are read",
    "a name twice": "two files of one name",
    "bzip2": "compressed by method 12",
    "LZMA": "compressed by method 14",
    "Infinity": "Infinity is no number",
    "a number of 70 bits": "does not fit 64 bits",
    "half a pair": "surrogates not allowed",
}


def rezipped(data: bytes, how: str) -> bytes:
    """The zip of a version, with something else in it."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = {info.filename: archive.read(info) for info in archive.infolist()}
    version, body = parts["metadata"].split(b"\n", 1)
    found = json.loads(body)
    texts = {"Infinity": "Infinity", "a number of 70 bits": str(1 << 70), "half a pair": '"\\ud800"'}
    if how == "a table 20,000 times":
        found["sstFiles"] = found["sstFiles"][:1] * 20_000
    text = json.dumps(found)
    if how in texts:
        text = text.replace("{", f'{{"extra":{texts[how]},', 1)
    parts["metadata"] = version + b"\n" + text.encode()
    method = {"bzip2": zipfile.ZIP_BZIP2, "LZMA": zipfile.ZIP_LZMA}.get(how, zipfile.ZIP_DEFLATED)
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", method) as archive:
        warnings.simplefilter("ignore")  # It warns of a name that is there twice.
        for name, content in parts.items():
            archive.writestr(name, content)
        if how == "a name twice":
            archive.writestr("metadata", parts["metadata"])
        for number in range(20_000 if how == "20,000 entries" else 0):
            archive.writestr(f"e{number}", b"")
    return out.getvalue()


@pytest.mark.parametrize("how", sorted(ZIPS))
def test_zips_that_no_query_wrote_are_refused_by_what_is_wrong_with_them(how: str) -> None:
    files = files_of(FIXTURES / "spark-4.3.0/aggregate-rocksdb/checkpoint")
    for path in [path for path in files if path.endswith(".zip")]:
        files[path] = rezipped(files[path], how)
    problems = spark(files).validate(None, "full", None).problems
    assert problems
    assert any(ZIPS[how] in problem.message for problem in problems), problems[0].message


def spark(files: dict[str, bytes]) -> Any:
    folder: Any = DictFolder(files)
    opened = formats.spark(folder, None)
    assert opened is not None
    return opened


HALF = b"\xed\xa0\x80"


@pytest.mark.parametrize("where", ["state", "uid", "name", "file"])
def test_what_can_be_validated_can_be_shown(where: str) -> None:
    header = hostile.header([(HALF if where == "state" else "s", hostile.LONG)])
    texts = {name: HALF for name in ("uid", "name") if name == where}
    files = hostile.files(header + hostile.pack("ihi", 0, 0, 0), [len(header)], **texts)
    if where == "file":
        files["_metadata"] = files["_metadata"].replace(hostile.utf("stream"), hostile.pack("H", 3) + HALF)
    opened = flink(files)
    (problem,) = opened.validate(None, "full", None).problems
    assert "has half a surrogate pair" in problem.message
    assert problem.message.isascii()
    with pytest.raises(UnsupportedFormat, match="half a surrogate pair"):
        opened.open()


def test_an_allocation_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = savepoint(hostile.LONG)

    def full(*_: Any) -> None:
        raise MemoryError("Unable to allocate 5.5 GiB")

    monkeypatch.setattr(DictFolder, "read_range", full)
    with pytest.raises(UnsupportedFormat, match=r"not enough memory to read it \(Unable to allocate 5.5 GiB\)"):
        opened.open()
    (problem,) = opened.validate(None, "full", None).problems
    assert problem.kind is ErrorKind.LIMIT_EXCEEDED
    failure = failure_of(MemoryError("Unable to allocate 5.5 GiB"))
    assert "bug" not in failure.message
    assert failure.kind == "limit_exceeded"


def test_operators_that_say_many_subtasks_are_counted_together() -> None:
    operators = [hostile.one_operator(b"\0", 32768, 32768, number, uid=b"u%d" % number) for number in range(100)]
    opened = flink({"_metadata": hostile.metadata(operators)})
    with pytest.raises(UnsupportedFormat, match="the subtasks of all operators would take 3,276,800 entries"):
        opened.open()


def test_zeros_are_no_entries_however_many_they_are() -> None:
    for entry in (bytes(8), struct.pack(">ii", 0, -1)):
        data = np.frombuffer(entry * (1 << 20) + struct.pack(">ihi", 0, 0, -1), np.uint8)
        with pytest.raises(DamagedCheckpoint, match="more than 65,536 entries one after another have no key"):
            hdfs_store.parse_chains(data, np.array([len(data)]), np.array([True]), ["1.delta"], gap=0)


def test_a_map_whose_keys_have_no_values_is_refused() -> None:
    found = {"type": "map", "keyType": "void", "valueType": "long", "valueContainsNull": True}
    text = json.dumps({"type": "struct", "fields": [{"name": "c", "type": found}]})
    with pytest.raises(UnsupportedFormat, match=r"the keys of a map have no values \(type void\)"):
        schemas.parse_schema_file(spark_schema(text), "state/0")


def test_sizes_that_no_number_of_a_record_holds_are_refused() -> None:
    header = hostile.header([("s", hostile.LONG)])
    opened = flink(hostile.files(header, [0], (1 << 63) - 1))
    with pytest.raises(UnsupportedFormat, match=r"header would take|by the sizes that are given, would take"):
        opened.open()


@pytest.mark.parametrize("code", [3, 7])
def test_the_rows_of_many_states_are_found_at_once(code: int) -> None:
    def opened(count: int) -> Any:
        header = hostile.header([(f"s{at}", hostile.LONG) for at in range(count)])
        group = bytearray(hostile.pack("i", 0) if code == 3 else b"")
        for number in range(count):
            if code == 3:
                group += hostile.pack("hi", number, 1) + b"\0" + hostile.pack("qq", 1, number)
            else:
                last = hostile.pack("h", -1 if number + 1 == count else number + 1)
                lead = hostile.pack("h", 0) if not number else b""
                group += lead + hostile.pack("ibq", 10, -128, 1) + b"\0" + hostile.pack("iq", 8, number) + last
        files = hostile.files(header + bytes(group), [len(header)])
        keyed = hostile.pack("b", 3) + hostile.pack("iiq", 0, 1, len(header))
        assert keyed in files["_metadata"]
        files["_metadata"] = files["_metadata"].replace(keyed, hostile.pack("b", code) + keyed[1:])
        return flink(files)

    begin = time.process_time()
    few = opened(5).open()
    assert few.read("op", "s4").table()["value"].to_pylist() == [4]
    many = opened(3_000)
    checkpoint = many.open()
    assert checkpoint.read("op", "s2999").table()["value"].to_pylist() == [2999]
    assert checkpoint.read("op", "s2998").table()["value"].to_pylist() == [2998]
    assert checkpoint.read("op", "s2998").table()["value"].to_pylist() == [2998]
    assert many.validate(None, "full", None).problems in ([], ())
    assert time.process_time() - begin < SECONDS_MAX


# ---- frames of Spark and Flink: what is encoded is decoded


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


# ---- many byte strings in one buffer: gathered as they lie, of any length and in any order


@settings(max_examples=200, deadline=None)
@given(
    data=some.binary(max_size=60), cuts=some.lists(some.tuples(some.integers(0, 60), some.integers(0, 60)), max_size=9)
)
def test_strings_are_gathered_from_where_they_lie(data: bytes, cuts: list[tuple[int, int]]) -> None:
    places = [(min(start, len(data)), min(start + length, len(data))) for start, length in cuts]
    start = np.array([first for first, _ in places], np.int64)
    length = np.array([last - first for first, last in places], np.int64)
    found = ByteStrings(np.frombuffer(data, np.uint8), start, length).to_arrow()
    found.validate(full=True)
    assert found.to_pylist() == [data[first:last] for first, last in places]


@settings(max_examples=100, deadline=None)
@given(values=some.lists(some.binary(max_size=20), max_size=9))
def test_strings_of_arrow_come_back(values: list[bytes]) -> None:
    assert from_arrow(pa.array(values, pa.binary())).to_arrow().to_pylist() == values


@pytest.mark.parametrize("dtype", ["<i8", ">u2", "u1", ">f4"])
def test_numbers_are_taken_at_an_offset_of_each(dtype: str) -> None:
    octets = np.arange(40, dtype=np.uint8)
    strings = ByteStrings(octets, np.array([0, 3, 20]), np.array([20, 20, 20]))
    wanted = [np.frombuffer(octets.tobytes(), dtype, 1, int(start) + 5)[0] for start in strings.start]
    assert strings.fixed(5, dtype).tolist() == [item.item() for item in wanted]
    assert ByteStrings(octets, np.zeros(0, np.int64), np.zeros(0, np.int64)).fixed(0, dtype).tolist() == []


def test_more_bytes_than_a_column_holds_are_refused_before_they_are_gathered() -> None:
    octets = np.zeros(1 << 20, np.uint8)
    strings = ByteStrings(octets, np.zeros(4096, np.int64), np.full(4096, 1 << 20, np.int64))
    with pytest.raises(UnsupportedFormat, match="4294967296 bytes are to be read at once") as caught:
        strings.to_arrow()
    assert caught.value.kind is ErrorKind.LIMIT_EXCEEDED

"""Extreme and honest state is written so that readers take it, or refused (SPEC.md section 7.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import ErrorKind, InvalidState
from stateformat.manifest import encode_manifest, handle_rows, handles_table, row_group_faults
from stateformat.model import Handle, State
from stateformat.parquet import DECODED_BYTES_MAX
from stateformat.segments import SegmentReader, WriteOptions
from stateformat.states import declare
from tests.segments import CountingStorage, record, table, write

MIB = 1 << 20


def state(kind: Any) -> State:
    return declare.value_state("op", "s", keys={"k": pa.int64()}, values={"v": kind})


def rows(values: pa.Array) -> pa.Table:
    return pa.table({"k": np.arange(len(values)), "v": values})


def repeated(value: Any, kind: Any, count: int) -> pa.Array:
    return pa.array([value], kind).take(pa.array(np.zeros(count, np.int32)))


def options(codec: Any, **more: Any) -> WriteOptions:
    return WriteOptions(codec=codec, check_unique=False, inline_bytes_max=0, **more)


@pytest.fixture
def storage() -> Iterator[CountingStorage]:
    yield CountingStorage("limits")
    MemoryStorage.reset("limits")


def read_both_ways(storage: CountingStorage, declared: State, handle: Handle) -> Iterator[list[pa.Table]]:
    """The pieces that are decoded at a time: of the object whole, and by row groups."""
    for whole in (True, False):
        reader = SegmentReader(storage, record(declared), declared, handle, whole=whole)
        yield [call() for call in reader.calls(0, handle.rows)]


def lists_of_nothing(count: int, length: int) -> pa.Array:
    ends = pa.array(np.arange(count + 1, dtype=np.int32) * length)
    return pa.ListArray.from_arrays(ends, pa.nulls(count * length, pa.int64()))


def large_among_small(small: int, large: int) -> pa.Array:
    return pa.array([b"x"] * small + [bytes(MIB)] * large + [b"y"] * small, pa.binary())


EXTREMES: dict[str, Callable[[], pa.Array]] = {
    "one_number_in_every_row": lambda: repeated(7, pa.int64(), 1_000_000),
    "nothing_in_any_row": lambda: pa.nulls(1_000_000, pa.int64()),
    "one_long_string_in_every_row": lambda: repeated("x" * 65_536, pa.string(), 3_000),
    "a_long_list_of_nothing_in_every_row": lambda: lists_of_nothing(25, 1_000_000),
    "large_ones_among_many_small": lambda: large_among_small(20_000, 150),
}


@pytest.mark.parametrize(
    "codec", ["zstd", "none", *(pytest.param(codec, marks=pytest.mark.truth) for codec in ("lz4", "snappy"))]
)
@pytest.mark.parametrize("case", EXTREMES)
def test_what_is_extreme_and_honest_is_written_so_that_it_is_read(
    storage: CountingStorage, case: str, codec: str
) -> None:
    values = EXTREMES[case]()
    declared = state(values.type)
    handle = write(storage, declared, rows(values), options(codec))
    for pieces in read_both_ways(storage, declared, handle):
        assert max(piece.nbytes for piece in pieces) <= DECODED_BYTES_MAX
        found = pa.concat_tables(pieces)
        assert found["v"].combine_chunks().equals(values.take(found["k"].combine_chunks()))


@pytest.mark.parametrize("streamed", [False, True])
def test_row_groups_that_are_cut_by_bytes_still_hold_whole_key_groups(storage: CountingStorage, streamed: bool) -> None:
    declared = state(pa.binary())
    data: Any = rows(large_among_small(5_000, 200))
    if streamed:
        first = write(storage, declared, data, options("zstd"))
        reader = SegmentReader(storage, record(declared), declared, first)
        data = iter(pa.concat_tables(call() for call in reader.calls(0, first.rows)).to_batches())
    handle = write(storage, declared, data, options("zstd"))
    metadata = pq.read_metadata(pa.BufferReader(storage.read(handle.path or "")))
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    assert len(groups) > 3
    assert max(group.total_byte_size for group in groups) < 100 * MIB
    assert not list(row_group_faults([group.num_rows for group in groups], handle_rows(handles_table([handle]))))


@pytest.mark.parametrize(
    ("codec", "made", "words"),
    [
        *(
            (codec, lambda: pa.array([bytes(160 * MIB)]), "at most 134,217,728 .* choose codec 'none'")
            for codec in ("lz4", "zstd")
        ),
        ("none", lambda: lists_of_nothing(1, 20_000_000), "1 of its rows would take 160,000,"),
    ],
    ids=["lz4", "zstd", "lists"],
)
def test_a_value_that_no_reader_may_decode_is_refused_when_it_is_written(
    storage: CountingStorage, codec: str, made: Callable[[], pa.Array], words: str
) -> None:
    values = made()
    with pytest.raises(InvalidState, match=words) as refused:
        write(storage, state(values.type), rows(values), options(codec))
    assert refused.value.kind is ErrorKind.LIMIT_EXCEEDED
    assert [found.path for found in storage.list("")] == []


@pytest.mark.parametrize("codec", ["snappy", "none"])
def test_a_huge_value_that_does_not_shrink_too_far_is_read(storage: CountingStorage, codec: str) -> None:
    value = bytes(160 * MIB)
    handle = write(storage, state(pa.binary()), rows(pa.array([value])), options(codec))
    for pieces in read_both_ways(storage, state(pa.binary()), handle):
        assert [len(piece) for piece in pieces] == [1]
        assert pieces[0]["v"][0].as_buffer().equals(pa.py_buffer(value))


def test_row_groups_beyond_what_a_file_may_have_are_refused(
    storage: CountingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateformat.segments.row_groups.split_bytes", lambda columns: 1)
    monkeypatch.setattr("stateformat.segments.row_groups.grown_limit", lambda limit, written: limit)
    with pytest.raises(InvalidState, match="more than 1024 row groups"):
        write(storage, state(pa.int64()), rows(pa.array(range(1100))), options("lz4"))


def test_row_groups_of_others_with_one_long_string_in_every_row_are_read_one_at_a_time(
    storage: CountingStorage,
) -> None:
    declared = state(pa.string())
    handle = write(storage, declared, rows(repeated("x" * 4096, pa.string(), 60_000)), options("zstd"))
    data = pa.BufferReader(storage.read(handle.path or ""))
    kept = pq.read_metadata(data).metadata
    sink = pa.BufferOutputStream()
    found = pq.read_table(data)
    counts = np.asarray(handle.rows_per_group)
    plain: dict[str, Any] = {"write_page_checksum": True, "write_statistics": False, "store_schema": False}
    with pq.ParquetWriter(sink, found.schema, use_dictionary=["v"], **plain) as writer:
        writer.add_key_value_metadata(kept)
        for stop, count in zip(np.cumsum(counts).tolist(), counts.tolist(), strict=True):
            writer.write_table(found.slice(stop - count, count), row_group_size=count)
    whole = sink.getvalue().to_pybytes()
    metadata = pq.read_metadata(pa.BufferReader(whole))
    footer_bytes = int.from_bytes(whole[-8:-4], "little") + 8
    storage.changed[handle.path or ""] = whole
    theirs = handle._replace(
        size_bytes=len(whole),
        digest=xxhash.xxh3_128_digest(whole),
        footer_bytes=footer_bytes,
        footer_digest=xxhash.xxh3_128_digest(whole[-footer_bytes:]),
        uncompressed_bytes=sum(metadata.row_group(at).total_byte_size for at in range(metadata.num_row_groups)),
    )
    assert theirs.uncompressed_bytes < 4 * MIB
    for pieces in read_both_ways(storage, declared, theirs):
        assert sum(piece.nbytes for piece in pieces) > 200 * MIB
        assert max(piece.nbytes for piece in pieces) < 16 * MIB
        assert sum(map(len, pieces)) == handle.rows


def test_a_manifest_that_readers_would_refuse_is_not_encoded(
    storage: CountingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = handles_table([write(storage, state(pa.int64()), table(state(pa.int64()), [{"k": 1, "v": 1}]))])
    assert encode_manifest(handles).size
    monkeypatch.setattr("stateformat.manifest.codec.DECODED_BYTES_MAX", 100)
    monkeypatch.setattr("stateformat.manifest.codec.EXPANSION_MAX", 0)
    with pytest.raises(InvalidState, match="readers would refuse the manifest of 1 handles") as refused:
        encode_manifest(handles)
    assert refused.value.kind is ErrorKind.LIMIT_EXCEEDED

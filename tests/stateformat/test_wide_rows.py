"""Large rows, and tables beyond 32-bit offsets, on every path; low bounds save gigabytes."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stateformat import tables
from stateformat.backends.state import Entries, KeyedValue, columns as state_columns
from stateformat.keys import DEFAULT_KEY_HASH
from stateformat.reading import rekey
from stateformat.segments import external_sort as sorting, write as segment
from stateformat.states import declare
from stateformat.tables import pieces, spill
from stateformat.tools.ckpt.files import write_rows
from tests.segments import CountingStorage, operator, place, read, write

BLOBS = declare.value_state("op", "blobs", keys={"k": pa.int64()}, values={"v": pa.string()})
LIMIT = 10_000


@pytest.fixture
def storage() -> CountingStorage:
    return CountingStorage("wide")


def blobs(count: int, *, width: int = 1000, first: int = 0) -> pa.Table:
    """``count`` rows of about ``width`` bytes, each value another."""
    keys = np.random.default_rng(count).permutation(count) + first
    return pa.table({"k": keys, "v": [f"{key:0{width}d}" for key in keys.tolist()]})


def rows_of(found: pa.Table | Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    table = found if isinstance(found, pa.Table) else pa.Table.from_batches(list(found))
    return sorted(table.drop_columns(["_key_group"]).to_pylist(), key=lambda row: row["k"])


def test_batches_are_bounded_in_bytes_unless_one_row_is_larger() -> None:
    table = pa.table({"v": pa.array(["x" * size for size in (9, 9000, 9, 25_000, *[100] * 500)])})
    found = list(tables.cut(table, 1000, LIMIT))
    assert pa.concat_tables(found).equals(table)
    assert all(piece.nbytes <= LIMIT or len(piece) == 1 for piece in found)
    assert [len(piece) for piece in tables.cut(table, 200, 1 << 30)] == [200, 200, 104]


def test_small_batches_are_joined_up_to_the_bound_and_no_further() -> None:
    parts = [pa.table({"v": pa.array(["x" * 400] * 2)}) for _ in range(100)]
    found = list(tables.rebatch(parts, parts[0].schema, 1000, LIMIT))
    assert pa.Table.from_batches(found).equals(pa.concat_tables(parts))
    assert len(found) < 12
    assert max(batch.nbytes for batch in found) <= LIMIT


@pytest.mark.parametrize("nulls", [False, True])
def test_batches_of_many_columns_are_bounded_in_bytes_as_those_of_few_are(nulls: bool) -> None:
    numbers = np.arange(3000)
    every = [pa.int8(), pa.int64(), pa.bool_(), pa.float64(), pa.timestamp("us")]
    kinds = [every[number % 5] for number in range(150)]
    mask = numbers % 3 == 0 if nulls else None
    table = pa.table([pa.array(numbers % 2, mask=mask).cast(kind) for kind in kinds], [f"c{n}" for n in range(150)])
    parts = [table.slice(start, 7) for start in range(0, 700, 7)] + [table.slice(700)]
    found = list(tables.rebatch(parts, table.schema, 2000, 20 * LIMIT))
    assert pa.Table.from_batches(found).equals(table)
    # Bitmaps may begin and end within a byte.
    assert max(batch.nbytes for batch in found) <= 20 * LIMIT + 4 * len(kinds)
    assert len(found) <= 2 * table.nbytes // (20 * LIMIT) + 2


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that gave memory back."""
    found: list[int] = []

    class Pool:
        def release_unused(self) -> None:
            found.append(threading.get_ident())

    monkeypatch.setattr(pieces.pa, "default_memory_pool", Pool)
    return found


def test_every_thread_gives_back_what_it_freed_itself(released: list[int]) -> None:
    calls = (tables.SizedCall(threading.get_ident, 40 << 20) for _ in range(3))
    makers = set(tables.prefetch((call for call in calls), workers=1))
    assert len(makers) == 1
    assert released.count(makers.pop()) == 3
    assert released.count(threading.get_ident()) == 3


def test_nothing_is_given_back_while_rows_are_kept(released: list[int]) -> None:
    size_bytes = 40 << 20

    def made() -> Iterator[pa.Buffer]:
        yield from tables.prefetch(
            tables.SizedCall(lambda: pa.allocate_buffer(size_bytes), size_bytes) for _ in range(4)
        )

    kept = [*made()]
    assert sum(buffer.size for buffer in kept) == 4 * size_bytes
    assert not released
    del kept
    # What the next rows take are the pages that these have freed.
    assert len([*made()]) == 4
    assert not released
    for _ in made():
        pass
    assert released


@pytest.mark.parametrize("file_format", ["jsonl", "csv"])
def test_wide_rows_become_text_a_few_megabytes_at_a_time(file_format: str) -> None:
    """One batch of 16 rows of 1 MB, whose text has two digits a byte."""
    batch = pa.record_batch({"k": range(16), "v": [bytes([row]) * (1 << 20) for row in range(16)]})
    sizes: list[int] = []

    class Seen(io.BytesIO):
        def write(self, data: Any) -> int:
            sizes.append(memoryview(data).nbytes)
            return super().write(data)

    file = Seen()
    assert write_rows(file, file_format, batch.schema, iter([batch])) == 16
    assert max(sizes) < 10 << 20
    lines = file.getvalue().splitlines()[-16:]
    assert [line.count(f"{row:02x}".encode() * (1 << 20)) for row, line in enumerate(lines)] == [1] * 16


NESTED: dict[str, pa.Array] = {
    "numbers": pa.array([1, None, 3], pa.int64()),
    "texts": pa.array(["a", None, "ccc"]),
    "lists": pa.array([["a", "bb"], None, []], pa.list_(pa.string())),
    "maps": pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int64())),
    "structs": pa.array(
        [{"t": "aaa", "n": 1}, None, {"t": None, "n": 2}], pa.struct({"t": pa.string(), "n": pa.int64()})
    ),
    "flags": pa.array([True, None, False]),
}


@pytest.mark.parametrize("name", NESTED)
def test_rows_are_taken_across_chunks_as_from_one_array(name: str) -> None:
    array = NESTED[name]
    column = pa.chunked_array([array, array.slice(0, 0), array.slice(1), array.slice(0, 2)])
    numbers = np.array([6, 0, 3, 3, 1, 5, 2, 4])
    assert tables.take_rows(column, numbers).equals(column.combine_chunks().take(pa.array(numbers)))
    assert len(tables.take_rows(column, numbers[:0])) == 0
    assert tables.take_rows(pa.chunked_array([], array.type), numbers[:0]).type == array.type


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("part", [slice(None), slice(1, None), slice(2, 3)])
def test_sizes_of_rows_are_those_of_the_rows_alone(name: str, part: slice) -> None:
    array = pa.concat_arrays([NESTED[name]] * 2)[part]
    fixed, varying = tables.row_sizes([pa.chunked_array([array])])
    twice = tables.row_sizes([pa.chunked_array([array])] * 2)
    assert twice[0] == 2 * fixed
    assert varying is None or np.array_equal(twice[1], 2 * varying)
    for number in range(len(array)):
        # Buffers of one row: an offset more than it has values, and bits in whole bytes.
        alone = pa.concat_arrays([array.slice(number, 1)]).nbytes
        size = fixed + (0 if varying is None else int(varying[number]))
        assert alone - 24 <= size <= alone + 24


def test_rows_come_back_from_their_heap_in_order_and_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "_BUFFERED_BYTES", 5000)
    parts = [blobs(7, first=100 * number) for number in range(6)]
    with tables.Spill(piece_bytes=3000) as buckets:
        for number, table in enumerate(parts):
            buckets.add(number % 2, table)
        for bucket in (0, 1):
            found = list(buckets.read(bucket))
            assert pa.Table.from_batches(found).equals(pa.concat_tables(parts[bucket::2]))
            assert max(batch.nbytes for batch in found) <= 3000
        assert list(buckets.read(2)) == []
        assert buckets.sizes == {bucket: sum(part.nbytes for part in parts[bucket::2]) for bucket in (0, 1)}


def test_equal_rows_are_dealt_to_one_heap_and_the_others_evenly_on_every_level() -> None:
    rows = blobs(4000, width=1)
    keys = [rows["k"]]
    first, second = tables.buckets_of(keys, 8, 0), tables.buckets_of(keys, 8, 1)
    assert np.array_equal(first, tables.buckets_of(keys, 8, 0))
    for bucket in range(8):
        assert 350 < (first == bucket).sum() < 650
        assert 20 < (second[first == bucket] == 3).sum() < 120
    with tables.Spill() as buckets:
        for bucket, chosen in tables.split_by_bucket(rows, first):
            buckets.add(bucket, chosen)
        found = pa.concat_tables(pa.Table.from_batches(buckets.read(bucket)) for bucket in range(8))
    assert rows.sort_by("k").equals(found.sort_by("k"))


@pytest.fixture
def low(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 10 kB, and 40 kB in memory."""
    monkeypatch.setattr(segment, "BATCH_BYTES", LIMIT)
    monkeypatch.setattr(segment, "RUN_BYTES", 4 * LIMIT)
    monkeypatch.setattr(sorting, "_PIECE_BYTES", LIMIT)
    monkeypatch.setattr(pieces.rebatch, "__defaults__", (LIMIT,))


@pytest.mark.usefixtures("low")
def test_large_rows_are_read_in_batches_of_so_many_bytes(storage: CountingStorage) -> None:
    given = blobs(300)
    found = read(storage, BLOBS, [write(storage, BLOBS, given)])
    assert rows_of(found) == rows_of(given.append_column("_key_group", pa.nulls(300)))
    assert max(batch.nbytes for batch in found.to_batches()) <= LIMIT


@pytest.mark.usefixtures("low")
@pytest.mark.parametrize("with_groups", [False, True])
@pytest.mark.parametrize("runs_max", [64, 3])
def test_a_stream_in_no_order_is_sorted_outside_of_memory(
    storage: CountingStorage, monkeypatch: pytest.MonkeyPatch, with_groups: bool, runs_max: int
) -> None:
    monkeypatch.setattr(sorting, "_RUNS_MAX", runs_max)
    given = blobs(700)
    expected = write(storage, BLOBS, given)
    batches: Iterator[pa.RecordBatch] = iter(given.to_batches(max_chunksize=50))
    if with_groups:
        stored = read(storage, BLOBS, [expected])
        shuffled = stored.take(pa.array(np.random.default_rng(1).permutation(700)))
        batches = iter(shuffled.to_batches(max_chunksize=50))
    handle = segment.write_unsorted(storage, place(BLOBS), batches)
    assert handle.rows_per_group == expected.rows_per_group
    assert rows_of(read(storage, BLOBS, [handle])) == rows_of(read(storage, BLOBS, [expected]))


@pytest.mark.usefixtures("low")
def test_a_stream_in_flight_is_sorted_by_channel_outside_of_memory(storage: CountingStorage) -> None:
    state = declare.in_flight_state("op", "in:e", edge="e", columns={"v": pa.string()})
    senders, numbers = (column.ravel() for column in np.meshgrid(range(5), range(100)))
    order = np.random.default_rng(2).permutation(500)
    given = pa.table(
        {
            "_sender": pa.array(senders[order], pa.int32()),
            "_receiver": pa.array(np.zeros(500), pa.int32()),
            "_seq": pa.array(numbers[order], pa.int64()),
            "v": [
                f"{sender} {number}".ljust(900) for sender, number in zip(senders[order], numbers[order], strict=True)
            ],
        }
    )
    handle = write(storage, state, iter(given.to_batches(max_chunksize=20)))
    found = read(storage, state, [handle])
    assert handle.rows_per_group == [100] * 5
    assert found.equals(given.sort_by([("_sender", "ascending"), ("_seq", "ascending")]).cast(found.schema))


def test_a_table_in_small_chunks_of_large_rows_is_not_copied_together(
    storage: CountingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateformat.segments.sort._JOINED_BYTES_MAX", 0)
    monkeypatch.setattr("stateformat.segments.sort._SLICE_BYTES_MAX", 4 * LIMIT)
    given = blobs(300)
    chunked = pa.Table.from_batches(given.to_batches(max_chunksize=11))
    assert rows_of(rekey(chunked, BLOBS, 128, DEFAULT_KEY_HASH)) == rows_of(rekey(given, BLOBS, 128, DEFAULT_KEY_HASH))
    found = read(storage, BLOBS, [write(storage, BLOBS, chunked)])
    assert rows_of(found) == rows_of(read(storage, BLOBS, [write(storage, BLOBS, given)]))


@pytest.mark.parametrize("kind", [pa.string(), pa.list_(pa.string()), pa.map_(pa.string(), pa.binary())])
def test_running_state_of_wide_values_is_squeezed_and_gathered_in_several_arrays(
    monkeypatch: pytest.MonkeyPatch, kind: pa.DataType
) -> None:
    monkeypatch.setattr(state_columns, "TAKEN_BYTES", LIMIT)
    monkeypatch.setattr(pieces.take_table, "__defaults__", (LIMIT,))

    def value(number: int) -> Any:
        text = str(number) * 200
        if pa.types.is_map(kind):
            return [(text, text.encode())]
        return [text, None] if pa.types.is_list(kind) else text

    state = KeyedValue(operator(), declare.value_state("op", "s", keys={"k": pa.int64()}, values={"v": kind}))
    expected = {}
    for first in range(0, 900, 30):
        keys = [number % 400 for number in range(first, first + 30)]
        values = [value(number) for number in range(first, first + 30)]
        expected |= dict(zip(keys, values, strict=True))
        state.put(pa.record_batch({"k": keys}), pa.record_batch([pa.array(values, kind)], ["v"]))
    gone = list(range(0, 400, 3))
    state.delete(pa.record_batch({"k": pa.array(gone, pa.int64())}))
    expected = {key: found for key, found in expected.items() if key not in gone}
    found = state.rows()
    assert dict(zip(found["k"].to_pylist(), found["v"].to_pylist(), strict=True)) == expected


def test_entries_put_together_stay_in_chunks_of_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces.rebatch, "__defaults__", (LIMIT,))
    state = Entries(declare.even_split_state("op", "s", columns={"v": pa.list_(pa.string())}))
    for number in range(200):
        state.append(pa.record_batch({"v": pa.array([[str(number) * 100]], pa.list_(pa.string()))}))
    assert [value for [value] in state.rows()["v"].to_pylist()] == [str(number) * 100 for number in range(200)]
    assert 3 < state.rows()["v"].num_chunks < 100


# ---- measured ------------------------------------------------------------------------------------

STREAMED = """
import sys
from benchmarks import bench_memory as bench
import stateformat.reading, stateformat.segments

bench.ROWS["wide"] = 3000
begin = bench.peak_bytes()
bench.publish(sys.argv[1], "wide")
bench.read(sys.argv[1], "wide")
print((bench.peak_bytes() - begin) // 10**6)
"""


@pytest.mark.truth
def test_300_megabytes_of_wide_rows_are_written_and_read_in_less_than_that(tmp_path: Path) -> None:
    """In no order, in a process that holds neither all it writes nor all it reads; both took 700
    MB.
    """
    command = [sys.executable, "-c", STREAMED, str(tmp_path / "store")]
    above = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert above < 450

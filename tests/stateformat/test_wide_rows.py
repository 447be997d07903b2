"""Large rows, and tables beyond 32-bit offsets, on every path; low bounds save gigabytes.

Texts that repeat are stored by a dictionary, never one that a reader would refuse. Extreme and
honest state is written so that readers take it, or refused (SPEC.md section 7.4).
"""

from __future__ import annotations

import io
import itertools
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from stateformat import tables
from stateformat.backends.state import Entries, KeyedValue, columns as state_columns
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import ErrorKind, InvalidState
from stateformat.keys import DEFAULT_KEY_HASH
from stateformat.manifest import encode_manifest, handle_rows, handles_table, row_group_faults
from stateformat.model import Handle, State
from stateformat.parquet import DECODED_BYTES_MAX
from stateformat.parquet.page_checks import _longest_of_short
from stateformat.reading import rekey
from stateformat.segments import SegmentReader, WriteOptions, sort as sorting, write as segment
from stateformat.states import declare, even_split_state, value_state
from stateformat.tables import pieces, spill
from stateformat.tools.ckpt.files import write_rows
from tests.worlds.segments import OBJECTS, CountingStorage, operator, place, read, record, table, write

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


ROWS = 100_000
LABELLED = pa.struct({"kind": pa.string(), "labels": pa.map_(pa.string(), pa.string())})


def state_of(**values: pa.DataType) -> State:
    return value_state("op", "texts", keys={"k": pa.int64()}, values=values)


def stored(storage: MemoryStorage, handle: Handle) -> pq.ParquetFile:
    return pq.ParquetFile(pa.BufferReader(storage.read(handle.path or "")), arrow_extensions_enabled=False)


def by_dictionary(storage: MemoryStorage, handle: Handle) -> list[set[str]]:
    """Of each row group, the leaves that have a dictionary."""
    metadata = stored(storage, handle).metadata
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return [
        {
            group.column(at).path_in_schema
            for at in range(metadata.num_columns)
            if "RLE_DICTIONARY" in group.column(at).encodings
        }
        for group in groups
    ]


def sorted_rows(table: pa.Table) -> list[dict[str, object]]:
    names = [name for name in table.column_names if name != "_key_group"]
    return table.select(names).sort_by("k").to_pylist()


@pytest.mark.parametrize(
    ("texts", "pays"),
    [
        pytest.param(["on", "off"] * 50_000, True, id="two words"),
        pytest.param([None, "on"] * 50_000, True, id="one word and nulls"),
        pytest.param([f"/page/{number % 5000}" for number in range(ROWS)], True, id="a page of 5,000"),
        pytest.param([f"user {number}" for number in range(ROWS)], False, id="all different"),
        pytest.param([f"user {number % 50_000}" for number in range(ROWS)], False, id="each twice"),
        pytest.param([None] * ROWS, False, id="nulls alone"),
        pytest.param(["on"] * 50, False, id="few rows"),
    ],
)
def test_texts_that_repeat_are_stored_by_a_dictionary(texts: list[str | None], pays: bool) -> None:
    storage, state = MemoryStorage("dictionaries"), state_of(v=pa.string())
    table = pa.table({"k": np.arange(len(texts)), "v": pa.array(texts, pa.string())})

    handle = write(storage, state, table)

    assert by_dictionary(storage, handle) == [{"v"} if pays else set()] * stored(storage, handle).num_row_groups
    assert sorted_rows(read(storage, state, [handle])) == table.to_pylist()


def test_dictionaries_take_fewer_bytes_and_plain_encoding_has_none() -> None:
    storage, state = MemoryStorage("dictionaries"), state_of(v=pa.string())
    table = pa.table({"k": np.arange(ROWS), "v": pa.array([f"/page/{number % 977}" for number in range(ROWS)])})

    fast, plain = (
        write(storage, state, table, WriteOptions(inline_bytes_max=0, encoding=encoding))
        for encoding in ("fast", "plain")
    )

    assert by_dictionary(storage, plain) == [set()] * 4
    assert fast.size_bytes < plain.size_bytes / 2


def test_texts_in_nested_values_are_stored_by_dictionaries_and_read_back() -> None:
    storage, state = MemoryStorage("dictionaries"), state_of(tags=pa.list_(pa.string()), of=LABELLED, b=pa.binary())
    rng = random.Random(1)
    rows = [
        {
            "k": number,
            "tags": rng.choice([None, [], ["a"], ["a", None, "b"]]),
            "of": rng.choice(
                [None, {"kind": "x", "labels": [("host", f"h{number % 7}")]}, {"kind": None, "labels": []}]
            ),
            "b": bytes([number % 3]) * 8,
        }
        for number in range(5000)
    ]

    handle = write(
        storage,
        state,
        pa.Table.from_pylist(
            rows, pa.schema({"k": pa.int64(), "tags": pa.list_(pa.string()), "of": LABELLED, "b": pa.binary()})
        ),
    )

    assert by_dictionary(storage, handle) == [
        {"b", "of.kind", "of.labels.key_value.key", "of.labels.key_value.value", "tags.list.element"}
    ]
    assert sorted_rows(read(storage, state, [handle])) == rows


def test_a_row_group_that_readers_would_refuse_ends_the_dictionaries_of_the_file() -> None:
    # In list-like state the order is that of the caller: short texts that repeat, then a long one.
    # A reader counts it for each row of its row group: 2 GB.
    storage, state = (
        MemoryStorage("dictionaries"),
        even_split_state("op", "texts", columns={"v": pa.string(), "n": pa.int64()}),
    )
    texts = ["on", "off"] * 40_000 + ["x" * 60_000] + ["on"] * 40_000
    table = pa.table({"v": texts, "n": np.arange(len(texts))})

    handle = write(storage, state, table)

    found = by_dictionary(storage, handle)
    assert found[0] == {"v"}
    assert found[-1] == set()
    assert [len(list(group)) for _, group in itertools.groupby(found)] == [2, 2]
    whole = read(storage, state, [handle])
    assert whole.equals(table.cast(whole.schema))


@pytest.mark.parametrize("inline_bytes_max", [0, 1 << 30])
def test_a_file_of_two_writers_is_a_parquet_file_like_any(tmp_path: object, inline_bytes_max: int) -> None:
    storage, state = MemoryStorage("dictionaries"), even_split_state("op", "texts", columns={"v": pa.string()})
    texts = ["on", "off"] * 40_000 + ["x" * 60_000] + ["on"] * 40_000

    handle = write(storage, state, pa.table({"v": texts}), WriteOptions(inline_bytes_max=inline_bytes_max))
    data = handle.inline or storage.read(handle.path or "").to_pybytes()
    file = f"{tmp_path}/rows.parquet"
    with open(file, "wb") as target:  # noqa: PTH123
        target.write(data)

    counts = "count(*), count(*) filter (v = 'on'), max(length(v))"
    assert duckdb.sql(f"select {counts} from '{file}'").fetchall() == [(len(texts), 80_000, 60_000)]
    assert pq.read_table(file)["v"].to_pylist() == texts
    assert pq.read_metadata(file).metadata[b"stateformat.state"] == b"texts"


def test_a_stream_whose_texts_become_long_is_written_and_read() -> None:
    storage, state = MemoryStorage("dictionaries"), state_of(v=pa.string())
    rng = np.random.default_rng(0)
    first = pa.table({"k": np.arange(200_000), "v": pa.array(rng.integers(0, 5, 200_000)).cast(pa.string())})
    other = pa.table({"k": np.arange(200_000, 201_000), "v": pa.array([f"{n}" * 2000 for n in range(1000)])})

    handle = write(storage, state, iter([*first.to_batches(8192), *other.to_batches()]), OBJECTS)

    assert sorted_rows(read(storage, state, [handle])) == pa.concat_tables([first, other]).to_pylist()


@pytest.mark.parametrize("seed", range(30))
def test_the_longest_text_of_a_dictionary_is_guessed_only_where_it_is_so(seed: int) -> None:
    rng = random.Random(seed)
    alphabet = b"ab\xff" if seed % 3 else b"a\0b"
    texts = [
        bytes(rng.choices(alphabet, k=rng.choice([0, 1, 2, 5, 255, 256, 257, 700]))) for _ in range(rng.randint(1, 60))
    ]
    plain = b"".join(len(text).to_bytes(4, "little") + text for text in texts)

    guessed = _longest_of_short(memoryview(plain), len(texts))

    assert guessed in (None, max(map(len, texts)))
    assert _longest_of_short(memoryview(plain[:-1]), len(texts)) in (None, guessed)


def test_usual_texts_need_no_walk() -> None:
    texts = [b"", *(b"page %d" % number for number in range(1000)), b"y" * 300]
    plain = b"".join(len(text).to_bytes(4, "little") + text for text in texts)

    assert _longest_of_short(memoryview(plain), len(texts)) == 300
    assert _longest_of_short(memoryview(plain), len(texts) - 1) is None


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
def counting() -> Iterator[CountingStorage]:
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
    counting: CountingStorage, case: str, codec: str
) -> None:
    values = EXTREMES[case]()
    declared = state(values.type)
    handle = write(counting, declared, rows(values), options(codec))
    for batches in read_both_ways(counting, declared, handle):
        assert max(piece.nbytes for piece in batches) <= DECODED_BYTES_MAX
        found = pa.concat_tables(batches)
        assert found["v"].combine_chunks().equals(values.take(found["k"].combine_chunks()))


@pytest.mark.parametrize("streamed", [False, True])
def test_row_groups_that_are_cut_by_bytes_still_hold_whole_key_groups(
    counting: CountingStorage, streamed: bool
) -> None:
    declared = state(pa.binary())
    data: Any = rows(large_among_small(5_000, 200))
    if streamed:
        first = write(counting, declared, data, options("zstd"))
        reader = SegmentReader(counting, record(declared), declared, first)
        data = iter(pa.concat_tables(call() for call in reader.calls(0, first.rows)).to_batches())
    handle = write(counting, declared, data, options("zstd"))
    metadata = pq.read_metadata(pa.BufferReader(counting.read(handle.path or "")))
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
    counting: CountingStorage, codec: str, made: Callable[[], pa.Array], words: str
) -> None:
    values = made()
    with pytest.raises(InvalidState, match=words) as refused:
        write(counting, state(values.type), rows(values), options(codec))
    assert refused.value.kind is ErrorKind.LIMIT_EXCEEDED
    assert [found.path for found in counting.list("")] == []


@pytest.mark.parametrize("codec", ["snappy", "none"])
def test_a_huge_value_that_does_not_shrink_too_far_is_read(counting: CountingStorage, codec: str) -> None:
    value = bytes(160 * MIB)
    handle = write(counting, state(pa.binary()), rows(pa.array([value])), options(codec))
    for batches in read_both_ways(counting, state(pa.binary()), handle):
        assert [len(piece) for piece in batches] == [1]
        assert batches[0]["v"][0].as_buffer().equals(pa.py_buffer(value))


def test_row_groups_beyond_what_a_file_may_have_are_refused(
    counting: CountingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateformat.segments.row_groups.split_bytes", lambda columns: 1)
    monkeypatch.setattr("stateformat.segments.row_groups.grown_limit", lambda limit, written: limit)
    with pytest.raises(InvalidState, match="more than 1024 row groups"):
        write(counting, state(pa.int64()), rows(pa.array(range(1100))), options("lz4"))


def test_row_groups_of_others_with_one_long_string_in_every_row_are_read_one_at_a_time(
    counting: CountingStorage,
) -> None:
    declared = state(pa.string())
    handle = write(counting, declared, rows(repeated("x" * 4096, pa.string(), 60_000)), options("zstd"))
    data = pa.BufferReader(counting.read(handle.path or ""))
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
    counting.changed[handle.path or ""] = whole
    theirs = handle._replace(
        size_bytes=len(whole),
        digest=xxhash.xxh3_128_digest(whole),
        footer_bytes=footer_bytes,
        footer_digest=xxhash.xxh3_128_digest(whole[-footer_bytes:]),
        uncompressed_bytes=sum(metadata.row_group(at).total_byte_size for at in range(metadata.num_row_groups)),
    )
    assert theirs.uncompressed_bytes < 4 * MIB
    for batches in read_both_ways(counting, declared, theirs):
        assert sum(piece.nbytes for piece in batches) > 200 * MIB
        assert max(piece.nbytes for piece in batches) < 16 * MIB
        assert sum(map(len, batches)) == handle.rows


def test_a_manifest_that_readers_would_refuse_is_not_encoded(
    counting: CountingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = handles_table([write(counting, state(pa.int64()), table(state(pa.int64()), [{"k": 1, "v": 1}]))])
    assert encode_manifest(handles).size
    monkeypatch.setattr("stateformat.manifest.codec.DECODED_BYTES_MAX", 100)
    monkeypatch.setattr("stateformat.manifest.codec.EXPANSION_MAX", 0)
    with pytest.raises(InvalidState, match="readers would refuse the manifest of 1 handles") as refused:
        encode_manifest(handles)
    assert refused.value.kind is ErrorKind.LIMIT_EXCEEDED

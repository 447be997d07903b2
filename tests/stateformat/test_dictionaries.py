"""Texts that repeat are stored by a dictionary, never one that a reader would refuse."""

from __future__ import annotations

import itertools
import random

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stateformat.backends.storage.memory import MemoryStorage
from stateformat.model import Handle, State
from stateformat.parquet.page_checks import _longest_of_short
from stateformat.segments import WriteOptions
from stateformat.states import even_split_state, value_state
from tests.segments import OBJECTS, read, write

ROWS = 100_000
NESTED = pa.struct({"kind": pa.string(), "labels": pa.map_(pa.string(), pa.string())})


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
    storage, state = MemoryStorage("dictionaries"), state_of(tags=pa.list_(pa.string()), of=NESTED, b=pa.binary())
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
            rows, pa.schema({"k": pa.int64(), "tags": pa.list_(pa.string()), "of": NESTED, "b": pa.binary()})
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

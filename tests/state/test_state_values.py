"""Keyed values and lists without keys, against dictionaries: every key type, random histories,
hashes that collide.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateformat.backends.state import Entries, KeyedValue, columns as parts_module, index as index_module
from stateformat.backends.state.index import SlotIndex
from stateformat.errors import InvalidInput, InvalidState
from stateformat.graph import Operator, OperatorId
from stateformat.states import declare
from tests.state.state_world import INT, INT_VALUE, POOLS, batch, ints, spelt, value_of

VALUES = {
    "n": pa.int64(),
    "s": pa.string(),
    "l": pa.list_(pa.int32()),
    "t": pa.struct([("x", pa.bool_()), ("y", pa.map_(pa.string(), pa.int8()))]),
}


def some_values(chance: random.Random, rows: int) -> list[dict[str, Any]]:
    return [
        {
            "n": chance.choice([None, 0, chance.randrange(-99, 99)]),
            "s": chance.choice([None, "", "x" * chance.randrange(9)]),
            "l": chance.choice([None, [], [1, None], [chance.randrange(9)]]),
            "t": chance.choice([None, {"x": None, "y": None}, {"x": True, "y": [("a", 1), ("b", None)]}]),
        }
        for _ in range(rows)
    ]


def pick_keys(chance: random.Random, pools: list[list[Any]], rows: int) -> list[tuple[Any, ...]]:
    return [tuple(chance.choice(pool) for pool in pools) for _ in range(rows)]


def key_batch(kinds: list[pa.DataType], keys: list[tuple[Any, ...]]) -> pa.RecordBatch:
    """Keys as a batch that is a slice of a longer one, as batches often are."""
    columns = [pa.array([None, *(key[i] for key in keys), None], kind) for i, kind in enumerate(kinds)]
    return pa.RecordBatch.from_arrays(columns, [f"k{i}" for i in range(len(kinds))]).slice(1, len(keys))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "names", [*([name] for name in POOLS), ["utf8", "int64"], ["bool", "struct", "date32"]], ids="+".join
)
def test_a_value_state_is_a_dictionary_of_its_keys(names: list[str]) -> None:
    kinds, pools = [POOLS[name][0] for name in names], [POOLS[name][1] for name in names]
    kept, oracle = value_of(VALUES, {f"k{i}": kind for i, kind in enumerate(kinds)}), {}
    chance = random.Random("+".join(names))
    for _ in range(60):
        keys = pick_keys(chance, pools, chance.randrange(12))
        rows = some_values(chance, len(keys))
        if chance.random() < 0.6:
            kept.put(key_batch(kinds, keys), pa.RecordBatch.from_pylist(rows, pa.schema(list(VALUES.items()))))
            for key, row in zip(keys, rows, strict=True):
                oracle[spelt(list(key))] = row
        else:
            kept.delete(key_batch(kinds, keys))
            for key in keys:
                oracle.pop(spelt(list(key)), None)
        asked = pick_keys(chance, pools, 10)
        values, found = kept.get(key_batch(kinds, asked))
        wanted = [oracle.get(spelt(list(key))) for key in asked]
        assert found.tolist() == [row is not None for row in wanted]
        assert values.to_pylist() == [row or dict.fromkeys(VALUES) for row in wanted]
        assert values.validate(full=True) is None
        assert len(kept) == len(oracle)
    # A dictionary keeps the order in which keys came, and so does the state.
    assert [{name: row[name] for name in VALUES} for row in kept.rows().to_pylist()] == [*oracle.values()]


@pytest.mark.usefixtures("impatient", "weakened")
def test_keys_whose_hashes_collide_are_told_apart() -> None:
    kept, oracle = value_of(INT_VALUE, {"a": pa.int64(), "b": pa.string()}), {}
    chance = random.Random(5)
    for step in range(80):
        keys = [(chance.randrange(12), chance.choice("uvwxyz")) for _ in range(chance.randrange(30))]
        columns = batch(a=(pa.int64(), [a for a, _ in keys]), b=(pa.string(), [b for _, b in keys]))
        if step % 3 == 2:
            kept.delete(columns)
            for key in keys:
                oracle.pop(key, None)
        else:
            kept.put(columns, ints(n=[step * 100 + i for i in range(len(keys))]))
            oracle |= {key: step * 100 + i for i, key in enumerate(keys)}
        assert [((row["a"], row["b"]), row["n"]) for row in kept.rows().to_pylist()] == [*oracle.items()]


def test_a_full_table_whose_hashes_are_all_the_last_one_wraps_around() -> None:
    index, hashes = SlotIndex(), np.full(700, 2**64 - 1, np.uint64)
    index.build(hashes, np.arange(700), more=1)
    asked = np.array([0, 350, 699])
    found = index.find(hashes[:3], lambda slots, rows: slots == asked[rows])
    assert found.tolist() == [0, 350, 699]
    index.remove(hashes[:1], np.array([350]))
    found = index.find(hashes[:3], lambda slots, rows: slots == asked[rows])
    assert found.tolist() == [0, -1, 699]


@pytest.mark.parametrize("asked", [40, 4000], ids=["searched in sorted entries", "searched in a table"])
def test_a_built_index_finds_its_keys_however_much_is_asked_and_tells_equal_hashes_apart(asked: int) -> None:
    random = np.random.default_rng(8)
    hashes = random.integers(0, 2**63, 4000).astype(np.uint64) << np.uint64(1)
    hashes[1000:1100] = hashes[:100] ^ np.uint64(1)  # One tag, two hashes.
    hashes[2000:2003] = hashes[77]
    index = SlotIndex()
    assert not index.build(hashes, np.arange(4000))
    rows = random.permutation(4000)[:asked]
    found = index.find(hashes[rows], lambda slots, of: slots == rows[of])
    assert (found == rows).all()
    assert (index.find(~hashes[:asked], lambda slots, of: hashes[slots] == ~hashes[of]) == -1).all()
    hashes[2000:2003] = np.arange(3, dtype=np.uint64)
    assert index.build(hashes, np.arange(4000))


def test_an_index_of_all_slots_is_made_piece_by_piece_and_sees_equal_hashes_wherever_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_module, "_PIECE_ENTRIES", 8)
    random, numbers = np.random.default_rng(9), np.arange(35)
    for count in range(1, 35):
        hashes = random.choice(2**62, count, replace=False).astype(np.uint64) << np.uint64(1)
        index = SlotIndex()
        assert index.build(np.append(hashes, hashes), range(count))
        found = index.find(hashes, lambda slots, rows: slots == numbers[rows])
        assert found.tolist() == [*range(count)]
        for place in range(count - 1):
            order = np.argsort(hashes)
            twice = hashes.copy()
            twice[order[place]] = twice[order[place + 1]]
            assert not SlotIndex().build(twice, range(count))


def test_many_keys_come_and_go_and_the_memory_of_the_dead_is_given_back() -> None:
    kept = value_of({"s": pa.string()})
    for start in range(0, 200_000, 10_000):
        keys = np.arange(start, start + 10_000)
        kept.put(pa.record_batch({"k": keys}), pa.record_batch({"s": [str(key) for key in keys]}))
        kept.delete(pa.record_batch({"k": keys - 20_000}))
    assert len(kept) == 20_000
    assert kept.rows()["k"].to_pylist() == [*range(180_000, 200_000)]
    assert kept.rows()["s"].to_pylist() == [str(key) for key in range(180_000, 200_000)]
    assert kept._store.capacity <= 131_072


def test_what_lies_under_a_null_is_no_part_of_a_key() -> None:
    kept = value_of(INT_VALUE, {"a": pa.int64(), "b": pa.struct([("c", pa.int64())])})
    for number in range(3):
        garbage = [None, pa.py_buffer(np.array([number, number]))]
        under = pa.Array.from_buffers(pa.int64(), 2, [pa.py_buffer(b"\0"), garbage[1]])
        inside = pa.Array.from_buffers(pa.int64(), 2, garbage)
        struct = pa.Array.from_buffers(pa.struct([("c", pa.int64())]), 2, [pa.py_buffer(b"\0")], children=[inside])
        kept.put(pa.record_batch({"a": under, "b": struct}), ints(n=[number, number]))
    assert kept.rows().to_pylist() == [{"a": None, "b": None, "n": 2}]


def test_strings_and_lists_that_are_overwritten_do_not_pile_up_and_no_value_is_copied_in_vain() -> None:
    kept = value_of({"s": pa.string(), "l": pa.list_(pa.int64())})
    for number in range(100):
        columns = {"s": [f"{number}-{key}" for key in range(100)], "l": [[number]] * 100}
        kept.put(ints(k=[*range(100)]), pa.record_batch(columns))
    text, nested = kept._store.buffers[1][1], kept._store.buffers[2][0]
    # Ten thousand values were put; a hundred are pointed at, and a thousand more may wait to be
    # squeezed out.
    assert text._rows <= 1300
    assert nested._rows <= 1300
    assert kept.rows().to_pylist() == [{"k": key, "s": f"99-{key}", "l": [99]} for key in range(100)]
    # A large first value is not copied for new keys when the overwritten ones are squeezed out.
    kept = value_of({"s": pa.string(), "l": pa.list_(pa.int64())})
    for keys, size in ((range(1), 10_000), *[(range(1, 101), 1)] * 12, (range(1, 121), 1)):
        kept.put(ints(k=[*keys]), pa.record_batch({"s": ["x" * size] * len(keys), "l": [[1] * size] * len(keys)}))
    text, nested = kept._store.buffers[1][1], kept._store.buffers[2][0]
    assert text._rows == nested._rows == 101 + 120
    assert int(text._offsets[text._rows]) < 11_000
    assert sum(len(array.flatten()) for array in nested._arrays) < 11_000
    sizes = {key: len(row["l"]) for key in range(121) if (row := kept.get_one(key))}
    assert sizes == {0: 10_000, **dict.fromkeys(range(1, 121), 1)}


def test_rows_whose_strings_no_array_holds_together_come_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = value_of({"s": pa.string()})
    keys = [*range(100)]
    kept.put(ints(k=keys), pa.record_batch({"s": ["x" * (key % 7) for key in keys]}))
    right = parts_module.put_together

    def narrow(kind: pa.DataType, raws: Iterator[Any], found: Any = None, hidden: Any = None) -> pa.Array:
        made = right(kind, raws, found, hidden)
        if pa.types.is_string(kind) and pc.sum(pc.binary_length(made)).as_py() > 30:
            raise pa.ArrowInvalid("input array too large")
        return made

    monkeypatch.setattr(parts_module, "put_together", narrow)
    for table in (kept.rows(), kept.changes.whole().select(["k", "s"])):
        assert table.to_pylist() == [{"k": key, "s": "x" * (key % 7)} for key in keys]
    kept.put(ints(k=[50]), pa.record_batch({"s": ["x" * 31]}))
    with pytest.raises(pa.ArrowInvalid, match="too large"):
        kept.rows()


def test_of_rows_with_the_same_key_the_last_one_counts() -> None:
    kept = value_of()
    kept.put(ints(k=[7, 8, 7, 9, 8, 7]), ints(n=[1, 2, 3, 4, 5, 6]))
    assert kept.rows().to_pylist() == [{"k": 7, "n": 6}, {"k": 8, "n": 5}, {"k": 9, "n": 4}]
    kept.put(ints(k=[9, 7, 9]), ints(n=[10, 11, 12]))
    assert kept.rows()["n"].to_pylist() == [11, 5, 12]


def test_one_key_at_a_time() -> None:
    kept = value_of({"n": pa.int64(), "s": pa.string()}, {"a": pa.string(), "b": pa.int32()})
    kept.put_one(("x", None), n=1)
    assert kept.get_one("x", None) == {"n": 1, "s": None}
    assert kept.get_one("x", 0) is None
    kept.delete_one("x", None)
    assert kept.get_one("x", None) is None
    with pytest.raises(InvalidInput, match="'x' is no key of"):
        kept.get_one("x")
    with pytest.raises(InvalidInput, match="are no value columns"):
        kept.put_one(("x", 1), m=1)


def test_a_state_of_keys_only_knows_which_are_there() -> None:
    kept = value_of({})
    kept.put_one((1,))
    kept.put_one((2,))
    kept.put_one((1,))
    assert kept.get(ints(k=[2, 3, 1]))[1].tolist() == [True, False, True]
    assert kept.rows().to_pylist() == [{"k": 1}, {"k": 2}]


AGGREGATES = {
    "total": pa.int64(),
    "low": pa.float64(),
    "high": pa.int32(),
    "rows": pa.int64(),
    "seen": pa.int64(),
    "note": pa.string(),
}
HOW = {"total": "sum", "low": "min", "high": "max", "rows": "count", "seen": "count"}


def test_accumulating_is_what_a_loop_does() -> None:
    kept, chance = value_of(AGGREGATES), random.Random(3)
    oracle: dict[int, dict[str, Any]] = {}
    schema = pa.schema([("k", pa.int64()), *((name, AGGREGATES[name]) for name in HOW if name != "rows")])
    for _ in range(40):
        given = [
            {
                "k": chance.randrange(15),
                "total": chance.choice([None, chance.randrange(99)]),
                "low": chance.choice([None, math.nan, chance.uniform(-9, 9)]),
                "high": chance.choice([None, chance.randrange(-99, 99)]),
                "seen": chance.choice([None, 1]),
            }
            for _ in range(chance.randrange(1, 20))
        ]
        columns = pa.RecordBatch.from_pylist(given, schema)
        kept.add(columns.select(["k"]), columns.drop_columns(["k"]), HOW)
        for row in given:
            old = oracle.setdefault(row["k"], dict.fromkeys(AGGREGATES) | {"rows": 0, "seen": 0})
            old["rows"] += 1
            old["seen"] += row["seen"] is not None
            if row["total"] is not None:
                old["total"] = (old["total"] or 0) + row["total"]
            if row["high"] is not None:
                old["high"] = row["high"] if old["high"] is None else max(old["high"], row["high"])
            if row["low"] is not None and (old["low"] is None or math.isnan(old["low"]) or row["low"] < old["low"]):
                old["low"] = row["low"]
    found = {row.pop("k"): spelt(row) for row in kept.rows().to_pylist()}
    assert found == {key: spelt(row) for key, row in oracle.items()}


def test_accumulating_goes_on_from_what_was_put() -> None:
    kept = value_of(AGGREGATES)
    put = pa.record_batch({"total": pa.array([5, None]), "low": [None, 2.0], "rows": [3, None], "note": ["a", "b"]})
    kept.put(ints(k=[1, 2]), put)
    more = pa.record_batch({"total": pa.array([7, 7, None]), "low": [9.0, 8.0, None]})
    kept.add(ints(k=[2, 1, 3]), more, {"total": "sum", "low": "min", "rows": "count"})
    found = [tuple(row[name] for name in ("k", "total", "low", "rows", "note")) for row in kept.rows().to_pylist()]
    assert found == [(1, 12, 8.0, 4, "a"), (2, 7, 2.0, 1, "b"), (3, None, None, 1, None)]


@pytest.mark.parametrize(
    ("column", "how"), [("note", "sum"), ("note", "max"), ("low", "count"), ("k", "sum"), ("total", "mean")]
)
def test_what_cannot_be_accumulated_is_refused_and_changes_nothing(column: str, how: str) -> None:
    kept = value_of(AGGREGATES)
    with pytest.raises(InvalidInput, match=column):
        kept.add(ints(k=[1]), ints(k=[1]), {column: how})
    assert len(kept) == 0


@pytest.mark.parametrize("how", [{"m": "sum"}, {"n": "count"}, {"n": "sum", "m": "max"}])
def test_accumulating_leaves_no_null_where_the_declaration_has_none(how: dict[str, str]) -> None:
    fields = [pa.field("n", pa.int64(), nullable=False), pa.field("m", pa.int64(), nullable=False)]
    kept = value_of(fields)
    with pytest.raises(InvalidInput, match="holds no nulls"):
        kept.add(ints(k=[1, 2]), ints(n=[1, 1], m=[1, None]), how)
    assert len(kept) == 0
    kept.add(ints(k=[1, 1]), ints(n=[1, None], m=[1, 2]), {"n": "count", "m": "sum"})
    assert kept.rows().to_pylist() == [{"k": 1, "n": 1, "m": 3}]


def test_update_reads_and_writes_with_one_call_and_a_failure_changes_nothing() -> None:
    kept = value_of()
    kept.put(ints(k=[1]), ints(n=[10]))

    def double(old: pa.RecordBatch, found: np.ndarray) -> pa.RecordBatch:
        return ints(n=[row["n"] * 2 if there else -1 for row, there in zip(old.to_pylist(), found, strict=True)])

    kept.update(ints(k=[2, 1]), double)
    assert kept.rows().to_pylist() == [{"k": 1, "n": 20}, {"k": 2, "n": -1}]
    with pytest.raises(ZeroDivisionError):
        kept.update(ints(k=[3]), lambda old, found: 1 // 0)
    assert len(kept) == 2


WRONG: dict[str, tuple[pa.RecordBatch, pa.RecordBatch]] = {
    "missing": (ints(x=[1]), ints(n=[1])),
    "unknown": (ints(k=[1]), ints(n=[1], x=[2])),
    "should be": (batch(k=(pa.string(), ["1"])), ints(n=[1])),
    "nulls": (ints(k=[1]), ints(n=[None])),
    "as many": (ints(k=[1, 2]), ints(n=[1])),
}


@pytest.mark.parametrize("what", WRONG)
def test_columns_that_contradict_the_declaration_are_refused_and_change_nothing(what: str) -> None:
    kept = value_of([pa.field("n", pa.int64(), nullable=False)])
    with pytest.raises(InvalidInput, match=what):
        kept.put(*WRONG[what])
    assert len(kept) == 0


def test_a_hash_that_nobody_registered_is_refused_before_there_is_a_state() -> None:
    unknown = Operator(OperatorId("op"), 1, 128, key_hash="nobody")
    with pytest.raises(InvalidInput, match="unknown key hash"):
        KeyedValue(unknown, declare.value_state("op", "v", keys=INT, values={}))


def test_more_keys_than_an_index_holds_are_refused_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "SLOTS_MAX", 2000)
    kept = value_of({})
    kept.put_one((1,))
    with pytest.raises(InvalidState, match=r"would have 2001 row keys, and 2000 is the most\. Raise the parallelism"):
        kept.add(ints(k=[*range(2001)]), ints(x=[0] * 2001), {})
    assert kept.rows().to_pylist() == [{"k": 1}]


def test_columns_of_narrower_types_and_without_nullable_ones_are_taken() -> None:
    kept = value_of({"n": pa.int64(), "s": pa.string()})
    kept.put(batch(more=(pa.bool_(), [True]), k=(pa.int8(), [5])), batch(s=(pa.large_string(), ["x"])))
    assert kept.rows().to_pylist() == [{"k": 5, "n": None, "s": "x"}]


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("seed", range(3))
def test_a_sum_that_leaves_its_column_is_refused_and_changes_nothing(bits: int, seed: int) -> None:
    """Random sums near both ends, beside those of Python, which have none."""
    draw = random.Random(seed)
    kind, limit = getattr(pa, f"int{bits}")(), 1 << bits - 1
    kept, sums, refused = value_of({"n": kind, "m": pa.int64()}), dict[int, int](), 0
    for _ in range(120):
        keys = [draw.randrange(4) for _ in range(draw.randrange(1, 5))]
        values = [draw.choice([None, 1, -1, limit // 2, -limit // 2, limit - 1, -limit]) for _ in keys]
        after = dict(sums)
        for key, value in zip(keys, values, strict=True):
            after[key] = after.get(key, 0) + (value or 0)
        batch = pa.record_batch({"n": pa.array(values, kind)})
        if all(-limit <= one < limit for one in after.values()):
            kept.add(ints(k=keys), batch, {"n": "sum"})
            sums = after
        else:
            refused += 1
            with pytest.raises(InvalidInput, match=f"a sum in column 'n' does not fit into int{bits}, so nothing"):
                kept.add(ints(k=keys), batch, {"n": "sum"})
        assert {row["k"]: row["n"] or 0 for row in kept.rows().to_pylist()} == sums
    assert 10 < refused < 110


def test_entries_keep_their_order() -> None:
    state = declare.union_state(
        "op", "u", columns=[pa.field("a", pa.int64(), nullable=False), pa.field("s", pa.string())]
    )
    entries = Entries(state)
    assert entries.rows().schema.names == ["a", "s"]
    for number in range(200):
        entries.append(ints(a=[number]))
    entries.append_one(a=-1, s="x")
    assert entries.rows()["a"].to_pylist() == [*range(200), -1]
    assert entries.rows()["a"].num_chunks < 100
    with pytest.raises(InvalidState, match="nulls"):
        entries.append(ints(a=[None]))
    with pytest.raises(InvalidInput, match="no value columns"):
        entries.append_one(b=1)
    with pytest.raises(InvalidInput, match=r"2\.5 is no int64"):
        entries.append_one(a=2.5)
    entries.replace(pa.table({"a": [5, 4], "s": ["p", None]}))
    assert entries.rows().to_pylist() == [{"a": 5, "s": "p"}, {"a": 4, "s": None}]
    entries.clear()
    assert len(entries) == 0


def histories() -> Iterator[list[tuple[int, ...]]]:
    for seed in range(3):
        chance = random.Random(seed)
        yield [tuple(chance.randrange(40) for _ in range(chance.randrange(1, 20))) for _ in range(20)]


def test_the_same_history_gives_the_same_order_however_it_is_cut_into_batches() -> None:
    for history in histories():
        tables = []
        for cut in (1, 1000):
            kept = value_of()
            keys = [key for part in history for key in part]
            for start in range(0, len(keys), cut):
                part = keys[start : start + cut]
                kept.put(ints(k=part), ints(n=part))
            tables.append(kept.rows().to_pylist())
        assert tables[0] == tables[1]
        assert [row["k"] for row in tables[0]] == [*dict.fromkeys(keys)]

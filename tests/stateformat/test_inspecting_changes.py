"""The change feed: what changed in a state from one checkpoint to another."""

from __future__ import annotations

import itertools
import pickle
import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pyarrow as pa
import pytest

from tests.data_world import same_rows
from tests.stateformat.changing_histories import KEYS, OWN, History, joined, random_history

SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.truth) for seed in range(2, 12))]


@pytest.fixture(scope="module")
def history_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], History]:
    folder = tmp_path_factory.mktemp("histories")
    return cache(lambda seed: random_history(str(folder / str(seed)), seed))


def without_id(changes: pa.Table) -> pa.Table:
    return changes.drop_columns(["_checkpoint_id"])


def counted(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(repr(sorted(row.items())) for row in rows)


def is_paired(changes: pa.Table, row_key: list[str]) -> bool:
    """Whether each update's rows stand next to each other, the earlier first."""
    rows = changes.select([*row_key, "_change"]).to_pylist()
    pairs = [(rows[at - 1], row) for at, row in enumerate(rows) if row["_change"] == "update_after"]
    befores = sum(row["_change"] == "update_before" for row in rows)
    return befores == len(pairs) and all(
        {**before, "_change": "update_after"} == after
        for before, after in pairs
        if before["_change"] != after["_change"]
    )


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_feed_equals_a_full_outer_join(history_of: Callable[[int], History], seed: int, kind: str) -> None:
    history = history_of(seed)
    newest = max(history.truth)
    pairs = [*itertools.combinations(range(1, newest + 1), 2)]
    pairs = [*random.Random(f"{seed}{kind}").sample(pairs, 2), (1, newest)]
    for start, end in pairs:
        found = history.store.changes("op", kind, start, end)
        before = history.rows(kind, start, as_of=end)
        wanted = joined(before, history.rows(kind, end, as_of=end), (*KEYS, *OWN[kind]))
        table = found.table()
        assert same_rows(without_id(table), wanted), (start, end)
        assert set(table["_checkpoint_id"].to_pylist()) <= {end}
        assert is_paired(table, [*KEYS, *OWN[kind]])
        parts = [pickle.loads(pickle.dumps(part)).table() for part in found.split(3)]
        assert len(parts) <= 3
        assert same_rows(pa.concat_tables(parts), table)


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_change_on_the_way_makes_the_last_of_the_first(
    history_of: Callable[[int], History], seed: int, kind: str
) -> None:
    history = history_of(seed)
    newest = max(history.truth)
    feed = history.store.changes("Operator", kind, 1, newest, every=True)
    rows = counted(history.rows(kind, 1, as_of=newest).to_pylist())
    seen = [0]
    for change in feed.table().to_pylist():
        seen.append(change.pop("_checkpoint_id"))
        gone = change.pop("_change") in ("delete", "update_before")
        text = repr(sorted(change.items()))
        rows[text] += -1 if gone else 1
        assert rows[text] >= 0
    assert seen == sorted(seen)
    assert +rows == counted(history.rows(kind, newest, as_of=newest).to_pylist())
    parts = pa.concat_tables(part.table() for part in feed.split(4))
    assert repr(parts.to_pylist()) == repr(feed.table().to_pylist())

"""Which keys, key groups and subtasks of a state have most rows or bytes: a document.

Theory of operation. Key groups and subtasks are counted from the manifest. Keys are counted from
their rows, exactly, in bounded memory: each batch is summed up by key at once, so a hot key is one
line per batch, however many rows it has. stateformat's rows come by key group, and a key has only
one: when there are too many sums, those of all groups but the last are complete, and only the
greatest of them are kept. Sums of one large group, and of other systems' rows, which come in any
order, are set aside in buckets by key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..documents import Document, Holdings, JsonRows, objects
from ..keys import key_group_count
from ..manifest import Ints, group_rows, integers, state_runs
from ..model import Capability, Kind, Mode, State
from ..reading import StateRows, Wanted
from ..schema import KEY_GROUP, row_schema
from ..segments import row_key_codes
from ..tables import HELD_BYTES, Spill, buckets_of, row_sizes, split_by_bucket, take_table

if TYPE_CHECKING:
    from ..reading import Checkpoint

ROWS: Final = "_rows"
BYTES: Final = "_bytes"
_MEASURES: Final = {"rows": ROWS, "bytes": BYTES}
_BUCKETS: Final = 128
_LEVELS_MAX: Final = 4
Progress = Callable[[int, int], None]
Seen = Callable[[int], None]


def top_document(
    checkpoint: Checkpoint,
    states: Sequence[State],
    *,
    by: str,
    limit: int,
    keys: bool = True,
    progress: Progress | None = None,
) -> list[Document]:
    """Return a document for each state, the largest first.

    ``by``: "rows" or "bytes". Key groups and subtasks are counted from the manifest: rows of all
    layers, stored bytes. Keys are read, with layers merged; their bytes are those of the values in
    memory. Without ``keys`` nothing is read. ``progress``: called with the rows read, and the
    total.

    Reading raises as ``ReadTask.batches`` does.
    """
    handles = checkpoint.handles if keys else checkpoint.outline
    holdings = Holdings(checkpoint.record, handles)
    runs = {key: handles.slice(start, stop - start) for key, start, stop in state_runs(handles)}
    none = handles.slice(0, 0)
    found = [
        _of_state(checkpoint, state, runs.get((state.operator, state.name), none), holdings, by, limit)
        for state in states
    ]
    total = sum(entry["rows"] or 0 for entry in found)
    done = 0
    for state, entry in zip(states, found, strict=True):
        entry["keys"] = None
        if keys and state.mode is Mode.KEYED and state.key_columns:
            seen = None if progress is None else _from(progress, done, total)
            entry["keys"] = _keys(checkpoint, state, by, limit, seen)
        done += entry["rows"] or 0
    return sorted(found, key=lambda entry: -(entry[by] or 0))


def _from(progress: Progress, done: int, total: int) -> Seen:
    return lambda rows: progress(min(done + rows, total), total)


def _of_state(
    checkpoint: Checkpoint, state: State, handles: pa.Table, holdings: Holdings, by: str, limit: int
) -> Document:
    """``handles``: those of the state."""
    operator = checkpoint.graph.operator(state.operator)
    known = holdings.document(state, {})
    # Rows of another system's checkpoint may not be counted.
    measure = "bytes" if known["rows"] is None else by
    subtasks: JsonRows = known["subtasks"]
    return {
        "operator": state.operator,
        "operator_name": operator.name,
        "state": state.name,
        "mode": state.mode.value,
        "kind": None if state.kind is None else state.kind.value,
        "key_columns": list(state.key_columns),
        "rows": known["rows"],
        "bytes": known["bytes"],
        "subtasks": {
            "count": operator.parallelism,
            "with_rows": len(subtasks),
            "skew": known["skew"] if measure == "rows" else _skew(subtasks.arrays["bytes"], operator.parallelism),
            "greatest": [_without_layers(entry) for entry in subtasks.greatest(limit, measure)],
        },
        "key_groups": _key_groups(state, handles, key_group_count(operator), measure, limit),
    }


def _without_layers(entry: Document) -> Document:
    return {name: value for name, value in entry.items() if name != "layers"}


def _key_groups(state: State, handles: pa.Table, count: int, measure: str, limit: int) -> Document | None:
    """Return the key groups with most; None if the handles do not count them."""
    if state.mode is not Mode.KEYED:
        return None
    mine = handles.filter(pc.greater(pc.fill_null(handles["rows"], 0), 0))
    if not mine.num_rows or mine["rows_per_group"].null_count:
        return None
    owner, group, rows = group_rows(mine)
    share = integers(mine["size_bytes"]) / np.maximum(1, integers(mine["segment_rows"]))
    stored = np.bincount(group, rows * share[owner], minlength=count)
    arrays: dict[str, Ints] = {
        "key_group": np.arange(len(stored)),
        "subtask": np.full(len(stored), -1),
        "rows": np.bincount(group, rows, minlength=count).astype(np.int64),
        "bytes": np.rint(stored).astype(np.int64),
    }
    arrays["subtask"][group] = integers(mine["subtask"])[owner]
    there = np.flatnonzero(arrays["rows"])
    listed = JsonRows(**{name: array[there] for name, array in arrays.items()})
    return {
        "count": count,
        "with_rows": len(there),
        "skew": _skew(arrays[measure], count),
        "greatest": listed.greatest(limit, measure),
    }


def _skew(values: Ints, count: int) -> float:
    """Return the ratio of the greatest to the mean of so many; 1.0 for nothing."""
    total = int(values.sum())
    return round(int(values.max()) * count / total, 2) if total else 1.0


def _keys(checkpoint: Checkpoint, state: State, by: str, limit: int, seen: Seen | None) -> Document:
    rows, measure = checkpoint.state(state), _MEASURES[by]
    even = even_keys(rows, measure)
    if even is not None:
        return {"each": even, "count": None, "rows": None, "bytes": None, "sum": None, "skew": 1.0, "greatest": []}
    by_group = Capability.KEY_GROUPS in checkpoint.capabilities
    found = hot_keys(rows, measure, limit, by_group=by_group, seen=seen)
    greatest = found.keys.select(list(state.key_columns))
    keys: list[Any] = objects(greatest.combine_chunks().to_batches(), limit)
    numbers = (found.keys[name].to_pylist() for name in (measure, ROWS, BYTES, "_key_group"))
    values, row_counts, sizes, groups = numbers
    total = found.rows if measure == ROWS else found.size_bytes
    return {
        "each": None,
        "count": found.key_count,
        "rows": found.rows,
        "bytes": found.size_bytes if measure == BYTES else None,
        "sum": None,
        "skew": round(values[0] * found.key_count / total, 2) if total else 1.0,
        "greatest": [
            {"key": key, "key_group": group, "rows": count, "bytes": size if measure == BYTES else None, "sum": None}
            for key, group, count, size in zip(keys, groups, row_counts, sizes, strict=True)
        ],
    }


class HotKeys(NamedTuple):
    """The greatest keys of a state, and sums over all of them."""

    keys: pa.Table
    """The key columns, ``_key_group``, ``_rows`` and ``_bytes``; the greatest first."""
    key_count: int
    """How many keys there are in total."""
    rows: int
    size_bytes: int


def even_keys(rows: StateRows, by: str) -> int | None:
    """Return how many ``rows`` or ``bytes`` every key has; None if keys differ. Reads nothing.

    A key of a value state has one row, and if no column varies in width, every key has the same
    number of bytes.
    """
    if rows.state.kind is not Kind.VALUE:
        return None
    width, varies = row_sizes(row_schema(rows.state).empty_table().columns)
    return 1 if by == ROWS else None if varies is not None else width


def hot_keys(rows: StateRows, by: str, limit: int, *, by_group: bool, seen: Seen | None = None) -> HotKeys:
    """Return the ``limit`` keys with most rows (``by`` is ``ROWS``) or bytes (``BYTES``).

    Bytes are those of the values, as Arrow has them in memory; values are read only for ``BYTES``,
    and only columns that vary in width. ``by_group``: the rows come by key group, as stateformat's
    do. ``seen`` is called with how many rows have been read. Of keys with equal counts, the first
    ones are returned.

    Reading raises as ``ReadTask.batches`` does.
    """
    keys = [*rows.state.key_columns]
    tables = _counted(rows, keys, by, seen)
    found = pa.table({name: pa.array([], pa.int64()) for name in (KEY_GROUP.name, *keys, ROWS, BYTES)})
    key_count = row_count = size_bytes = 0
    for table in tables if rows.state.kind is Kind.VALUE else _by_key(tables, keys, by_group=by_group):
        key_count += len(table)
        row_count += int(integers(table[ROWS]).sum())
        size_bytes += int(integers(table[BYTES]).sum())
        least = found[by][-1].as_py() if len(found) == limit else -1
        greater = take_table(table, np.flatnonzero(integers(table[by]) > least))
        both = pa.concat_tables([found, greater]) if len(found) else greater
        found = take_table(both, np.argsort(-integers(both[by]), kind="stable")[:limit])
    return HotKeys(found, key_count, row_count, size_bytes)


def _counted(rows: StateRows, keys: list[str], by: str, seen: Seen | None) -> Iterator[pa.Table]:
    """Yield the keys of all rows, with the counts of one row each."""
    schema = row_schema(rows.state)
    fixed = row_sizes(schema.empty_table().columns)[0]
    varying = [field.name for field in schema if row_sizes(pa.schema([field]).empty_table().columns)[1] is not None]
    sized = varying if by == BYTES else []
    done = 0
    for batch in rows.task.batches(wanted=Wanted((KEY_GROUP.name, *dict.fromkeys([*keys, *sized])))):
        table = pa.Table.from_batches([batch])
        more = row_sizes(table.select(sized).columns)[1] if sized else None
        size_bytes = np.full(len(table), fixed, np.int64) if more is None else more + fixed
        yield (
            table.select([KEY_GROUP.name, *keys])
            .append_column(ROWS, pa.array(np.ones(len(table), np.int64)))
            .append_column(BYTES, pa.array(size_bytes))
        )
        done += len(table)
        if seen is not None:
            seen(done)


def _by_key(tables: Iterable[pa.Table], keys: list[str], *, by_group: bool, level: int = 0) -> Iterator[pa.Table]:
    """Yield one row per key, with its sums."""
    held: list[pa.Table] = []
    held_bytes = 0
    with Spill[int]() as spill:
        for table in tables:
            held.append(_summed(table, keys))
            held_bytes += held[-1].nbytes
            if held_bytes <= HELD_BYTES:
                continue
            summed = _summed(pa.concat_tables(held), keys)
            if by_group and not spill.sizes:
                # The last group may continue.
                whole = integers(summed[KEY_GROUP.name]) != integers(table[KEY_GROUP.name])[-1]
                yield summed.filter(pa.array(whole))
                summed = summed.filter(pa.array(~whole))
            held, held_bytes = [summed], summed.nbytes
            if held_bytes > HELD_BYTES // 2 and level < _LEVELS_MAX:
                _set_aside(spill, summed, keys, level)
                held, held_bytes = [], 0
        if held:
            summed = _summed(pa.concat_tables(held), keys)
            if not spill.sizes:
                yield summed
                return
            _set_aside(spill, summed, keys, level)
        for bucket in sorted(spill.sizes):
            sums = (pa.Table.from_batches([batch]) for batch in spill.read(bucket))
            yield from _by_key(sums, keys, by_group=False, level=level + 1)


def _set_aside(spill: Spill[int], summed: pa.Table, keys: list[str], level: int) -> None:
    for bucket, rows in split_by_bucket(summed, buckets_of([summed[name] for name in keys], _BUCKETS, level)):
        spill.add(bucket, rows)


def _summed(table: pa.Table, keys: list[str]) -> pa.Table:
    """Return one row per key, in the order in which they come first."""
    codes = row_key_codes([table[name] for name in keys])
    count = int(codes.max(initial=-1)) + 1
    if count == len(table):
        return table
    first = np.full(count, -1, np.int64)
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)
    summed = take_table(table.select([KEY_GROUP.name, *keys]), first)
    for name in (ROWS, BYTES):
        sums = np.bincount(codes, integers(table[name]), minlength=count)
        summed = summed.append_column(name, pa.array(sums.astype(np.int64)))
    return summed

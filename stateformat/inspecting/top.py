"""Which keys, key groups and subtasks of a state have most rows or bytes: a document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow.compute as pc

from ..documents import Document, Holdings, JsonRows, objects
from ..keys import key_group_count
from ..manifest import Ints, integers, lists, one_chunk, spread, state_runs
from ..model import Mode, State
from .hot_keys import BYTES, ROWS, even_keys, hot_keys

if TYPE_CHECKING:
    import pyarrow as pa

    from ..reading import Checkpoint

_MEASURES: Final = {"rows": ROWS, "bytes": BYTES}
Progress = Callable[[int, int], None]


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
    reads = keys and checkpoint.system is not None
    handles = checkpoint.handles if reads else checkpoint.outline
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


def _from(progress: Progress, done: int, total: int) -> Callable[[int], None]:
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
    starts, ends, counts = lists(one_chunk(mine["rows_per_group"]))
    owner, nth = spread(ends - starts)
    group, rows = integers(mine["first_group"])[owner] + nth, counts[starts[owner] + nth]
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


def _keys(checkpoint: Checkpoint, state: State, by: str, limit: int, seen: Callable[[int], None] | None) -> Document:
    rows, measure = checkpoint.state(state), _MEASURES[by]
    even = even_keys(rows, measure)
    if even is not None:
        return {"each": even, "count": None, "rows": None, "bytes": None, "skew": 1.0, "greatest": []}
    found = hot_keys(rows, measure, limit, by_group=checkpoint.system is None, seen=seen)
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
        "skew": round(values[0] * found.key_count / total, 2) if total else 1.0,
        "greatest": [
            {"key": key, "key_group": group, "rows": count, "bytes": size if measure == BYTES else None}
            for key, group, count, size in zip(keys, groups, row_counts, sizes, strict=True)
        ],
    }

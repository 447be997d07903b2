"""States in a report: bounded lists for drawing, however many subtasks and key groups there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .. import words
from ..documents import Document, Holdings, JsonRows
from ..manifest import Ints, integers, lists, one_chunk, spread, state_runs
from ..model import Mode, State

if TYPE_CHECKING:
    import pyarrow as pa

    from ..reading import Checkpoint

BARS: Final = 128
"""Subtasks or key groups in a chart; with more, neighbors share a bar."""
GREATEST: Final = 5


def states_document(checkpoint: Checkpoint, record: Document, holdings: Holdings, handles: pa.Table) -> list[Document]:
    """Return each state as ``inspect`` shows it, with subtasks and key groups as bounded lists."""
    runs = {key: slice(start, stop) for key, start, stop in state_runs(handles)}
    found = []
    for state, declared in zip(checkpoint.states, record["states"], strict=True):
        document = holdings.document(state, declared)
        mine = runs.get((state.operator, state.name), slice(0, 0))
        document["subtasks"] = _subtasks(checkpoint, state, document)
        document["key_groups"] = _key_groups(checkpoint, state, handles.slice(mine.start, mine.stop - mine.start))
        found.append(document)
    return found


def _subtasks(checkpoint: Checkpoint, state: State, document: Document) -> Document | None:
    """Return what each subtask has; None if no subtask owns the state."""
    owned: JsonRows = document["subtasks"]
    operator = checkpoint.graph.by_uid.get(state.operator)
    if operator is None or state.mode in (Mode.COORDINATOR, Mode.COMMITTABLES):
        return None
    measure = "bytes" if document["rows"] is None else "rows"
    values = np.zeros(operator.parallelism, np.int64)
    for first, last in operator.done.ranges:
        values[first : last + 1] = -1
    index = owned.arrays["subtask"]
    known = (index >= 0) & (index < operator.parallelism)
    values[index[known]] = owned.arrays[measure][known]
    return {"measure": measure, **_bars(values), "greatest": owned.greatest(GREATEST, measure) if len(owned) else []}


def _bars(values: Ints) -> Document:
    """Return at most :data:`BARS` values, each the greatest of its neighbors; null means no
    value.
    """
    per_bar = max(1, -(-len(values) // BARS))
    starts = np.arange(0, len(values), per_bar)
    shown = np.maximum.reduceat(values, starts).tolist() if len(values) else []
    return {
        "count": len(values),
        "per_bar": per_bar,
        "values": [None if value < 0 else value for value in shown],
    }


def _key_groups(checkpoint: Checkpoint, state: State, handles: pa.Table) -> Document | None:
    """Return the rows of each key group; None if they are unknown, or there are no groups."""
    operator = checkpoint.graph.by_uid.get(state.operator)
    if operator is None or state.mode is not Mode.KEYED or not operator.max_parallelism or not handles.num_rows:
        return None
    column: Any = one_chunk(handles["rows_per_group"])
    starts, ends, rows = lists(column)
    counts = ends - starts
    if not counts.sum():
        return None
    owner, place = spread(counts)
    group = integers(handles["first_group"])[owner] + place
    sound = (group >= 0) & (group < operator.max_parallelism)
    values = np.bincount(group[sound], rows[starts[owner] + place][sound], operator.max_parallelism).astype(np.int64)
    greatest = np.argsort(-values, kind="stable")[:GREATEST].tolist()
    return {
        **_bars(values),
        "empty": int((values == 0).sum()),
        "skew": words.skew(values.tolist()),
        "greatest": [{"group": number, "rows": int(values[number])} for number in greatest if values[number]],
    }

"""A sink driven by hand, step by step, as a task and a driver would."""

from __future__ import annotations

import copy
from typing import Any

import pyarrow as pa

from stateformat.backends.dataflow import Prepared

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])
PERMIT: Any = object()


class Context:
    """The place of a sink."""

    def __init__(self, uid: str = "out", subtask: int = 0) -> None:
        self.uid = uid
        self.subtask = subtask


def batch_of(*numbers: int) -> pa.RecordBatch:
    texts = [None if n % 3 == 0 else f"日 {n}" for n in numbers]
    return pa.record_batch([pa.array(numbers, pa.int64()), pa.array(texts, pa.string())], schema=SCHEMA)


def subtask_of(sink: Any, subtask: int = 0, uid: str = "out") -> Any:
    """A subtask's own copy of a prototype, open."""
    opened = copy.copy(sink)
    opened.open(Context(uid, subtask))
    return opened


def prepared(sink: Any, checkpoint_id: int = 1, attempt: str = "a" * 32) -> pa.Table | None:
    """What a snapshot has of a sink, with the columns that the runtime adds."""
    rows = sink.prepare_commit(Prepared(checkpoint_id, attempt))
    if rows is None:
        return None
    assert rows.schema == sink.committable_columns
    ids = pa.array([checkpoint_id] * rows.num_rows, pa.int64())
    attempts = pa.array([attempt] * rows.num_rows, pa.string())
    return rows.append_column("_checkpoint_id", ids).append_column("_attempt_id", attempts)

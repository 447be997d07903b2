"""A sink driven by hand, step by step, as tasks and a driver would."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from stateformat.backends.dataflow import Prepared

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])
PERMIT: Any = object()
ATTEMPTS = ("a" * 32, "b" * 32, "c" * 32)


class Context:
    """The place of a sink."""

    def __init__(self, uid: str = "out", subtask: int = 0) -> None:
        self.uid = uid
        self.subtask = subtask


class Crash(Exception):
    """The process is gone."""


def batch_of(*numbers: int, word: str = "日") -> pa.RecordBatch:
    texts = [None if n % 3 == 0 else f"{word} {n}" for n in numbers]
    return pa.record_batch([pa.array(numbers, pa.int64()), pa.array(texts, pa.string())], schema=SCHEMA)


def subtask_of(sink: Any, subtask: int = 0, uid: str = "out") -> Any:
    """A subtask's own copy of a prototype, open."""
    opened = copy.copy(sink)
    opened.open(Context(uid, subtask))
    return opened


def snapshot(sink: Any, checkpoint_id: int = 1, attempt: str = ATTEMPTS[0]) -> pa.Table | None:
    """What a snapshot has of a sink, with the columns that the runtime adds."""
    rows = sink.prepare_commit(Prepared(checkpoint_id, attempt))
    if rows is None:
        return None
    assert rows.schema == sink.committable_columns
    ids = pa.array([checkpoint_id] * rows.num_rows, pa.int64())
    attempts = pa.array([attempt] * rows.num_rows, pa.string())
    return rows.append_column("_checkpoint_id", ids).append_column("_attempt_id", attempts)


def prepared(sink: Any, checkpoint_id: int = 1, attempt: str = ATTEMPTS[0]) -> pa.Table:
    """The same of a sink that has rows."""
    rows = snapshot(sink, checkpoint_id, attempt)
    assert rows is not None
    return rows


def prepared_of(
    sink: Any,
    *rows: int | pa.RecordBatch,
    word: str = "日",
    checkpoint_id: int = 1,
    attempt: str = ATTEMPTS[0],
    **place: Any,
) -> pa.Table:
    """What a new subtask prepares of these numbers or batches."""
    opened = subtask_of(sink, **place)
    for batch in rows if isinstance(rows[0], pa.RecordBatch) else [batch_of(*rows, word=word)]:  # type: ignore[arg-type]
        opened.process(batch, 0)
    return prepared(opened, checkpoint_id, attempt)


def run_to_the_end(
    sink: Any,
    look: Callable[[Sequence[pa.Table]], object],
    failures: type[Exception],
    *,
    counts: tuple[int, int],
    subtasks: int = 1,
    failed: Callable[[], object] = lambda: None,
    ended: Callable[[], object] = lambda: None,
) -> int:
    """One job of two checkpoints, begun again whenever it fails; how often it did.

    ``counts``: rows of each checkpoint. ``look`` checks that what is seen is that of the
    checkpoints committed so far. ``failed`` is called after a failure, ``ended`` when only checks
    follow.
    """
    published: list[pa.Table] = []
    count = 0
    while len(published) < 2:
        try:
            if published:
                sink.commit(PERMIT, published[-1])
            sink.clean("out", len(published), None)
            opened = [subtask_of(sink, number) for number in range(subtasks)]
            while len(published) < 2:
                checkpoint_id = len(published) + 1
                look(published)
                for number, each in enumerate(opened):
                    for n in rows_of(checkpoint_id, counts)[number::subtasks]:
                        each.process(batch_of(n), 0)
                tables = [snapshot(each, checkpoint_id, f"{count:032x}") for each in opened]
                look(published)
                published.append(pa.concat_tables(table for table in tables if table is not None))
                sink.commit(PERMIT, published[-1])
        except failures:
            count += 1
            failed()
    ended()
    sink.commit(PERMIT, published[-1])
    sink.clean("out", 2, published[-1])
    look(published)
    return count


def rows_of(checkpoint_id: int, counts: tuple[int, int]) -> range:
    return range(10 * checkpoint_id, 10 * checkpoint_id + counts[checkpoint_id - 1])


def rows_until(checkpoints: int, counts: tuple[int, int]) -> list[int]:
    """The rows of the first checkpoints."""
    return [n for each in range(1, checkpoints + 1) for n in rows_of(each, counts)]


def check_every_crash(run: Callable[[int], int], least: int) -> None:
    """``run(n)`` dies at its step n and returns how many steps there are; -1: it does not die."""
    steps = run(-1)
    assert steps > least
    for crash_at in range(1, steps + 1):
        try:
            run(crash_at)
        except Exception as error:
            raise AssertionError(f"after a crash at step {crash_at}") from error

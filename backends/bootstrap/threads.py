"""The engine of a bootstrap in this process. Rows pass through a temporary file."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from typing import Any, Final, TypeAlias

import pyarrow as pa

from stateformat.graph import brief
from stateformat.snapshot import WriteContext
from stateformat.tables import Spill, cut, prefetch

from ..rewrite import DISTRIBUTE_BYTES, Workers, gathered
from .inputs import StateInput, stream_of
from .work import Written, conformed, deal, write_place

Dealt: TypeAlias = list[tuple[int, pa.RecordBatch]]
_PIECE_ROWS: Final = 1 << 20
_AHEAD: Final = 2


class ThreadEngine:
    """Writes rows that export the Arrow C stream, and reads each batch once."""

    def __repr__(self) -> str:
        return brief(self)

    def schema(self, where: str, rows: Any) -> tuple[pa.Schema, Any]:
        """Return the columns of the rows, and what :meth:`write` reads."""
        return stream_of(where, rows)

    def write(
        self, context: WriteContext, input: StateInput, rows: Iterator[pa.RecordBatch], done: Callable[[int], None]
    ) -> list[Written]:
        """Write a state; return what each subtask with rows has of it, in order."""
        context = context.only(input.state.operator)
        buckets: Spill[int] = Spill()
        with buckets, closing(prefetch(_deals(rows, input), workers=_AHEAD, depth=_AHEAD + 1)) as dealt:
            for parts in dealt:
                for subtask, batch in parts:
                    buckets.add(subtask, pa.Table.from_batches([batch]))
            with Workers() as workers:
                return workers.run_buckets(
                    buckets, lambda subtask, mine: write_place(context, input, subtask, mine, done, in_order=True)
                )


def _deals(rows: Iterator[pa.RecordBatch], input: StateInput) -> Generator[Callable[[], Dealt], None, None]:
    """Calls that deal the rows, a few megabytes each."""
    first = turn = 0
    for batch in rows:
        for table in gathered(cut(batch, _PIECE_ROWS, DISTRIBUTE_BYTES), DISTRIBUTE_BYTES):
            yield partial(_dealt, table, input, first, turn)
            first, turn = first + len(table), turn + 1


def _dealt(rows: pa.Table, input: StateInput, first: int, turn: int) -> Dealt:
    return list(deal(conformed(rows, input, first), input, turn))

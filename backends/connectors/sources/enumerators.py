"""Dealing splits: the enumerator that the ready-made sources share, and checks that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import brief
from stateformat.tables import table_from_python

from ...dataflow.api import NoSplit, Split, SplitEnumerator


def not_null(**columns: pa.DataType) -> pa.Schema:
    """Columns of these types, none of which holds nulls."""
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


class ListEnumerator(SplitEnumerator):
    """Assigns the splits of a list, each once, in order.

    ``splits`` is called when the first split is requested, and never after a restore: the
    enumerator keeps what it has not assigned, and a reader's checkpoints keep what it was assigned.
    So later changes to the origin of the list do not matter.

    By default the next subtask that asks gets the next split, which suits splits that end. With
    ``shared_out``, split number *n* goes to subtask *n* mod parallelism: the first reader to ask
    would otherwise get all splits that do not end.

    Keeps ``number`` (int64, the index in the list), ``id`` (utf8) and ``payload`` (binary) of the
    remaining splits. Raises ``InvalidInput`` for two splits with the same id.
    """

    columns = not_null(number=pa.int64(), id=pa.string(), payload=pa.binary())

    def __init__(self, splits: Callable[[], Iterable[Split]], *, shared_out: bool = False) -> None:
        self._make = splits
        self._shared_out = shared_out
        self._left: dict[int, Split] | None = None

    def __repr__(self) -> str:
        return brief(self)

    @property
    def left(self) -> dict[int, Split]:
        if self._left is None:
            self._left = dict(enumerate(self._make()))
            seen: set[str] = set()
            for split in self._left.values():
                if split.id in seen:
                    raise InvalidInput(f"two splits have the id {split.id!r}. Each needs its own")
                seen.add(split.id)
        return self._left

    def next_split(self, subtask: int, parallelism: int) -> Split | NoSplit:
        for number in self.left:
            if not self._shared_out or number % parallelism == subtask:
                return self.left.pop(number)
        return NoSplit.NEVER

    def snapshot(self) -> pa.Table:
        return self.keeping(self.left)

    @classmethod
    def keeping(cls, left: Mapping[int, Split]) -> pa.Table:
        """Return the snapshot of an enumerator with these splits left, by index in the list."""
        rows = ({"number": number, "id": split.id, "payload": split.payload} for number, split in left.items())
        return table_from_python(rows, cls.columns, "the splits")

    def restore(self, rows: pa.Table) -> None:
        left = sorted(rows.select(self.columns.names).to_pylist(), key=lambda row: row["number"])
        self._left = {row["number"]: Split(row["id"], row["payload"]) for row in left}


def check_at_least(name: str, value: int, least: int) -> None:
    """Raise ``InvalidInput`` unless the option is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInput(f"{name} is {value!r}. It takes a whole number, at least {least}")


def check_position(what: str, split: Split, rows: int) -> None:
    """Raise ``InvalidInput`` for a split of ``rows`` rows that is to be read beyond its end."""
    if not 0 <= split.position <= rows:
        raise InvalidInput(
            f"split {split.id!r} is to be read from row {split.position} and {what} has {rows}. It has changed since "
            "the checkpoint was taken. Put back what was there, or start the job afresh",
            kind=ErrorKind.SCHEMA_MISMATCH,
        )

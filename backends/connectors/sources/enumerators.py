"""Dealing splits: the enumerator that the ready-made sources share.

Theory of operation. What a :class:`ListEnumerator` deals is known when it is first asked, and in what order. It keeps what it
has not dealt; a split that was dealt is its reader's, whose checkpoints keep it. So a restore needs neither the list nor the
place that it came from, and what has come to that place since does not matter.

Two ways to deal. *In turn*: whoever asks gets the next one; right for bounded splits, which end. *Shared out*: split number
*n* is for subtask *n* mod parallelism; right for splits that do not end, of which the first reader to ask would get all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput

from ...dataflow.api import NoSplit, Split, SplitEnumerator


class ListEnumerator(SplitEnumerator):
    """Deals the splits of a list, each once, in order.

    ``splits`` is called when the first one is asked for, and never after a restore: only then are files looked at.
    ``shared_out``: each subtask has splits of its own (see above); then nobody waits for another's.
    Keeps ``number`` (int64, the place in the list), ``id`` (utf8) and ``payload`` (binary) of what is left. Raises
    ``InvalidInput`` for two splits of one id; the fault of whoever made the list.
    """

    columns = pa.schema(
        [
            pa.field("number", pa.int64(), nullable=False),
            pa.field("id", pa.string(), nullable=False),
            pa.field("payload", pa.binary(), nullable=False),
        ]
    )

    def __init__(self, splits: Callable[[], Iterable[Split]], *, shared_out: bool = False) -> None:
        self._make = splits
        self._shared_out = shared_out
        self._left: dict[int, Split] | None = None

    @property
    def left(self) -> dict[int, Split]:
        """What has not been dealt, by its place in the list."""
        if self._left is None:
            self._left = dict(enumerate(self._make()))
            seen: set[str] = set()
            for split in self._left.values():
                if split.id in seen:
                    raise InvalidInput(f"two splits have the id {split.id!r}; each needs its own")
                seen.add(split.id)
        return self._left

    def next_split(self, subtask: int, parallelism: int) -> Split | NoSplit:
        """The next one that is this reader's; ``NEVER`` when there is none left."""
        for number in self.left:
            if not self._shared_out or number % parallelism == subtask:
                return self.left.pop(number)
        return NoSplit.NEVER

    def snapshot(self) -> pa.Table:
        """What has not been dealt, in order."""
        left = self.left
        columns = [list(left), [split.id for split in left.values()], [split.payload for split in left.values()]]
        return pa.table(
            [pa.array(values, field.type) for values, field in zip(columns, self.columns, strict=True)],
            schema=self.columns,
        )

    def restore(self, rows: pa.Table) -> None:
        """Take back what was left."""
        left = sorted(rows.select(self.columns.names).to_pylist(), key=lambda row: row["number"])
        self._left = {row["number"]: Split(row["id"], row["payload"]) for row in left}


def check_at_least(name: str, value: int, least: int) -> None:
    """Raise ``InvalidInput`` for a number that is too small, or none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInput(f"{name} is {value!r}; it is a whole number, at least {least}")


def check_position(what: str, split: Split, rows: int) -> None:
    """Raise ``InvalidInput`` where a reader is to go on behind the end of a split of ``rows`` rows."""
    if not 0 <= split.position <= rows:
        raise InvalidInput(
            f"split {split.id!r} is to be read from row {split.position} and {what} has {rows}; it is not what it was when "
            "the checkpoint was taken. Put back what was there, or start the job afresh",
            kind=ErrorKind.SCHEMA_MISMATCH,
        )


__all__ = ["ListEnumerator", "check_at_least", "check_position"]

"""Rows, or changes of rows, kept for a document: a list while they are few, else a file."""

from __future__ import annotations

import tempfile
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.documents import json_texts, lines_of
from stateformat.segments import one_array
from stateformat.tables import cut, take_table

from .json_text import LONG, JsonTexts

_HELD_BYTES: Final = 4 << 20
_ROWS: Final = 16_384
_TEXT_BYTES: Final = 4 << 20
"""Bytes of rows that become text at once; the text takes several times as much memory."""


class Kept:
    """JSON objects, one a line, in memory or in a temporary file. A context.

    ``most``: how many are kept, about; the others are counted. All if None.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._file = tempfile.SpooledTemporaryFile(_HELD_BYTES, prefix="stateformat-")  # noqa: SIM115 - see __exit__
        self.count = 0

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    @property
    def document(self) -> JsonTexts | list[Any]:
        """What was added, in order; to be written while the context lasts."""
        texts = JsonTexts(self._file)
        return texts if self.count > LONG and self._most is None else list(texts)

    def add(self, rows: pa.RecordBatch) -> None:
        """Keep rows as objects."""
        for piece in cut(rows, _ROWS, _TEXT_BYTES):
            if not self._is_full:
                self._write(json_texts(piece.slice(0, self._most)))
            self.count += len(piece)

    def add_changes(self, rows: pa.Table, change: str) -> None:
        """Keep changes: objects of ``change`` (insert, delete, update), ``before`` and ``after``.

        ``change``: the column that says what a row is; both rows of an update follow each other.
        """
        # Both rows of an update are one entry, also where a piece ends between them.
        kinds = one_array(rows[change])
        first = np.flatnonzero(pc.not_equal(kinds, "update_after").to_numpy(zero_copy_only=False))
        values = rows.drop_columns([change])
        parts = max(1, -(-len(first) // _ROWS), -(-rows.nbytes // _TEXT_BYTES))
        for at in np.array_split(first, min(parts, max(1, len(first)))):
            if not self._is_full:
                self._write(_changes(values, kinds, at[: self._most]))
            self.count += len(at)

    @property
    def _is_full(self) -> bool:
        return self._most is not None and self.count >= self._most

    def _write(self, texts: pa.Array) -> None:
        self._file.write(memoryview(lines_of(texts)))


def _changes(values: pa.Table, kinds: pa.Array, at: np.ndarray[Any, Any]) -> pa.Array:
    """The entries whose first rows stand ``at`` these places."""
    kind = kinds.take(pa.array(at))
    is_update = pc.equal(kind, "update_before")
    lasts = pc.add(pa.array(at), is_update.cast(pa.int64()))
    none = pa.scalar(None, pa.int64())
    before = pc.if_else(pc.equal(kind, "insert"), none, pa.array(at))
    after = pc.if_else(pc.equal(kind, "delete"), none, lasts)
    names = pc.replace_substring(kind, "update_before", "update")
    members = [
        '{"change": "',
        names,
        '", "before": ',
        _texts(values, before),
        ', "after": ',
        _texts(values, after),
        "}",
    ]
    return pc.binary_join_element_wise(*members, "")


def _texts(values: pa.Table, at: pa.Array) -> pa.Array:
    """Rows as objects; null where there is none."""
    there = at.drop_null()
    rows = take_table(values, there.to_numpy()).combine_chunks().to_batches()
    texts = json_texts(rows[0]) if rows else pa.array([], pa.string())
    places = pc.subtract(pc.cumulative_sum(pc.is_valid(at).cast(pa.int64())), 1)
    return pc.fill_null(texts.take(pc.if_else(pc.is_valid(at), places, pa.scalar(None, pa.int64()))), "null")

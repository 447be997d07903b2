"""Which columns and rows of a state are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ErrorKind, InvalidInput
from ..model import known_names

if TYPE_CHECKING:
    from .merge import KeyFilter

# Values of these types, nulls too, are equal exactly if Arrow says so.
_EXACT: Final = (
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_string,
    pa.types.is_binary,
    pa.types.is_date,
    pa.types.is_timestamp,
    pa.types.is_decimal,
)


@dataclass(frozen=True)
class Wanted:
    """Some columns of a state, in this order, and the rows that have one of some keys."""

    columns: tuple[str, ...] | None = None
    """All if None. May be empty: then batches tell only how many rows there are."""
    keys: pa.Table | None = None
    """The key columns, normalized as in segments. All rows if None."""

    def schema_of(self, schema: pa.Schema) -> pa.Schema:
        """Return the wanted columns of a schema."""
        return schema if self.columns is None else pa.schema([schema.field(name) for name in self.columns])

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the wanted columns of the wanted rows."""
        return batch if self.columns is None else batch.select(list(self.columns))

    def rows(self, table: pa.Table) -> pa.Table:
        """Return the rows with one of the keys. Null equals null, NaN equals NaN, -0.0 is 0.0."""
        if self.keys is None or not len(table):
            return table
        names = self.keys.column_names
        if len(names) == 1 and any(is_kind(table[names[0]].type) for is_kind in _EXACT):
            return table.filter(pc.is_in(table[names[0]], self.keys[names[0]].combine_chunks()))
        import numpy as np

        from ..segments import row_key_codes

        suspects = np.flatnonzero(self._filter.may_have(table))
        if not len(suspects):
            return table.slice(0, 0)
        rows = table.take(pa.array(suspects))
        both = pa.concat_tables([rows.select(names).replace_schema_metadata(), self.keys])
        codes = row_key_codes(both.columns)
        return rows.filter(pa.array(np.isin(codes[: len(rows)], codes[len(rows) :])))

    @cached_property
    def _filter(self) -> KeyFilter:
        from .merge import KeyFilter

        assert self.keys is not None
        return KeyFilter(self.keys, self.keys.column_names)


EVERYTHING: Final = Wanted()


def chosen_columns(where: str, known: Sequence[str], columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that a caller selects from ``known``; ``where`` begins the messages.

    Raises ``InvalidInput`` for no columns, unknown and repeated ones, and text in place of a list.
    """
    if isinstance(columns, str):
        raise InvalidInput(f"columns are the text {columns!r}; give a list of names: [{columns!r}]")
    if not columns:
        raise InvalidInput(f"no column of {where} is named; name at least one")
    for name in columns:
        if name not in known:
            raise InvalidInput(
                f"{where} has no column {name!r}; {known_names(known, name)}",
                kind=ErrorKind.SCHEMA_MISMATCH,
                column=name,
            )
    if len(set(columns)) < len(columns):
        raise InvalidInput(f"columns {', '.join(columns)} of {where} name one twice; name each once")
    return tuple(columns)


def checked_parts(parts: int) -> int:
    """Return ``parts``. Raises ``InvalidInput`` if it is less than one."""
    if parts < 1:
        raise InvalidInput(f"rows cannot be split into {parts} parts; give at least 1")
    return parts

"""Join a stream with a small table that is broadcast to every subtask.

The table arrives on input 1, by broadcast. Every subtask keeps it in broadcast state and builds an
index over its keys. With ``wait``, stream rows that arrive before the table has ended are kept in
an even-split list. Broadcast state also records that the table has ended: ``end_input`` is not
called again after a restore, so a restored subtask must know. All subtasks agree about it, because
they take their snapshots at the same position of the broadcast channels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import Operator as Place, OperatorId, brief
from stateformat.keys import normalize_key_column
from stateformat.segments import one_array
from stateformat.states import value_state
from stateformat.tables import BATCH_BYTES, cut

from ...state import KeyedValue
from ..api import BroadcastState, Descriptor, Operator, OperatorContext, Output, SplitList
from .aggregate import in_batches, plain
from .row_steps import check_columns

_SMALL_ROWS: Final = 32_768


class BroadcastJoin(Operator):
    """Adds to each row of a stream the columns of the row with the same key in a small table.

    Example::

        join = BroadcastJoin("carrier", columns=["name"])
        named = flights.apply(join, airlines.broadcast(), uid="airlines")

    - ``on``: the key columns, one name or several, or a mapping stream column → table column.
    - ``columns``: the columns of the table to add; by default all but its keys.
    - ``how``: ``"inner"`` drops stream rows without a match, ``"left"`` keeps them with nulls. A
      null key has no match. Among table rows with equal keys the last one counts, so keys must be
      unique if they arrive over several channels.
    - ``wait`` True: stream rows are kept in the state ``held`` until the table has ended, so the
      result does not depend on timing. False: they are joined with the table rows so far.

    Emits the columns of the stream, then those added. Further states: ``table``, and
    ``table_ended``, which has a row once the table has ended. Raises ``InvalidInput`` for columns
    that are missing, of different types, or duplicate (when the dataflow is built), and for a table
    that is not broadcast (when the job starts).
    """

    broadcast_inputs = (1,)

    def __init__(
        self,
        on: str | Sequence[str] | Mapping[str, str],
        *,
        columns: Sequence[str] | None = None,
        how: str = "inner",
        wait: bool = True,
    ) -> None:
        names = [on] if isinstance(on, str) else on
        self._on = dict(names) if isinstance(names, Mapping) else {name: name for name in names}
        if not self._on or how not in ("inner", "left"):
            raise InvalidInput(f"a join on {on!r}, {how!r}. Give a key column, and 'inner' or 'left'.")
        self._columns = None if columns is None else list(columns)
        self._inner = how == "inner"
        self._wait = wait
        self._output = pa.schema([])
        self._added: list[str] = []
        self._kept: list[pa.Field] = []
        self._ended = False
        self._index: KeyedValue
        self._small: dict[str, pa.Array] | None = None

    def __repr__(self) -> str:
        return brief(self, *self._on)

    def states(self, *inputs: pa.Schema) -> list[Descriptor]:
        """``table``, and with ``wait`` also ``table_ended`` and ``held``."""
        self._learn(*inputs)
        states: list[Descriptor] = [BroadcastState("table", self._kept)]
        if self._wait:
            held = [plain(field) for field in inputs[0]]
            states += [BroadcastState("table_ended", {"ended": pa.bool_()}), SplitList("held", held)]
        return states

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Return the columns of the stream, then those added."""
        self._learn(*inputs)
        return self._output

    def _learn(self, *inputs: pa.Schema) -> None:
        if len(inputs) != 2:
            raise InvalidInput(f"a broadcast join has two inputs, a stream and a table, and is given {len(inputs)}")
        stream, table = inputs
        check_columns(stream, self._on, "the stream of a join")
        check_columns(table, [*self._on.values(), *(self._columns or ())], "the table of a join")
        for left, right in self._on.items():
            if stream.field(left).type != table.field(right).type:
                raise InvalidInput(
                    f"a join of {left!r}, which is {stream.field(left).type}, with {right!r}, which is "
                    f"{table.field(right).type}. Cast one before.",
                    kind=ErrorKind.SCHEMA_MISMATCH,
                )
        keys = set(self._on.values())
        self._added = [name for name in table.names if name not in keys] if self._columns is None else self._columns
        used = Counter([*self._on.values(), *self._added])
        repeated = [name for name, count in used.items() if count > 1]
        if repeated:
            raise InvalidInput(
                f"a join on the table's {', '.join(self._on.values())} that adds {', '.join(self._added)} uses "
                f"{repeated} more than once. Name each column of the table once (a key's value is in the stream)."
            )
        twice = sorted(set(self._added) & set(stream.names))
        if twice:
            raise InvalidInput(
                f"stream and table both have {twice}. Rename one with Select, or name the columns to add."
            )
        self._kept = [plain(table.field(name)) for name in dict.fromkeys([*self._on.values(), *self._added])]
        self._output = pa.schema(
            [*(plain(field) for field in stream), *(plain(table.field(name)) for name in self._added)]
        )

    def open(self, context: OperatorContext) -> None:
        """Build the table's index, and find out whether the table has ended."""
        super().open(context)
        fields = {field.name: field for field in self._kept}
        keys, added = ([fields[name] for name in names] for names in (self._on.values(), self._added))
        declared = value_state("join", "table", keys=keys, values=added)
        self._index = KeyedValue(Place(OperatorId("join"), 1, 1), declared)
        self._small = None
        self._table_bytes = 0
        for batch in context.entries("table").rows().to_batches():
            self._take(batch)
        self._ended = self._wait and len(context.entries("table_ended")) > 0

    def _take(self, batch: pa.RecordBatch) -> None:
        """Put rows of the table into the index, except those with a null key: nothing matches."""
        keys = batch.select(list(self._on.values()))
        if any(column.null_count for column in keys.columns):
            known = reduce(pc.and_, (column.is_valid() for column in keys.columns))
            batch, keys = batch.filter(known), keys.filter(known)
        self._index.put(keys, batch.select(self._added))
        self._table_bytes += batch.nbytes
        self._small = None

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        """Join rows of the stream, or hold them back; take rows of the table."""
        if input == 1:
            kept = batch.select([field.name for field in self._kept])
            self.context.entries("table").append(kept)
            self._take(kept)
            return None
        if self._wait and not self._ended:
            self.context.entries("held").append(batch)
            return None
        return self._parts(batch)

    def _parts(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield the joined rows, in parts small enough that the added columns stay small."""
        added_bytes = self._table_bytes // max(1, len(self._index))
        for part in cut(batch, max(1, BATCH_BYTES // max(1, added_bytes)), BATCH_BYTES):
            yield self._joined(part)

    def _joined(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if len(self._on) == 1 and len(self._index) <= _SMALL_ROWS and not pa.types.is_nested(self._kept[0].type):
            return self._joined_with_few(batch)
        added, found = self._index.get(batch.select(list(self._on)).rename_columns(list(self._on.values())))
        columns = added.columns
        if self._inner and not found.all():
            partners = pa.array(found)
            batch, columns = batch.filter(partners), [column.filter(partners) for column in columns]
        return pa.RecordBatch.from_arrays([*batch.columns, *columns], schema=self._output)

    def _joined_with_few(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """As :meth:`_joined`, for few keys: there Arrow's index per batch is faster than ours."""
        if self._small is None:
            rows = self._index.rows()
            self._small = {name: one_array(rows[name]) for name in rows.column_names}
        [(stream, table)] = self._on.items()
        places = pc.index_in(normalize_key_column(batch.column(stream)), value_set=self._small[table], skip_nulls=True)
        if self._inner and places.null_count:
            batch, places = batch.filter(places.is_valid()), places.drop_null()
        added = [self._small[name].take(places) for name in self._added]
        return pa.RecordBatch.from_arrays([*batch.columns, *added], schema=self._output)

    def end_input(self, input: int) -> Iterator[pa.RecordBatch]:
        """Join the stream rows that were held back, once the table has ended."""
        if input != 1 or not self._wait:
            return
        self._ended = True
        self.context.entries("table_ended").replace(pa.record_batch({"ended": pa.array([True])}))
        entries = self.context.entries("held")
        held = entries.rows()
        entries.clear()
        for batch in in_batches(held):
            yield from self._parts(batch)

    def snapshot(self) -> None:
        """Remove rows of the table that never match: those replaced later or with a null key."""
        entries = self.context.entries("table")
        if len(entries) > len(self._index):
            entries.replace(self._index.rows())

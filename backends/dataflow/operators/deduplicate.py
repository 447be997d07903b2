"""The first row of every key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from stateformat.graph import brief
from stateformat.segments import row_key_codes

from ..api import Operator, ValueState
from .aggregate import key_names, plain
from .row_steps import check_columns


class Deduplicate(Operator):
    """Lets the first row of each key pass, and drops every other one for ever.

    Example::

        once = orders.key_by("order_id").apply(Deduplicate("order_id"), uid="once")

    ``keys`` are the columns that its input is keyed by, in that order. The state ``seen`` has a row
    for each key that ever came and never shrinks.
    """

    def __init__(self, keys: str | Sequence[str]) -> None:
        self._keys = key_names(keys)

    def __repr__(self) -> str:
        return brief(self, *self._keys)

    def states(self, *inputs: pa.Schema) -> list[ValueState]:
        """``seen``: the keys, each with the column ``seen``, which is true."""
        check_columns(inputs[0], self._keys, "removing duplicates")
        return [ValueState("seen", [plain(inputs[0].field(name)) for name in self._keys], {"seen": pa.bool_()})]

    def process(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch | None:  # noqa: ARG002 - there is one
        """Drop what was seen before, in this batch too."""
        if not batch.num_rows:
            return None
        keys = batch.select(self._keys)
        _, first = np.unique(row_key_codes(keys.columns), return_index=True)
        rows = pa.array(np.sort(first))
        keys, batch = keys.take(rows), batch.take(rows)
        seen = self.context.value_state("seen")
        _, found = seen.get(keys)
        if found.all():
            return None
        if found.any():
            new = pa.array(~found)
            keys, batch = keys.filter(new), batch.filter(new)
        seen.put(keys, pa.record_batch({"seen": pa.repeat(True, keys.num_rows)}))
        return batch

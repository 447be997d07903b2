"""The harness of operators, as the tests of the ready-made ones want it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from stateformat.backends.dataflow import Operator
from stateformat.backends.dataflow.testing import OperatorHarness
from stateformat.states import as_schema


def driven_by(operator: Operator, *inputs: pa.Schema) -> OperatorHarness:
    """A harness whose first input is keyed by what the operator's states are keyed by."""
    operator.output_schema(*inputs)
    keyed = [as_schema(state.keys).names for state in operator.states(*inputs) if hasattr(state, "keys")]
    return OperatorHarness(operator, *inputs, key_by={0: keyed[0]} if keyed else {})


def again(harness: OperatorHarness) -> OperatorHarness:
    """Another one that goes on from a snapshot; what came out stays behind."""
    return OperatorHarness.restore(harness.snapshot())


def rows_of(table: pa.Table | Iterable[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    """Rows as tuples, sorted as text."""
    table = table if isinstance(table, pa.Table) else pa.Table.from_batches(list(table))
    return sorted(zip(*(column.to_pylist() for column in table.columns), strict=True), key=repr)

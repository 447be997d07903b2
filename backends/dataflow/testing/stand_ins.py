"""The surroundings of a harness: a dataflow whose sources do nothing, and stores."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import pyarrow as pa

from stateformat.errors import InvalidInput
from stateformat.states import as_schema
from stateformat.store import CheckpointStore
from stateformat.tables import table_from_python

from ...storage import MemoryStorage
from ..api import NoSplit, Operator, Source, Split, SplitEnumerator, TwoPhaseCommitSink
from ..flow import Dataflow

KeyBy: TypeAlias = "str | Sequence[str] | Mapping[int, Sequence[str]]"
Rows: TypeAlias = "pa.RecordBatch | pa.Table | Iterable[Mapping[str, Any]]"

JOB: Final = "harness"
OUTPUT: Final = "harness-output"
_numbers = itertools.count(1)


@dataclass(frozen=True)
class OperatorSetup:
    """An operator and how it is used in its dataflow."""

    prototype: Operator
    inputs: tuple[pa.Schema, ...]
    key_by: KeyBy
    parallelism: int
    max_parallelism: int | None
    uid: str


class _NoSplits(SplitEnumerator):
    columns = pa.schema([("split", pa.string())])

    def next_split(self, subtask: int, parallelism: int) -> Split | NoSplit:  # noqa: ARG002
        return NoSplit.NEVER

    def snapshot(self) -> pa.Table:
        return as_schema(self.columns).empty_table()

    def restore(self, rows: pa.Table) -> None:
        pass


class _Hand(Source):
    """Stands for an input; nothing is read from it."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def enumerator(self) -> SplitEnumerator:
        return _NoSplits()

    def read(self, split: Split, context: object) -> Any:  # noqa: ARG002
        return iter(())


class _Collect(Operator):
    """Stands behind the operator, so that what it emits goes somewhere."""

    def process(self, batch: pa.RecordBatch, input: int) -> None:
        pass


def flow_of(setup: OperatorSetup) -> Dataflow:
    """The dataflow of an operator alone."""
    flow = Dataflow(JOB)
    streams = []
    for number, schema in enumerate(setup.inputs):
        stream = flow.source(_Hand(schema), uid=f"harness-input-{number}")
        key_by = setup.key_by.get(number, ()) if isinstance(setup.key_by, Mapping) else setup.key_by
        columns = (key_by,) if isinstance(key_by, str) else tuple(key_by)
        if number in setup.prototype.broadcast_inputs:
            stream = stream.broadcast()
        else:
            stream = stream.key_by(*columns) if columns else stream.rebalance()
        streams.append(stream)
    stream = flow.apply(
        setup.prototype,
        *streams,
        uid=setup.uid,
        parallelism=setup.parallelism,
        max_parallelism=setup.max_parallelism,
        chain=False,
    )
    if not isinstance(setup.prototype, TwoPhaseCommitSink) and stream.schema.names:
        stream.rebalance().apply(_Collect(), uid=OUTPUT, chain=False)
    return flow


def batches_of(rows: Rows, schema: pa.Schema) -> list[pa.RecordBatch]:
    """Rows as batches of an input's schema. ``InvalidInput`` for other columns or types."""
    if isinstance(rows, pa.RecordBatch):
        rows = pa.Table.from_batches([rows])
    if not isinstance(rows, pa.Table):
        rows = table_from_python(rows, schema, "the rows")
    names = sorted({*rows.column_names} ^ {*schema.names})
    if names:
        raise InvalidInput(f"the rows differ from the input in the columns {names}; the input has {schema.names}")
    try:
        found: list[pa.RecordBatch] = rows.select(schema.names).cast(schema).to_batches()
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise InvalidInput(f"the rows do not have the types of the input, {schema.to_string()}: {error}") from error
    return found


def new_store(like: CheckpointStore | None) -> CheckpointStore:
    """A store in memory, gone with its last user; a copy of another one if that is given."""
    name = f"operator-harness-{next(_numbers)}"
    storage = MemoryStorage(name)
    if like is not None:
        for item in like.storage.list(""):
            storage.create(item.path, like.storage.read(item.path).to_pybytes())
    store = CheckpointStore(storage)
    weakref.finalize(store, MemoryStorage.reset, name)
    return store

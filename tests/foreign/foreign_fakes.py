"""Foreign checkpoints in memory: a source over rows given as Python values, to test what reads it.

``FakeSource`` deals rows to key groups and subtasks by the operator's key hash, as a real one has
them. Its files are the parts' paths, all of which exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.backends.foreign.source import Level, Note, Part, Progress
from stateformat.findings import Finding
from stateformat.graph import JobGraph, Operator
from stateformat.keys import DEFAULT_KEY_HASH, key_group_range, key_groups, key_hash
from stateformat.model import (
    AttemptId,
    CheckpointId,
    CheckpointKind,
    JobId,
    ManifestRef,
    Mode,
    Record,
    State,
    Totals,
)
from stateformat.schema import has_key_groups, segment_schema
from stateformat.states import declare

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class FakeSource:
    """A :class:`ForeignSource` over rows; picklable.

    ``rows``: by (operator, state). Rows of states without keys name their ``subtask``. ``hashed``:
    whether rows are dealt by the operator's key hash; otherwise by Python's order, one after
    another, as for a hash that nobody knows. ``moved``: by how many key groups each row lies beside
    its own, to forge exchanged files.
    """

    goes_on_from_copies: ClassVar[bool] = False

    record: Record
    rows: Mapping[tuple[str, str], Rows]
    notes: tuple[Note, ...] = ()
    hashed: bool = True
    moved: int = 0
    counts_rows: bool = False
    """Whether the metadata says how many rows a part has."""
    problems: tuple[Finding, ...] = ()
    _tables: dict[Any, pa.Table] = field(default_factory=dict, compare=False, repr=False)

    @property
    def parts(self) -> list[Part]:
        return sorted(self._parts(), key=lambda part: (part.operator, part.state, part.subtask or 0))

    def _parts(self) -> Iterator[Part]:
        for state in self.record.states:
            operator = self.record.graph.operator(state.operator)
            if state.mode is Mode.COORDINATOR:
                yield self._part(state, None)
                continue
            for subtask in range(operator.parallelism):
                if subtask in operator.done:
                    continue
                part = self._part(state, subtask)
                if has_key_groups(state):
                    ceiling = operator.max_parallelism or 1
                    first, last = key_group_range(subtask, parallelism=operator.parallelism, max_parallelism=ceiling)
                    part = part._replace(first_group=first, last_group=last)
                yield part

    def _part(self, state: State, subtask: int | None) -> Part:
        count = len(self._table(state).filter(self._mask(state, subtask)))
        rows = count if self.counts_rows else None
        return Part(state.operator, state.name, subtask, 100 * count, f"{state.operator}/{subtask}", rows)

    def used_files(self) -> int:
        return len(self.parts)

    def group_rows(self, part: Part) -> npt.NDArray[np.int64] | int:
        rows = pa.Table.from_batches(self.read(part), schema=self._schema(part))
        if part.first_group is None or part.last_group is None:
            return len(rows)
        groups = rows["_key_group"].to_numpy() - part.first_group
        return np.bincount(groups, minlength=part.last_group - part.first_group + 1).astype(np.int64)

    def read(
        self, part: Part, first_group: int | None = None, last_group: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        state = self.record.state(part.operator, part.state)
        rows = self._table(state).filter(self._mask(state, part.subtask)).select(self._schema(part).names)
        if first_group is not None and last_group is not None:
            group = rows["_key_group"]
            rows = rows.filter(pc.and_(pc.greater_equal(group, first_group), pc.less_equal(group, last_group)))
        yield from rows.to_batches(max_chunksize=7)

    def check(self, level: Level, progress: Progress) -> Iterable[Finding]:
        progress(1, 1)
        return self.problems

    def _schema(self, part: Part) -> pa.Schema:
        return segment_schema(self.record.state(part.operator, part.state))

    def _mask(self, state: State, subtask: int | None) -> pa.ChunkedArray:
        column = self._table(state)["subtask"]
        if not has_key_groups(state):
            return column.is_null() if subtask is None else pc.equal(column, subtask)
        operator = self.record.graph.operator(state.operator)
        ceiling = operator.max_parallelism or 1
        first, last = key_group_range(subtask or 0, parallelism=operator.parallelism, max_parallelism=ceiling)
        groups = self._table(state)["_key_group"]
        return pc.and_(pc.greater_equal(groups, first), pc.less_equal(groups, last))

    def _table(self, state: State) -> pa.Table:
        """The rows of a state, by key group, and the subtask that each names."""
        place = (state.operator, state.name)
        if place not in self._tables:
            schema = segment_schema(state)
            given = self.rows.get(place, ())
            subtasks = pa.array([row.get("subtask") for row in given], pa.int32())
            columns = [pa.array([row.get(item.name) for row in given], item.type) for item in schema]
            table = pa.table([*columns, subtasks], schema=schema.append(pa.field("subtask", pa.int32())))
            if has_key_groups(state):
                groups = self._groups(state, table)
                table = table.set_column(0, schema.field(0), pa.array(groups)).take(np.argsort(groups, kind="stable"))
            self._tables[place] = table
        return self._tables[place]

    def _groups(self, state: State, table: pa.Table) -> npt.NDArray[np.int32]:
        operator = self.record.graph.operator(state.operator)
        ceiling = operator.max_parallelism or 1
        if not self.hashed:
            return (np.arange(len(table)) % ceiling).astype(np.int32)
        hashes = key_hash(operator.key_hash or DEFAULT_KEY_HASH)([table[name] for name in state.key_columns])
        return (key_groups(hashes, ceiling) + self.moved).astype(np.int32) % np.int32(ceiling)


def fake_record(
    operators: Iterable[Operator],
    states: Iterable[State],
    *,
    checkpoint_id: int = 7,
    job_id: str = "query-1",
    job_name: str = "",
    properties: Mapping[str, str] | None = None,
) -> Record:
    """The record of a foreign checkpoint, without edges and without a manifest."""
    return Record(
        checkpoint_id=CheckpointId(checkpoint_id),
        attempt_id=AttemptId("f" * 32),
        kind=CheckpointKind.CHECKPOINT,
        job_id=JobId(job_id),
        job_name=job_name,
        graph=JobGraph(tuple(operators)),
        states=tuple(states),
        manifest=ManifestRef("", 0, "", 0),
        totals=Totals(),
        created_at_us=1_700_000_000_000_000,
        properties=dict(properties or {}),
    )


WORDS = [f"word {i}" for i in range(50)]


def spark_like(partitions: int = 5, **changes: Any) -> FakeSource:
    """An aggregation and a deduplication of a Structured Streaming query that reads files."""
    window = pa.struct([pa.field("start", pa.timestamp("us", "UTC")), pa.field("end", pa.timestamp("us", "UTC"))])
    counts = declare.value_state(
        "operator-0",
        "default",
        keys={"window": window, "word": pa.string()},
        values={"count": pa.int64(), "sum": pa.float64()},
    )
    seen = declare.value_state("operator-1", "default", keys={"word": pa.string()}, values={"present": pa.bool_()})
    operators = [
        Operator(uid, partitions, partitions, name=name, key_hash=DEFAULT_KEY_HASH)
        for uid, name in (("operator-0", "stateStoreSave"), ("operator-1", "dedupe"))
    ]
    record = fake_record(
        operators,
        [counts, seen],
        checkpoint_id=3,
        job_id="5f0e9a66-0000-4000-8000-000000000001",
        properties={
            "spark.query_id": "5f0e9a66-0000-4000-8000-000000000001",
            "spark.batch": "2",
            "spark.watermark_ms": "1700000000000",
            "spark.offsets.0": '{"logOffset":2}',
        },
    )
    rows = {
        ("operator-0", "default"): [
            {
                "window": {"start": 3_600_000_000 * (i % 3), "end": 3_600_000_000 * (i % 3 + 1)},
                "word": word,
                "count": i,
                "sum": i / 4,
            }
            for i, word in enumerate(WORDS)
        ],
        ("operator-1", "default"): [{"word": word, "present": True} for word in WORDS],
    }
    return replace(FakeSource(record, rows, counts_rows=True), **changes)


def flink_like(key_hash_name: str = DEFAULT_KEY_HASH, **changes: Any) -> FakeSource:
    """A job of three operators, one of which has every kind of keyed state; all run."""
    value = pa.struct([pa.field("count", pa.int64()), pa.field("total", pa.float64())])
    key = {"key": pa.string()}
    states = [
        declare.even_split_state("source", "SourceReaderState", columns={"value": pa.binary()}),
        declare.coordinator_state("source", "coordinator", columns={"value": pa.binary()}),
        declare.value_state("counts", "accState", keys=key, values={"value": value}),
        declare.map_state("counts", "perDay", keys=key, map_key=pa.int64(), values={"value": pa.int64()}),
        declare.list_state("counts", "last", keys=key, values={"value": pa.string()}),
        declare.timers("counts", "_timer_state/event_user-timers", keys=key),
        declare.broadcast_state("counts", "rules", columns={"key": pa.string(), "value": pa.int64()}),
        declare.even_split_state("sink", "writer", columns={"value": pa.binary()}),
    ]
    operators = [
        Operator("source", 2, 128, key_hash=key_hash_name, coordinator=True),
        Operator("counts", 3, 128, name="Counts", key_hash=key_hash_name),
        Operator("sink", 2, 128, key_hash=key_hash_name),
    ]
    rows: dict[tuple[str, str], Rows] = {
        ("source", "SourceReaderState"): [{"value": bytes([i]), "subtask": i % 2} for i in range(5)],
        ("source", "coordinator"): [{"value": b"enumerator"}],
        ("counts", "accState"): [{"key": word, "value": {"count": i, "total": i / 2}} for i, word in enumerate(WORDS)],
        ("counts", "perDay"): [
            {"key": word, "_map_key": day, "value": i * day} for i, word in enumerate(WORDS) for day in range(i % 3)
        ],
        ("counts", "last"): [
            {"key": word, "_index": n, "value": str(i * n)} for i, word in enumerate(WORDS) for n in range(i % 4)
        ],
        ("counts", "_timer_state/event_user-timers"): [
            {"key": word, "_timestamp": i * 1000, "_tag": "event/user-timers"} for i, word in enumerate(WORDS)
        ],
        ("counts", "rules"): [{"key": "a", "value": 1, "subtask": subtask} for subtask in range(3)],
        ("sink", "writer"): [{"value": b"x", "subtask": 0}],
    }
    notes = (
        Note("opaque", "source/SourceReaderState", "the state of the source is kept as it is, byte for byte"),
        Note("renamed", "counts/accState", "the second column 'value' is called 'value_2'"),
    )
    record = fake_record(
        operators, states, checkpoint_id=12, job_id="flink-job", job_name="words", properties={"flink.version": "6"}
    )
    return replace(FakeSource(record, rows, notes), **changes)

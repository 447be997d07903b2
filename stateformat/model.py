"""The values of a checkpoint: ids as types, operators, edges, the job graph, states, the record.

Everything here is frozen, compared by value, and knows nothing of bytes (``codec``) or of files (``segment``). A
:class:`JobGraph` serves three times: as the graph of a record, as the topology that a checkpoint is to be restored into,
and as what a dataflow compiles to. Checks of values live beside the values; they raise ``InvalidInput`` at the first
fault, because a caller made it. What can be wrong in *stored* checkpoints is collected by ``validation`` instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, NewType, TypeAlias

from stateformat.errors import ErrorKind, InvalidInput

CheckpointId = NewType("CheckpointId", int)
"""1 … 2⁵³ − 1, without gaps along a chain."""
AttemptId = NewType("AttemptId", str)
"""128 random bits as 32 hexadecimal digits: one try at publishing an id."""
WriteId = NewType("WriteId", str)
"""The same, for one opened segment."""
OperatorId: TypeAlias = str
"""The uid that the user gave; survives every change of the graph. No type of its own, for users write it as text."""
JobId = NewType("JobId", str)

MAX_CHECKPOINT_ID = 2**53 - 1


def new_attempt_id() -> AttemptId:
    """A fresh attempt id."""
    return AttemptId(os.urandom(16).hex())


def new_write_id() -> WriteId:
    """A fresh write id."""
    return WriteId(os.urandom(16).hex())


class Mode(StrEnum):
    """How a state is dealt to another parallelism (SPEC.md section 3.6)."""

    KEYED = "keyed"
    EVEN_SPLIT = "even_split"
    UNION = "union"
    BROADCAST = "broadcast"
    COORDINATOR = "coordinator"
    COMMITTABLES = "committables"
    PROGRESS = "progress"
    IN_FLIGHT = "in_flight"


PER_SUBTASK_MODES = frozenset({Mode.KEYED, Mode.EVEN_SPLIT, Mode.UNION, Mode.BROADCAST, Mode.PROGRESS, Mode.IN_FLIGHT})
"""Modes of which every running subtask reports a handle, even with no rows."""


class Kind(StrEnum):
    """Kinds of keyed state; they differ in their row key (SPEC.md section 5.3)."""

    VALUE = "value"
    MAP = "map"
    LIST = "list"
    TIMERS = "timers"


class Partitioner(StrEnum):
    """How records choose their channel on an edge."""

    FORWARD = "forward"
    RESCALE = "rescale"
    REBALANCE = "rebalance"
    HASH = "hash"
    BROADCAST = "broadcast"

    @property
    def all_to_all(self) -> bool:
        """Whether every upstream subtask reaches every downstream one (else POINTWISE)."""
        return self not in (Partitioner.FORWARD, Partitioner.RESCALE)


class Status(StrEnum):
    """What an operator has come to, derived from its subtasks (FLIP-147)."""

    RUNNING = "running"
    PARTIALLY_FINISHED = "partially_finished"
    FULLY_FINISHED = "fully_finished"


class CheckpointKind(StrEnum):
    """How a checkpoint came to be."""

    CHECKPOINT = "checkpoint"
    SAVEPOINT = "savepoint"
    RESCALE = "rescale"
    REWRITE = "rewrite"
    ROLLBACK = "rollback"


class StopMode(StrEnum):
    """FLIP-34's TERMINATE is ``drain``, its SUSPEND is ``no_drain``."""

    DRAIN = "drain"
    NO_DRAIN = "no_drain"


@dataclass(frozen=True, slots=True)
class SubtaskSet:
    """A set of subtask indexes as sorted, disjoint, non-adjacent, inclusive ranges."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, indexes: Iterable[int]) -> SubtaskSet:
        """The set of these indexes, in any order, repeated or not."""
        ranges: list[tuple[int, int]] = []
        for index in sorted(set(indexes)):
            if ranges and ranges[-1][1] == index - 1:
                ranges[-1] = (ranges[-1][0], index)
            else:
                ranges.append((index, index))
        return cls(tuple(ranges))

    @classmethod
    def all(cls, parallelism: int) -> SubtaskSet:
        """Every subtask of an operator."""
        return cls(((0, parallelism - 1),))

    def __contains__(self, index: int) -> bool:
        return any(first <= index <= last for first, last in self.ranges)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.ranges)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __iter__(self) -> Iterator[int]:
        for first, last in self.ranges:
            yield from range(first, last + 1)

    def __or__(self, other: SubtaskSet) -> SubtaskSet:
        return SubtaskSet.of([*self, *other])

    def __str__(self) -> str:
        return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in self.ranges)


@dataclass(frozen=True, slots=True)
class Operator:
    """A node of the graph.

    ``max_parallelism`` is None only in a topology, where it means *derived*: the saved one is adopted, or the default
    of ``key_groups.default_max_parallelism``. ``key_hash`` likewise None or a registered name. ``finished`` and
    ``finishing`` are facts of a checkpoint and empty in a topology. ``pinned`` is a wish of a topology: the chain must
    not be broken up.
    """

    uid: OperatorId
    parallelism: int
    max_parallelism: int | None = None
    name: str = ""
    key_hash: str | None = None
    chain: str | None = None
    finished: SubtaskSet = SubtaskSet()
    finishing: SubtaskSet = SubtaskSet()
    coordinator: bool = False
    pinned: bool = False

    @property
    def done(self) -> SubtaskSet:
        """Finished and finishing subtasks together."""
        return self.finished | self.finishing

    @property
    def status(self) -> Status:
        """Derived: fully finished when every subtask is finished or finishing."""
        if not (self.finished or self.finishing):
            return Status.RUNNING
        count = len(self.finished) + len(self.finishing)
        return Status.FULLY_FINISHED if count >= self.parallelism else Status.PARTIALLY_FINISHED

    @property
    def display_name(self) -> str:
        """The human name, or the uid where none was given."""
        return self.name or self.uid


@dataclass(frozen=True, slots=True)
class Edge:
    """A connection. ``input`` is the index of the input of ``target`` that it feeds."""

    id: str
    source: OperatorId
    target: OperatorId
    partitioner: Partitioner = Partitioner.REBALANCE
    input: int = 0
    key_columns: tuple[str, ...] = ()
    feedback: bool = False


@dataclass(frozen=True)
class JobGraph:
    """Operators and edges. Order of operators is the user's; stateless operators stand in it too."""

    operators: tuple[Operator, ...]
    edges: tuple[Edge, ...] = ()

    @cached_property
    def by_uid(self) -> Mapping[OperatorId, Operator]:
        """Operators by uid."""
        return {operator.uid: operator for operator in self.operators}

    @cached_property
    def by_edge(self) -> Mapping[str, Edge]:
        """Edges by id."""
        return {edge.id: edge for edge in self.edges}

    def operator(self, uid: str) -> Operator:
        """The operator of a uid; ``InvalidInput`` (kind ``UNKNOWN_OPERATOR``) where there is none."""
        found = self.by_uid.get(OperatorId(uid))
        if found is None:
            raise InvalidInput(
                f"no operator {uid!r} in the job graph; it has {', '.join(self.by_uid) or 'none'}",
                kind=ErrorKind.UNKNOWN_OPERATOR,
                operator=uid,
            )
        return found

    def inputs(self, uid: str) -> tuple[Edge, ...]:
        """Edges into an operator, feedback edges left out, in order of definition."""
        return tuple(edge for edge in self.edges if edge.target == uid and not edge.feedback)

    def with_operators(self, change: Mapping[OperatorId, Operator]) -> JobGraph:
        """The same graph with some operators replaced, by uid."""
        return replace(self, operators=tuple(change.get(op.uid, op) for op in self.operators))

    def at(
        self,
        parallelism: int | None = None,
        *,
        per_operator: Mapping[str, int] | None = None,
        max_parallelism: int | None = None,
    ) -> JobGraph:
        """The topology "the same job at another parallelism", with no subtask finished.

        ``parallelism`` is for every operator that is not fully finished, ``per_operator`` goes before it; max
        parallelism stays derived (adopted from the checkpoint) unless it is given. Ranges are checked by the planner.
        """
        chosen = dict(per_operator or {})
        for uid in chosen:
            self.operator(uid)
        for number in (parallelism, max_parallelism, *chosen.values()):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
                raise InvalidInput(f"{number!r} is no parallelism; give an integer", kind=ErrorKind.INVALID_PARALLELISM)
        return replace(
            self,
            operators=tuple(
                replace(
                    op,
                    parallelism=chosen.get(
                        op.uid,
                        op.parallelism if parallelism is None or op.status is Status.FULLY_FINISHED else parallelism,
                    ),
                    max_parallelism=max_parallelism,
                    finished=SubtaskSet(),
                    finishing=SubtaskSet(),
                )
                for op in self.operators
            ),
        )


@dataclass(frozen=True, slots=True)
class Field:
    """A column of a state (SPEC.md section 3.6): ``type`` is a type of section 3.7, as ``schema`` parses it.

    ``type`` is a primitive's name, or ``("struct", fields)``, ``("list", field)``, ``("map", key field, value field)``.
    ``default`` is text.
    """

    id: int
    name: str
    type: FieldType
    nullable: bool = True
    default: str | None = None


FieldType = str | tuple[str, Field] | tuple[str, Field, Field] | tuple[str, tuple[Field, ...]]


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """The fields of a state under one schema id, in column order."""

    id: int
    fields: tuple[Field, ...]


@dataclass(frozen=True)
class State:
    """The declaration of one state of one operator, with every schema that a handle may still name."""

    operator: OperatorId
    name: str
    mode: Mode
    schemas: tuple[SchemaVersion, ...]
    kind: Kind | None = None
    key_columns: tuple[str, ...] = ()
    edge: str | None = None
    last_field_id: int = 0

    @property
    def current(self) -> SchemaVersion:
        """The newest schema: what is written now and what readers are given unless they ask otherwise."""
        return self.schemas[-1]

    @cached_property
    def by_schema_id(self) -> Mapping[int, SchemaVersion]:
        """Schemas by id."""
        return {schema.id: schema for schema in self.schemas}

    @property
    def row_key(self) -> tuple[str, ...]:
        """Columns of the row key (SPEC.md section 5.3); empty for modes without keys."""
        extra = {Kind.MAP: ("_map_key",), Kind.LIST: ("_index",), Kind.TIMERS: ("_timestamp", "_tag")}
        return self.key_columns + (extra.get(self.kind, ()) if self.kind else ())


class Handle(NamedTuple):
    """One row of the manifest (SPEC.md section 4.1), column for column: some rows of one segment, owned by one subtask."""

    operator: str
    state: str
    mode: str
    subtask: int | None
    layer: int
    edge: str | None
    schema_id: int
    path: str | None = None
    row_start: int = 0
    rows: int = 0
    segment_rows: int = 0
    size_bytes: int = 0
    uncompressed_bytes: int = 0
    footer_bytes: int = 0
    digest: bytes | None = None
    footer_digest: bytes | None = None
    first_group: int | None = None
    last_group: int | None = None
    rows_per_group: list[int] | None = None
    inline: bytes | None = None


class ParentRef(NamedTuple):
    """A checkpoint by id and attempt: what a child names and a publisher proves."""

    checkpoint_id: CheckpointId
    attempt_id: AttemptId


@dataclass(frozen=True, slots=True)
class Stop:
    """The job stops at this checkpoint, by a request."""

    mode: StopMode
    request: str


@dataclass(frozen=True, slots=True)
class FormerStatus:
    """What a partially finished operator was before a rescale made all of its subtasks running."""

    uid: OperatorId
    parallelism: int
    finished: SubtaskSet
    finishing: SubtaskSet


@dataclass(frozen=True, slots=True)
class RescaledFrom:
    """Which checkpoint was dealt out anew (SPEC.md section 6.4)."""

    source: ParentRef
    operators: tuple[FormerStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the manifest: ``segments`` and ``bytes`` count distinct segments, inline ones among them."""

    handles: int = 0
    rows: int = 0
    segments: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class ManifestRef:
    """Where the manifest lies and how to tell that it is the one."""

    path: str
    size_bytes: int
    digest: str
    uncompressed_bytes: int


@dataclass(frozen=True)
class Record:
    """The publication record (SPEC.md section 3), as a value."""

    checkpoint_id: CheckpointId
    attempt_id: AttemptId
    kind: CheckpointKind
    job_id: JobId
    graph: JobGraph
    states: tuple[State, ...]
    manifest: ManifestRef
    totals: Totals
    created_at_us: int
    job_name: str = ""
    writer: str = ""
    parent: ParentRef | None = None
    stop: Stop | None = None
    rescaled_from: RescaledFrom | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    required_features: tuple[str, ...] = ()
    optional_features: tuple[str, ...] = ()

    @property
    def ref(self) -> ParentRef:
        """This checkpoint, as a child would name it."""
        return ParentRef(self.checkpoint_id, self.attempt_id)

    @cached_property
    def by_state(self) -> Mapping[tuple[str, str], State]:
        """States by (operator, name)."""
        return {(state.operator, state.name): state for state in self.states}

    def state(self, operator: str, name: str) -> State:
        """One state; ``InvalidInput`` (kind ``UNKNOWN_STATE``) where there is none."""
        found = self.by_state.get((operator, name))
        if found is None:
            self.graph.operator(operator)
            names = ", ".join(state.name for state in self.states if state.operator == operator)
            raise InvalidInput(
                f"operator {operator!r} has no state {name!r}; it has {names or 'none'}",
                kind=ErrorKind.UNKNOWN_STATE,
                operator=operator,
                state=name,
            )
        return found

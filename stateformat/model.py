"""The values of a checkpoint: ids, states, handles, the record; frozen and compared by value."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Final, Literal, NamedTuple, NewType

from .errors import ErrorKind, InvalidInput
from .graph import (
    Edge as Edge,
    JobGraph as JobGraph,
    Operator as Operator,
    OperatorId as OperatorId,
    Partitioner as Partitioner,
    Status as Status,
    SubtaskSet as SubtaskSet,
    shortened,
)
from .ttl import TTL_COLUMN, Ttl

CheckpointId = NewType("CheckpointId", int)
"""1 … 2⁵³ − 1; a child's id is its parent's + 1."""
AttemptId = NewType("AttemptId", str)
"""One try at publishing an id: 128 random bits as 32 hexadecimal digits."""
WriteId = NewType("WriteId", str)
"""One opened segment: 128 random bits as 32 hexadecimal digits."""
JobId = NewType("JobId", str)

MAX_CHECKPOINT_ID = 2**53 - 1
RESERVED_PROPERTIES = "stateformat."
"""The prefix of property names that SPEC.md defines (section 3.2); all others are the user's."""
KEEP_PROPERTY = f"{RESERVED_PROPERTIES}keep"
"""Present where the publishing run keeps its runtime's default number of checkpoints."""
LATE_PROPERTY = f"{RESERVED_PROPERTIES}late_rows"
"""How many rows the job had dropped as late when the checkpoint was published."""
FAILURES_PROPERTY = f"{RESERVED_PROPERTIES}failures"
"""What failures have cost the publishing program: JSON (SPEC.md section 3.2)."""
GIVEN_UP_PROPERTY = f"{RESERVED_PROPERTIES}given_up"
"""What of lost segments a checkpoint was published without: JSON (SPEC.md section 8.4)."""
PROGRAM_PROPERTY = f"{RESERVED_PROPERTIES}program"
"""The script, notebook or function that ran the job, without its folder."""
CODE_PROPERTY = f"{RESERVED_PROPERTIES}code"
"""The version of the program: a commit, or a package with its version."""
SPARK_PROPERTY = f"{RESERVED_PROPERTIES}spark_application"
"""The id of the Spark application."""
HOST_PROPERTY = f"{RESERVED_PROPERTIES}host"
USER_PROPERTY = f"{RESERVED_PROPERTIES}user"
ORIGIN_PROPERTIES = (PROGRAM_PROPERTY, CODE_PROPERTY, SPARK_PROPERTY, HOST_PROPERTY, USER_PROPERTY)
"""Who published a checkpoint, as far as the run said it."""
RESCALE_PROPERTY = f"{RESERVED_PROPERTIES}rescale"
"""Of a stop's record: the parallelism at which the job goes on from there."""
RUN_PROPERTIES = (KEEP_PROPERTY, RESCALE_PROPERTY, FAILURES_PROPERTY, *ORIGIN_PROPERTIES)
"""Those of the reserved names that a run gives when it begins a checkpoint."""


def new_attempt_id() -> AttemptId:
    """Return a fresh attempt id."""
    return AttemptId(os.urandom(16).hex())


def new_write_id() -> WriteId:
    """Return a fresh write id."""
    return WriteId(os.urandom(16).hex())


class Mode(StrEnum):
    """How a state is redistributed when the parallelism changes (SPEC.md section 3.6)."""

    KEYED = "keyed"
    EVEN_SPLIT = "even_split"
    UNION = "union"
    BROADCAST = "broadcast"
    COORDINATOR = "coordinator"
    COMMITTABLES = "committables"
    PROGRESS = "progress"
    IN_FLIGHT = "in_flight"


PER_SUBTASK_MODES = frozenset({Mode.KEYED, Mode.EVEN_SPLIT, Mode.UNION, Mode.BROADCAST, Mode.PROGRESS, Mode.IN_FLIGHT})
"""Modes of which every running subtask reports a handle, even without rows."""


class Kind(StrEnum):
    """The kind of a keyed state; kinds differ in their row key (SPEC.md section 5.3)."""

    VALUE = "value"
    MAP = "map"
    LIST = "list"
    TIMERS = "timers"


TimerClock = Literal["event_time", "processing_time"]


class CheckpointKind(StrEnum):
    """How a checkpoint was made."""

    CHECKPOINT = "checkpoint"
    SAVEPOINT = "savepoint"
    RESCALE = "rescale"
    REWRITE = "rewrite"
    ROLLBACK = "rollback"


class StopMode(StrEnum):
    """How a job stops: FLIP-34's TERMINATE is ``drain``, its SUSPEND is ``no_drain``."""

    DRAIN = "drain"
    NO_DRAIN = "no_drain"


@dataclass(frozen=True, slots=True)
class Field:
    """A column of a state (SPEC.md section 3.6)."""

    id: int
    name: str
    type: FieldType
    """As ``schema`` parses section 3.7: a primitive's name, or ``("struct", fields)``,
    ``("list", field)``, ``("map", key field, value field)``."""
    nullable: bool = True
    default: str | None = None
    """The default value as text."""


FieldType = str | tuple[str, Field] | tuple[str, Field, Field] | tuple[str, tuple[Field, ...]]


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """The fields of a state under one schema id, in column order."""

    id: int
    fields: tuple[Field, ...]

    def __repr__(self) -> str:
        return f"SchemaVersion({self.id}, {shortened(', '.join(item.name for item in self.fields), 60)})"


@dataclass(frozen=True)
class State:
    """The declaration of one state of one operator, with every schema that a handle may name."""

    operator: OperatorId
    name: str
    mode: Mode
    schemas: tuple[SchemaVersion, ...]
    kind: Kind | None = None
    key_columns: tuple[str, ...] = ()
    edge: str | None = None
    last_field_id: int = 0
    ttl: Ttl | None = None
    """How long a row lives after its ``ttl_last_access``."""
    ttl_now_us: int | None = field(default=None, compare=False)
    """The time of ``ttl``'s clock at the checkpoint, in µs. Rows expired by then are hidden."""
    clock: TimerClock = "event_time"
    """The clock by which timers fire."""
    clock_now_us: int | None = field(default=None, compare=False)
    """For processing-time timers: the time of the clock when the checkpoint was made, in µs."""

    def __repr__(self) -> str:
        kind = f" {self.kind}" if self.kind else ""
        columns = len(self.schemas[-1].fields) if self.schemas else 0
        return f"State({shortened(self.operator)}, {shortened(self.name)}, {self.mode}{kind}, {columns} columns)"

    @property
    def current(self) -> SchemaVersion:
        """The newest schema. Writers use it, and so do readers unless they ask for another."""
        return self.schemas[-1]

    @cached_property
    def by_schema_id(self) -> Mapping[int, SchemaVersion]:
        """Schemas by id."""
        return {schema.id: schema for schema in self.schemas}

    @property
    def by_processing_time(self) -> bool:
        """Whether rows expire or timers fire by processing time."""
        return "processing_time" in (self.clock, self.ttl.clock if self.ttl else None)

    @property
    def processing_now_us(self) -> int | None:
        """The processing time of the checkpoint in µs, if the state uses it; else None."""
        if not self.by_processing_time:
            return None
        return self.clock_now_us if self.ttl is None else self.ttl_now_us

    @property
    def ttl_field(self) -> Field | None:
        """The column with the last access; None for a state whose rows do not expire."""
        return next((item for item in self.current.fields if item.name == TTL_COLUMN), None) if self.ttl else None

    @property
    def row_key(self) -> tuple[str, ...]:
        """The columns of the row key (SPEC.md section 5.3); empty for modes without keys."""
        extra = {Kind.MAP: ("_map_key",), Kind.LIST: ("_index",), Kind.TIMERS: ("_timestamp", "_tag")}
        return self.key_columns + (extra.get(self.kind, ()) if self.kind else ())


ON_TOP: Final = -1
"""The layer of a delta until the driver publishes: one above what its subtask carries."""


class Handle(NamedTuple):
    """One row of the manifest (SPEC.md section 4.1): rows of one segment, owned by one subtask."""

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

    def __repr__(self) -> str:
        owner = "coordinator" if self.subtask is None else f"subtask {self.subtask}"
        whose = f"{shortened(self.operator)}, {shortened(self.state)}, {owner}"
        return f"Handle({whose}, layer {self.layer}, {self.rows} rows)"


class ParentRef(NamedTuple):
    """A checkpoint by id and attempt, as a child names it."""

    checkpoint_id: CheckpointId
    attempt_id: AttemptId


@dataclass(frozen=True, slots=True)
class Stop:
    """The stop of a job at a checkpoint, and the id of the request that asked for it."""

    mode: StopMode
    request: str


@dataclass(frozen=True, slots=True)
class FormerStatus:
    """The finished subtasks of an operator before a rescale made all of them running."""

    uid: OperatorId
    parallelism: int
    finished: SubtaskSet
    finishing: SubtaskSet


@dataclass(frozen=True, slots=True)
class RescaledFrom:
    """The checkpoint whose state was redistributed (SPEC.md section 6.4)."""

    source: ParentRef
    operators: tuple[FormerStatus, ...] = ()

    def __repr__(self) -> str:
        return f"RescaledFrom(checkpoint {self.source.checkpoint_id}, {len(self.operators)} operators)"


class Capability(StrEnum):
    """What some checkpoints can do besides being read and planned, which all can."""

    CARRY = "carry"
    """Jobs go on from it: new checkpoints and copies refer to its segments."""
    VERIFY = "verify"
    """Its handles follow the rules of a manifest (SPEC.md section 4), which need no segment."""
    KEY_GROUPS = "key_groups"
    """All rows of a key are in one key group."""
    FIELD_IDS = "field_ids"
    """A column keeps its id for as long as it lives, whatever its name."""
    RECORD = "record"
    """Its record was published: what is made of it has the same members, or has lost some."""


def _told(rows: int | None) -> str:
    return "rows not counted" if rows is None else f"{rows} rows"


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the manifest; ``segments`` and ``bytes`` count distinct segments."""

    handles: int = 0
    rows: int | None = 0
    """None if another system's metadata does not count them."""
    segments: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        return f"{_told(self.rows)}, {self.segments} segments, {self.bytes} bytes"


@dataclass(frozen=True, slots=True)
class ManifestRef:
    """Path, size and digest of the manifest."""

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
    content_of: ParentRef | None = None
    stop: Stop | None = None
    rescaled_from: RescaledFrom | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    required_features: tuple[str, ...] = ()
    optional_features: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return (
            f"Record({self.checkpoint_id}, {self.kind} of {shortened(self.job_id)}, "
            f"{len(self.graph.operators)} operators, {_told(self.totals.rows)})"
        )

    @property
    def ref(self) -> ParentRef:
        """This checkpoint, as a child names it."""
        return ParentRef(self.checkpoint_id, self.attempt_id)

    @property
    def link(self) -> ParentRef | None:
        """The next checkpoint below in the history: a repair's source, else the parent."""
        return self.content_of or self.parent

    @property
    def lasting_properties(self) -> dict[str, str]:
        """The properties that a copy or rollback takes over: the user's, and ``keep``."""
        return {
            name: value
            for name, value in self.properties.items()
            if name == KEEP_PROPERTY or not name.startswith(RESERVED_PROPERTIES)
        }

    @cached_property
    def by_state(self) -> Mapping[tuple[str, str], State]:
        """States by (operator, name)."""
        return {(state.operator, state.name): state for state in self.states}

    def state(self, operator: str, name: str) -> State:
        """Return one state. Raises ``InvalidInput`` (kind ``UNKNOWN_STATE``)."""
        found = self.by_state.get((operator, name))
        if found is None:
            self.graph.operator(operator)
            names = [state.name for state in self.states if state.operator == operator]
            raise InvalidInput(
                f"operator {operator!r} has no state {name!r}; {known_names(names, name)}",
                kind=ErrorKind.UNKNOWN_STATE,
                operator=operator,
                state=name,
            )
        return found


NAMES_LISTED: Final = 20


def known_names(names: Sequence[str], given: str) -> str:
    """Return the end of a sentence about an unknown name: the closest name, and the known ones."""
    from difflib import get_close_matches

    names = list(dict.fromkeys(names))
    close = get_close_matches(given, names, n=1)
    meant = f"did you mean {close[0]!r}? It" if close else "it"
    left = len(names) - NAMES_LISTED
    listed = ", ".join(map(repr, names[:NAMES_LISTED]))
    return f"{meant} has {listed or 'none'}{f' and {left:,} more' if left > 0 else ''}"

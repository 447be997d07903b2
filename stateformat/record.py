"""The publication record (SPEC.md section 3): the small JSON object that makes a checkpoint exist.

First how one member is read and how its fault is named, then the members of version 1, then
framing, digest and versions.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from . import model, paths as layout
from .errors import REPAIR_ADVICE, CheckpointError, DamagedCheckpoint, ErrorKind, InvalidInput, UnsupportedFormat
from .graph import JobGraph
from .model import Mode, Record, RescaledFrom, State
from .paths import MANIFESTS
from .schema import arrow_type
from .storage import check_path
from .ttl import CLOCKS, NO_TIME_US, REFRESHES, TTL_COLUMN, Ttl, clock_us

# ---- members of JSON -----------------------------------------------------------------------------
#
# Read members of a JSON object. Each fault names its member: ``operators[2].parallelism``.


INTEGER_MAX: Final = 2**53 - 1
"""The greatest integer that every JSON parser reads exactly."""

_HEX = re.compile(r"[0-9a-f]{32}")
_JSON_NAMES: Final = {str: "a string", int: "an integer", bool: "true or false", list: "an array", dict: "an object"}

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


class RecordFault(Exception):
    """What is wrong with a record, and where. Readers of one raise it as ``DamagedCheckpoint``."""

    def __init__(self, where: str, message: str, kind: ErrorKind = ErrorKind.DAMAGED_RECORD, **details: Any) -> None:
        super().__init__(f"{where} {message}" if where else message)
        self.where = where
        self.kind = kind
        self.details = details


class Members:
    """One JSON object and its place in the record, ``""`` for the record itself."""

    __slots__ = ("place", "values")

    def __init__(self, values: dict[str, Any], place: str) -> None:
        self.values = values
        self.place = place

    def at(self, name: str) -> str:
        """Return the JSON path of a member."""
        return f"{self.place}.{name}" if self.place else name

    def fault(self, name: str, message: str, kind: ErrorKind = ErrorKind.DAMAGED_RECORD) -> RecordFault:
        """Return a fault of a member, for the caller to raise."""
        return RecordFault(self.at(name), message, kind)

    def has(self, name: str) -> bool:
        """Return whether the object has a member."""
        return name in self.values

    def get(self, name: str, kind: type[T]) -> T:
        """Return a member of exactly this JSON type."""
        if name not in self.values:
            raise self.fault(name, "is missing")
        return typed(self.values[name], kind, self.at(name))

    def text(self, name: str, *, least: int = 0) -> str:
        """Return a string of at least ``least`` characters."""
        value = self.get(name, str)
        if len(value) < least:
            raise self.fault(name, "is empty")
        return value

    def integer(self, name: str, least: int = 0, most: int = INTEGER_MAX) -> int:
        """Return an integer from ``least`` to ``most``."""
        value = self.get(name, int)
        if not least <= value <= most:
            raise self.fault(name, f"is {value}; it must be from {least} to {most}")
        return value

    def hexadecimal(self, name: str) -> str:
        """Return an attempt id or a digest."""
        value = self.get(name, str)
        if not _HEX.fullmatch(value):
            raise self.fault(name, f"is {value!r:.80}, not 32 lower-case hexadecimal digits")
        return value

    def one_of(self, name: str, values: type[E]) -> E:
        """Return a member of an enumeration."""
        value = self.get(name, str)
        try:
            return values(value)
        except ValueError:
            raise self.fault(name, f"is {value!r:.80}, not one of {', '.join(values)}") from None

    def texts(self, name: str) -> tuple[str, ...]:
        """Return an array of strings."""
        return tuple(typed(item, str, f"{self.at(name)}[{i}]") for i, item in enumerate(self.get(name, list)))

    def object(self, name: str) -> Members:
        """Return a member that is an object."""
        return Members(self.get(name, dict), self.at(name))

    def objects(self, name: str) -> Iterator[Members]:
        """Yield the objects of an array."""
        for i, item in enumerate(self.get(name, list)):
            place = f"{self.at(name)}[{i}]"
            yield Members(typed(item, dict, place), place)

    def optional(self, name: str, read: Callable[[str], T]) -> T | None:
        """Return what ``read`` returns for a member, or None if it is absent."""
        return read(name) if self.has(name) else None


def typed(value: Any, kind: type[T], place: str) -> T:
    """Return ``value`` if it has exactly this type; here bool is not int."""
    if type(value) is not kind:
        raise RecordFault(place, f"is {_JSON_NAMES.get(type(value), 'null')} where {_JSON_NAMES[kind]} is expected")
    return value


# ---- version 1 -----------------------------------------------------------------------------------
#
# The members of a record of version 1 (SPEC.md sections 3.2 to 3.7) and values of ``model``.
#
# :func:`members_of` builds dictionaries in the order of the specification and checks nothing.
# :func:`record_of` checks everything that a value needs to be safe to hold: bounds on parallelism
# and subtask ranges, a parent id below its child's, legal paths, known types, at least one schema.


PARALLELISM_MAX: Final = 32_768
FIELD_ID_MAX: Final = 2**31 - 1
MANIFEST_BYTES_MAX: Final = 1 << 30
"""The stored size of a manifest (SPEC.md section 7.4)."""
SUBTASKS_MAX: Final = 1 << 22
"""Subtasks of all operators together (SPEC.md section 7.4)."""


# ---- from values to members ----------------------------------------------------------------------


def members_of(record: model.Record) -> dict[str, Any]:
    """Return the members between ``version`` and ``digest``, in the order of SPEC.md 3.2."""
    members: dict[str, Any] = {
        "required_features": list(record.required_features),
        "optional_features": list(record.optional_features),
        "writer": record.writer,
        "checkpoint_id": record.checkpoint_id,
        "attempt_id": record.attempt_id,
        "kind": record.kind,
    }
    if record.parent is not None:
        members["parent"] = record.parent._asdict()
    if record.content_of is not None:
        members["content_of"] = record.content_of._asdict()
    members |= {"job_id": record.job_id, "job_name": record.job_name}
    if record.stop is not None:
        members["stop"] = asdict(record.stop)
    if record.rescaled_from is not None:
        members["rescaled_from"] = {
            **record.rescaled_from.source._asdict(),
            "operators": [
                asdict(former) | {"finished": former.finished.ranges, "finishing": former.finishing.ranges}
                for former in record.rescaled_from.operators
            ],
        }
    return members | {
        "created_at_us": record.created_at_us,
        **graph_members(record.graph, record.states),
        "totals": asdict(record.totals),
        "properties": dict(record.properties),
        "manifest": asdict(record.manifest),
    }


def graph_members(graph: model.JobGraph, states: Iterable[model.State]) -> dict[str, Any]:
    """Return the members ``operators``, ``edges`` and ``states``."""
    return {
        "operators": [_operator_members(operator) for operator in graph.operators],
        "edges": [_edge_members(edge) for edge in graph.edges],
        "states": [_state_members(state) for state in states],
    }


def _operator_members(operator: model.Operator) -> dict[str, Any]:
    members: dict[str, Any] = {
        "uid": operator.uid,
        "name": operator.name,
        "parallelism": operator.parallelism,
        "max_parallelism": operator.max_parallelism,
        "key_hash": operator.key_hash,
    }
    if operator.chain is not None:
        members["chain"] = operator.chain
    return members | {
        "status": operator.status,
        "finished": operator.finished.ranges,
        "finishing": operator.finishing.ranges,
        "coordinator": operator.coordinator,
    }


def _edge_members(edge: model.Edge) -> dict[str, Any]:
    return {
        "id": edge.id,
        "from": edge.source,
        "to": edge.target,
        "input": edge.input,
        "partitioner": edge.partitioner,
        "key_columns": edge.key_columns,
        "feedback": edge.feedback,
    }


def _state_members(state: model.State) -> dict[str, Any]:
    members: dict[str, Any] = {"operator": state.operator, "name": state.name, "mode": state.mode}
    if state.kind is not None:
        members["kind"] = state.kind
    members["key_columns"] = state.key_columns
    if state.edge is not None:
        members["edge"] = state.edge
    if state.ttl is not None:
        members["ttl"] = _ttl_members(state, state.ttl)
    if state.clock != "event_time":
        members["clock"] = state.clock
        if state.clock_now_us is not None:
            members["now_us"] = clock_us(state.clock_now_us)
    return members | {
        "last_field_id": state.last_field_id,
        "schemas": [
            {"id": schema.id, "fields": [_field_members(item) for item in schema.fields]} for schema in state.schemas
        ],
    }


def _ttl_members(state: model.State, ttl: Ttl) -> dict[str, Any]:
    members: dict[str, Any] = {"field": state.ttl_field.id if state.ttl_field else 0, **asdict(ttl)}
    return members if state.ttl_now_us is None else {**members, "now_us": clock_us(state.ttl_now_us)}


def _field_members(item: model.Field) -> dict[str, Any]:
    members = {"id": item.id, "name": item.name, "type": _type_member(item.type), "nullable": item.nullable}
    return members if item.default is None else {**members, "default": item.default}


def _type_member(kind: model.FieldType) -> Any:
    if isinstance(kind, str):
        return kind
    if kind[0] == "struct":
        return {"struct": [_field_members(item) for item in cast("tuple[model.Field, ...]", kind[1])]}
    if kind[0] == "list":
        return {"list": _field_members(cast("model.Field", kind[1]))}
    return {"map": [_field_members(item) for item in cast("tuple[str, model.Field, model.Field]", kind)[1:]]}


# ---- from members to values ----------------------------------------------------------------------


def record_of(values: dict[str, Any]) -> model.Record:
    """Return the record of a parsed JSON object. Raises ``RecordFault`` at the first fault."""
    members = Members(values, "")
    totals, properties = members.object("totals"), members.object("properties")
    checkpoint_id = model.CheckpointId(members.integer("checkpoint_id", 1, model.MAX_CHECKPOINT_ID))
    return model.Record(
        checkpoint_id=checkpoint_id,
        attempt_id=model.AttemptId(members.hexadecimal("attempt_id")),
        kind=members.one_of("kind", model.CheckpointKind),
        job_id=model.JobId(members.text("job_id", least=1)),
        graph=model.JobGraph(tuple(_operators(members)), tuple(edge_of(item) for item in members.objects("edges"))),
        states=tuple(_state(item) for item in members.objects("states")),
        manifest=_manifest(members.object("manifest")),
        totals=model.Totals(*(totals.integer(name) for name in ("handles", "rows", "segments", "bytes"))),
        created_at_us=members.integer("created_at_us", -INTEGER_MAX),
        job_name=members.text("job_name"),
        writer=members.text("writer"),
        parent=_below(members, "parent", checkpoint_id),
        content_of=_below(members, "content_of", checkpoint_id),
        stop=_stop(members),
        rescaled_from=_rescaled_from(members),
        properties={name: properties.text(name) for name in properties.values},
        required_features=_features(members, "required_features"),
        optional_features=_features(members, "optional_features"),
    )


def _features(members: Members, name: str) -> tuple[str, ...]:
    features = members.texts(name)
    if list(features) != sorted(set(features)):
        raise members.fault(name, "is not sorted, or names a feature twice")
    return features


def _reference(members: Members) -> model.ParentRef:
    return model.ParentRef(
        model.CheckpointId(members.integer("checkpoint_id", 1, model.MAX_CHECKPOINT_ID)),
        model.AttemptId(members.hexadecimal("attempt_id")),
    )


def _below(members: Members, name: str, checkpoint_id: model.CheckpointId) -> model.ParentRef | None:
    """Read an optional reference to an older checkpoint; its id is less than the record's."""
    if not members.has(name):
        return None
    found = _reference(members.object(name))
    if found.checkpoint_id >= checkpoint_id:
        what = f"is {found.checkpoint_id}, not less than the record's {checkpoint_id}"
        raise RecordFault(f"{name}.checkpoint_id", what)
    return found


def _stop(members: Members) -> model.Stop | None:
    if not members.has("stop"):
        return None
    stop = members.object("stop")
    return model.Stop(stop.one_of("mode", model.StopMode), stop.text("request"))


def _rescaled_from(members: Members) -> model.RescaledFrom | None:
    if not members.has("rescaled_from"):
        return None
    found = members.object("rescaled_from")
    return model.RescaledFrom(_reference(found), tuple(_former_status(item) for item in found.objects("operators")))


def _former_status(members: Members) -> model.FormerStatus:
    parallelism = members.integer("parallelism", 1, PARALLELISM_MAX)
    return model.FormerStatus(
        uid=model.OperatorId(members.text("uid", least=1)),
        parallelism=parallelism,
        finished=_subtasks(members, "finished", parallelism),
        finishing=_subtasks(members, "finishing", parallelism),
    )


def _manifest(members: Members) -> model.ManifestRef:
    path = members.text("path")
    try:
        check_path(path)
    except InvalidInput as error:
        raise members.fault("path", f"is not legal: {error}", ErrorKind.INVALID_PATH) from error
    if not path.startswith(MANIFESTS):
        raise members.fault("path", f"is {path!r}, which does not lie under {MANIFESTS}", ErrorKind.INVALID_PATH)
    return model.ManifestRef(
        path,
        members.integer("size_bytes", 1, MANIFEST_BYTES_MAX),
        members.hexadecimal("digest"),
        members.integer("uncompressed_bytes"),
    )


def _subtasks(members: Members, name: str, parallelism: int) -> model.SubtaskSet:
    ranges: list[tuple[int, int]] = []
    for i, item in enumerate(members.get(name, list)):
        place = f"{members.at(name)}[{i}]"
        bounds = typed(item, list, place)
        if len(bounds) != 2:
            raise RecordFault(place, "is not a pair [first, last]")
        first, last = (typed(bound, int, place) for bound in bounds)
        # At least one subtask lies between two ranges: neighbors are one range.
        least = ranges[-1][1] + 2 if ranges else 0
        if not least <= first <= last < parallelism:
            what = f"is [{first}, {last}]; ranges are sorted, disjoint, not adjacent and within subtasks"
            raise RecordFault(place, f"{what} 0 to {parallelism - 1}")
        ranges.append((first, last))
    return model.SubtaskSet(tuple(ranges))


def _first_shared(one: model.SubtaskSet, other: model.SubtaskSet) -> int | None:
    """Return the first subtask in both, by ranges: a short record can name very many subtasks."""
    bounds = sorted((*one.ranges, *other.ranges))
    return next((start for (_, end), (start, _) in pairwise(bounds) if start <= end), None)


def _operators(members: Members) -> Iterator[model.Operator]:
    subtasks = 0
    for item in members.objects("operators"):
        operator = _operator(item)
        subtasks += operator.parallelism
        if subtasks > SUBTASKS_MAX:
            what = f"of {operator.uid!r} makes more than {SUBTASKS_MAX:,} subtasks in all, which is the limit"
            raise item.fault("parallelism", what, ErrorKind.LIMIT_EXCEEDED)
        yield operator


def _operator(members: Members) -> model.Operator:
    parallelism = members.integer("parallelism", 1, PARALLELISM_MAX)
    operator = model.Operator(
        uid=model.OperatorId(members.text("uid", least=1)),
        parallelism=parallelism,
        max_parallelism=members.integer("max_parallelism", parallelism, PARALLELISM_MAX),
        name=members.text("name"),
        key_hash=members.text("key_hash", least=1),
        chain=members.optional("chain", members.text),
        finished=_subtasks(members, "finished", parallelism),
        finishing=_subtasks(members, "finishing", parallelism),
        coordinator=members.get("coordinator", bool),
    )
    both = _first_shared(operator.finished, operator.finishing)
    if both is not None:
        raise RecordFault(members.place, f"says that subtask {both} of {operator.uid!r} is both finished and finishing")
    stored = members.one_of("status", model.Status)
    if stored is not operator.status:
        raise RecordFault(
            members.at("status"),
            f"of operator {operator.uid!r} is {stored}, but {len(operator.finished)} finished and "
            f"{len(operator.finishing)} finishing of {parallelism} subtasks make it {operator.status}",
            ErrorKind.STATUS_CONTRADICTION,
            operator=operator.uid,
            stored=stored,
            derived=operator.status,
        )
    return operator


def edge_of(members: Members) -> model.Edge:
    """Return one edge (section 3.5). Raises ``RecordFault``."""
    return model.Edge(
        id=members.text("id", least=1),
        source=model.OperatorId(members.text("from", least=1)),
        target=model.OperatorId(members.text("to", least=1)),
        partitioner=members.one_of("partitioner", model.Partitioner),
        input=members.integer("input"),
        key_columns=members.texts("key_columns"),
        feedback=members.get("feedback", bool),
    )


def _state(members: Members) -> model.State:
    schemas = tuple(_schema(item) for item in members.objects("schemas"))
    if not schemas:
        raise members.fault("schemas", "is empty; a state has at least one schema")
    ttl, now_us = _ttl(members.object("ttl"), schemas[-1]) if members.has("ttl") else (None, None)
    return model.State(
        operator=model.OperatorId(members.text("operator", least=1)),
        name=members.text("name", least=1),
        mode=members.one_of("mode", model.Mode),
        schemas=schemas,
        kind=members.one_of("kind", model.Kind) if members.has("kind") else None,
        key_columns=members.texts("key_columns"),
        edge=members.optional("edge", members.text),
        last_field_id=members.integer("last_field_id", 0, FIELD_ID_MAX),
        ttl=ttl,
        ttl_now_us=now_us,
        clock=_clock(members),
        clock_now_us=members.optional("now_us", lambda name: members.integer(name, NO_TIME_US)),
    )


def _ttl(members: Members, schema: model.SchemaVersion) -> tuple[Ttl, int | None]:
    """Read how long rows live, and the time of the checkpoint (section 6.5)."""
    field_id = members.integer("field", 1, FIELD_ID_MAX)
    named = next((item for item in schema.fields if item.id == field_id), None)
    if named is None or named.name != TTL_COLUMN:
        is_now = f"column {named.name!r}" if named else "no column"
        raise members.fault("field", f"is {field_id}, {is_now} of schema {schema.id}; it is the id of {TTL_COLUMN!r}")
    if named.type != "timestamp_us" or named.nullable:
        raise members.fault("field", f"is {field_id}, and column {TTL_COLUMN!r} is no timestamp_us without nulls")
    given = {name: members.text(name) for name in ("clock", "refresh")}
    for name, known in (("clock", CLOCKS), ("refresh", REFRESHES)):
        if given[name] not in known:
            raise members.fault(name, f"is {given[name]!r:.80}, which is none of {', '.join(known)}")
    ttl = Ttl(members.integer("duration_us", 1), **cast("Any", given))
    return ttl, members.integer("now_us", NO_TIME_US) if members.has("now_us") else None


def _clock(members: Members) -> model.TimerClock:
    """Read the clock that fires timers (section 6.6)."""
    if not members.has("clock"):
        return "event_time"
    if members.text("clock") != "processing_time":
        raise members.fault(
            "clock", f"is {members.text('clock')!r:.80}; the one that a state may name is processing_time"
        )
    return "processing_time"


def _schema(members: Members) -> model.SchemaVersion:
    fields = tuple(_field(item) for item in members.objects("fields"))
    return model.SchemaVersion(members.integer("id", 1, FIELD_ID_MAX), fields)


def _field(members: Members) -> model.Field:
    return model.Field(
        id=members.integer("id", 1, FIELD_ID_MAX),
        name=members.text("name", least=1),
        type=_field_type(members),
        nullable=members.get("nullable", bool),
        default=members.optional("default", members.text),
    )


def _field_type(members: Members) -> model.FieldType:
    """Read a type of section 3.7. The nesting limit of the record bounds the recursion."""
    value = members.values.get("type")
    if isinstance(value, dict):
        inner = Members(value, members.at("type"))
        found = [name for name in ("struct", "list", "map") if name in value]
        if len(found) != 1:
            raise members.fault("type", 'is an object without exactly one of "struct", "list" and "map"')
        if found == ["list"]:
            return ("list", _field(inner.object("list")))
        fields = tuple(_field(item) for item in inner.objects(found[0]))
        if found == ["struct"] and fields:
            return ("struct", fields)
        if found == ["map"] and len(fields) == 2:
            return ("map", *fields)
        raise inner.fault(found[0], f"has {len(fields)} fields; a struct has at least one, a map a key and a value")
    name = members.text("type")
    try:
        found_type = arrow_type(name)
    except InvalidInput as error:
        raise members.fault("type", f"is not a type of this format: {error}", ErrorKind.UNSUPPORTED_TYPE) from error
    if pa.types.is_decimal(found_type) and name != f"decimal({found_type.precision},{found_type.scale})":
        raise members.fault("type", f"is {name!r}, a decimal that is not written as decimal(p,s)")
    return name


# ---- bytes ---------------------------------------------------------------------------------------
#
# The publication record as bytes (SPEC.md section 3): framing, digest, one codec per version.
#
# A record may come from an attacker. So a reader takes these steps in order; each bounds the next:
#
# 1. Check size, UTF-8 and nesting, by a scan of the brackets outside strings.
# 2. Parse with the JSON parser of the standard library. Its hooks note a float, a huge integer or a
#    repeated member without raising, because a newer version may allow them.
# 3. Check ``format`` and ``version``: a newer version ends here as ``UnsupportedFormat``.
# 4. Raise for what step 2 noted, and verify the digest over the exact bytes before it.
# 5. Check ``required_features``: an unknown one ends here as ``UnsupportedFormat``.
# 6. Read the members by the codec of the version.
#
# Users' requests (``requests``) are framed the same way, by :func:`sealed` and :func:`unsealed`.
# Members that contradict each other are left to ``validation``, unless the value would be unsafe to
# hold.


FORMAT: Final = "stateformat"
VERSION: Final = 1
"""The version that :func:`encode_record` writes."""

FEATURES: Final = ("committables", "finished_operators", "in_flight", "layers", "processing_time_timers", "rescaled")
"""Every required feature of version 1 (SPEC.md section 3.3), sorted."""

RECORD_BYTES_MAX: Final = (8 << 20) - 1
"""A storage creates smaller objects in one step, and one read of 8 MiB shows a larger one."""
RECORD_DEPTH_MAX: Final = 32
CONTAINERS_MAX: Final = 1 << 20

_MEMBERS: Final[Mapping[int, Callable[[dict[str, Any]], Record]]] = {1: record_of}
_DIGEST_MEMBER: Final = b',"digest":"'
_TAIL_BYTES: Final = len(_DIGEST_MEMBER) + 32 + len(b'"}\n')

# A JSON string, or the rest of an unterminated one, without backtracking.
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_DEEPER: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[{]}"))
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


def encode_record(record: Record) -> bytes:
    """Return the bytes of a record in version 1, with ``record.required_features`` as given.

    Raises ``InvalidInput``, the caller's fault, for a record that :func:`decode_record` would
    refuse. ``Operator.pinned`` is a wish of a topology and is not written.
    """
    members = {"format": FORMAT, "version": VERSION, **members_of(record)}
    try:
        data = sealed(members)
        _decoded(data)
    except (RecordFault, UnsupportedFormat, TypeError, ValueError, RecursionError) as error:
        kind = error.kind if isinstance(error, RecordFault | CheckpointError) else ErrorKind.INVALID_ARGUMENT
        raise InvalidInput(
            f"the record of checkpoint {record.checkpoint_id} cannot be written: {error}",
            kind=ErrorKind.INVALID_ARGUMENT if kind is ErrorKind.DAMAGED_RECORD else kind,
        ) from error
    return data


def decode_record(data: bytes, *, path: str = "") -> Record:
    """Return the record of these bytes, every member checked (SPEC.md section 7.1).

    ``path`` is named in messages, and its id must be the record's.

    Raises ``UnsupportedFormat`` for a newer version or an unknown required feature, and
    ``DamagedCheckpoint`` for everything else: kind ``DAMAGED_RECORD``, ``OBJECT_DIGEST_DIFFERS``,
    ``INVALID_PATH``, ``STATUS_CONTRADICTION`` or ``LIMIT_EXCEEDED``. It never raises another error.
    """
    what = f"record {path}" if path else "the record"
    try:
        record = _decoded(data)
        named = layout.record_id(path)
        if named is not None and named != record.checkpoint_id:
            raise RecordFault("checkpoint_id", f"is {record.checkpoint_id}, but the object's name says {named}")
    except RecordFault as fault:
        raise DamagedCheckpoint(
            f"{what} is damaged: {fault}{REPAIR_ADVICE}",
            kind=fault.kind,
            path=path,
            member=fault.where,
            **fault.details,
        ) from fault
    except UnsupportedFormat as error:
        raise UnsupportedFormat(f"{what} {error}", kind=error.kind, path=path, **error.details) from None
    return record


def required_features(
    graph: JobGraph, states: Sequence[State], handles: pa.Table, rescaled_from: RescaledFrom | None
) -> tuple[str, ...]:
    """Return the features that a checkpoint uses, sorted. ``handles`` needs only layer and mode."""
    used = {
        "finished_operators": any(operator.finished or operator.finishing for operator in graph.operators),
        "layers": (pc.max(handles["layer"]).as_py() or 0) > 0,
        "in_flight": any(state.mode is Mode.IN_FLIGHT for state in states),
        "committables": pc.any(pc.equal(handles["mode"], Mode.COMMITTABLES.value)).as_py() is True,
        "processing_time_timers": any(state.clock == "processing_time" for state in states),
        "rescaled": rescaled_from is not None,
    }
    return tuple(feature for feature in FEATURES if used[feature])


def optional_features(states: Iterable[State]) -> tuple[str, ...]:
    """Return the optional features that a checkpoint uses (SPEC.md section 3.3), sorted."""
    return ("ttl",) if any(state.ttl is not None for state in states) else ()


def _decoded(data: bytes) -> Record:
    """Return the record of these bytes, cached if it is small.

    A run reads the records that it keeps each time it expires one.
    """
    return _remembered(data) if len(data) <= _SMALL_BYTES else _decode(data)


def _decode(data: bytes) -> Record:
    """Return the record; faults hold the rest of a sentence that begins with the record."""
    members, tokens = unsealed(
        data, format_name=FORMAT, versions=_MEMBERS, bytes_max=RECORD_BYTES_MAX, noun="record of a checkpoint"
    )
    _check_features(members)
    record = _MEMBERS[members["version"]](members)
    refuse_null(tokens)
    return record


_SMALL_BYTES: Final = 64 << 10
_remembered: Final = lru_cache(maxsize=32)(_decode)


def sealed(members: Mapping[str, Any]) -> bytes:
    """Return the bytes of one object of SPEC.md section 3.1: the members, then their digest.

    Raises ``TypeError`` and ``ValueError`` for what JSON or UTF-8 cannot represent.
    """
    text = json.dumps(members, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    body = text[:-1].encode("utf-8")
    return body + _DIGEST_MEMBER + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


def unsealed(
    data: bytes, *, format_name: str, versions: Collection[int], bytes_max: int, noun: str
) -> tuple[dict[str, Any], bytes]:
    """Return the members of what :func:`sealed` made, and the bytes outside its strings.

    Steps 1 to 4 of the module. The caller reads the members, and then calls :func:`refuse_null`.
    Raises ``RecordFault`` and, for a version not in ``versions``, ``UnsupportedFormat``.
    """
    if len(data) > bytes_max:
        raise RecordFault("", f"it has {len(data):,} bytes; at most {bytes_max:,} are allowed", _LIMIT)
    tokens = _STRING.sub(b"", data)
    _check_depth(tokens)
    members, faults = _parse(data)
    if members.get("format") != format_name:
        raise RecordFault("format", f"is {members.get('format')!r:.80}, not {format_name!r}: this is not a {noun}")
    version = members.get("version")
    if type(version) is not int or version < 1:
        raise RecordFault("version", f"is {version!r:.80}, not an integer from 1")
    if version not in versions:
        raise UnsupportedFormat(
            f"is of format version {version}; this reader knows {', '.join(map(str, versions))}. Upgrade stateformat",
            kind=ErrorKind.UNSUPPORTED_VERSION,
            version=version,
        )
    if faults:
        raise RecordFault("", faults[0])
    _check_tokens(data, tokens, members)
    _check_digest(data)
    return members, tokens


def refuse_null(tokens: bytes) -> None:
    """Refuse a null in a member that the codec did not read."""
    if b"null" in tokens:
        raise RecordFault("", "a member that this reader does not know is null; leave absent members out")


_LIMIT: Final = ErrorKind.LIMIT_EXCEEDED


def _check_depth(tokens: bytes) -> None:
    """Refuse nesting beyond the limit, without parsing."""
    levels = np.frombuffer(tokens.translate(_DEEPER, _NOT_BRACKETS), np.int8)
    level, step = 0, 1 << 16
    for start in range(0, len(levels), step):
        here = level + np.cumsum(levels[start : start + step], dtype=np.int64)
        if here.max() > RECORD_DEPTH_MAX:
            raise RecordFault("", f"it is nested deeper than {RECORD_DEPTH_MAX} levels", _LIMIT)
        level = int(here[-1])
    if len(levels) > 2 * CONTAINERS_MAX:
        raise RecordFault("", f"it has more than {CONTAINERS_MAX:,} objects and arrays", _LIMIT)


def _parse(data: bytes) -> tuple[dict[str, Any], list[str]]:
    """Return the members of the JSON object, and the first thing that version 1 forbids in it."""
    faults: list[str] = []

    def note(fault: str) -> None:
        # Only the first is kept: a hostile record could have millions.
        if not faults:
            faults.append(fault)

    def integer(text: str) -> int:
        # Check the length first: turning a million digits into an int takes seconds.
        value = int(text) if len(text) <= 17 else INTEGER_MAX + 1
        if abs(value) > INTEGER_MAX:
            note(f"the integer {text[:40]} has magnitude 2**53 or more")
        return value

    def fraction(text: str) -> float:
        note(f"{text[:40]} is not an integer, and other numbers are not allowed")
        return 0.0

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            names = Counter(name for name, _ in items)
            twice = next(name for name in found if names[name] > 1)
            note(f"member {twice!r:.80} appears twice in one object")
        return found

    try:
        members = json.loads(
            data.decode("utf-8"),
            parse_int=integer,
            parse_float=fraction,
            parse_constant=fraction,
            object_pairs_hook=pairs,
        )
    except UnicodeDecodeError as error:
        raise RecordFault("", f"it is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from error
    except (ValueError, RecursionError) as error:
        raise RecordFault("", f"it is not JSON: {error}") from error
    if not isinstance(members, dict):
        raise RecordFault("", "it is not one JSON object")
    return members, faults


def _check_tokens(data: bytes, tokens: bytes, members: dict[str, Any]) -> None:
    """Refuse white space and lone surrogates, which the parser accepts."""
    if tokens[-1:] != b"\n" or len(tokens[:-1].split(None, 1)) != 1 or tokens[:-1] != tokens[:-1].strip():
        raise RecordFault("", "it has white space between tokens, or does not end in exactly one newline")
    if _SURROGATE.search(data):
        try:
            json.dumps(members, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise RecordFault("", "a string holds half a character (a lone surrogate)") from error


def _check_digest(data: bytes) -> None:
    """Verify the last member, the digest of the exact bytes before it (SPEC.md section 3.1)."""
    body, tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
    if not tail.startswith(_DIGEST_MEMBER) or not tail.endswith(b'"}\n'):
        raise RecordFault("digest", 'is not the last member: the object must end in ,"digest":"<32 digits>"}')
    stored = tail[len(_DIGEST_MEMBER) : -3]
    computed = xxhash.xxh3_128_hexdigest(body).encode()
    if stored != computed:
        raise RecordFault(
            "digest",
            f"is {stored.decode('utf-8', 'replace')}, but the bytes before it have {computed.decode()}",
            ErrorKind.OBJECT_DIGEST_DIFFERS,
        )


def _check_features(members: dict[str, Any]) -> None:
    features = members.get("required_features")
    if not isinstance(features, list) or not all(isinstance(feature, str) for feature in features):
        raise RecordFault("required_features", "is missing or is not an array of strings")
    unknown = sorted(set(features) - set(FEATURES))
    if unknown:
        raise UnsupportedFormat(
            f"requires {', '.join(map(repr, unknown))}; this reader knows {', '.join(FEATURES)}. Upgrade stateformat",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            features=unknown,
        )

"""The members of a record of version 1 (SPEC.md sections 3.2 to 3.7) and values of ``model``.

:func:`members_of` builds dictionaries in the order of the specification and checks nothing.
:func:`record_of` checks everything that a value needs to be safe to hold: bounds on parallelism and
subtask ranges, a parent id below its child's, legal paths, known types, at least one schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import pairwise
from typing import Any, Final, cast

import pyarrow as pa

from .. import model
from ..errors import ErrorKind, InvalidInput
from ..paths import MANIFESTS
from ..schema import arrow_type
from ..storage import check_path
from ..ttl import CLOCKS, NO_TIME_US, REFRESHES, TTL_COLUMN, Ttl, clock_us
from .json_members import INTEGER_MAX, Members, RecordFault, typed

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
        graph=model.JobGraph(tuple(_operators(members)), tuple(_edge(item) for item in members.objects("edges"))),
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


def _edge(members: Members) -> model.Edge:
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

"""The members of a record of version 1 (SPEC.md sections 3.2 to 3.7): from and to the values of ``model``.

Two directions that mirror each other, section by section. :func:`members_of` builds plain dictionaries in the order of
the specification and checks nothing. :func:`record_of` trusts nothing: it reads through ``record_members.Members``, so
that every fault names its member. It also checks what a value must satisfy to be safe to hold: bounds on parallelism and
subtask ranges (nobody shall iterate over 10¹⁵ subtasks), a parent below its child (a chain ends), legal paths, known
types, at least one schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Final, cast

import pyarrow as pa

from ..errors import ErrorKind, InvalidInput
from ..graph import Edge, JobGraph, Operator, OperatorId, Partitioner, Status, SubtaskSet
from ..model import (
    MAX_CHECKPOINT_ID,
    AttemptId,
    CheckpointId,
    CheckpointKind,
    Field,
    FieldType,
    FormerStatus,
    JobId,
    Kind,
    ManifestRef,
    Mode,
    ParentRef,
    Record,
    RescaledFrom,
    SchemaVersion,
    State,
    Stop,
    StopMode,
    Totals,
)
from ..paths import MANIFESTS
from ..schema import arrow_type
from ..storage import check_path
from .json_members import INTEGER_MAX, Members, RecordFault, typed

PARALLELISM_MAX: Final = 32_768
FIELD_ID_MAX: Final = 2**31 - 1
MANIFEST_BYTES_MAX: Final = 1 << 30
"""A manifest as it is stored (SPEC.md section 7.4)."""
SUBTASKS_MAX: Final = 1 << 22
"""Subtasks of all operators together (SPEC.md section 7.4)."""


# ---- from values to members ------------------------------------------------------------------------------------------


def members_of(record: Record) -> dict[str, Any]:
    """All members between ``version`` and ``digest``, in the order of SPEC.md section 3.2."""
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
        members["stop"] = {"mode": record.stop.mode, "request": record.stop.request}
    if record.rescaled_from is not None:
        members["rescaled_from"] = {
            **record.rescaled_from.source._asdict(),
            "operators": [
                {
                    "uid": former.uid,
                    "parallelism": former.parallelism,
                    "finished": former.finished.ranges,
                    "finishing": former.finishing.ranges,
                }
                for former in record.rescaled_from.operators
            ],
        }
    return members | {
        "created_at_us": record.created_at_us,
        "operators": [_operator_members(operator) for operator in record.graph.operators],
        "edges": [_edge_members(edge) for edge in record.graph.edges],
        "states": [_state_members(state) for state in record.states],
        "totals": {
            "handles": record.totals.handles,
            "rows": record.totals.rows,
            "segments": record.totals.segments,
            "bytes": record.totals.bytes,
        },
        "properties": dict(record.properties),
        "manifest": {
            "path": record.manifest.path,
            "size_bytes": record.manifest.size_bytes,
            "digest": record.manifest.digest,
            "uncompressed_bytes": record.manifest.uncompressed_bytes,
        },
    }


def _operator_members(operator: Operator) -> dict[str, Any]:
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


def _edge_members(edge: Edge) -> dict[str, Any]:
    return {
        "id": edge.id,
        "from": edge.source,
        "to": edge.target,
        "input": edge.input,
        "partitioner": edge.partitioner,
        "key_columns": edge.key_columns,
        "feedback": edge.feedback,
    }


def _state_members(state: State) -> dict[str, Any]:
    members: dict[str, Any] = {"operator": state.operator, "name": state.name, "mode": state.mode}
    if state.kind is not None:
        members["kind"] = state.kind
    members["key_columns"] = state.key_columns
    if state.edge is not None:
        members["edge"] = state.edge
    return members | {
        "last_field_id": state.last_field_id,
        "schemas": [
            {"id": schema.id, "fields": [_field_members(item) for item in schema.fields]} for schema in state.schemas
        ],
    }


def _field_members(item: Field) -> dict[str, Any]:
    members = {"id": item.id, "name": item.name, "type": _type_member(item.type), "nullable": item.nullable}
    return members if item.default is None else {**members, "default": item.default}


def _type_member(kind: FieldType) -> Any:
    if isinstance(kind, str):
        return kind
    if kind[0] == "struct":
        return {"struct": [_field_members(item) for item in cast("tuple[Field, ...]", kind[1])]}
    if kind[0] == "list":
        return {"list": _field_members(cast("Field", kind[1]))}
    return {"map": [_field_members(item) for item in cast("tuple[str, Field, Field]", kind)[1:]]}


# ---- from members to values ------------------------------------------------------------------------------------------


def record_of(values: dict[str, Any]) -> Record:
    """The record of a parsed JSON object of version 1. Raises :class:`RecordFault` at the first member that is wrong."""
    members = Members(values, "")
    checkpoint_id = CheckpointId(members.integer("checkpoint_id", 1, MAX_CHECKPOINT_ID))
    return Record(
        checkpoint_id=checkpoint_id,
        attempt_id=AttemptId(members.hexadecimal("attempt_id")),
        kind=members.one_of("kind", CheckpointKind),
        job_id=JobId(members.text("job_id", least=1)),
        graph=JobGraph(
            tuple(_operators(members)),
            tuple(_edge(item) for item in members.objects("edges")),
        ),
        states=tuple(_state(item) for item in members.objects("states")),
        manifest=_manifest(members.object("manifest")),
        totals=_totals(members.object("totals")),
        created_at_us=members.integer("created_at_us", -INTEGER_MAX),
        job_name=members.text("job_name"),
        writer=members.text("writer"),
        parent=_below(members, "parent", checkpoint_id),
        content_of=_below(members, "content_of", checkpoint_id),
        stop=_stop(members.object("stop")) if members.has("stop") else None,
        rescaled_from=_rescaled_from(members.object("rescaled_from")) if members.has("rescaled_from") else None,
        properties=_properties(members.object("properties")),
        required_features=_features(members, "required_features"),
        optional_features=_features(members, "optional_features"),
    )


def _features(members: Members, name: str) -> tuple[str, ...]:
    features = members.texts(name)
    if list(features) != sorted(set(features)):
        raise members.fault(name, "is not sorted, or names a feature twice")
    return features


def _reference(members: Members) -> ParentRef:
    return ParentRef(
        CheckpointId(members.integer("checkpoint_id", 1, MAX_CHECKPOINT_ID)),
        AttemptId(members.hexadecimal("attempt_id")),
    )


def _below(members: Members, name: str, checkpoint_id: CheckpointId) -> ParentRef | None:
    """An optional reference by which history goes on, so its id is less than the record's: every chain ends."""
    if not members.has(name):
        return None
    found = _reference(members.object(name))
    if found.checkpoint_id >= checkpoint_id:
        raise RecordFault(
            f"{name}.checkpoint_id", f"is {found.checkpoint_id}, not less than the record's {checkpoint_id}"
        )
    return found


def _stop(members: Members) -> Stop:
    return Stop(members.one_of("mode", StopMode), members.text("request"))


def _rescaled_from(members: Members) -> RescaledFrom:
    former = []
    for item in members.objects("operators"):
        parallelism = item.integer("parallelism", 1, PARALLELISM_MAX)
        former.append(
            FormerStatus(
                uid=OperatorId(item.text("uid", least=1)),
                parallelism=parallelism,
                finished=_subtasks(item, "finished", parallelism),
                finishing=_subtasks(item, "finishing", parallelism),
            )
        )
    return RescaledFrom(_reference(members), tuple(former))


def _totals(members: Members) -> Totals:
    return Totals(*(members.integer(name) for name in ("handles", "rows", "segments", "bytes")))


def _properties(members: Members) -> Mapping[str, str]:
    return {name: members.text(name) for name in members.values}


def _manifest(members: Members) -> ManifestRef:
    path = members.text("path")
    try:
        check_path(path)
    except InvalidInput as error:
        raise members.fault("path", f"is not legal: {error}", ErrorKind.INVALID_PATH) from error
    if not path.startswith(MANIFESTS):
        raise members.fault("path", f"is {path!r}, which does not lie under {MANIFESTS}", ErrorKind.INVALID_PATH)
    return ManifestRef(
        path,
        members.integer("size_bytes", 1, MANIFEST_BYTES_MAX),
        members.hexadecimal("digest"),
        members.integer("uncompressed_bytes"),
    )


def _subtasks(members: Members, name: str, parallelism: int) -> SubtaskSet:
    ranges: list[tuple[int, int]] = []
    for i, item in enumerate(members.get(name, list)):
        place = f"{members.at(name)}[{i}]"
        bounds = typed(item, list, place)
        if len(bounds) != 2:
            raise RecordFault(place, "is no pair [first, last]")
        first, last = (typed(bound, int, place) for bound in bounds)
        # At least one subtask must lie between two ranges, else they were one.
        least = ranges[-1][1] + 2 if ranges else 0
        if not least <= first <= last < parallelism:
            raise RecordFault(
                place,
                f"is [{first}, {last}]; ranges are sorted, disjoint, not adjacent and within subtasks 0 to {parallelism - 1}",
            )
        ranges.append((first, last))
    return SubtaskSet(tuple(ranges))


def _first_shared(one: SubtaskSet, other: SubtaskSet) -> int | None:
    """The first subtask of both, by their ranges: a short record can name very many subtasks."""
    bounds = sorted((*one.ranges, *other.ranges))
    return next((start for (_, end), (start, _) in pairwise(bounds) if start <= end), None)


def _operators(members: Members) -> Iterator[Operator]:
    subtasks = 0
    for item in members.objects("operators"):
        operator = _operator(item)
        subtasks += operator.parallelism
        if subtasks > SUBTASKS_MAX:
            raise item.fault(
                "parallelism",
                f"of {operator.uid!r} makes more than {SUBTASKS_MAX:,} subtasks in all, which is the limit",
                ErrorKind.LIMIT_EXCEEDED,
            )
        yield operator


def _operator(members: Members) -> Operator:
    parallelism = members.integer("parallelism", 1, PARALLELISM_MAX)
    operator = Operator(
        uid=OperatorId(members.text("uid", least=1)),
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
        raise RecordFault(members.place, f"says that subtask {both} of {operator.uid!r} is finished and finishing")
    stored = members.one_of("status", Status)
    if stored is not operator.status:
        raise RecordFault(
            members.at("status"),
            f"of operator {operator.uid!r} is {stored}, but {len(operator.finished)} finished and {len(operator.finishing)} "
            f"finishing of {parallelism} subtasks make it {operator.status}",
            ErrorKind.STATUS_CONTRADICTION,
            operator=operator.uid,
            stored=stored,
            derived=operator.status,
        )
    return operator


def _edge(members: Members) -> Edge:
    return Edge(
        id=members.text("id", least=1),
        source=OperatorId(members.text("from", least=1)),
        target=OperatorId(members.text("to", least=1)),
        partitioner=members.one_of("partitioner", Partitioner),
        input=members.integer("input"),
        key_columns=members.texts("key_columns"),
        feedback=members.get("feedback", bool),
    )


def _state(members: Members) -> State:
    schemas = tuple(_schema(item) for item in members.objects("schemas"))
    if not schemas:
        raise members.fault("schemas", "is empty; a state has at least one schema")
    return State(
        operator=OperatorId(members.text("operator", least=1)),
        name=members.text("name", least=1),
        mode=members.one_of("mode", Mode),
        schemas=schemas,
        kind=members.one_of("kind", Kind) if members.has("kind") else None,
        key_columns=members.texts("key_columns"),
        edge=members.optional("edge", members.text),
        last_field_id=members.integer("last_field_id", 0, FIELD_ID_MAX),
    )


def _schema(members: Members) -> SchemaVersion:
    fields = tuple(_field(item) for item in members.objects("fields"))
    return SchemaVersion(members.integer("id", 1, FIELD_ID_MAX), fields)


def _field(members: Members) -> Field:
    return Field(
        id=members.integer("id", 1, FIELD_ID_MAX),
        name=members.text("name", least=1),
        type=_field_type(members),
        nullable=members.get("nullable", bool),
        default=members.optional("default", members.text),
    )


def _field_type(members: Members) -> FieldType:
    """A type of section 3.7. The recursion is bounded by the depth of the whole record."""
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
        raise members.fault("type", f"is no type of this format: {error}", ErrorKind.UNSUPPORTED_TYPE) from error
    if pa.types.is_decimal(found_type) and name != f"decimal({found_type.precision},{found_type.scale})":
        raise members.fault("type", f"is {name!r}, a decimal that is not written as decimal(p,s)")
    return name

"""Topology files: the job graph to restore a checkpoint into, as JSON (docs/cli.md).

A file has ``operators`` and ``edges`` as in a record (SPEC.md sections 3.4 and 3.5), so the output
of ``ckpt inspect --format json`` is one. Members that can be derived or adopted from the checkpoint
are optional. The reader ignores what only a checkpoint knows (``status``, ``finished``,
``finishing``); any other unknown member of an operator or edge is refused, as a probable typing
error.

``states`` (section 3.6) are for a program that declares others. A state is given as in a record,
with field ids, or as a program declares it: with ``columns`` in place of ``schemas``, without ids,
and with ``renames`` and ``drops`` for what became of earlier columns. A ``ttl`` (section 6.5) then
needs ``duration_us`` alone, and its column is not among ``columns``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Final

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import Edge, JobGraph, Operator, OperatorId
from stateformat.model import Record, State
from stateformat.record import Members, RecordFault, edge_of, members_of, record_of
from stateformat.states import Changes, column_name, evolve_state, split_drop
from stateformat.ttl import CLOCKS, REFRESHES, TTL_COLUMN

_OPERATOR: Final = {"uid", "name", "parallelism", "max_parallelism", "key_hash", "chain", "coordinator", "pinned"}
_OF_A_CHECKPOINT: Final = {"status", "finished", "finishing"}
_EDGE: Final = {"id", "from", "to", "input", "partitioner", "key_columns", "feedback"}
_STATE: Final = {"operator", "name", "mode", "kind", "key_columns", "edge", "last_field_id", "schemas", "clock", "ttl"}
_PROGRAM: Final = {
    "operator",
    "name",
    "mode",
    "kind",
    "key_columns",
    "edge",
    "columns",
    "renames",
    "drops",
    "clock",
    "ttl",
}


def read_topology(
    path: Path, record: Record, drop: Collection[str] = ()
) -> tuple[JobGraph, tuple[State, ...], tuple[str, ...]]:
    """The graph, the declared states, and what to give up: ``drop`` and the states' ``drops``.

    Raises ``InvalidInput``, which names the member at fault.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise RecordFault("", "is no JSON object")
        members = Members(values, "")
        graph = JobGraph(
            tuple(_operator(item, record.graph) for item in members.objects("operators")),
            tuple(_edge(item) for item in members.objects("edges")) if members.has("edges") else (),
        )
        return graph, *_states(values, record, drop)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InvalidInput(
            f"topology file {path} cannot be read: {error}. Give a JSON object with operators and edges, such as "
            "`ckpt inspect --format json` prints",
            kind=ErrorKind.INVALID_GRAPH,
            path=str(path),
        ) from error
    except RecordFault as fault:
        raise InvalidInput(
            f"topology file {path}: {fault}. SPEC.md sections 3.4 and 3.5 describe operators and edges",
            kind=ErrorKind.INVALID_GRAPH,
            path=str(path),
            member=fault.where,
        ) from fault


def _known(members: Members, known: Collection[str]) -> None:
    for name in members.values:
        if name not in known:
            raise members.fault(name, f"is unknown; known are {', '.join(sorted(known))}")


def _operator(members: Members, saved_graph: JobGraph) -> Operator:
    _known(members, _OPERATOR | _OF_A_CHECKPOINT)
    uid = OperatorId(members.text("uid", least=1))
    saved = saved_graph.by_uid.get(uid)
    operator = Operator(
        uid=uid,
        # The planner checks the numbers, of all operators at once.
        parallelism=members.get("parallelism", int),
        max_parallelism=members.optional("max_parallelism", lambda name: members.get(name, int)),
        name=members.text("name") if members.has("name") else saved.name if saved else "",
        key_hash=members.optional("key_hash", members.text),
        chain=members.optional("chain", members.text),
        coordinator=members.get("coordinator", bool)
        if members.has("coordinator")
        else bool(saved and saved.coordinator),
        pinned=members.get("pinned", bool) if members.has("pinned") else False,
    )
    if saved is not None and members.has("status") and operator.max_parallelism == saved.max_parallelism:
        # A copy of the checkpoint's operator: no user chose this max parallelism, so it stays
        # derived.
        return replace(operator, max_parallelism=None)
    return operator


def _edge(members: Members) -> Edge:
    _known(members, _EDGE)
    return edge_of(Members({"input": 0, "key_columns": [], "feedback": False, **members.values}, members.place))


def _states(values: dict[str, Any], record: Record, drop: Collection[str]) -> tuple[tuple[State, ...], tuple[str, ...]]:
    """The declared states, by the codec of records; members only ``inspect`` prints are ignored."""
    if "states" not in values:
        return (), tuple(drop)
    raw, changes = [], []
    for item in Members(values, "").objects("states"):
        from_program = item.has("columns")
        changes.append(_changes(item) if from_program else None)
        whole = _as_in_a_record(item) if from_program else item.values
        if whole.get("clock") == "event_time":
            whole = {**whole, "clock": None}  # As inspect shows what a record leaves out.
        raw.append({name: _given(value) for name, value in whole.items() if name in _STATE and value is not None})
    as_parsed = json.loads(json.dumps(members_of(record)))
    declared = record_of({**as_parsed, "states": raw}).states
    split_drop(drop, [*record.states, *declared], record.graph.by_uid)  # Refuses what may be several things.
    others, columns = split_drop(drop, declared)
    found: list[State] = []
    for state, change in zip(declared, changes, strict=True):
        given_up = columns.get((state.operator, state.name), frozenset())
        saved = record.by_state.get((state.operator, state.name))
        if saved is None or change is None or _sort(saved) != _sort(state):
            found.append(state)
        else:
            went_on = evolve_state(saved, state, replace(change, drops=change.drops | given_up), check=False)
            found.append(went_on.state)
            given_up = frozenset(went_on.dropped)
        others += [column_name(state, name) for name in sorted(given_up)]
    return tuple(found), tuple(others)


def _given(value: Any) -> Any:
    """A member without the nulls that ``inspect`` prints in a ttl."""
    return {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else value


def _sort(state: State) -> tuple[object, ...]:
    return state.mode, state.kind, state.clock, state.key_columns, state.edge


def _changes(members: Members) -> Changes:
    _known(members, _PROGRAM)
    renames = members.object("renames").values if members.has("renames") else {}
    for name, value in renames.items():
        if not isinstance(value, str):
            raise members.fault("renames", f"has {value!r} for {name!r}, which is no name")
    return Changes(dict(renames), frozenset(members.texts("drops") if members.has("drops") else ()))


def _as_in_a_record(members: Members) -> dict[str, Any]:
    """A state as a program declares it, with ids."""
    ids = count(1)
    columns = [_numbered(item.values, ids) for item in members.objects("columns")]
    more: dict[str, Any] = {}
    if members.has("ttl"):
        columns.append({"id": next(ids), "name": TTL_COLUMN, "type": "timestamp_us", "nullable": False})
        given = members.object("ttl").values
        more["ttl"] = {"clock": CLOCKS[0], "refresh": REFRESHES[0], **given, "field": columns[-1]["id"]}
    return {
        "key_columns": [],
        **members.values,
        **more,
        "schemas": [{"id": 1, "fields": columns}],
        "last_field_id": next(ids) - 1,
    }


def _numbered(value: Any, ids: Iterator[int]) -> Any:
    """A field with ids, also for nested fields; nullable by default."""
    if isinstance(value, list):
        return [_numbered(item, ids) for item in value]
    if not isinstance(value, dict):
        return value
    own = {"id": next(ids)} if "type" in value else {}
    default = {"nullable": True} if own else {}
    return {**default, **{name: _numbered(inner, ids) for name, inner in value.items()}, **own}

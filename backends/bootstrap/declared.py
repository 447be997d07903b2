"""The states that a dataflow declares, as users name them: ``operator/state``."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import shortened
from stateformat.model import Kind, Mode, State, known_names
from stateformat.schema import row_schema
from stateformat.states import labels_of, named
from stateformat.ttl import TTL_COLUMN

from ..dataflow.compile import Job, compile_job
from ..dataflow.flow import Dataflow
from ..dataflow.graph import ENUMERATOR, ENUMERATOR_LOG, SPLITS, graph_of

_DECLARED = frozenset({Mode.KEYED, Mode.EVEN_SPLIT, Mode.UNION, Mode.BROADCAST})


def compiled(flow: Dataflow, parallelism: int | None, per_operator: Mapping[str, int] | None) -> Job:
    """Compile a dataflow as for its first run. ``InvalidInput`` for an impossible one."""
    if not isinstance(flow, Dataflow):
        raise InvalidInput(f"the dataflow is {flow!r}. Give the Dataflow of the job that is to go on")
    graph = graph_of(flow, parallelism=parallelism, per_operator=per_operator)
    return compile_job(flow, graph, unaligned=False)


def columns_of(flow: Dataflow) -> dict[str, pa.Schema]:
    """Return the columns of the rows of each declared state, by ``operator/state``.

    ``_index`` of a list, ``_tag`` of timers and ``ttl_last_access`` may be left out.
    """
    states = declared_states(compiled(flow, None, None))
    found = {f"{state.operator}/{state.name}": columns_for(state) for state in states}
    if len(found) < len(states):
        for name in found:
            named(name, states)  # Says which two have one name.
    return found


def columns_for(state: State) -> pa.Schema:
    """The columns of rows of a state, as users give them, with what may be null."""
    nullable = {item.name: item.nullable for item in state.current.fields}
    return pa.schema([item.with_nullable(nullable.get(item.name, False)) for item in row_schema(state)])


def declared_states(job: Job) -> list[State]:
    """The states that the operators declare, without those of the runtime."""
    return [
        state
        for state in job.states
        if state.mode in _DECLARED
        and not (state.name in (SPLITS, ENUMERATOR, ENUMERATOR_LOG) and job.vertex_of(state.operator).is_source)
    ]


def find_state(job: Job, given: str) -> State:
    """The state of ``operator/state``, by the operator's uid or by its name where that is unique.

    Raises ``InvalidInput`` for an unknown one, and for a state of the runtime.
    """
    declared = declared_states(job)
    found = named(given, job.states, labels_of(job.graph.operators))
    known = [f"{state.operator}/{state.name}" for state in declared]
    if found is not None and found.state is not None and found.column is None:
        state = next((one for one in declared if (one.operator, one.name) == found[:2]), None)
        if state is not None:
            named(f"{state.operator}/{state.name}", job.states)  # Its own name, under which its rows are counted.
            return state
        raise InvalidInput(
            f"state {given!r} is the runtime's own, which a bootstrap fills. Give the positions of sources with "
            f"positions={{uid: …}}, and rows of {', '.join(known) or 'no state: the dataflow declares none'}",
            kind=ErrorKind.STATE_NOT_ALLOWED,
        )
    of_operator = any(f"{given}/".startswith(f"{uid}/") for uid in job.graph.by_uid)
    raise InvalidInput(
        f"dataflow {shortened(job.flow.job_id)} declares no state {given!r}; {known_names(known, given)}. Write "
        "OPERATOR/STATE",
        kind=ErrorKind.UNKNOWN_STATE if of_operator else ErrorKind.UNKNOWN_OPERATOR,
    )


def optional_of(state: State) -> frozenset[str]:
    """The columns that rows need not have: place in a list, tag of a timer, last access."""
    return frozenset({"_index", "_tag", *([] if state.ttl is None else [TTL_COLUMN])})


def shown(state: State) -> str:
    """The columns of a state in words, for messages."""
    found = []
    for item in columns_for(state):
        key = "key" if item.name in state.key_columns else ""
        rest = "may be left out" if item.name in optional_of(state) else ("" if item.nullable or key else "not null")
        notes = ", ".join(note for note in (key, rest) if note)
        found.append(f"{item.name} {item.type}{f' ({notes})' if notes else ''}")
    return ", ".join(found)


def is_list(state: State) -> bool:
    """Whether a state keeps any number of rows by key."""
    return state.kind is Kind.LIST

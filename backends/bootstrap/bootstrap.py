"""``bootstrap``: check what is given, write it, publish the first checkpoint.

Everything is checked before the first row is read, as far as columns and names tell it. Nothing is
published unless every state has been written: a failure, a kill or an interrupt leaves the store
without a checkpoint, and with some segments that nothing names.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import pyarrow as pa

import stateformat as sf
from stateformat.errors import ErrorKind, InvalidInput, InvalidState
from stateformat.graph import shortened
from stateformat.manifest import handles_table
from stateformat.model import PER_SUBTASK_MODES, Handle, Mode, Record, State, known_names
from stateformat.publication import CommitPermit
from stateformat.segments import REPEATED_SHOWN, WriteOptions
from stateformat.snapshot import WriteContext
from stateformat.store import CheckpointStore
from stateformat.ttl import NO_TIME_US

from ..dataflow.api import Source, StartingPoint
from ..dataflow.compile import Job
from ..dataflow.flow import Dataflow
from .declared import compiled, find_state
from .inputs import OnDuplicate, Rows, StateInput, state_input
from .sources import source_snapshots, source_states
from .threads import ThreadEngine
from .work import Written

PROPERTY: Final = "bootstrap."
"""Properties of a checkpoint that a bootstrap has published begin so."""


class Engine(Protocol):
    """Reads the rows of a state and writes them."""

    def schema(self, where: str, rows: Any) -> tuple[pa.Schema, Any]:
        """Return the columns of the given rows, and what :meth:`write` takes. Reads no row.

        Raises ``InvalidInput``, naming ``where``, for what the engine cannot read.
        """
        ...

    def write(
        self, context: WriteContext, input: StateInput, rows: Any, done: Callable[[int], None]
    ) -> Iterable[Written]:
        """Write the rows of a state; return what each subtask with rows got, in any order.

        It calls ``done`` with the number of rows just written, from any thread.
        """
        ...


@dataclass(frozen=True)
class Bootstrapped:
    """The published checkpoint, and what went into it."""

    permit: CommitPermit
    rows: Mapping[str, int]
    """The number of rows written for each given state, by ``operator/state``."""
    positions: Mapping[str, str]
    """By uid of a source, what it continues after."""

    @property
    def record(self) -> Record:
        """The record of the checkpoint."""
        return self.permit.record


def bootstrap(
    store: CheckpointStore | str | os.PathLike[str],
    flow: Dataflow,
    states: Mapping[str, Any],
    *,
    parallelism: int | None = None,
    per_operator: Mapping[str, int] | None = None,
    positions: Mapping[str, Any] | None = None,
    order_by: str | None = None,
    on_duplicate: OnDuplicate = "refuse",
    properties: Mapping[str, str] | None = None,
    options: WriteOptions | None = None,
    engine: Engine | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Bootstrapped:
    """Publish rows as the state of a job: the first checkpoint of an empty store.

    Example::

        bootstrap(
            "s3://bucket/store",
            flow,
            {"totals/totals": duckdb.sql("from 'history/*.parquet'")},
            parallelism=8,
            positions={"orders": "orders/2025/"},
        )

    - ``states``: by ``operator/state``, rows that export the Arrow C stream, or :class:`Rows` of
      them. Every other state of the dataflow is empty. :func:`columns_of` returns the columns.
    - ``parallelism``, ``per_operator``: as for a run.
    - ``positions``: by uid of a source, what the history covers; see the source's ``behind``. A
      source without one starts from the beginning.
    - ``order_by``, ``on_duplicate``: for every state that is not given as :class:`Rows`.
    - ``properties``: of the record. stateformat adds ``bootstrap.states`` and
      ``bootstrap.source.UID``.
    - ``progress``: called with ``operator/state`` and the number of rows just written, from any
      thread.

    Raises ``InvalidInput`` for what does not fit, by name, and for a store with a checkpoint;
    ``InvalidState`` for rows that contradict a state, with up to three keys if several rows have
    them; ``JobMismatch`` for another job's store; and what publishing raises.
    """
    place = store if isinstance(store, CheckpointStore) else sf.open(store)
    job = compiled(flow, parallelism, per_operator)
    _check_empty(place, flow)
    starts = _starting_points(job, positions or {})
    engine = engine or ThreadEngine()
    inputs = _inputs(job, states, Rows(None, order_by, on_duplicate), engine)
    declared = _declared(job, starts)
    pending = place.begin(
        job_id=flow.job_id,
        job_name=flow.name,
        graph=job.graph,
        states=declared,
        parent=None,
        properties={**(properties or {}), **_properties(inputs, starts)},
        options=options,
    )
    for uid in {state.operator for state in declared if state.ttl is not None}:
        pending.set_now(uid, event_time_us=NO_TIME_US, processing_time_us=time.time_ns() // 1000)
    context = pending.context
    handles: list[Handle] = []
    counts: dict[str, int] = {}
    for one, rows in inputs:
        counts[one.name] = 0
        handles += _written(one, engine.write(context, one, rows, partial(_report, progress, one.name)))
    for handle in handles:
        counts[f"{handle.operator}/{handle.state}"] += handle.rows
    for uid, start in starts.items():
        handles += [one for snapshot in source_snapshots(context, uid, start) for one in snapshot.handles]
    handles += _empty(job, declared, handles)
    pending.add_handles(handles_table(handles))
    return Bootstrapped(pending.publish(), counts, {uid: start.description for uid, start in starts.items()})


def _report(progress: Callable[[str, int], None] | None, name: str, rows: int) -> None:
    if progress is not None and rows:
        progress(name, rows)


def _check_empty(store: CheckpointStore, flow: Dataflow) -> None:
    permit = store.start(flow.job_id)
    if permit is not None:
        raise InvalidInput(
            f"{store.url} already holds checkpoint {permit.ref.checkpoint_id} of job {shortened(flow.job_id)}, and a "
            "bootstrap must be the first. Give an empty store",
            kind=ErrorKind.STORE_NOT_EMPTY,
            url=store.url,
        )


def _starting_points(job: Job, positions: Mapping[str, Any]) -> dict[str, StartingPoint]:
    if not isinstance(positions, Mapping):
        raise InvalidInput(f"the positions are {positions!r}. Give a mapping from the uid of a source to its position")
    found = {}
    sources = [uid for uid, step in job.flow.steps.items() if isinstance(step.logic, Source)]
    for given, position in positions.items():
        named = [uid for uid in sources if job.flow.steps[uid].name == given]
        uid = named[0] if given not in sources and len(named) == 1 else given
        if uid not in sources:
            raise InvalidInput(
                f"a position is given for {given!r}, which is no source of dataflow {shortened(job.flow.job_id)}; "
                f"{known_names(sources, given)}",
                kind=ErrorKind.UNKNOWN_OPERATOR,
            )
        logic = job.logic(uid)
        assert isinstance(logic, Source)
        try:
            found[uid] = logic.behind(position)
        except (TypeError, ValueError, AttributeError) as error:
            # Whatever a user gave, a source of another author may not have expected it.
            kind = error.kind if isinstance(error, InvalidInput) else ErrorKind.INVALID_ARGUMENT
            raise InvalidInput(f"source {uid!r} cannot begin behind {position!r}: {error}", kind=kind) from error
    return found


def _inputs(job: Job, states: Mapping[str, Any], given: Rows, engine: Engine) -> list[tuple[StateInput, Any]]:
    if not isinstance(states, Mapping):
        raise InvalidInput(f"the states are {type(states).__name__}. Give a mapping from OPERATOR/STATE to rows")
    found: dict[tuple[str, str], tuple[StateInput, Any]] = {}
    for name, rows in states.items():
        state = find_state(job, name)
        one = rows if isinstance(rows, Rows) else Rows(rows, given.order_by, given.on_duplicate)
        where = f"the rows of state {state.name!r} of operator {state.operator!r}"
        schema, stream = engine.schema(where, one.rows)
        checked = state_input(job.graph.operator(state.operator), state, one, schema)
        key = (state.operator, state.name)
        if key in found:
            raise InvalidInput(f"{where} are given twice, the second time as {name!r}. Give them once")
        found[key] = (checked, stream)
    return list(found.values())


def _declared(job: Job, starts: Mapping[str, StartingPoint]) -> list[State]:
    """The states of the job. Coordinators and sources without a position begin as in a first run,
    so they have none.
    """
    own = {uid: source_states(uid, start) for uid, start in starts.items()}
    kept = [
        state
        for state in job.states
        if state.mode is not Mode.COORDINATOR and not isinstance(job.logic(state.operator), Source)
    ]
    return [*kept, *(state for states in own.values() for state in states)]


def _written(input: StateInput, found: Iterable[Written]) -> list[Handle]:
    """The handles of a state. ``InvalidState`` for keys that stand on several rows."""
    found = list(found)
    repeated = [text for one in found for text in one.repeated]
    if repeated:
        keys = f"{', '.join(repeated[:REPEATED_SHOWN])}{' and perhaps more' if len(repeated) >= REPEATED_SHOWN else ''}"
        if input.last:
            what, advice = f"have several last rows by {input.order_by!r}", "Order them by a column that decides"
        else:
            what, advice = (
                "have several rows with one key",
                ("Keep the row that counts, or give on_duplicate='last' with order_by"),
            )
        raise InvalidState(
            f"{input.where} {what}: {keys}. {advice}. Nothing was published",
            kind=ErrorKind.DUPLICATE_ROW_KEY,
            operator=input.state.operator,
            state=input.state.name,
        )
    return [one.handle for one in found if one.handle is not None]


def _empty(job: Job, states: Iterable[State], handles: Iterable[Handle]) -> list[Handle]:
    """Handles of what has no rows: every subtask answers for every state."""
    answered = {(handle.operator, handle.state, handle.subtask) for handle in handles}
    return [
        Handle(state.operator, state.name, state.mode, subtask, 0, state.edge, state.current.id)
        for state in states
        if state.mode in PER_SUBTASK_MODES and state.mode is not Mode.COMMITTABLES
        for subtask in range(job.graph.operator(state.operator).parallelism)
        if (state.operator, state.name, subtask) not in answered
    ]


def _properties(inputs: Iterable[tuple[StateInput, Any]], starts: Mapping[str, StartingPoint]) -> dict[str, str]:
    names = ", ".join(one.name for one, _ in inputs)
    facts = {"states": names or "none"} | {f"source.{uid}": start.description for uid, start in starts.items()}
    return {f"{PROPERTY}{name}": text for name, text in facts.items()}

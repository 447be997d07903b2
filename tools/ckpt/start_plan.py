"""What a start of a program in a store would do: the plan that the start makes, and what else it
would refuse or say. Nothing is run or written.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from stateformat.errors import CheckpointError, InvalidInput
from stateformat.words import plural

if TYPE_CHECKING:
    from stateformat.backends.dataflow.flow import Dataflow
    from stateformat.backends.runtime import Options
    from stateformat.model import Record
    from stateformat.reading import Checkpoint
    from stateformat.store import CheckpointStore

    from .functions import FunctionName
    from .output import Document


T = TypeVar("T")
_LIBRARIES = ("stateformat", "pyarrow", "numpy", "contextlib")
"""Modules whose own exceptions are no fault of the program."""


def start_document(
    store: CheckpointStore, checkpoint: Checkpoint | None, flow: Dataflow, options: Options, program: FunctionName
) -> Document:
    """The document of a start of ``flow`` from ``checkpoint``; None: the store has none.

    Raises ``InvalidInput`` for a dataflow that no start would take, and for what its code raises.
    """

    def plan() -> Document:
        return _anew(store, flow, options) if checkpoint is None else _planned(store, checkpoint, flow, options)

    document = _of_the_program(program, plan)
    document["start"] |= {"program": program.shown, "job_id": flow.job_id, "job_name": flow.name}
    return document


def _anew(store: CheckpointStore, flow: Dataflow, options: Options) -> Document:
    """The document where there is nothing to go on from."""
    members = _members(flow, options)
    return {
        "store": store.url,
        "system": None,
        "refused": False,
        "load": [],
        "states": [_new_state(state) for state in members["states"]],
        "committable_rows": 0,
        "plan": None,
        "start": {
            "anew": True,
            "operators": members["operators"],
            "edges": members["edges"],
            "refusals": [],
            "notes": [*_notes_on_sources(flow), *members["warnings"]],
        },
    }


def _planned(store: CheckpointStore, checkpoint: Checkpoint, flow: Dataflow, options: Options) -> Document:
    from stateformat.backends.runtime import at_parallelism, plan_of
    from stateformat.history import record_ids
    from stateformat.model import Capability
    from stateformat.redistribution import plan_document
    from stateformat.rescaling import rescale_of

    record = checkpoint.record
    # Of another system's checkpoints there is no newest to start from.
    newest = max(record_ids(store.storage)) if Capability.CARRY in checkpoint.capabilities else checkpoint.id
    wanted = rescale_of(record) if newest == checkpoint.id else None
    if wanted is not None:
        options = at_parallelism(options, flow, wanted.of(record.graph))
    plan = plan_of(flow, checkpoint, options, check=False)
    document = plan_document(store.url, record, plan, system=checkpoint.system)
    planned = {(column.operator, column.state) for column in plan.columns}
    missing = {(each.operator, each.details.get("state")) for each in plan.refusals if each.code == "state_missing"}
    for state in document["states"]:
        key = (state["operator"], state["name"])
        # Elsewhere columns that nobody declares stay as they are. A program declares all.
        state["columns"] = state["columns"] if key in planned else []
        state["rule"] = "not declared by the program" if key in missing else state["rule"]
    members = _members(flow, options)
    declared = members["states"]
    known = {(str(state.operator), state.name) for state in record.states}
    document["states"] += [_new_state(one) for one in declared if (one["operator"], one["name"]) not in known]
    refusals = [*_refusals(store, checkpoint, flow)]
    notes = [*_notes(store, checkpoint, flow, newest, plan.topology), *members["warnings"]]
    document["refused"] = bool(plan.refused or refusals)
    document["start"] = {"anew": False, "operators": [], "edges": [], "refusals": refusals, "notes": notes}
    return document


def _members(flow: Dataflow, options: Options) -> Document:
    return flow.document(
        parallelism=options.parallelism, per_operator=options.per_operator, unaligned=options.unaligned
    )


def _new_state(state: Mapping[str, Any]) -> Document:
    return {
        "operator": state["operator"],
        "name": state["name"],
        "mode": state["mode"],
        "kind": state.get("kind"),
        "clock": state.get("clock", "event_time") if state.get("kind") == "timers" else None,
        "rule": "new: begins empty",
        "columns": [],
    }


def _refusals(store: CheckpointStore, checkpoint: Checkpoint, flow: Dataflow) -> Iterator[Document]:
    """What a start refuses besides the plan."""
    from stateformat.model import Capability, CheckpointKind

    record = checkpoint.record
    if Capability.CARRY not in checkpoint.capabilities:
        return  # The job id is chosen at the import, and its store has nothing prepared.
    if record.job_id != flow.job_id:
        yield {
            "code": "job_mismatch",
            "operator": "",
            "message": f"{store.url} belongs to job {record.job_id!r}, and the program makes job {flow.job_id!r}",
            "advice": f"name it Dataflow({record.job_id!r}), or give it a store of its own",
        }
    taken = _taken_place(store, record, flow) if record.kind is CheckpointKind.SAVEPOINT else None
    if taken is not None:
        uid = str(taken.details.get("operator", ""))
        yield {"code": "sink_place_taken", "operator": uid, "message": str(taken), "advice": ""}


def _taken_place(store: CheckpointStore, record: Record, flow: Dataflow) -> InvalidInput | None:
    """Why no job can begin a store of its own with this checkpoint: another writes to its sinks."""
    from stateformat.backends.runtime import check_places, sinks_of

    try:
        check_places(sinks_of(flow), record, store.url)
    except InvalidInput as error:
        return error
    return None


def _notes(store: CheckpointStore, checkpoint: Checkpoint, flow: Dataflow, newest: int, topology: Any) -> Iterator[str]:
    """What a start needs, does or says, a sentence each."""
    from stateformat.backends.runtime import parallelism_words
    from stateformat.model import Capability, CheckpointKind, StopMode
    from stateformat.rescaling import lasting_stop, rescale_of

    record, number = checkpoint.record, checkpoint.id
    if Capability.CARRY not in checkpoint.capabilities:
        from stateformat.backends.foreign import advice_for

        system = str(checkpoint.system)
        yield f"this is {system}: {advice_for(system, 'start', store.url, job_id=flow.job_id)}"
    elif record.kind is CheckpointKind.SAVEPOINT:
        yield (
            f"this is a savepoint, which is yours: `--from {store.url}` begins an empty store with it, and --claim "
            "hands it over to the job"
        )
    elif newest > number:
        here = f"{store.url}@{number}"
        yield (
            f"a start in this store goes on from its newest checkpoint, {newest}; from this one a job "
            f"goes on in an empty store with `--from {here}`, or after `ckpt rollback {here}`"
        )
        taken = _taken_place(store, record, flow)
        if taken is not None:
            yield f"with --from it would be refused: {taken}"
    wanted, stop = rescale_of(record), lasting_stop(record)
    if wanted is not None and newest == number:
        yield f"the job stopped at checkpoint {number} for a rescale: a start goes on at {wanted.describe()}"
    elif stop is not None and stop.mode is StopMode.DRAIN:
        yield f"the job has ended for good at checkpoint {number}, with a drain: a start returns at once"
    elif stop is not None:
        yield f"the job stopped at checkpoint {number}: a start goes on from there only with --resume"
    if record.graph.is_finished:
        yield f"everything has finished in checkpoint {number}: a start returns at once"
    said = parallelism_words(record, topology)
    if said and (wanted is None or newest != number):
        yield said
    yield from _notes_on_sources(flow)


def _notes_on_sources(flow: Dataflow) -> Iterator[str]:
    """Which executor runs the program, if only one does."""
    from stateformat.backends.dataflow.api import Source

    by_reader: dict[str, list[str]] = {}
    for uid, step in flow.steps.items():
        if isinstance(step.logic, Source) and step.logic.read_by is not None:
            by_reader.setdefault(step.logic.read_by, []).append(repr(uid))
    for reader, uids in by_reader.items():
        yield f"only {reader} reads {plural(len(uids), 'source').split()[1]} {', '.join(uids)}"


def _of_the_program(program: FunctionName, code: Callable[[], T]) -> T:
    """What code returns that calls a program's operators; what these raise is ``InvalidInput``."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return code()
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        if not _is_theirs(error):
            raise
        raise InvalidInput(
            f"{program}: its code raised {type(error).__name__} when its states were asked for: {error}. The stack "
            "trace is shown with --verbose"
        ) from error


def _is_theirs(error: Exception) -> bool:
    """Whether an exception came through code that is not ours."""
    frames = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            return True
        frames = frames.tb_next
    return False

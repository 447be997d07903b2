"""``ckpt get``: the rows of one key, at one checkpoint or along the history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from stateformat import words

from ...exit_status import FINE, PROBLEMS
from ...options import Address, Session, command
from ...output import Document, Step
from ...pages import KEY_ROWS_SHOWN, key_history_page, key_page
from .inspect import chosen_states

if TYPE_CHECKING:
    import pyarrow as pa

    from stateformat.errors import CheckpointError
    from stateformat.inspecting import KeyStep
    from stateformat.model import Record, State
    from stateformat.reading import Checkpoint

STATES_LISTED: Final = 20
MANIFESTS_AT_ONCE: Final = 8


@command("get", foreign=True, expired=True)
@click.option("--operator", metavar="UID", help="The operator, by uid or name.")
@click.option("--state", metavar="NAME", help="The state. Both may be left out if there is only one choice.")
@click.option(
    "--key", required=True, metavar="KEY", help="The key: text, or JSON: a value, or an array or object of its columns."
)
@click.option("--all", "along", is_flag=True, help="Show at which checkpoints of the history the key's rows changed.")
def get(session: Session, address: Address, *, operator: str | None, state: str | None, key: str, along: bool) -> int:
    """Show the rows of one key, now or along the history.

    The key is the value if the state has one key column: --key user-4711, --key 42, --key null. Of
    several columns it is JSON, an array of the values in the order of the columns, or an object by
    column: --key '["de", 7]'. Text that begins like JSON is in double quotes: --key '"[a]"'. Only
    the row groups of the key's key group are read.

    With --all: what changed when, newest first, from the checkpoint of the address down. A
    checkpoint with the same rows as the one before it is not shown; one that cannot be read is
    reported and skipped. All rows have the columns of the latest schema.

    Exit status: 1 if the key has no rows, or if part of the history could not be read.
    """
    with ExitStack() as files:
        if along:
            document, status = _along(session, address, operator, state, key, files)
            session.output.show(document, key_history_page)
            return status
        from stateformat.reading import keys_from_json

        from ...kept import Kept

        checkpoint = session.shown(session.read_only(address))
        chosen = chosen_state(checkpoint, operator, state)
        rows = checkpoint.state(chosen)  # Says what is wrong with its declaration.
        keys = keys_from_json(chosen, key)
        if said := checkpoint.without_state(chosen.operator):
            session.output.note(said)
        kept = files.enter_context(Kept(_most(session)))
        for batch in rows.at_keys(keys).batches():
            kept.add(batch)
        document = {**_head(checkpoint, chosen, keys), "row_count": kept.count, "rows": kept.document}
        session.output.show(document, key_page)
        return FINE if kept.count else PROBLEMS


def _most(session: Session) -> int | None:
    """How many rows or changes a document needs: JSON has all."""
    return None if session.output.as_json else KEY_ROWS_SHOWN


def chosen_state(checkpoint: Checkpoint, operator: str | None, name: str | None) -> State:
    """The one state with keys that ``--operator`` and ``--state`` select, or ``InvalidInput``."""
    from stateformat.errors import ErrorKind, InvalidInput

    uid = None if operator is None else checkpoint.operator_uid(operator)
    found = chosen_states(checkpoint, uid, name)
    keyed = [state for state in found if state.key_columns]
    if len(keyed) == 1:
        return keyed[0]
    where = f"checkpoint {checkpoint.id}" if uid is None else f"operator {uid!r}"
    if keyed:
        listed = [f"--operator {state.operator!r} --state {state.name!r}" for state in keyed[:STATES_LISTED]]
        left = f"; and {len(keyed) - STATES_LISTED:,} more" if len(keyed) > STATES_LISTED else ""
        said = "" if name is None else f" named {name!r}"
        raise InvalidInput(
            f"{where} has {len(keyed)} states with keys{said}; choose one: {'; '.join(listed)}{left}",
            kind=ErrorKind.UNKNOWN_STATE,
        )
    if not found:
        raise InvalidInput(f"{where} has no state", kind=ErrorKind.UNKNOWN_STATE)
    one = found[0]
    what = f"state {one.name!r} of {one.operator!r} is {one.mode} and has" if len(found) == 1 else f"{where} has"
    raise InvalidInput(
        f"{what} no keys; `ckpt inspect --operator {one.operator} --state {one.name} --rows 20` shows rows, and "
        "`ckpt sql` finds some",
        kind=ErrorKind.UNKNOWN_STATE,
    )


def _head(checkpoint: Checkpoint, state: State, keys: pa.Table) -> Document:
    """What is looked for, and where."""
    from stateformat.documents import objects
    from stateformat.reading import key_group_of
    from stateformat.schema import row_schema

    operator = checkpoint.graph.operator(state.operator)
    group = key_group_of(keys, operator)
    return {
        "store": checkpoint.storage.url,
        "checkpoint_id": checkpoint.id,
        "created_at": words.moment(checkpoint.record.created_at_us),
        "created_at_us": checkpoint.record.created_at_us,
        "system": checkpoint.system,
        "operator": state.operator,
        "operator_name": operator.name,
        "state": state.name,
        "kind": None if state.kind is None else state.kind.value,
        "key_columns": list(state.key_columns),
        "columns": [{"name": field.name, "type": str(field.type)} for field in row_schema(state)],
        "key": objects(keys.to_batches(), 1)[0],
        "key_group": None if group is None else group[0],
        "max_parallelism": operator.max_parallelism,
        "subtask": None if group is None else group[1],
    }


def _along(
    session: Session, address: Address, operator: str | None, name: str | None, key: str, files: ExitStack
) -> tuple[Document, int]:
    """The document of ``--all``, whose changes lie in ``files``, and the exit status."""
    from stateformat.history import record_lost
    from stateformat.inspecting import key_history, latest_declaration, newest_declaration
    from stateformat.reading import StoreCheckpoint, keys_from_json
    from stateformat.storage import remembered

    store = session.store(address)
    found = store.survey()
    upto = found.listed[-1] if address.checkpoint_id is None else address.checkpoint_id
    records = [record for record in found.checkpoints if record.checkpoint_id <= upto]
    if not records or records[0].checkpoint_id < (address.checkpoint_id or 0):
        store.open(address.checkpoint_id)  # Says what is wrong with it.
    storage = remembered(store.storage)
    checkpoints = [
        session.shown(StoreCheckpoint(storage, record) if record.manifest.path else store.checkpoint_of(record))
        for record in records
    ]
    if operator is None or name is None:
        state = chosen_state(checkpoints[0], operator, name)
    else:
        state = newest_declaration(checkpoints, operator, name)
    state = latest_declaration(checkpoints, state)
    declared = next(one for one in checkpoints if (state.operator, state.name) in one.record.by_state)
    keys = keys_from_json(state, key)
    history = [_unreadable(number, error) for number, error in found.unreadable.items() if number in found.damaged]
    history += [_unreadable(ref.checkpoint_id, record_lost(store.storage, ref)) for ref in found.lost]
    history = [entry for entry in history if entry["checkpoint_id"] <= upto]
    with session.output.progress("Reading the history", unit="checkpoints") as step:
        watched = _watched(checkpoints, step)
        most = _most(session)
        history += [_entry(one, files, most) for one in key_history(watched, state, keys)]
    history.sort(key=lambda entry: -entry["checkpoint_id"])
    document = {
        **_head(declared, state, keys),
        "checkpoint_id": records[0].checkpoint_id,
        "checkpoints": len(records),
        "oldest": {"checkpoint_id": records[-1].checkpoint_id, "is_first": records[-1].parent is None},
        "history": history,
    }
    whole = all(entry["error"] is None for entry in history)
    return document, FINE if history and whole else PROBLEMS


def _watched(checkpoints: Sequence[Checkpoint], step: Step) -> Iterator[Checkpoint]:
    """Copies with their manifests, some of which are read ahead where reading is mostly waiting."""
    from stateformat.tables import prefetch

    at_once = min(MANIFESTS_AT_ONCE, checkpoints[0].storage.reads_at_once)
    calls = (partial(_with_manifest, checkpoint) for checkpoint in checkpoints)
    with closing(prefetch(calls, workers=at_once, depth=at_once)) as opened:
        for done, checkpoint in enumerate(opened):
            step(done, len(checkpoints))
            yield checkpoint


def _with_manifest(checkpoint: Checkpoint) -> Checkpoint:
    from stateformat.errors import CheckpointError

    # A checkpoint keeps its manifest; those of a history are too many to be held.
    fresh = copy(checkpoint)
    # Whoever uses it meets the error.
    with suppress(CheckpointError):
        fresh.outline  # noqa: B018 - reads it
    return fresh


def _entry(step: KeyStep, files: ExitStack, most: int | None) -> Document:
    """One checkpoint at which something happened, with so many changes."""
    from stateformat.inspecting import CHANGE, column_changes

    from ...kept import Kept

    record = step.record
    if step.fault is not None:
        return {**_unreadable(record.checkpoint_id, step.fault), **_made(record)}
    kept = files.enter_context(Kept(most))
    for table in step.changes:
        kept.add_changes(table, CHANGE.name)
    before, now = step.rows
    if step.since is None:
        event = "added" if record.parent is None and record.kind.value == "checkpoint" else "present"
    elif not before:
        event = "added"
    elif not now:
        event = "removed"
    else:
        event = "changed" if kept.count else "unchanged"
    return {
        "checkpoint_id": record.checkpoint_id,
        **_made(record),
        "event": event,
        "since": None if step.since is None else step.since.checkpoint_id,
        "rows_before": before,
        "row_count": now,
        "change_count": kept.count,
        "changes": kept.document,
        "column_changes": [] if step.declared is None else column_changes(*step.declared),
        "error": None,
    }


def _made(record: Record) -> Document:
    return {
        "created_at": words.moment(record.created_at_us),
        "created_at_us": record.created_at_us,
        "kind": record.kind.value,
    }


def _unreadable(checkpoint_id: int, error: CheckpointError) -> Document:
    """A checkpoint that cannot be read; members that nobody knows are null."""
    from stateformat.documents import fault_document

    unknown = dict.fromkeys(("created_at", "created_at_us", "kind", "since", "rows_before", "row_count"))
    return {
        "checkpoint_id": int(checkpoint_id),
        **unknown,
        "event": "unreadable",
        "change_count": 0,
        "changes": [],
        "column_changes": [],
        "error": fault_document(error),
    }

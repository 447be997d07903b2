"""``ckpt inspect``: one page about a checkpoint, from its record and manifest.

Segments are opened only for ``--rows``, and for what the states of a runtime hold where a page is narrowed to some.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from ..options import Address, Session, command, operator_uid
from ..output import Document
from ..text.inspect import draw

if TYPE_CHECKING:
    from stateformat.model import State
    from stateformat.reading import Checkpoint


@command("inspect")
@click.option("--operator", metavar="UID", help="Only this operator, by uid or name, subtask by subtask.")
@click.option("--state", metavar="NAME", help="Only states of this name.")
@click.option("--rows", type=click.IntRange(min=1), metavar="N", help="Show the first N rows of each state chosen.")
def inspect(session: Session, address: Address, *, operator: str | None, state: str | None, rows: int | None) -> None:
    """Show what is in a checkpoint: graph, states, skew, rows.

    The job graph stands in topological order, each operator with what has finished of it. Bytes are stored bytes; the bars
    are the rows of each subtask beside those of the greatest, with a dash for a subtask that has finished. With --operator or
    --state the rows of timers, progress, committables and records in flight are looked at: when, from whom, since when.
    """
    from ..documents import Holdings, holds_document, record_document

    checkpoint = session.look(address)
    uid = None if operator is None else operator_uid(checkpoint, operator)
    states = chosen_states(checkpoint, uid, state)
    document = record_document(checkpoint.storage.url, checkpoint.record)
    document["inline_bytes"] = checkpoint.manifest.inline_bytes()
    document["selection"] = {"operator": uid, "state": state}
    declared = dict(zip(checkpoint.states, document["states"], strict=True))
    holdings = Holdings(checkpoint.record, checkpoint.handles)
    document["holds"] = holds_document(checkpoint.record, holdings)
    document["states"] = [holdings.document(chosen, declared[chosen]) for chosen in states]
    if uid is not None or state is not None:
        from ..documents import contents

        for entry, chosen in zip(document["states"], states, strict=True):
            entry["contents"] = contents(checkpoint, chosen, entry["rows"])
    if rows is not None:
        for entry, chosen in zip(document["states"], states, strict=True):
            entry["sample"] = _sample(checkpoint, chosen, rows)
    session.output.show(document, lambda page, look: draw(page, look, time.time_ns() // 1000))


def chosen_states(checkpoint: Checkpoint, operator: str | None, name: str | None) -> list[State]:
    """The states that ``--operator`` (a uid) and ``--state`` leave; ``InvalidInput`` where a name fits none."""
    from stateformat.errors import ErrorKind, InvalidInput
    from stateformat.model import known_names

    found = [state for state in checkpoint.states if operator is None or state.operator == operator]
    if name is None:
        return found
    named = [state for state in found if state.name == name]
    if not named:
        where = f"operator {operator!r}" if operator is not None else f"checkpoint {checkpoint.id}"
        known = known_names([state.name for state in found], name)
        raise InvalidInput(f"{where} has no state {name!r}; {known}", kind=ErrorKind.UNKNOWN_STATE, state=name)
    return named


def _sample(checkpoint: Checkpoint, state: State, count: int) -> list[Document]:
    """The first rows of a state, layers merged, in the order of its subtasks."""
    from ..rows import objects

    return objects(checkpoint.read(state.operator, state.name).batches(batch_rows=max(count, 1024)), count)

"""``ckpt inspect``: one page about a checkpoint, from its record and manifest.

It opens segments only for ``--rows``, and for a page narrowed to some states (``contents``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import click

from ...options import Address, Session, Whole, command

if TYPE_CHECKING:
    from stateformat.model import State
    from stateformat.reading import Checkpoint


ROW_BYTES: Final = 16
"""About what a row takes where nobody has counted them, to judge whether they are too many."""


@command("inspect", foreign=True, expired=True)
@click.option("--operator", metavar="UID", help="Only this operator, by uid or name, subtask by subtask.")
@click.option("--state", metavar="NAME", help="Only states of this name.")
@click.option("--rows", type=Whole(), metavar="N", help="Show the first N rows of each state.")
def inspect(session: Session, address: Address, *, operator: str | None, state: str | None, rows: int | None) -> None:
    """Show what is in a checkpoint: graph, states, skew, rows.

    The job graph is in topological order. Bytes are stored bytes. Each bar shows the rows of one
    subtask relative to the largest; a dash is a subtask that has finished. With --operator or
    --state the page also says what timers, progress, committables and records in flight hold.
    """
    from stateformat.documents import checkpoint_document, objects
    from stateformat.pages.checkpoint import checkpoint_page

    checkpoint = session.read_only(address)
    uid = None if operator is None else checkpoint.operator_uid(operator)
    states = chosen_states(checkpoint, uid, state)
    document = checkpoint_document(checkpoint, states, operator=uid, state=state)
    for entry, chosen in zip(document["states"], states, strict=True):
        if uid is not None or state is not None:
            from stateformat.inspecting import contents

            rows_about = entry["bytes"] // ROW_BYTES if entry["rows"] is None else entry["rows"]
            entry["contents"] = contents(checkpoint, chosen, rows_about)
        if rows is not None:
            # Layers are merged, and subtasks are in order.
            task = session.shown(checkpoint).read(chosen.operator, chosen.name)
            entry["sample"] = objects(task.batches(batch_rows=max(rows, 1024)), rows)
    session.output.show(document, lambda page: checkpoint_page(page, time.time_ns() // 1000))


def chosen_states(checkpoint: Checkpoint, operator: str | None, name: str | None) -> list[State]:
    """The states that ``--operator`` and ``--state`` select; ``InvalidInput`` if there are none."""
    from stateformat.errors import ErrorKind, InvalidInput
    from stateformat.model import known_names

    found = [state for state in checkpoint.states if operator is None or state.operator == operator]
    if name is None:
        return found
    same_name = [state for state in found if state.name == name]
    if not same_name:
        where = f"operator {operator!r}" if operator is not None else f"checkpoint {checkpoint.id}"
        known = known_names([state.name for state in found], name)
        raise InvalidInput(f"{where} has no state {name!r}; {known}", kind=ErrorKind.UNKNOWN_STATE, state=name)
    return same_name

"""``ckpt history``: the checkpoints of a store, newest first, and its stray records; or what lies
below a folder.
"""

from __future__ import annotations

import time
from typing import Final

import click

from stateformat.errors import NotFound
from stateformat.pages.checkpoint import below_page, history_page

from ...exit_status import FINE, PROBLEMS
from ...options import Address, Session, Whole, command

PLACES: Final = 50
"""What is opened and checked of all that lies below a folder, if not said otherwise."""


@command("history", checkpoint="never", foreign=True)
@click.option(
    "--limit",
    type=Whole(),
    metavar="N",
    help=f"Only the newest N checkpoints; below a folder the first N that are found, else {PLACES}.",
)
def history(session: Session, address: Address, *, limit: int | None) -> int:
    """List the checkpoints of a store, newest first.

    An operator counts as finished when all of its subtasks have ended, as partly finished when some
    have. A record that is damaged or lost is shown in its place, with the checkpoints below it, and
    the exit status is 1; `ckpt repair` says what to do. A record that no parent link reaches is a
    stray, not a checkpoint. Strays are listed below the table, and so are the savepoints below the
    store: pins, and those of jobs. STORE@NAME is the address of a savepoint.

    Of a folder that is no store, all that lies below it is listed, nearest first: stores, Spark
    queries, and checkpoints and savepoints of Flink, with the newest checkpoint of each, and
    whether that is whole, as `ckpt validate` says without reading all data. Hidden folders and
    links are passed over.
    """
    from stateformat.inspecting import below_document, savepoints_document, survey_document

    store = session.store(address)
    try:
        found = store.survey(limit)
    except NotFound as error:
        if (below := error.details.get("below")) is None:
            raise
        session.output.show(
            below_document(below, limit or PLACES), lambda page: below_page(page, time.time_ns() // 1000)
        )
        return FINE
    document = survey_document(store.url, store.storage, found, limit)
    document["savepoints"] = savepoints_document(store.pins())
    session.output.show(document, lambda page: history_page(page, time.time_ns() // 1000))
    return FINE if document["ended_by"] is None else PROBLEMS

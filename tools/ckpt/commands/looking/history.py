"""``ckpt history``: the checkpoints of a store, newest first, and its stray records."""

from __future__ import annotations

import time

import click

from stateformat.documents import fault_document, history_document, reference
from stateformat.pages.checkpoint import history_page

from ...exit_status import FINE, PROBLEMS
from ...options import Address, Session, Whole, command


@command("history", checkpoint="never", foreign=True)
@click.option("--limit", type=Whole(), metavar="N", help="Only the newest N checkpoints.")
def history(session: Session, address: Address, *, limit: int | None) -> int:
    """List the checkpoints of a store, newest first.

    An operator counts as finished when all of its subtasks have ended, as partly finished when some
    have. A record that is damaged or lost is shown in its place, with the checkpoints below it, and
    the exit status is 1; `ckpt repair` says what to do. A record that no parent link reaches is a
    stray, not a checkpoint. Strays are listed below the table, and so are the savepoints below the
    store: pins, and those of jobs. STORE@NAME is the address of a savepoint.
    """
    from stateformat.inspecting import savepoints_document

    store = session.store(address)
    found = store.survey(limit)
    fault = found.fault(store.storage)
    records = found.checkpoints[:limit]
    document = {
        "store": store.url,
        "job_id": records[0].job_id if records else "",
        "job_name": records[0].job_name if records else "",
        "checkpoints": [history_document(record) for record in found.chain[:limit]],
        "cut_off": [history_document(record) for record in records[len(found.chain) :]],
        "damaged": [
            {"checkpoint_id": number, **fault_document(error)}
            for number, error in ((number, found.unreadable[number]) for number in found.damaged)
        ],
        "lost": [reference(ref) for ref in found.lost],
        "strays": None if limit is not None else [reference(stray) for stray in found.strays],
        "savepoints": savepoints_document(store.pins()),
        "ended_by": None if fault is None else fault_document(fault),
    }
    session.output.show(document, lambda page: history_page(page, time.time_ns() // 1000))
    return FINE if fault is None else PROBLEMS

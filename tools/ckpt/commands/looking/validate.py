"""``ckpt validate``: all that is wrong with a checkpoint or a store, what to do. Never writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import click

from ...exit_status import FINE, PROBLEMS, UNAVAILABLE
from ...options import Address, Session, command, id_of
from ...output import Document, Step
from ...pages import checkpoint_findings_page, newest_whole_page, store_findings_page

if TYPE_CHECKING:
    from stateformat.findings import Level
    from stateformat.store import CheckpointStore


@command("validate", foreign=True)
@click.option(
    "--level",
    type=click.Choice(["quick", "full"]),
    default="quick",
    show_default=True,
    help="Record, manifest, sizes and footers; or every byte and row.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="All checkpoints of the store and the savepoints below it; what checkpoints share is read once.",
)
@click.option(
    "--newest-whole",
    "search",
    is_flag=True,
    help="Go down from the newest checkpoint, and stop at the first whole one.",
)
def validate(session: Session, address: Address, *, level: str, everything: bool, search: bool) -> int:
    """Find everything that is wrong with a checkpoint.

    Each finding names the broken section of SPEC.md, the object, and what to do. Nothing is
    written.

    Exit status: 1 if there is any problem; warnings do not count. With --newest-whole: 0 if it is
    the newest, 1 if it is an older one, 3 if none is whole.
    """
    from stateformat.documents import report_document, store_report_document
    from stateformat.validation import newest_whole, validate as run, validate_all

    _check(address, everything=everything, search=search)
    store, chosen = session.store(address), cast("Any", level)
    with session.output.progress(f"Validating {address}") as step:
        if everything or search:
            found = (newest_whole if search else validate_all)(store, level=chosen, progress=step)
            document = store_report_document(found)
            # What is left where no checkpoint is.
            wanted = everything or found.newest_whole is None
            document["savepoints"] = _savepoints(store, chosen, step, every=everything) if wanted else []
            document["ok"] &= all(each["ok"] for each in document["savepoints"])
        else:
            document = report_document(run(store, id_of(address), level=chosen, progress=step))
    if not search:
        session.output.show(document, store_findings_page if everything else checkpoint_findings_page)
        return FINE if document["ok"] else PROBLEMS
    session.output.show(document, newest_whole_page)
    if document["newest_whole"] is None:
        return UNAVAILABLE
    return FINE if document["newest_whole"] == document["newest"] else PROBLEMS


def _savepoints(store: CheckpointStore, level: Level, step: Step, *, every: bool) -> list[Document]:
    """What is wrong with the savepoints below a store, the newest checkpoint first.

    Unless ``every``, it ends with the first that is whole.
    """
    from stateformat.documents import problem_document
    from stateformat.errors import NotFound
    from stateformat.history import record_ids
    from stateformat.validation import validate as run

    storage, found = store.storage, list[Document]()
    if not record_ids(storage):
        return found
    ids = {one.name: one.record.checkpoint_id if one.record else 0 for one in store.pins()}
    for name in sorted(ids, key=lambda name: (-ids[name], name)):
        try:
            report = run(storage.savepoint(name), level=level, progress=step)
        except NotFound:
            continue  # It was removed meanwhile.
        found.append(
            {
                "name": name,
                "url": report.url,
                "checkpoint_id": report.checkpoint_id,
                "ok": report.ok,
                "problems": [problem_document(problem) for problem in report.problems],
            }
        )
        if report.ok and not every:
            break
    return found


def _check(address: Address, *, everything: bool, search: bool) -> None:
    """Raise a usage error for options that contradict each other."""
    if everything and search:
        raise click.UsageError(
            "--all and --newest-whole answer two questions. Leave one out: --all reads every checkpoint and says which "
            "is the newest whole one, too"
        )
    if (everything or search) and address.checkpoint_id is not None:
        option = "--all" if everything else "--newest-whole"
        raise click.UsageError(f"{option} is about the whole store. Leave @{address.checkpoint_id} out")

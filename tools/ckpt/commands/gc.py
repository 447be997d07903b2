"""``ckpt gc``: what retention and orphans would free, and with ``--delete`` its removal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import click

from ..exit_status import FINE, PROBLEMS
from ..options import Address, Session, command
from ..output import Document
from ..text import Column, Look, facts, heading, label, paragraph, plural, sentence, size, table

if TYPE_CHECKING:
    from stateformat.storage import Leftover, ObjectInfo

FOLDERS: Final = {"records": "checkpoints/", "segments": "segments/", "manifests": "manifests/"}
"""Where each sort of object lies. Leftovers lie in all of them."""

SHOWN: Final = 20
"""Objects of each sort named on a page; JSON lists all."""


@command("gc", checkpoint="never")
@click.option(
    "--keep", type=click.IntRange(min=1), metavar="N", help="Expire all but the newest N checkpoints; without it, none."
)
@click.option("--delete", is_flag=True, help="Delete. Without it nothing is changed.")
def gc(session: Session, address: Address, *, keep: int | None, delete: bool) -> int:
    """Show, or with --delete remove, what retention would free.

    Garbage is what no checkpoint names: expired records with their data, and what crashed or beaten attempts left
    behind, temporary files included. What a running job is writing lies above the newest checkpoint and is never
    touched. Nothing is deleted where a record or manifest cannot be read or was lost, because what it needs is unknown;
    exit status 1.
    """
    from stateformat.history import record_ids, require_records

    store = session.store(address.url)
    require_records(store.storage, record_ids(store.storage))
    if delete:
        session.changes("what was deleted by then stays deleted, the rest is still there; run it again to go on")
    with session.output.progress("Looking for garbage"):
        found = store.collect_garbage(delete=delete) if keep is None else store.expire(keep, delete=delete)
    document = {
        "store": store.url,
        "newest": found.newest,
        "keep": keep,
        "deleted": found.deleted,
        "stopped": found.stopped,
        "records": _objects(found.records),
        "segments": _objects(found.segments),
        "manifests": _objects(found.manifests),
        "leftovers": _leftovers(found.leftovers),
        "unfinished": _leftovers(found.unfinished),
        "bytes": found.size_bytes,
    }
    session.output.show(document, draw)
    return PROBLEMS if found.stopped else FINE


def _objects(found: Sequence[ObjectInfo]) -> list[Document]:
    return [{"path": item.path, "size_bytes": item.size_bytes} for item in found]


def _leftovers(found: Sequence[Leftover]) -> list[Document]:
    return [{"path": item.name, "size_bytes": item.size_bytes} for item in found]


def draw(document: Document, look: Look) -> Iterator[str]:
    """The page: the sums, the objects, and what to do next."""
    yield heading("Garbage", look)
    yield ""
    kept = "every checkpoint" if document["keep"] is None else f"the newest {plural(document['keep'], 'checkpoint')}"
    what = [(name, document[name]) for name in ("records", "segments", "manifests", "leftovers")]
    counts = ", ".join(plural(len(items), name.removesuffix("s")) for name, items in what if items)
    freed = f"{counts}, {size(document['bytes'])}" if counts else "nothing"
    unfinished = document["unfinished"]
    left = f"{plural(len(unfinished), 'temporary file')} of writers that may be alive" if unfinished else ""
    verb = "freed" if document["deleted"] else "would free"
    newest = f", newest {document['newest']}" if document["newest"] is not None else ""
    pairs = [("keeps", f"{kept}{newest}"), (verb, freed), ("not touched", left)]
    yield from facts([("store", label(document["store"])), *pairs], look)
    for name, items in what:
        if items:
            yield ""
            folder = FOLDERS.get(name, "")
            title = f"{name} in {folder}" if folder else name
            rows = [[label(item["path"].removeprefix(folder)), size(item["size_bytes"])] for item in items[:SHOWN]]
            yield from table([Column(title, flexible=True), Column("bytes", right=True)], rows, look)
            if len(items) > SHOWN:
                yield f"  {look['ellipsis']} and {len(items) - SHOWN} more (--format json lists all)"
    if document["stopped"]:
        yield ""
        yield from paragraph(look.paint(sentence(f"stopped: {document['stopped']}"), "problem"), look)
    elif counts and not document["deleted"]:
        yield ""
        yield from paragraph("Nothing was changed. Run it again with --delete to delete these.", look)

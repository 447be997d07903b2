"""``ckpt unpin``: removes a savepoint below a store."""

from __future__ import annotations

import click

from stateformat.pages.blocks import Facts, Heading, Page

from ...options import Address, Session, command
from ...output import Document


@command("unpin")
@click.argument("name", metavar="[NAME]", required=False)
def unpin(session: Session, address: Address, *, name: str | None) -> None:
    """Remove a pin, or another savepoint below the store.

    Name it by STORE@NAME, or by STORE NAME. What lies in savepoints/NAME/, a store with one
    checkpoint, is removed, its record first; the store itself stays as it is, and so do checkpoints
    that share its bytes. A savepoint in which a job has gone on is the job's store, and is refused.
    Run an interrupted unpin again to finish it.
    """
    from stateformat import pins
    from stateformat.documents import reference
    from stateformat.storage import split_name

    url, named = (address.url, name) if name is not None else split_name(address.url)
    if named is None or address.checkpoint_id is not None or address.format is not None:
        raise click.UsageError("give the name of a pin: STORE@NAME, or STORE NAME; `ckpt history STORE` lists them")
    store = session.store(Address(url, whole=True))
    session.changes("run it again to finish: without its record the savepoint is no checkpoint any more")
    removed = pins.unpin(store.storage, named)
    record = None if removed is None else removed.record
    document = {
        "store": store.url,
        "name": named,
        "removed": None if record is None else reference(record.ref),
    }
    session.output.show(document, page)


def page(document: Document) -> Page:
    """The page: what was removed."""
    removed = document["removed"]
    of = f"checkpoint {removed['checkpoint_id']}" if removed else "what an interrupted pin or unpin had left"
    facts = [("store", document["store"]), ("removed", f"savepoints/{document['name']}/: {of}")]
    return [Heading(f"Unpinned {document['name']}"), Facts(facts)]

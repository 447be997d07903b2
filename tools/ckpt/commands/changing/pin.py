"""``ckpt pin``: a checkpoint kept under a name, as a savepoint below its store."""

from __future__ import annotations

import click

from stateformat.pages.blocks import Facts, Heading, Page

from ...options import Address, Session, command
from ...output import Document
from ...published import Moved, moved_text, source_document, totals_text


@command("pin")
@click.argument("name", metavar="NAME")
def pin(session: Session, address: Address, *, name: str) -> None:
    """Keep a checkpoint under a name, out of reach of retention.

    Makes a savepoint in savepoints/NAME/ below the store, by links or copies on the server where
    the storage has them. Its address is STORE@NAME, which works wherever STORE@ID does. NAME is a
    letter followed by letters, digits, '.', '_' and '-'. Pinning a checkpoint again under the same
    name changes nothing, or completes an interrupted pin. `ckpt history` lists the pins of a store,
    `ckpt unpin` removes one.
    """
    from stateformat import pins
    from stateformat.documents import published_document

    store, checkpoint = session.checkpoint(address)
    session.changes("run it again to complete the pin: what is there is not copied twice")
    with session.output.progress(f"Pinning checkpoint {checkpoint.id}") as step:
        moved = Moved(step)
        made = pins.pin(checkpoint, name, progress=moved)
    document = {
        **published_document(made.url, made.record),
        "name": name,
        "made": made.made,
        "source": source_document(store, checkpoint.record),
        "moved": moved.document,
    }
    session.output.show(document, page)


def page(document: Document) -> Page:
    """The page: which checkpoint, and the address that it has now."""
    facts = [
        ("address", f"{document['source']['store']}@{document['name']}"),
        ("lies in", document["store"]),
        ("size", totals_text(document["totals"])),
        ("moved", moved_text(document["moved"])),
    ]
    done = "Pinned" if document["made"] else "Pinned before:"
    return [Heading(f"{done} checkpoint {document['checkpoint_id']} as {document['name']}"), Facts(facts)]

"""``ckpt copy``: a self-contained checkpoint in a store of its own."""

from __future__ import annotations

from collections.abc import Iterator

import click

from stateformat import words
from stateformat.words import label

from ...options import Address, AddressType, Session, command
from ...output import Document
from ...text import Look, render
from ._published import source_document


@command("copy")
@click.argument("target", type=AddressType("never"), metavar="TARGET")
def copy(session: Session, address: Address, *, target: Address) -> None:
    """Copy a checkpoint into a store of its own: a savepoint.

    TARGET is the path or URL of a store that does not exist yet or is empty. Every object keeps its
    path and bytes; its digest is verified on the way. Run an interrupted copy again to complete it.
    """
    from stateformat.documents import published_document

    store, checkpoint = session.checkpoint(address, target.url)
    there = session.store(target.url, address.url)
    session.changes("run it again to complete the copy: what is there is not copied twice")
    with session.output.progress(f"Copying checkpoint {checkpoint.id}") as step:
        record = store.copy(checkpoint, there, lambda now: step(now.bytes_done, now.bytes_total))
    document = {
        **published_document(there.url, record),
        "source": source_document(store, checkpoint.record),
        "manifest_bytes": record.manifest.size_bytes,
    }
    session.output.show(document, draw)


def draw(document: Document, look: Look) -> Iterator[str]:
    """The page: what was copied, from where to where."""
    totals = document["totals"]
    manifest, segments = (
        f"manifest {words.size(document['manifest_bytes'])}",
        words.plural(totals["segments"], "segment"),
    )
    facts = [
        ("from", label(document["source"]["store"])),
        ("to", label(document["store"])),
        ("kind", document["kind"]),
        ("size", look.dotted(words.plural(totals["rows"], "row"), words.size(totals["bytes"]), segments, manifest)),
    ]
    return render.page_head(f"Copied checkpoint {document['checkpoint_id']}", facts, look)

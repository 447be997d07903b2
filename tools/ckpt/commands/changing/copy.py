"""``ckpt copy``: a self-contained checkpoint in a store of its own."""

from __future__ import annotations

import click

from stateformat import words
from stateformat.pages.blocks import Facts, Heading, Page

from ...options import Address, AddressType, Session, command
from ...output import Document
from ...published import Moved, moved_text, proof, prove_option, show_proved, source_document, totals_text


@command("copy")
@click.argument("target", type=AddressType("never"), metavar="TARGET")
@prove_option
def copy(session: Session, address: Address, *, target: Address, prove: bool) -> int:
    """Copy a checkpoint into a store of its own: a savepoint.

    TARGET is the path or URL of a store that does not exist yet or is empty. Every object keeps its
    path and bytes; its digest is verified during the copy. On the same disk objects are linked
    instead, so both stores share their bytes; between two places of one S3 server the server
    copies, and sizes are checked (`ckpt validate --level full` reads the digests). Run an
    interrupted copy again to complete it.
    """
    from stateformat.documents import published_document

    store, checkpoint = session.checkpoint(address, target.url)
    there = session.target(target, address.url)
    session.changes("run it again to complete the copy: what is there is not copied twice")
    with session.output.progress(f"Copying checkpoint {checkpoint.id}") as step:
        moved = Moved(step)
        record = store.copy(checkpoint, there, moved)
    document = {
        **published_document(there.url, record),
        "source": source_document(store, checkpoint.record),
        "manifest_bytes": record.manifest.size_bytes,
        "moved": moved.document,
        "proof": None,
    }
    if prove:
        from stateformat.inspecting import prove_checkpoints

        result = there.open(record.checkpoint_id)
        document["proof"] = proof(
            session,
            lambda step: prove_checkpoints(checkpoint, result, progress=step),
            copied=there,
            is_savepoint=True,
        )
    return show_proved(session, document, page)


def page(document: Document) -> Page:
    """The page: what was copied, from where to where."""
    manifest = f"manifest {words.size(document['manifest_bytes'])}"
    facts = [
        ("from", document["source"]["store"]),
        ("to", document["store"]),
        ("kind", document["kind"]),
        ("size", totals_text(document["totals"], manifest)),
        ("moved", moved_text(document["moved"])),
    ]
    return [Heading(f"Copied checkpoint {document['checkpoint_id']}"), Facts(facts)]

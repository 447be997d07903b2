"""``ckpt copy``, ``pin`` and ``unpin``: a checkpoint in a store of its own, under a name below its
store, or no more; ``ckpt rollback``: an older one, published again as the newest.
"""

from __future__ import annotations

import click

from stateformat import words
from stateformat.pages.blocks import Facts, Heading, Page

from ...options import Address, AddressType, Session, command, other_store
from ...output import Document
from ...published import (
    Moved,
    moved_text,
    proof,
    prove_option,
    published,
    published_page,
    show_proved,
    source_document,
    totals_text,
)


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
    return show_proved(session, document, copied_page)


def copied_page(document: Document) -> Page:
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
    session.output.show(document, pinned_page)


def pinned_page(document: Document) -> Page:
    """The page: which checkpoint, and the address that it has now."""
    facts = [
        ("address", f"{document['source']['store']}@{document['name']}"),
        ("lies in", document["store"]),
        ("size", totals_text(document["totals"])),
        ("moved", moved_text(document["moved"])),
    ]
    done = "Pinned" if document["made"] else "Pinned before:"
    return [Heading(f"{done} checkpoint {document['checkpoint_id']} as {document['name']}"), Facts(facts)]


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
    session.output.show(document, unpinned_page)


def unpinned_page(document: Document) -> Page:
    """The page: what was removed."""
    removed = document["removed"]
    of = f"checkpoint {removed['checkpoint_id']}" if removed else "what an interrupted pin or unpin had left"
    facts = [("store", document["store"]), ("removed", f"savepoints/{document['name']}/: {of}")]
    return [Heading(f"Unpinned {document['name']}"), Facts(facts)]


@command("rollback", checkpoint="always")
@click.option("--to", "target", type=AddressType("never"), metavar="URL", help="Publish in this empty store instead.")
def rollback(session: Session, address: Address, *, target: Address | None) -> None:
    """Make an older checkpoint the newest again; metadata only.

    Publishes newest + 1 with the content of STORE@ID. Nothing is deleted, and no data is copied. A
    running job stops at its next publication. Output that the skipped checkpoints have committed
    stays committed. With --to the store stays as it is; the new one begins with a copy of the
    content.
    """
    store, source = session.checkpoint(address, *(() if target is None else (target.url,)))
    if target is None:
        session.publishes(store.url)
        there, permit = store, store.rollback(source.id)
    else:
        there = other_store(session, store, target, address)
        session.publishes(there.url)
        with session.output.progress(f"Copying checkpoint {source.id}") as step:
            permit = there.start_from(source, progress=lambda now: step(now.bytes_done, now.bytes_total))
    session.output.show(published(there, permit, store, source.record), published_page)

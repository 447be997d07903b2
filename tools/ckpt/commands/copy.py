"""``ckpt copy``: a checkpoint, self-contained, in a store of its own."""

from __future__ import annotations

from collections.abc import Iterator

import click

from ..options import Address, AddressType, Session, command
from ..output import Document
from ..text import Look, facts, heading, label, plural, size


@command("copy")
@click.argument("target", type=AddressType("never"), metavar="TARGET")
def copy(session: Session, address: Address, *, target: Address) -> None:
    """Copy a checkpoint into a store of its own: a savepoint.

    TARGET is the path or URL of a store that does not exist yet or is empty. Every object keeps its path and bytes, and its
    digest is verified on the way. A copy that was interrupted is made whole by running it again.
    """
    from ..documents import published_document

    store, checkpoint = session.checkpoint(address, target.url)
    there = session.store(target.url, address.url)
    session.changes("run it again to make the copy whole: what is there already is not copied twice")
    with session.output.progress(f"Copying checkpoint {checkpoint.id}") as step:
        record = store.copy(checkpoint, there, lambda now: step(now.bytes_done, now.bytes_total))
    document = {
        **published_document(there.url, record),
        "source": {"store": store.url, **checkpoint.record.ref._asdict()},
        "manifest_bytes": record.manifest.size_bytes,
    }
    session.output.show(document, draw)


def draw(document: Document, look: Look) -> Iterator[str]:
    """The page: what was copied, whence and whither."""
    totals, source = document["totals"], document["source"]
    yield heading(f"Copied checkpoint {document['checkpoint_id']}", look)
    yield ""
    parts = [plural(totals["rows"], "row"), size(totals["bytes"]), plural(totals["segments"], "segment")]
    yield from facts(
        [
            ("from", label(source["store"])),
            ("to", label(document["store"])),
            ("kind", document["kind"]),
            ("size", f" {look['dot']} ".join([*parts, f"manifest {size(document['manifest_bytes'])}"])),
        ],
        look,
    )

"""``ckpt rollback``: an older checkpoint of the chain, published again as the newest."""

from __future__ import annotations

import click

from ..options import Address, AddressType, Session, command, other_store
from ._published import draw_published, published


@command("rollback", checkpoint="always")
@click.option("--to", "target", type=AddressType("never"), metavar="URL", help="Publish in this empty store instead.")
def rollback(session: Session, address: Address, *, target: Address | None) -> None:
    """Make an older checkpoint the newest again; metadata only.

    Publishes newest + 1 with the content of STORE@ID; nothing is deleted and no data is copied. A running job stops at its
    next publication. Output that the checkpoints left behind have committed stays committed. With --to, the store stays as
    it is, and a new one begins with the content and a copy of the segments.
    """
    store, source = session.checkpoint(address, *(() if target is None else (target.url,)))
    destination = store if target is None else other_store(session, store, target, address)
    session.publishes(destination.url)
    if target is None:
        permit = store.rollback(source.id)
    else:
        with session.output.progress(f"Copying checkpoint {source.id}") as step:
            permit = destination.start_from(source, progress=lambda now: step(now.bytes_done, now.bytes_total))
    reference = {"store": store.url, **source.record.ref._asdict()}
    document = published(destination.url, permit.record, reference, permit.record.graph, permit.notes)
    session.output.show(document, draw_published)

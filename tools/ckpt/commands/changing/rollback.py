"""``ckpt rollback``: an older checkpoint of the chain, published again as the newest."""

from __future__ import annotations

import click

from ...options import Address, AddressType, Session, command, other_store
from ...published import published, published_page


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

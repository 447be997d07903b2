"""``ckpt rollback``: an older checkpoint of the chain, published again as the newest."""

from __future__ import annotations

from tools.ckpt.address import Address
from tools.ckpt.common import Session, command
from tools.ckpt.published import draw_published, published


@command("rollback", checkpoint="always")
def rollback(session: Session, address: Address) -> None:
    """Make an older checkpoint the newest again; metadata only.

    Publishes newest + 1 with the content of STORE@ID; nothing is deleted and no data is copied. A running job stops at its
    next publication. Output that the checkpoints left behind have committed stays committed.
    """
    store, source = session.checkpoint(address)
    permit = store.rollback(source.id)
    reference = {"store": store.url, **source.record.ref._asdict()}
    document = published(store.url, permit.record, reference, permit.record.graph, permit.notes)
    session.output.show(document, draw_published)

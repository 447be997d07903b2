"""``ckpt top``: the keys, key groups and subtasks with most rows or bytes."""

from __future__ import annotations

import click

from stateformat import words

from ...options import Address, Session, command
from ...pages import top_page
from .inspect import chosen_states


@command("top", foreign=True, expired=True)
@click.option("--operator", metavar="UID", help="Only this operator, by uid or name.")
@click.option("--state", metavar="NAME", help="Only states of this name.")
@click.option(
    "--by", type=click.Choice(["rows", "bytes"]), default="rows", show_default=True, help="Rank by rows or by bytes."
)
@click.option(
    "--limit",
    type=click.IntRange(min=1, max=10_000),
    default=5,
    show_default=True,
    metavar="N",
    help="Keys, key groups and subtasks of each state.",
)
@click.option("--no-keys", is_flag=True, help="Only key groups and subtasks, from the manifest: reads no rows.")
def top(
    session: Session,
    address: Address,
    *,
    operator: str | None,
    state: str | None,
    by: str,
    limit: int,
    no_keys: bool,
) -> None:
    """Show which keys, key groups and subtasks are largest.

    The skew is the largest over the mean: 1 is even, 8 means that one has eight times its share.
    Rows and stored bytes of key groups and subtasks come from the manifest and count all layers.
    Keys are read, with their layers merged: --by rows reads only the key columns, --by bytes also
    the columns whose values vary in size. The bytes of a key are those of its values in memory. The
    figures are exact, however many keys there are. Each key is shown as `ckpt get --key` takes it.
    """
    from stateformat.inspecting import top_document

    checkpoint = session.shown(session.read_only(address))
    uid = None if operator is None else checkpoint.operator_uid(operator)
    states = chosen_states(checkpoint, uid, state)
    with session.output.progress("Reading keys", unit="rows") as step:
        found = top_document(checkpoint, states, by=by, limit=limit, keys=not no_keys, progress=step)
    document = {
        "store": checkpoint.storage.url,
        "checkpoint_id": checkpoint.id,
        "created_at": words.moment(checkpoint.record.created_at_us),
        "created_at_us": checkpoint.record.created_at_us,
        "system": checkpoint.system,
        "by": by,
        "limit": limit,
        "states": found,
    }
    session.output.show(document, top_page)

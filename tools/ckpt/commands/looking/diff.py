"""``ckpt diff``: what differs between two checkpoints, of one store or of two."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from ...exit_status import FINE, PROBLEMS
from ...options import Address, AddressType, Session, Whole, command

if TYPE_CHECKING:
    from stateformat.reading import Checkpoint


@command("diff", foreign=True, expired=True)
@click.argument("other", metavar="OTHER[@ID]")
@click.option("--operator", metavar="UID", help="Only this operator, by uid or name.")
@click.option("--state", metavar="NAME", help="Only states of this name, and no graph.")
@click.option("--rows", type=Whole(), metavar="N", help="Show up to N removed, changed and added rows of a state.")
def diff(
    session: Session, address: Address, *, other: str, operator: str | None, state: str | None, rows: int | None
) -> int:
    """Show what differs between two checkpoints.

    STORE is the earlier one, OTHER the later; @ID or @NAME alone is one of the same store. The two
    may differ in store, parallelism, max parallelism and system: compare a Flink savepoint with its
    import, or a rewrite with its source.

    Rows are compared in the columns of the later checkpoint: a renamed or widened column has
    changed no row. Floats are compared by their bits, with one NaN. The entries of union and
    even_split state are one sequence, whatever the subtasks. Progress is compared by the least
    watermark of an input, which has ended if it has for all subtasks. What digests show to be equal
    is not read.

    Exit status: 0 if the content is the same, 1 if it differs. How state is laid out does not count
    as content: parallelism, key hashes, layers, encodings, files.
    """
    from stateformat.inspecting import diff_checkpoints
    from stateformat.pages.difference import difference_page

    context = click.get_current_context()
    text = f"{_store_of(session, address)}{other}" if other.startswith("@") else other
    second = AddressType().convert(text, None, context)
    before, after = map(session.shown, _opened(session, address, second))
    with session.output.progress("Comparing") as step:
        found = diff_checkpoints(before, after, operator=operator, state=state, rows=rows or 0, progress=step)
    session.output.show(found.document(rows=rows), difference_page)
    return FINE if found.same else PROBLEMS


def _store_of(session: Session, address: Address) -> Address:
    """The store of an address, without its id or the name of a pin."""
    from stateformat.pins import is_named
    from stateformat.storage import split_name

    store, name = split_name(address.url)
    if name is not None and is_named(session.read_only(address).storage, address.url):
        return replace(address, url=store, checkpoint_id=None)
    return replace(address, checkpoint_id=None)


def _opened(session: Session, first: Address, second: Address) -> tuple[Checkpoint, Checkpoint]:
    """Both checkpoints; two older ones of a store by one reading of its history."""
    ids = first.checkpoint_id, second.checkpoint_id
    if None in ids or ids[0] == ids[1] or replace(first, checkpoint_id=None) != replace(second, checkpoint_id=None):
        return session.read_only(first, second.url), session.read_only(second, first.url)
    found: dict[int, Checkpoint] = {
        one.id: one for one in session.store(first).checkpoints([number for number in ids if number is not None])
    }
    before, after = (found[number] for number in ids if number is not None)
    return before, after

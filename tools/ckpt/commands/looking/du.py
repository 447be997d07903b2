"""``ckpt du``: what a store costs on its storage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import click

from stateformat import words
from stateformat.pages.blocks import Block, Column, Facts, Heading, Note, Said, Table, dotted
from stateformat.pages.checkpoint import freed

from ...exit_status import FINE, PROBLEMS
from ...options import Address, SecondsType, Session, Whole, command
from ...output import Document

SHOWN: Final = 20
"""Checkpoints, states and folders on a page; JSON has all."""
GIGABYTE: Final = 1e9


class PriceType(SecondsType):
    """A finite amount of money, 0 or more."""

    name = "price"


@command("du", checkpoint="never", foreign=True)
@click.option("--keep", type=Whole(), metavar="N", help="Show what `ckpt gc --keep N` would free.")
@click.option(
    "--price", type=PriceType(min=0), metavar="PRICE", help="Price of 1 GB (10^9 bytes) a month: show the cost."
)
def du(session: Session, address: Address, *, keep: int | None, price: float | None) -> int:
    """Show what a store costs: by folder, checkpoint and state.

    "named" counts all bytes that a checkpoint or state names; "own" counts those that removing it
    alone would free. Sums count shared bytes once, also those that a pin shares with the store
    (hard links). Small segments lie inline in the manifest of their checkpoint, whose bytes count.
    Data files are not read. For Flink and Spark checkpoints, the page lists the files and what each
    checkpoint names.

    Exit status: 1 if damage hides what is needed, so that garbage is unknown.
    """
    from stateformat.inspecting import sizes_document

    store = session.store(address)
    with session.output.progress("Adding up"):
        document = sizes_document(store, keep=keep, price=price)
    session.output.show(document, page)
    garbage = document["garbage"]
    return PROBLEMS if garbage is not None and garbage["stopped"] else FINE


def page(document: Document) -> Iterator[Block]:
    """Make the page: the sums, then folders, checkpoints and states."""
    yield Heading("Sizes")
    yield Facts(_facts(document))
    for columns, rows in (_folders(document), _checkpoints(document), _states(document)):
        yield _priced(document, columns, rows)
    garbage = document["garbage"]
    if garbage and garbage["stopped"]:
        yield Note(Said(words.sentence(f"stopped: {garbage['stopped']}"), "bad"))


def _priced(document: Document, columns: list[Column], rows: list[tuple[int | None, list[str]]]) -> Table:
    """A table whose rows come with the bytes that they are priced by."""
    price = document["price"]
    if price is None:
        return Table(columns, [cells for _, cells in rows], SHOWN)
    month = price["per_gb_month"] / GIGABYTE
    priced = [[*cells, "" if size_bytes is None else money(size_bytes * month)] for size_bytes, cells in rows]
    return Table([*columns, Column("a month", right=True)], priced, SHOWN)


def _facts(document: Document) -> list[tuple[str, str]]:
    price, keep, begun = document["price"], document["keep"], document["unfinished"]
    facts = [
        ("store", document["store"]),
        ("system", document["system"] or ""),
        ("holds", dotted(words.size(document["bytes"]), words.plural(document["objects"], "object"))),
        ("shared", f"{words.size(document['shared_bytes'])} under two names" if document["shared_bytes"] else ""),
        ("garbage", freed(document["garbage"])),
        *([(f"--keep {keep['keep']}", freed(keep))] if keep else []),
        ("being written", words.size(begun["bytes"]) if begun and begun["objects"] else ""),
    ]
    if price:
        paid = [money(price["month"])]
        paid += [f"garbage {money(price['garbage_month'])}"] if price["garbage_month"] else []
        paid += [f"--keep {keep['keep']} saves {money(price['keep_month'])}"] if price["keep_month"] is not None else []
        facts.append(("a month", dotted(*paid)))
    return facts


def money(amount: float) -> str:
    """An amount in the currency of the price, with two decimals."""
    return "<0.01" if 0 < amount < 0.01 else f"{amount:,.2f}"


def _folders(document: Document) -> tuple[list[Column], list[tuple[int | None, list[str]]]]:
    columns = [
        Column("folder", flexible=True),
        Column("objects", right=True),
        Column("bytes", right=True),
        Column("shared", right=True, optional=2),
        Column("garbage", right=True, optional=1),
    ]
    return columns, [
        (
            one["bytes"],
            [
                words.folder_of(one["folder"], document["system"]),
                words.count(one["objects"]),
                *map(_some, (one["bytes"], one["shared_bytes"] or None, one["garbage_bytes"] or None)),
            ],
        )
        for one in document["folders"]
        if one["objects"]
    ]


def _checkpoints(document: Document) -> tuple[list[Column], list[tuple[int | None, list[str]]]]:
    columns = [
        Column("checkpoint", right=True),
        Column("kind", flexible=True),
        Column("segments" if document["system"] is None else "files", right=True, optional=2),
        Column("inline", right=True, optional=1),
        Column("named", right=True),
        Column("own", right=True),
    ]
    rows: dict[int, tuple[int | None, list[str]]] = {
        one["checkpoint_id"]: (
            one["own_bytes"],
            [
                str(one["checkpoint_id"]),
                one["kind"],
                words.count(one["objects"]),
                *map(_some, (one["inline_bytes"] or None, one["bytes"], one["own_bytes"])),
            ],
        )
        for one in document["checkpoints"]
    }
    for one in document["unreadable"]:
        rows[one["checkpoint_id"]] = None, [str(one["checkpoint_id"]), "damaged", *[""] * 4]
    return columns, [rows[number] for number in sorted(rows, reverse=True)]


def _states(document: Document) -> tuple[list[Column], list[tuple[int | None, list[str]]]]:
    columns = [
        Column("state", flexible=True),
        Column("newest", right=True),
        Column("inline", right=True, optional=1),
        Column("named", right=True),
        Column("own", right=True),
    ]
    order = sorted(document["states"], key=lambda one: -(one["bytes"] or one["newest_bytes"]))
    sizes = ("newest_bytes", "newest_inline_bytes", "bytes", "own_bytes")
    return columns, [
        (
            one["own_bytes"],
            [
                f"{one['operator']}/{one['state']}",
                *(_some(one[name] or (None if "inline" in name else one[name])) for name in sizes),
            ],
        )
        for one in order
    ]


def _some(size_bytes: int | None) -> str:
    return "" if size_bytes is None else words.size(size_bytes)

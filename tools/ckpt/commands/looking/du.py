"""``ckpt du``: what a store costs on its storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import click

from stateformat import words
from stateformat.words import label

from ...exit_status import FINE, PROBLEMS
from ...options import Address, SecondsType, Session, Whole, command
from ...output import Document
from ...text import Column, Look, render

SHOWN: Final = 20
"""Checkpoints, states and folders on a page; JSON has all."""
GIGABYTE: Final = 1e9

Month = Callable[[int | None], list[str]]
"""The cell of what bytes cost in a month; none without a price."""


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
    session.output.show(document, draw)
    garbage = document["garbage"]
    return PROBLEMS if garbage is not None and garbage["stopped"] else FINE


def draw(document: Document, look: Look) -> Iterator[str]:
    """The page: the sums, then folders, checkpoints and states."""
    price = document["price"]

    def month(size_bytes: int | None) -> list[str]:
        if price is None:
            return []
        return ["" if size_bytes is None else money(size_bytes / GIGABYTE * price["per_gb_month"])]

    yield from render.page_head("Sizes", _facts(document, look), look)
    for part in (_folders, _checkpoints, _states):
        yield ""
        yield from part(document, month, look)
    garbage = document["garbage"]
    if garbage and garbage["stopped"]:
        yield ""
        yield from render.paragraph(look.paint(words.sentence(f"stopped: {garbage['stopped']}"), "problem"), look)


def _facts(document: Document, look: Look) -> list[tuple[str, str]]:
    price, keep, begun = document["price"], document["keep"], document["unfinished"]
    facts = [
        ("store", label(document["store"])),
        ("system", document["system"] or ""),
        ("holds", look.dotted(words.size(document["bytes"]), words.plural(document["objects"], "object"))),
        ("shared", f"{words.size(document['shared_bytes'])} under two names" if document["shared_bytes"] else ""),
        ("garbage", _freed(document["garbage"], look)),
        *([(f"--keep {keep['keep']}", _freed(keep, look))] if keep else []),
        ("being written", words.size(begun["bytes"]) if begun and begun["objects"] else ""),
    ]
    if price:
        paid = [money(price["month"])]
        paid += [f"garbage {money(price['garbage_month'])}"] if price["garbage_month"] else []
        paid += [f"--keep {keep['keep']} saves {money(price['keep_month'])}"] if price["keep_month"] is not None else []
        facts.append(("a month", look.dotted(*paid)))
    return facts


def _freed(found: Document | None, look: Look) -> str:
    """What deleting would free, and what of it stays under other names."""
    if found is None:
        return ""
    if found["stopped"]:
        return "not known"
    if not found["objects"]:
        return "nothing"
    freed = f"frees {words.size(found['bytes'] - found['shared_bytes'])}"
    stays = f"{words.size(found['shared_bytes'])} stay under other names" if found["shared_bytes"] else ""
    return look.dotted(*filter(None, (freed, words.plural(found["objects"], "object"), stays)))


def money(amount: float) -> str:
    """An amount in the currency of the price, with two decimals."""
    return "<0.01" if 0 < amount < 0.01 else f"{amount:,.2f}"


def _folders(document: Document, month: Month, look: Look) -> Iterator[str]:
    without = "begun, not ended" if document["system"] is None else "the folder itself"
    yield from _table(
        [
            Column("folder", flexible=True),
            Column("objects", right=True),
            Column("bytes", right=True),
            Column("shared", right=True, optional=2),
            Column("garbage", right=True, optional=1),
        ],
        [
            [
                label(one["folder"] or without),
                words.count(one["objects"]),
                words.size(one["bytes"]),
                _some(one["shared_bytes"]),
                _some(one["garbage_bytes"]),
                *month(one["bytes"]),
            ]
            for one in document["folders"]
            if one["objects"]
        ],
        month,
        look,
    )


def _checkpoints(document: Document, month: Month, look: Look) -> Iterator[str]:
    rows = {
        one["checkpoint_id"]: [
            str(one["checkpoint_id"]),
            one["kind"],
            words.count(one["objects"]),
            _some(one["inline_bytes"]),
            words.size(one["bytes"]),
            "" if one["own_bytes"] is None else words.size(one["own_bytes"]),
            *month(one["own_bytes"]),
        ]
        for one in document["checkpoints"]
    }
    for one in document["unreadable"]:
        rows[one["checkpoint_id"]] = [str(one["checkpoint_id"]), "damaged", *[""] * (4 + len(month(0)))]
    columns = [
        Column("checkpoint", right=True),
        Column("kind", flexible=True),
        Column("segments" if document["system"] is None else "files", right=True, optional=2),
        Column("inline", right=True, optional=1),
        Column("named", right=True),
        Column("own", right=True),
    ]
    yield from _table(columns, [rows[number] for number in sorted(rows, reverse=True)], month, look)


def _states(document: Document, month: Month, look: Look) -> Iterator[str]:
    order = sorted(document["states"], key=lambda one: -(one["bytes"] or one["newest_bytes"]))
    yield from _table(
        [
            Column("state", flexible=True),
            Column("newest", right=True),
            Column("inline", right=True, optional=1),
            Column("named", right=True),
            Column("own", right=True),
        ],
        [
            [
                label(f"{one['operator']}/{one['state']}"),
                words.size(one["newest_bytes"]),
                _some(one["newest_inline_bytes"]),
                "" if one["bytes"] is None else words.size(one["bytes"]),
                "" if one["own_bytes"] is None else words.size(one["own_bytes"]),
                *month(one["own_bytes"]),
            ]
            for one in order
        ],
        month,
        look,
    )


def _some(size_bytes: int | None) -> str:
    return words.size(size_bytes) if size_bytes else ""


def _table(columns: list[Column], rows: list[list[str]], month: Month, look: Look) -> Iterator[str]:
    paid = [Column("a month", right=True)] if month(0) else []
    yield from render.table([*columns, *paid], rows[:SHOWN], look)
    if len(rows) > SHOWN:
        yield f"  {render.more(len(rows) - SHOWN, look)}"

"""The part of ``ckpt repair`` about lost segments: what going on gives up, and who has copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from stateformat import words
from stateformat.words import label

from . import render
from .render import Column, Look

Document = Mapping[str, Any]

SHOWN: Final = 20
"""States on a page; JSON lists all."""
RANGES_SHOWN: Final = 4

_KEYS_FORGOTTEN: Final = (
    "Keys of these key groups begin anew, in all keyed states of the operator. All of their layers go: some "
    "without the others would be a state that never existed."
)
_MEANS: Final = {
    "forgotten": "Entries of lost segments are forgotten.",
    "begins_anew": "A coordinator whose state is lost begins with none.",
    "output": "Output that lost committables name is never committed, unless it was before.",
    "watermarks": "Watermarks of these subtasks are unknown until they advance; an input that had ended may end again.",
    "in_flight": "Records in flight are lost.",
}


def draw_copies(document: Document, look: Look) -> Iterator[str]:
    """Who else has lost segments, and how they are put back."""
    lost, address = document["lost_segments"], _address(document)
    for copy in lost["copies"]:
        count, of = copy["segments"], len(lost["segments"])
        all_of = "what is lost" if count == of else f"{words.count(count)} of the {words.count(of)} lost segments"
        yield from render.paragraph(
            f"{label(copy['url'])} has {all_of}, by name and size. `ckpt repair {address} --restore-from "
            f"{label(copy['url'])} --yes` reads it, and puts back what matches its digest.",
            look,
        )


def _address(document: Document) -> str:
    """The store, with the id of the checkpoint if it is not the newest."""
    store, number = label(document["store"]), document["lost_segments"]["checkpoint_id"]
    return store if number == document["newest"] else f"{store}@{number}"


def draw_losses(document: Document, look: Look) -> Iterator[str]:
    """Going on from a checkpoint without what is lost: what that is, and what it means."""
    lost = document["lost_segments"]
    number, segments = lost["checkpoint_id"], lost["segments"]
    missing = sum(each["missing"] for each in segments)
    what = [words.plural(missing, "segment missing", "segments missing")] if missing else []
    what += [words.plural(len(segments) - missing, "damaged")] if len(segments) > missing else []
    yield from render.paragraph(f"To go on from {number}, without what is lost ({', '.join(what)}):", look)
    yield ""
    yield from _table(lost["give_up"]["keys"], look)
    yield ""
    yield from _advice(document, look)


def _advice(document: Document, look: Look) -> Iterator[str]:
    lost = document["lost_segments"]
    number, rows, keys = lost["checkpoint_id"], lost["give_up"]["rows"], lost["give_up"]["keys"]
    address = _address(document)
    needed = [each for each in rows if each["needed"]]
    if needed:
        names = ", ".join(sorted({f"{label(each['operator'])}/{label(each['state'])}" for each in needed}))
        yield from render.paragraph(
            f"This cannot be given up: {names} holds positions of a source. Without them input would be lost or read "
            "again.",
            look,
        )
        return
    gone, least = _all(keys), _all(rows)
    less = f"{words.plural(gone, 'row')} less" if gone else "nothing less"
    yield from render.paragraph(
        f"`ckpt repair {address} --give-up keys --yes` publishes checkpoint {document['newest'] + 1} with the content "
        f"of {number}, {less}.",
        look,
    )
    for meaning in _meanings(rows):
        yield from render.paragraph(meaning, look)
    if gone > least:
        yield from render.paragraph(
            f"`--give-up rows` keeps {words.plural(gone - least, 'row')} of these keys in the operator's other states. "
            "A key may then have half of its state, which its program must handle: a window without a timer never "
            "ends.",
            look,
        )
    if document["level"] == "quick":
        yield from render.paragraph("Footers were read, but no rows; with --give-up every byte is.", look)


def _all(losses: Sequence[Document]) -> int:
    return sum(each["rows"] + each["rows_besides"] for each in losses)


def _meanings(losses: Sequence[Document]) -> Iterator[str]:
    """Yield what each kind of loss means, once."""
    seen = dict.fromkeys((each["effect"], each["mode"] == "keyed") for each in losses)
    for effect, keyed in seen:
        text = _KEYS_FORGOTTEN if keyed and effect == "forgotten" else _MEANS.get(effect)
        if text:
            yield text


def draw_given_up(document: Document, look: Look) -> Iterator[str]:
    """What was put back and given up for a checkpoint that was published."""
    if document["put_back"]:
        yield ""
        yield from render.paragraph(f"Put back: {words.plural(len(document['put_back']), 'segment')}.", look)
    if document["given_up"]:
        yield ""
        yield from render.paragraph(
            f"Given up, of checkpoint {document['source']['checkpoint_id']}; `ckpt inspect` shows it:", look
        )
        yield ""
        yield from _table(document["given_up"], look)


def draw_put_back(document: Document, look: Look) -> Iterator[str]:
    """The page where nothing had to be published."""
    number = document["checkpoint_id"]
    facts = [("store", label(document["store"])), ("put back", words.plural(len(document["put_back"]), "segment"))]
    yield from render.page_head(f"Checkpoint {number} is whole again", facts, look)
    yield ""
    yield from render.paragraph("Nothing was published, and nothing is lost.", look)


def _table(losses: Sequence[Document], look: Look) -> Iterator[str]:
    columns = [
        Column("state"),
        Column("mode", optional=2),
        Column("rows lost", right=True),
        Column("with them", right=True, optional=3),
        Column("left", right=True, optional=1),
        Column("of", flexible=True),
    ]
    rows = [
        [
            f"{label(each['operator'])}/{label(each['state'])}",
            each["mode"],
            words.count(each["rows"]),
            words.count(each["rows_besides"]),
            words.count(each["rows_kept"]),
            _part(each),
        ]
        for each in losses[:SHOWN]
    ]
    yield from render.table(columns, rows, look)
    if len(losses) > SHOWN:
        yield f"  {render.more(len(losses) - SHOWN, look)}"


def _part(loss: Document) -> str:
    if loss["effect"] == "copied":
        return f"{_ranges('subtask', loss['subtasks'])}: another subtask's copy is used"
    if loss["mode"] == "keyed":
        return _ranges("key group", loss["key_groups"])
    return _ranges("subtask", loss["subtasks"]) if loss["subtasks"] else ""


def _ranges(noun: str, ranges: Sequence[Sequence[int]]) -> str:
    count = sum(last - first + 1 for first, last in ranges)
    if len(ranges) > RANGES_SHOWN:
        return f"{words.plural(count, noun)}, {ranges[0][0]} to {ranges[-1][1]}"
    return f"{noun}{'s' if count > 1 else ''} {words.ranges(ranges)}"

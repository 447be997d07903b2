"""``ckpt repair``: what is wrong with the newest checkpoint of a store, the ways out, and with ``--yes`` going one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, cast

import click

from ..documents import reference, totals_document
from ..exit_status import FINE, PROBLEMS
from ..options import Address, Session, command
from ..output import Document
from ..text import (
    Column,
    Look,
    clock,
    facts,
    heading,
    label,
    paragraph,
    ranges,
    sentence,
    size,
    table,
)
from ._published import draw_published, published
from .validate import problem_document

if TYPE_CHECKING:
    from stateformat.history import Survey
    from stateformat.problems import Problem
    from stateformat.publication import Diagnosis, WayOut

SHOWN: Final = 10
"""Ways out and problems that a page lists; JSON has all."""


@command("repair")
@click.option("--yes", is_flag=True, help="Carry it out. Without it nothing is changed.")
@click.option(
    "--level",
    type=click.Choice(["quick", "full"]),
    default="quick",
    show_default=True,
    help="How checkpoints are looked at: record, manifest, sizes and footers; or every byte and row.",
)
def repair(session: Session, address: Address, *, yes: bool, level: str) -> int:
    """Say what is wrong with the newest checkpoint, and mend it.

    Lists what is damaged, the older checkpoints that could take the place of the newest, and whose output may then be
    there twice. With --yes publishes newest + 1 with the content of STORE@ID, or of the highest checkpoint that is whole.
    Nothing is deleted or overwritten, no data is copied, and a running job stops at its next publication.

    Exit status: 0 nothing is wrong, or it was mended; 1 something is wrong.
    """
    store = session.store(address.url)
    with session.output.progress("Looking for damage"):
        diagnosis = store.diagnose(address.checkpoint_id, level=cast("Any", level))
    if yes and (diagnosis.closed or address.checkpoint_id is not None):
        session.publishes(store.url)
        permit = store.repair(address.checkpoint_id, diagnosis=diagnosis)
        source = diagnosis.chosen
        assert source is not None, "what was carried out had a source"
        content = {"store": store.url, **source.record.ref._asdict()}
        document = published(store.url, permit.record, content, permit.record.graph, permit.notes)
        session.output.show({**document, "content_of": reference(permit.record.content_of)}, draw_published)
        return FINE
    document = _document(store.url, diagnosis, level)
    session.output.show(document, draw)
    return FINE if document["ok"] else PROBLEMS


def _document(url: str, found: Diagnosis, level: str) -> Document:
    survey = found.found
    return {
        "store": url,
        "ok": not (found.closed or survey.damaged or survey.lost),
        "newest": found.newest,
        "level": level,
        "closed": found.closed,
        "undecided": found.undecided,
        "damaged": [
            {"checkpoint_id": number, "kind": error.kind.value, "message": _without_advice(str(error))}
            for number, error in ((number, survey.unreadable[number]) for number in survey.damaged)
        ],
        "lost": [reference(ref) for ref in survey.lost],
        "problems": [_problem(problem) for problem in found.problems],
        "ways": [_way(way) for way in found.ways],
        "chosen": None if found.chosen is None else found.chosen.record.checkpoint_id,
        "cut_off": [record.checkpoint_id for record in survey.cut_off],
        "missing": _missing(survey),
    }


def _missing(survey: Survey) -> int:
    """How many ids between the history and what is cut off from it have no record."""
    if not (survey.chain and survey.cut_off):
        return 0
    above, beneath = survey.chain[-1].link, survey.cut_off[0].checkpoint_id
    upper = above.checkpoint_id if above is not None else beneath
    return upper - beneath - sum(beneath < checkpoint_id <= upper for checkpoint_id in survey.listed)


def _problem(problem: Problem) -> Document:
    return {**problem_document(problem), "message": _without_advice(problem.message)}


def _without_advice(message: str) -> str:
    """A message that does not advise to run this very command."""
    from stateformat.errors import REPAIR_ADVICE

    return message.removesuffix(REPAIR_ADVICE)


def _way(way: WayOut) -> Document:
    record = way.record
    return {
        **(reference(record.ref) or {}),
        "kind": record.kind.value,
        "created_at_us": record.created_at_us,
        "totals": totals_document(record.totals),
        "certain": way.certain,
        "whole": way.whole if way.problems is not None else None,
        "problems": [_problem(problem) for problem in way.problems or ()],
        "doubled": list(way.doubled),
    }


def draw(document: Document, look: Look) -> Iterator[str]:
    """The page: what is wrong, the ways out, what to run."""
    yield heading("Repair", look)
    yield ""
    state = "cannot be run from" if document["closed"] else "whole"
    newest = f"{document['newest']}, {'undecided' if document['undecided'] else state}"
    yield from facts([("store", label(document["store"])), ("newest", newest)], look)
    faults = [sentence(fault["message"]) for fault in document["damaged"]]
    faults += [
        sentence(f"the record of checkpoint {ref['checkpoint_id']} was lost: others name it, and older ones stand")
        for ref in document["lost"]
    ]
    faults += [sentence(problem["message"]) for problem in document["problems"]]
    for fault in faults[:SHOWN]:
        yield ""
        mark = look.paint(look["fail"], "problem")
        yield from paragraph(fault, look, indent="    ", first=f"  {mark} ")
    if len(faults) > SHOWN:
        yield f"  {look['ellipsis']} and {len(faults) - SHOWN} more (--format json lists all)"
    if document["closed"] and not document["undecided"] and document["ways"]:
        yield ""
        yield from _ways(document["ways"], look)
    yield ""
    for line in _advice(document):
        yield from paragraph(line, look)


def _ways(ways: list[Document], look: Look) -> Iterator[str]:
    columns = [
        Column("content of", right=True),
        Column("published (UTC)", optional=1),
        Column("bytes", right=True, optional=2),
        Column("is"),
        Column("repeats output of", flexible=True),
    ]
    rows = [
        [
            str(way["checkpoint_id"]),
            clock(way["created_at_us"], seconds=False),
            size(way["totals"]["bytes"]),
            _is(way),
            _ids(way["doubled"]),
        ]
        for way in ways[:SHOWN]
    ]
    yield from table(columns, rows, look)
    if len(ways) > SHOWN:
        yield f"  {look['ellipsis']} and {len(ways) - SHOWN} more (--format json lists all)"


def _ids(ascending: list[int]) -> str:
    """Checkpoint ids as ranges: ``3-5, 7``."""
    pairs: list[list[int]] = []
    for number in ascending:
        if pairs and number == pairs[-1][1] + 1:
            pairs[-1][1] = number
        else:
            pairs.append([number, number])
    return ranges(pairs)


def _is(way: Document) -> str:
    sure = "" if way["certain"] else ", perhaps a stray"
    return {None: "not looked at", True: "whole", False: "damaged"}[way["whole"]] + sure


def _advice(document: Document) -> Iterator[str]:
    """What to do next, a paragraph each."""
    store, chosen = label(document["store"]), document["chosen"]
    way = next((way for way in document["ways"] if way["checkpoint_id"] == chosen), None)
    deeply = " --level full" if document["level"] == "full" else ""
    if document["undecided"]:
        yield "Whether the newest checkpoint is damaged cannot be said as long as it cannot be read. Mend that first."
        return
    if document["ok"]:
        deeper = (
            "" if document["level"] == "full" else " Footers were read, and no rows: --level full reads every byte."
        )
        yield f"Nothing is wrong.{deeper}"
        return
    if not document["closed"]:
        yield "The newest checkpoint is whole, and the job can go on from it. Nothing has to be done."
        if document["cut_off"]:
            yield (
                f"What is cut off, {_ids(document['cut_off'][::-1])}, can be looked at and copied by its id (`ckpt copy "
                f"{store}@ID TARGET`). `ckpt repair {store}@ID --yes` goes back to one of these; a rollback does not reach "
                "them. Nothing is collected until retention has passed the damage."
            )
        if document["missing"] > 1:
            yield (
                f"More than one record is missing above {document['cut_off'][0]}. If {document['newest']} was put there by "
                f"hand or from a backup, go back to {document['cut_off'][0]}."
            )
    if way is not None and way["whole"] and (document["closed"] or chosen in document["cut_off"]):
        yield (
            f"`ckpt repair {store}@{chosen}{deeply} --yes` publishes checkpoint {document['newest'] + 1} with the content of "
            f"{chosen}. Sinks then see the input of {_ids(way['doubled'])} again: what was committed by then, or still is, "
            "stays in the output."
        )
        if not way["certain"]:
            yield f"Checkpoint {chosen} stands alone, so it may be the remains of a run that was beaten."
        alone = [each["checkpoint_id"] for each in document["ways"] if each["whole"] and each["checkpoint_id"] > chosen]
        if alone:
            yield (
                f"Checkpoint {alone[0]} is whole as well and would repeat less, but it stands alone, so it may be the "
                f"remains of a run that was beaten. If you know that it is not: `ckpt repair {store}@{alone[0]}{deeply} --yes`."
            )
    elif way is not None and not way["whole"]:
        yield f"Checkpoint {chosen} is damaged too: {sentence(way['problems'][0]['message'])}"
    elif document["closed"] and not document["ways"]:
        yield (
            "No other checkpoint of this store is left to take its place. Start the job from a savepoint or another copy, "
            "with an empty store."
        )
    elif document["closed"]:
        yield (
            "No checkpoint of this store is whole and certain. Name one that is listed to have it looked at (STORE@ID), or "
            "start the job from a savepoint or another copy."
        )
    if document["closed"] and document["ways"]:
        yield f"A checkpoint that is whole can be copied out first: `ckpt copy {store}@ID TARGET`."

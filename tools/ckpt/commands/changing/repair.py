"""``ckpt repair``: what is wrong with the newest checkpoint, and with ``--yes`` a way out."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, cast

import click

from stateformat import words
from stateformat.documents import problem_document, reference
from stateformat.pages.blocks import Block, Column, Facts, Heading, Note, Page, Table, more
from stateformat.words import label

from ...exit_status import FINE, PROBLEMS
from ...options import Address, AddressType, Session, command
from ...output import Document
from ...published import published, published_page
from .repair_query import repair_query

if TYPE_CHECKING:
    from stateformat.findings import Finding
    from stateformat.history import Survey
    from stateformat.publication import Diagnosis, WayOut
    from stateformat.repairing import Losses
    from stateformat.storage import Storage
    from stateformat.store import CheckpointStore

SHOWN: Final = 10
"""Ways out and problems on a page; JSON lists all."""


@command("repair")
@click.option("--yes", is_flag=True, help="Carry it out. Without it nothing is changed.")
@click.option(
    "--to",
    "target",
    type=AddressType("never"),
    metavar="COPY",
    help="Of a Spark query: the empty folder for a copy that is whole.",
)
@click.option(
    "--restore-from",
    "places",
    multiple=True,
    type=AddressType("optional"),
    metavar="STORE[@NAME]",
    help="Put lost segments back from this savepoint or copy; repeatable.",
)
@click.option(
    "--level",
    type=click.Choice(["quick", "full"]),
    help="What to check of checkpoints: record, manifest, sizes and footers; or every byte and row.  [default: quick; "
    "full with --restore-from]",
)
def repair(
    session: Session,
    address: Address,
    *,
    yes: bool,
    target: Address | None,
    places: tuple[Address, ...],
    level: str | None,
) -> int:
    """Show what is wrong with the newest checkpoint; repair it.

    Lists what is damaged, and the ways out. Segments of the newest checkpoint, or of STORE@ID, that
    are missing: --restore-from puts back what another store has, and nothing is lost. Else go back:
    the page lists the older checkpoints that could replace the newest, and whose output would then
    be repeated; --yes publishes newest + 1 with the content of STORE@ID, or of the newest whole
    checkpoint. Nothing is deleted or overwritten. A running job stops at its next publication.

    STORE may also be the checkpoint location of a Structured Streaming query that is stopped. The
    page says which is the newest batch that a copy can have whole, and what is lost; --to writes
    that copy, and the original stays as it is. A snapshot is left out where an older one and all
    changes after it are there: then nothing is lost.

    Exit status: 0 nothing is wrong, or it was repaired; 1 something is wrong.
    """
    from stateformat.history import record_ids
    from stateformat.repairing import losses_of, savepoints_of

    for place in places:
        if place.checkpoint_id is not None:
            raise click.UsageError(f"--restore-from {place} names a checkpoint; segments are taken from a whole store")
    store = session.store(address)
    from stateformat.backends.foreign.advice import SPARK

    if session.system(store) == SPARK:
        if yes or places or level is not None:
            raise click.UsageError(
                f"{store.url} is {SPARK}, which is never changed: --to COPY writes one that is whole; --yes, "
                "--restore-from and --level are for stores"
            )
        return repair_query(session, address, store, target)
    if target is not None:
        raise click.UsageError("--to is for a Spark query; a store is repaired where it is, with --yes")
    level = level or ("full" if places else "quick")
    source = address.checkpoint_id
    if places and source is not None and [source] == record_ids(store.storage)[-1:]:
        source = None  # The newest is put in order, by its id or without.
    with session.output.progress("Looking for damage"):
        diagnosis = store.diagnose(source, level=cast("Any", level))
        losses = losses_of(store.storage, diagnosis, source)
    others = [session.store(place, address.url).storage for place in places]
    if yes and places and (losses is not None or diagnosis.closed):
        return _put_back(session, store, diagnosis, losses, others)
    if yes and not places and (diagnosis.closed or address.checkpoint_id is not None):
        session.publishes(store.url)
        permit = store.repair(address.checkpoint_id, diagnosis=diagnosis)
        assert diagnosis.chosen is not None, "a repair has a source"
        document = published(store, permit, store, diagnosis.chosen.record)
        document["content_of"] = reference(permit.record.content_of)
        session.output.show(document, published_page)
        return FINE
    document = _document(store.url, diagnosis, level)
    document["lost_segments"] = None
    if losses is not None:
        document["lost_segments"] = _lost(losses, [*others, *savepoints_of(store.storage)])
    session.output.show(document, page)
    return FINE if document["ok"] and losses is None else PROBLEMS


def _put_back(
    session: Session,
    store: CheckpointStore,
    diagnosis: Diagnosis,
    losses: Losses | None,
    places: Sequence[Storage],
) -> int:
    """Put missing segments back, and show what was done."""
    from stateformat.repairing import put_back, why_not

    if losses is None:
        raise why_not(store.storage, diagnosis)
    session.changes("segments that were put back stay. Run it again to go on")
    with session.output.progress("Putting segments back") as step:
        again = put_back(store.storage, losses, places, progress=step)
    document = {
        "store": store.url,
        "checkpoint_id": losses.record.checkpoint_id,
        "published": False,
        "put_back": [{"path": path} for path in again],
    }
    session.output.show(document, put_back_page)
    return FINE


def _lost(losses: Losses, places: Sequence[Storage]) -> Document:
    """What is lost, and which of ``places`` list some of it by name and size."""
    from stateformat.repairing import listed_in

    sizes = {each.path: each.size_bytes for each in losses.segments}
    return {
        "checkpoint_id": losses.record.checkpoint_id,
        "attempt_id": losses.record.attempt_id,
        "segments": [
            {"path": each.path, "size_bytes": each.size_bytes, "missing": not each.is_there} for each in losses.segments
        ],
        "states": [
            {"operator": uid, "state": name, "positions": (uid, name) in losses.positions}
            for uid, name in losses.states
        ],
        "copies": [
            {"url": url, "segments": len(paths), "bytes": sum(sizes[path] for path in paths)}
            for url, paths in listed_in(losses.segments, places).items()
        ],
    }


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


def _problem(problem: Finding) -> Document:
    return {**problem_document(problem), "message": _without_advice(problem.message)}


def _without_advice(message: str) -> str:
    """A message without the advice to run this very command."""
    from stateformat.errors import REPAIR_ADVICE

    return message.removesuffix(REPAIR_ADVICE)


def _way(way: WayOut) -> Document:
    record = way.record
    return {
        **(reference(record.ref) or {}),
        "kind": record.kind.value,
        "created_at_us": record.created_at_us,
        "totals": asdict(record.totals),
        "certain": way.certain,
        "whole": way.whole if way.problems is not None else None,
        "problems": [_problem(problem) for problem in way.problems or ()],
        "doubled": list(way.doubled),
    }


def page(document: Document) -> Iterator[Block]:
    """Make the page: what is wrong, the ways out, what to run."""
    state = "undecided" if document["undecided"] else "cannot be run from" if document["closed"] else "whole"
    yield Heading("Repair")
    yield Facts([("store", document["store"]), ("newest", f"{document['newest']}, {state}")])
    faults = [fault["message"] for fault in document["damaged"]]
    faults += [
        f"the record of checkpoint {ref['checkpoint_id']} was lost: other records name it, and older ones exist"
        for ref in document["lost"]
    ]
    faults += [problem["message"] for problem in document["problems"]]
    yield from (Note(words.sentence(fault), "✗", "bad") for fault in faults[:SHOWN])
    if len(faults) > SHOWN:
        yield Note(more(len(faults) - SHOWN))
    lost = document["lost_segments"]
    if lost is not None and lost["copies"]:
        yield Note([*_copies(document)])
    if document["closed"] and not document["undecided"] and document["ways"]:
        yield _ways(document["ways"])
    yield Note([*_advice(document), *(_advice_on_losses(document) if lost is not None else ())])


def put_back_page(document: Document) -> Page:
    """Make the page of a checkpoint that is whole again."""
    facts = [("store", document["store"]), ("put back", words.plural(len(document["put_back"]), "segment"))]
    return [
        Heading(f"Checkpoint {document['checkpoint_id']} is whole again"),
        Facts(facts),
        Note("Nothing was published, and nothing is lost."),
    ]


def _copies(document: Document) -> Iterator[str]:
    """Who else has lost segments, and how they are put back."""
    lost, address = document["lost_segments"], _address(document)
    for copy in lost["copies"]:
        count, of = copy["segments"], len(lost["segments"])
        all_of = "what is lost" if count == of else f"{words.count(count)} of the {words.count(of)} lost segments"
        yield (
            f"{copy['url']} has {all_of}, by name and size. `ckpt repair {address} --restore-from {copy['url']} --yes` "
            "reads it, and puts back what matches its digest."
        )


def _address(document: Document) -> str:
    """The store, with the id of the checkpoint if it is not the newest."""
    store, number = label(document["store"]), document["lost_segments"]["checkpoint_id"]
    return store if number == document["newest"] else f"{store}@{number}"


def _advice_on_losses(document: Document) -> Iterator[str]:
    """Going on without the states that lost rows."""
    lost = document["lost_segments"]
    names = [f"{each['operator']}/{each['state']}" for each in lost["states"]]
    positions = [name for name, each in zip(names, lost["states"], strict=True) if each["positions"]]
    if positions:
        yield (
            f"{label(positions[0])} holds positions of a source: without them input would be lost or read again, so "
            f"no job goes on from {lost['checkpoint_id']}."
        )
    elif lost["checkpoint_id"] == document["newest"] and len(names) <= SHOWN:
        drops = " ".join(f"--drop {shlex.quote(label(name))}" for name in names)
        yield (
            f"A job can go on from {lost['checkpoint_id']} without what it had in {label(', '.join(names))}: start it "
            f"with {drops}, or with drop=[…] in a program."
        )


def _ways(ways: list[Document]) -> Table:
    columns = [
        Column("content of", right=True),
        Column("published (UTC)", optional=1),
        Column("bytes", right=True, optional=2),
        Column("is"),
        Column("repeats output of", flexible=True),
    ]
    rows = [
        (
            str(way["checkpoint_id"]),
            words.clock(way["created_at_us"], seconds=False),
            words.size(way["totals"]["bytes"]),
            {None: "not checked", True: "whole", False: "damaged"}[way["whole"]]
            + ("" if way["certain"] else ", perhaps a stray"),
            _ids(way["doubled"]),
        )
        for way in ways
    ]
    return Table(columns, rows, SHOWN)


def _ids(ascending: list[int]) -> str:
    """Checkpoint ids as ranges: ``3-5, 7``."""
    pairs: list[list[int]] = []
    for number in ascending:
        if pairs and number == pairs[-1][1] + 1:
            pairs[-1][1] = number
        else:
            pairs.append([number, number])
    return words.ranges(pairs)


def _advice(document: Document) -> Iterator[str]:
    """What to do next, a paragraph each."""
    if document["undecided"]:
        yield "The newest checkpoint cannot be read, so it is unknown whether it is damaged. Fix that first."
    elif document["ok"]:
        level = "" if document["level"] == "full" else " Footers were read, but no rows: --level full reads every byte."
        yield f"Nothing is wrong.{level}"
    else:
        if not document["closed"]:
            yield from _advice_below_the_newest(document)
        yield from _advice_on_ways(document)


def _advice_below_the_newest(document: Document) -> Iterator[str]:
    store, cut_off = label(document["store"]), document["cut_off"]
    yield "The newest checkpoint is whole, and the job can go on from it. There is nothing to do."
    if cut_off:
        yield (
            f"Checkpoints {_ids(cut_off[::-1])} are cut off. They can be inspected and copied by id (`ckpt copy "
            f"{store}@ID TARGET`), and `ckpt repair {store}@ID --yes` goes back to one of them; a rollback does not "
            "reach them. Nothing is collected until retention has passed the damage."
        )
    if document["missing"] > 1:
        yield (
            f"More than one record is missing above {cut_off[0]}. If {document['newest']} was put there by hand or "
            f"from a backup, go back to {cut_off[0]}."
        )


def _advice_on_ways(document: Document) -> Iterator[str]:
    store, chosen, closed = label(document["store"]), document["chosen"], document["closed"]
    way = next((way for way in document["ways"] if way["checkpoint_id"] == chosen), None)
    level = " --level full" if document["level"] == "full" else ""
    if way is not None and way["whole"] and (closed or chosen in document["cut_off"]):
        yield (
            f"`ckpt repair {store}@{chosen}{level} --yes` publishes checkpoint {document['newest'] + 1} with the "
            f"content of {chosen}. Sinks then see the input of {_ids(way['doubled'])} again: what those have "
            "committed, or still will, stays in the output."
        )
        if not way["certain"]:
            yield f"Checkpoint {chosen} stands alone, so it may be left over from a run that was beaten."
        alone = [each["checkpoint_id"] for each in document["ways"] if each["whole"] and each["checkpoint_id"] > chosen]
        if alone:
            yield (
                f"Checkpoint {alone[0]} is whole as well and would repeat less. But it stands alone, so it may be left "
                f"over from a run that was beaten. If you know that it is not: `ckpt repair {store}@{alone[0]}{level} "
                "--yes`."
            )
    elif way is not None and not way["whole"]:
        yield f"Checkpoint {chosen} is damaged too: {words.sentence(way['problems'][0]['message'])}"
    elif closed and not document["ways"]:
        yield (
            "No other checkpoint of this store can take its place. Start the job from a savepoint or another copy, "
            "with an empty store."
        )
    elif closed:
        yield (
            "No checkpoint of this store is whole and certain. Name a listed one to have it checked (STORE@ID), or "
            "start the job from a savepoint or another copy."
        )
    if closed and document["ways"]:
        yield f"You can copy out a whole checkpoint first: `ckpt copy {store}@ID TARGET`."

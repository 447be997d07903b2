"""``ckpt repair`` of a Structured Streaming query: the newest batch that a copy can have whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from stateformat import words
from stateformat.pages.blocks import Block, Column, Facts, Heading, Note, Table, more
from stateformat.words import label

from ...exit_status import FINE, PROBLEMS
from ...options import Address, Session
from ...output import Document
from ...repartitioned import ONE_QUERY

if TYPE_CHECKING:
    from stateformat.store import CheckpointStore

SHOWN: Final = 10
"""Batches and files on a page; JSON lists all."""


def repair_query(session: Session, address: Address, store: CheckpointStore, target: Address | None) -> int:
    """Show what a copy can save of a query, and write it; returns the exit status."""
    from stateformat.backends.foreign import advice_for
    from stateformat.backends.foreign.advice import SPARK
    from stateformat.backends.foreign.spark.copying import check_target, copy_query, plan_copy
    from stateformat.backends.foreign.spark.edits import location_like
    from stateformat.backends.foreign.spark.mending import mend
    from stateformat.errors import InvalidInput

    folder = store.storage.folder()
    assert folder is not None, "a query's checkpoint lies in a folder"
    there = None if target is None else session.folder(target, address.url)
    if there is not None:
        check_target(folder, there)
    with session.output.progress("Looking for a batch that is whole"):
        found = mend(folder, address.checkpoint_id)
        rows = found.rows
    source = found.source
    if there is not None and found.is_whole and source.batch == found.newest:
        raise InvalidInput(f"nothing is wrong with {folder.url}. {advice_for(SPARK, 'pin', folder.url)}")
    document: Document = {
        "store": store.url,
        "ok": found.is_whole,
        "query_id": source.query_id,
        "newest_batch": found.newest,
        "batch": source.batch,
        "rows": rows,
        "left_out": list(found.left_out),
        "lost": [{"batch": batch, "message": message} for batch, message in found.lost.items()],
        "runs_again": f"offsets/{source.batch + 1}" in {item.path for item in source.folder.list("offsets/")},
        "to": None,
    }
    if there is not None:
        plan = plan_copy(source, there.url)
        session.changes(
            f"{there.url} holds a part of the copy, if anything, on which Spark refuses to start: remove the folder "
            "and run it again"
        )
        with session.output.progress(f"Copying batch {plan.batch}") as step:
            files, size = copy_query(source.folder, there, plan, step)
        location = location_like("", there.url)
        document["to"] = {"store": there.url, "location": location, "files": files, "bytes": size}
    session.output.show(document, query_page)
    return FINE if document["ok"] or document["to"] else PROBLEMS


def query_page(document: Document) -> Iterator[Block]:
    """Make the page: what is damaged, what a copy has and what it lacks, and how to go on."""
    batch, newest, to = document["batch"], document["newest_batch"], document["to"]
    store = label(document["store"])
    if document["ok"] and not to:
        yield Heading("The query is whole" if batch == newest else f"Batch {batch} is whole")
        yield Facts([("at", document["store"]), ("query", document["query_id"]), ("newest batch", str(newest))])
        others = (
            f"Older batches were not read: `ckpt validate {store} --all --level full`"
            if batch == newest
            else f"Newer batches were not looked at: `ckpt repair {store}`"
        )
        yield Note(
            f"All that a restart from batch {batch} reads was read: {words.plural(document['rows'], 'row')}. Nothing "
            f"is wrong. {others} does that."
        )
        return
    yield Heading(f"{'Copied' if document['ok'] else 'Saved' if to else 'A copy can save'} batch {batch}")
    facts = [
        ("from", document["store"]),
        ("query", document["query_id"]),
        ("newest batch", str(newest)),
        ("rows", words.count(document["rows"])),
    ]
    if to:
        size = f"{words.plural(to['files'], 'file')}, {words.size(to['bytes'])}"
        facts += [("to", to["store"]), ("checkpointLocation", to["location"]), ("size", size)]
    yield Facts(facts)
    if document["left_out"]:
        yield Table(
            [Column("left out of the copy", flexible=True)], [(one,) for one in document["left_out"]], SHOWN, "file"
        )
        if any(not one.startswith("offsets/") for one in document["left_out"]):
            yield Note("They are damaged, and older files make up for them: of this batch nothing is lost.")
        else:
            yield Note("Spark makes these offsets of the next batch anew, from what its sources have then.")
    if document["lost"]:
        lost = document["lost"]
        yield from (Note(f"Batch {one['batch']} is lost: {one['message']}") for one in lost[:SHOWN])
        if len(lost) > SHOWN:
            yield Note(more(len(lost) - SHOWN, "lost batch"))
        which = f"batch {newest}" if newest == batch + 1 else f"batches {batch + 1} to {newest}"
        again = "with the same input" if document["runs_again"] else "with what its sources have then"
        yield Note(
            f"What {which} changed in the state is lost, in all partitions. Spark runs "
            f"batch {batch + 1} again, {again}, and all later input, if it is still there; what they put out is in the "
            "sink already."
        )
    if document["ok"]:
        yield Note(f"Spark goes on from the copy with batch {batch + 1}.")
    yield Note(ONE_QUERY if to else f"`ckpt repair {store} --to COPY` writes the copy. {store} stays as it is.")

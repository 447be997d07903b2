"""``ckpt history``: the checkpoints of a store, newest first, and the records that are none."""

from __future__ import annotations

import time
from collections.abc import Iterator

import click

from ..documents import history_document, reference
from ..exit_status import FINE, PROBLEMS
from ..options import Address, Session, command
from ..output import Document
from ..text import (
    Column,
    Look,
    age,
    clock,
    count,
    facts,
    heading,
    label,
    paragraph,
    plural,
    sentence,
    size,
    table,
)


@command("history", checkpoint="never")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most this many checkpoints, the newest.")
def history(session: Session, address: Address, *, limit: int | None) -> int:
    """List the checkpoints of a store, newest first.

    Finished are the operators of which every subtask has ended, partly those of which some have. A record that cannot be
    read, or was lost, is shown in its place, with the checkpoints beneath it, and makes the exit status 1; `ckpt repair`
    says what can be done. A record that no parent link reaches is a stray: no checkpoint, and named below the table.
    """
    store = session.store(address.url)
    found = store.survey(limit)
    fault = found.fault(store.storage)
    records = found.checkpoints[:limit]
    document = {
        "store": store.url,
        "job_id": records[0].job_id if records else "",
        "job_name": records[0].job_name if records else "",
        "checkpoints": [history_document(record) for record in found.chain[:limit]],
        "cut_off": [history_document(record) for record in records[len(found.chain) :]],
        "damaged": [
            {"checkpoint_id": number, "kind": error.kind.value, "message": str(error)}
            for number, error in ((number, found.unreadable[number]) for number in found.damaged)
        ],
        "lost": [reference(ref) for ref in found.lost],
        "strays": None if limit is not None else [reference(stray) for stray in found.strays],
        "ended_by": None if fault is None else {"kind": fault.kind.value, "message": str(fault)},
    }
    session.output.show(document, draw)
    return FINE if fault is None else PROBLEMS


def draw(document: Document, look: Look) -> Iterator[str]:
    """The page: the store and its job, the table, the strays."""
    checkpoints = document["checkpoints"]
    yield heading("History", look)
    yield ""
    job, name = label(document["job_id"]), label(document["job_name"])
    named = job if name in ("", job) else f"{job} ({name})"
    yield from facts([("store", label(document["store"])), ("job", named)], look)
    yield ""
    columns = [
        Column("id", right=True),
        Column("kind"),
        Column("published (UTC)"),
        Column("age", right=True, optional=2),
        Column("finished", flexible=True),
        Column("rows", right=True),
        Column("bytes", right=True),
        Column("parent", right=True, optional=1),
    ]
    now_us = time.time_ns() // 1000
    rows = {entry["checkpoint_id"]: _row(entry, now_us) for entry in (*checkpoints, *document["cut_off"])}
    rows |= {entry["checkpoint_id"]: _missing(entry, "damaged") for entry in document["damaged"]}
    rows |= {entry["checkpoint_id"]: _missing(entry, "lost") for entry in document["lost"]}
    yield from table(columns, [rows[number] for number in sorted(rows, reverse=True)], look)
    for entry in checkpoints:
        if entry["stop"]:
            yield ""
            yield from paragraph(
                f"Checkpoint {entry['checkpoint_id']} is where the job stopped ({entry['stop']['mode'].replace('_', ' ')}).",
                look,
            )
    if document["ended_by"]:
        yield ""
        message = sentence(document["ended_by"]["message"])
        yield from paragraph(look.paint(f"{look['fail']} {message}", "problem"), look)
    if document["strays"]:
        names = ", ".join(
            f"{stray['checkpoint_id']} ({'attempt ' + stray['attempt_id'][:8] if stray['attempt_id'] else 'damaged'})"
            for stray in document["strays"]
        )
        yield ""
        them = "it" if len(document["strays"]) == 1 else "them"
        yield from paragraph(
            f"{plural(len(document['strays']), 'stray')}, no checkpoint: {names}. Retention removes {them} "
            "(`ckpt gc --keep N`).",
            look,
        )


def _missing(entry: Document, what: str) -> list[str]:
    """The row of a checkpoint whose record cannot be read."""
    return [str(entry["checkpoint_id"]), what, *[""] * 6]


def _row(entry: Document, now_us: int) -> list[str]:
    partly = f", {entry['partially_finished']} partly" if entry["partially_finished"] else ""
    return [
        str(entry["checkpoint_id"]),
        entry["kind"],
        clock(entry["created_at_us"], seconds=False),
        age(entry["created_at_us"], now_us),
        f"{entry['finished']} of {entry['operators']}{partly}",
        count(entry["totals"]["rows"]),
        size(entry["totals"]["bytes"]),
        str(entry["parent"]["checkpoint_id"]) if entry["parent"] else "",
    ]

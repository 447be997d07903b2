"""``ckpt history``: the checkpoints of a store, newest first, and its stray records."""

from __future__ import annotations

import time
from collections.abc import Iterator

import click

from stateformat import words
from stateformat.documents import fault_document, history_document, reference

from ...exit_status import FINE, PROBLEMS
from ...options import Address, Session, Whole, command
from ...output import Document
from ...text import Column, Look, render


@command("history", checkpoint="never", foreign=True)
@click.option("--limit", type=Whole(), metavar="N", help="Only the newest N checkpoints.")
def history(session: Session, address: Address, *, limit: int | None) -> int:
    """List the checkpoints of a store, newest first.

    An operator counts as finished when all of its subtasks have ended, as partly finished when some
    have. A record that is damaged or lost is shown in its place, with the checkpoints below it, and
    the exit status is 1; `ckpt repair` says what to do. A record that no parent link reaches is a
    stray, not a checkpoint. Strays are listed below the table, and so are the savepoints below the
    store: pins, and those of jobs. STORE@NAME is the address of a savepoint.
    """
    from stateformat.inspecting import savepoints_document

    store = session.store(address)
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
            {"checkpoint_id": number, **fault_document(error)}
            for number, error in ((number, found.unreadable[number]) for number in found.damaged)
        ],
        "lost": [reference(ref) for ref in found.lost],
        "strays": None if limit is not None else [reference(stray) for stray in found.strays],
        "savepoints": savepoints_document(store.pins()),
        "ended_by": None if fault is None else fault_document(fault),
    }
    session.output.show(document, draw)
    return FINE if fault is None else PROBLEMS


def draw(document: Document, look: Look) -> Iterator[str]:
    """The page: the store and its job, the table, the strays."""
    checkpoints = document["checkpoints"]
    job = words.named(document["job_id"], document["job_name"])
    yield from render.page_head("History", [("store", words.label(document["store"])), ("job", job)], look)
    yield ""
    columns = [
        Column("id", right=True),
        Column("kind"),
        Column("published (UTC)"),
        Column("age", right=True, optional=2),
        Column("finished", flexible=True, optional=1),
        Column("rows", right=True),
        Column("bytes", right=True),
        Column("parent", right=True, optional=1),
    ]
    now_us = time.time_ns() // 1000
    rows = {entry["checkpoint_id"]: _row(entry, now_us) for entry in (*checkpoints, *document["cut_off"])}
    for what in ("damaged", "lost"):
        for entry in document[what]:
            rows[entry["checkpoint_id"]] = [str(entry["checkpoint_id"]), what, *[""] * 6]
    yield from render.table(columns, [rows[number] for number in sorted(rows, reverse=True)], look)
    yield from _savepoints(document["savepoints"], now_us, look)
    for entry in checkpoints:
        if entry["stop"]:
            yield ""
            text = f"At checkpoint {entry['checkpoint_id']} the job {words.stopped(entry['stop'])}."
            yield from render.paragraph(text, look)
    if document["ended_by"]:
        message = words.sentence(document["ended_by"]["message"])
        yield ""
        yield from render.paragraph(look.paint(f"{look['fail']} {message}", "problem"), look)
    strays = document["strays"]
    if strays:
        names = ", ".join(
            f"{stray['checkpoint_id']} ({'attempt ' + stray['attempt_id'][:8] if stray['attempt_id'] else 'damaged'})"
            for stray in strays
        )
        them = "it" if len(strays) == 1 else "them"
        removal = f"Retention removes {them} (`ckpt gc --keep N`)."
        yield ""
        yield from render.paragraph(f"{words.plural(len(strays), 'stray')}, no checkpoint: {names}. {removal}", look)


def _savepoints(found: list[Document], now_us: int, look: Look) -> Iterator[str]:
    """The table of what lies in ``savepoints/``, and what is wrong with it."""
    if not found:
        return
    columns = [
        Column("savepoint", flexible=True),
        Column("id", right=True),
        Column("published (UTC)"),
        Column("age", right=True, optional=2),
        Column("rows", right=True),
        Column("bytes", right=True),
    ]
    yield ""
    yield from render.table(columns, [_savepoint_row(entry, now_us) for entry in found], look)
    for entry in found:
        if entry["fault"]:
            yield ""
            message = words.sentence(f"savepoint {entry['name']}: {entry['fault']['message']}")
            yield from render.paragraph(look.paint(f"{look['fail']} {message}", "problem"), look)
        elif entry["claimed"]:
            yield ""
            yield from render.paragraph(f"Savepoint {entry['name']} is claimed: a job has gone on in it.", look)


def _savepoint_row(entry: Document, now_us: int) -> list[str]:
    of, name = entry["checkpoint"], words.label(entry["name"])
    if of is None:
        return [name, "damaged", *[""] * 4]
    return [
        name,
        str(of["checkpoint_id"]),
        words.clock(of["created_at_us"], seconds=False),
        words.age(of["created_at_us"], now_us),
        words.count(of["totals"]["rows"]),
        words.size(of["totals"]["bytes"]),
    ]


def _row(entry: Document, now_us: int) -> list[str]:
    partly = f", {entry['partially_finished']} partly" if entry["partially_finished"] else ""
    made_us = entry["created_at_us"]
    return [
        str(entry["checkpoint_id"]),
        entry["kind"],
        # Flink's metadata has no time.
        words.clock(made_us, seconds=False) if made_us else "-",
        words.age(made_us, now_us) if made_us else "",
        f"{entry['finished']} of {entry['operators']}{partly}",
        words.count(entry["totals"]["rows"]),
        words.size(entry["totals"]["bytes"]),
        str(entry["parent"]["checkpoint_id"]) if entry["parent"] else "",
    ]

"""``ckpt history``: the checkpoints of a store, newest first, and the records that are none."""

from __future__ import annotations

import time
from collections.abc import Iterator

import click

from tools.ckpt.address import Address
from tools.ckpt.common import Session, command
from tools.ckpt.describe import history_document, reference
from tools.ckpt.output import Document
from tools.ckpt.render import Column, Look, age, clock, count, facts, heading, label, paragraph, plural, size, table


@command("history", checkpoint="never")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most this many checkpoints, the newest.")
def history(session: Session, address: Address, *, limit: int | None) -> int:
    """List the checkpoints of a store, newest first.

    Finished are the operators of which every subtask has ended, partly those of which some have. A record that no parent link
    from the newest reaches is a stray: no checkpoint, and named below the table. Where a record cannot be read the list ends
    with a sentence, for what lies below cannot be told from strays; exit status 1.
    """
    from stateformat.history import read_history, require_records

    store = session.store(address.url)
    found = require_records(store.storage, read_history(store.storage, limit=limit))
    records, broken = found.chain, found.ended_by
    strays = None if limit is not None or broken else store.strays()
    document = {
        "store": store.url,
        "job_id": records[0].job_id,
        "job_name": records[0].job_name,
        "checkpoints": [history_document(record) for record in records],
        "strays": None if strays is None else [reference(stray) for stray in strays],
        "ended_by": None if broken is None else {"kind": broken.kind.value, "message": str(broken)},
    }
    session.output.show(document, draw)
    return 0 if broken is None else 1


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
    yield from table(columns, [_row(entry, now_us) for entry in checkpoints], look)
    for entry in checkpoints:
        if entry["stop"]:
            yield ""
            yield from paragraph(
                f"Checkpoint {entry['checkpoint_id']} is where the job stopped ({entry['stop']['mode'].replace('_', ' ')}).",
                look,
            )
    if document["ended_by"]:
        yield ""
        yield from paragraph(f"The list ends here: {document['ended_by']['message']}", look)
    if document["strays"]:
        names = ", ".join(
            f"{stray['checkpoint_id']} (attempt {stray['attempt_id'][:8]})" for stray in document["strays"]
        )
        yield ""
        yield from paragraph(
            f"{plural(len(document['strays']), 'stray')}, no checkpoint: {names}. `ckpt gc --keep N --delete` removes it "
            "when it has expired.",
            look,
        )


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

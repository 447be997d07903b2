"""``ckpt sql``: a query over the states of a checkpoint, by a DuckDB that can only read."""

from __future__ import annotations

import atexit
import gc
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, Final

import click

from stateformat import words
from stateformat.pages.blocks import Facts, Heading, Lines, Margin, Note, Page, Values, dotted

from ...files import FORMATS, check_outside, format_of, remote_folder, write_file
from ...json_text import JsonTexts
from ...options import Address, Session, TargetType, Whole, command
from ...output import Document

if TYPE_CHECKING:
    import pyarrow as pa

    from stateformat.backends.exporting import Place
    from stateformat.backends.querying import Answer

ROWS_SHOWN: Final = 100
"""Rows of a page, where --rows does not say."""
PLAN: Final = ["explain_key", "explain_value"]
"""The columns of what EXPLAIN answers: the second is lines as they are."""
GROUP_ROWS: Final = 131_072
SPOOLED_BYTES: Final = 8 << 20
NOTES_SHOWN: Final = 10


@command("sql", foreign=True, expired=True)
@click.argument("query", metavar="QUERY")
@click.option("--all-checkpoints", is_flag=True, help="States of the whole history, with a column _checkpoint_id.")
@click.option(
    "--rows",
    type=Whole(),
    metavar="N",
    help=f"Show the first N rows; by default {ROWS_SHOWN} on a page, all in JSON.",
)
@click.option(
    "--to", "target", type=TargetType(), metavar="FILE", help="Write all rows to this file; - for standard output."
)
@click.option(
    "--as",
    "file_format",
    type=click.Choice(FORMATS),
    help="The file's format; by default its name's ending decides. Without --to: to standard output.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def sql(
    session: Session,
    address: Address,
    *,
    query: str,
    all_checkpoints: bool,
    rows: int | None,
    target: str | None,
    file_format: str | None,
    force: bool,
) -> None:
    """Query the states of a checkpoint with SQL.

    Every state is a table OPERATOR.STATE, with its rows as a restore would give them. An operator
    goes by its uid, or by its name if only one has it. The tables checkpoints, operators, states
    and handles cover the whole history. QUERY is one statement of DuckDB's SQL, or - to read it
    from standard input; "show tables" lists the tables, "describe T" the columns of one.

    DuckDB ignores case in names: of those that differ only in case, all but the first are called
    NAME_2, NAME_3, and a line says so. A query reads the states and nothing else: no files, no
    network, no settings. It needs DuckDB: install from a clone, with '.[sql]'.
    """
    if all_checkpoints and address.checkpoint_id is not None:
        raise click.UsageError(f"--all-checkpoints reads the whole history; leave @{address.checkpoint_id} out")
    if rows is not None and (target or file_format):
        raise click.UsageError(
            "--rows is about what is shown, and --to and --as write all rows; put LIMIT in the query"
        )
    if target is None and file_format is not None:
        target = "-"
    chosen = None if target is None else format_of(target, file_format)
    place = None if target is None else remote_folder(session, address, target, force=force)
    from stateformat.backends.querying import query as run_query

    # DuckDB reports objects that are left when the interpreter ends; `main` would leave them all.
    atexit.unregister(gc.freeze)
    text = sys.stdin.read() if query == "-" else query
    store = session.store(address)
    answer = run_query(
        store,
        text,
        checkpoint_id=address.checkpoint_id,
        all_checkpoints=all_checkpoints,
        with_expired=session.with_expired,
    )
    for note in answer.notes[:NOTES_SHOWN]:
        session.output.note(note)
    if len(answer.notes) > NOTES_SHOWN:
        session.output.note(f'and {len(answer.notes) - NOTES_SHOWN:,} more names; "show tables" has them')
    document: Document = {
        "store": store.url,
        "checkpoint_ids": [int(one.id) for one in answer.checkpoints],
        "columns": [{"name": one.name, "type": str(one.type)} for one in answer.schema],
        "notes": list(answer.notes),
    }
    if target is not None and chosen is not None:
        first = answer.checkpoints[0]
        check_outside(target, first.storage.url, first.system)
        _write(session, answer, target, place, chosen, document, force=force)
        return
    with tempfile.SpooledTemporaryFile(SPOOLED_BYTES, prefix="stateformat-") as spool:
        with session.output.progress("Querying", unit="rows") as step:
            batches = answer.watched(lambda read: step(read, 0)).batches()
            if session.output.as_json:
                document["rows"] = JsonTexts(spool)
                document["more"] = _spooled(batches, rows, spool)
            else:
                document["rows"], document["more"] = _objects(batches, rows or ROWS_SHOWN)
        session.output.show(document, page)


def _write(
    session: Session,
    answer: Answer,
    target: str,
    place: Place | None,
    file_format: str,
    document: Document,
    *,
    force: bool,
) -> None:
    """Write all rows to a file or to standard output; show what was written where."""
    import pyarrow as pa

    from stateformat.tables import rebatch

    with session.output.progress("Querying", unit="rows") as step:
        tables = (pa.Table.from_batches([batch]) for batch in answer.watched(lambda read: step(read, 0)).batches())
        # Batches of answers are small: rows of Parquet lie in groups worth their headers.
        batches = rebatch(tables, answer.schema, GROUP_ROWS)
        rows, length = write_file(session, target, place, file_format, answer.schema, batches, force=force)
    if target == "-":
        session.output.note(words.plural(rows, "row"))
        return
    session.output.show(
        {**document, "format": file_format, "path": target, "rows": rows, "bytes": length}, written_page
    )


def _objects(batches: Iterator[pa.RecordBatch], limit: int) -> tuple[list[dict[str, Any]], bool]:
    """The first rows, and whether there are more."""
    from stateformat.documents import objects

    found = objects(batches, limit + 1)
    return found[:limit], len(found) > limit


def _spooled(batches: Iterator[pa.RecordBatch], limit: int | None, file: IO[bytes]) -> bool:
    """Write the rows as JSON lines: memory may not hold them. Returns whether there are more."""
    from stateformat.documents import json_lines
    from stateformat.tables import cut

    from ...files import TEXT_BYTES

    left = limit
    for batch in batches:
        chosen = batch if left is None else batch.slice(0, left)
        for piece in cut(chosen, chosen.num_rows, TEXT_BYTES):
            file.write(memoryview(json_lines(piece)))
        if left is not None and batch.num_rows > left:
            return True
        left = None if left is None else left - batch.num_rows
    return False


def page(document: Document) -> Page:
    """Make the page: a table, and how much of the answer it is."""
    if [column["name"] for column in document["columns"]] == PLAN:
        plans = [words.lines_label(row["explain_value"]).rstrip() for row in document["rows"]]
        return [Lines([line for plan in plans for line in plan.split("\n")])]
    count = len(document["rows"])
    hint = "--rows N shows more, --to FILE writes all"
    said = f"the first {words.plural(count, 'row')} ({hint})" if document["more"] else words.plural(count, "row")
    return [Margin([Values(document["columns"], document["rows"]), Note(said)])]


def written_page(document: Document) -> Page:
    """Make the page: what was written where."""
    length = f"{words.size(document['bytes'])} of {document['format']}"
    facts = [
        ("store", document["store"]),
        ("file", document["path"]),
        ("columns", ", ".join(column["name"] for column in document["columns"])),
        ("size", dotted(words.plural(document["rows"], "row"), length)),
    ]
    return [Heading("Answer written"), Facts(facts)]

"""``ckpt export``: state, layers merged, as files and tables that any program reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from stateformat import words
from stateformat.pages.blocks import Block, Cell, Column, Facts, Heading, Note, Page, Table, dotted, more
from stateformat.words import label

from ...files import FORMATS, SUFFIXES, check_outside, format_of, remote_folder, write_file, write_rows
from ...options import Address, CheckpointsType, Session, TargetType, Whole, command
from ...output import Document, Step

if TYPE_CHECKING:
    from stateformat.backends.exporting import Exported, Place, Source
    from stateformat.model import State
    from stateformat.reading import Checkpoint
    from stateformat.store import CheckpointStore

SAVEPOINT: Final = "flink-savepoint"
TABLES: Final = ("iceberg", "delta")
SHOWN: Final = 20
"""States, and notes, that a page lists."""
_IDS_SHOWN: Final = 6


@dataclass(frozen=True)
class Request:
    """What the options of one call ask for."""

    operator: str | None
    state: str | None
    subtask: int | None
    checkpoints: tuple[int | None, int | None] | None
    """From and to; None for the one of the address."""
    where: str | None
    partition_by: tuple[str, ...]
    target: str
    file_format: str | None
    force: bool

    @property
    def alone(self) -> bool:
        """Whether one state is exported, not all."""
        return self.state is not None


@command("export", foreign=True, expired=True)
@click.option("--operator", metavar="UID", help="The operator, by uid or name; without --state, all its states.")
@click.option("--state", metavar="NAME", help="The state; without it, all states are exported.")
@click.option("--subtask", type=Whole(0, 2**31 - 1), metavar="N", help="Only what this subtask owns.")
@click.option(
    "--checkpoints",
    type=CheckpointsType(),
    metavar="FROM..TO",
    help="Several checkpoints, with a column _checkpoint_id; 3.. and ..7 are open.",
)
@click.option("--all-checkpoints", is_flag=True, help="All checkpoints of the history, with _checkpoint_id.")
@click.option(
    "--where",
    metavar="CONDITION",
    help="Only rows for which this is true: SQL over the columns, by DuckDB (extra sql).",
)
@click.option(
    "--partition-by",
    metavar="COLUMN[,...]",
    help="Parquet in a folder for each value: column=value/part-00000.parquet.",
)
@click.option(
    "--to",
    "target",
    type=TargetType(),
    required=True,
    metavar="FILE|FOLDER",
    help="The file to write, - for standard output; or the folder of tables, or of files of all states.",
)
@click.option(
    "--as",
    "file_format",
    type=click.Choice([*FORMATS, *TABLES, SAVEPOINT]),
    help="The format; by default a file's ending decides. flink-savepoint: the whole checkpoint.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def export(
    session: Session,
    address: Address,
    *,
    partition_by: str | None,
    all_checkpoints: bool,
    checkpoints: tuple[int | None, int | None] | None,
    **options: Any,
) -> None:
    """Write state to files and tables, or a checkpoint as a Flink savepoint.

    Rows are as a restore would give them: layers merged, with the columns of the current schema,
    without the key group. Broadcast state is written once. CSV and JSON lines have binary values as
    hexadecimal text, and CSV has nested ones as JSON. The file appears only when it is complete.

    With --state one state goes into a file, a table or partitioned Parquet. Without it all states
    go into a folder, each into OPERATOR/STATE. Names that cannot be folder names get a digest.

    --as iceberg and --as delta (extras iceberg and delta) write a table by one commit; an export
    that fails leaves it as it was. The table becomes the state of the checkpoint: another
    checkpoint replaces the rows in a new snapshot, older ones stay for time travel, and a
    checkpoint that is already there adds nothing. With --checkpoints or --all-checkpoints the table
    holds the rows of each, and those that are missing are added. Columns are added, renamed and
    widened with the state's. Iceberg's tables are in the SQLite catalog catalog.db of the folder,
    and each can be read by its folder alone (metadata/version-hint.text); on S3 there is no
    catalog. Types that a format lacks are widened, names that it refuses are changed, and the page
    says so.

    --partition-by and files of all states go to a folder that is new or empty.

    With --as flink-savepoint the whole checkpoint becomes a canonical savepoint, which Flink
    restores at any parallelism. It was imported from Flink with --key-hash keep, or is Flink's.
    """
    columns = tuple(part.strip() for part in partition_by.split(",")) if partition_by else ()
    if all_checkpoints and checkpoints is not None:
        raise click.UsageError("--checkpoints and --all-checkpoints contradict each other; give one of them")
    span = (None, None) if all_checkpoints else checkpoints
    request = Request(partition_by=columns, checkpoints=span, **options)
    _check(request, address)
    if request.file_format == SAVEPOINT:
        _export_savepoint(session, address, request.target)
    elif request.alone and not columns and request.file_format not in TABLES:
        _export_file(session, address, request)
    else:
        _export_folder(session, address, request)


def _check(request: Request, address: Address) -> None:
    """Refuse options that contradict each other."""
    given = (request.operator, request.state, request.checkpoints, request.where, request.partition_by or None)
    if request.file_format == SAVEPOINT:
        if any(one is not None for one in given) or request.subtask is not None or request.force:
            raise click.UsageError(f"--as {SAVEPOINT} writes all operators into an empty folder; give --to alone")
        return
    if request.checkpoints is not None and address.checkpoint_id is not None:
        raise click.UsageError(f"@{address.checkpoint_id} is one checkpoint; leave it out to export several")
    if request.checkpoints is not None and request.subtask is not None:
        raise click.UsageError("--subtask is of one checkpoint; leave it out to export several")
    if request.partition_by and request.file_format not in (None, "parquet"):
        raise click.UsageError(f"--partition-by writes Parquet; leave out --as {request.file_format}")
    if request.target == "-" and (request.file_format in TABLES or request.partition_by):
        raise click.UsageError("--to - is standard output, and this goes into a folder; name one")
    in_file = request.target == "-" or (
        request.file_format not in TABLES and Path(request.target).suffix.lower() in SUFFIXES
    )
    if not request.alone and in_file:
        missing = "--operator" if request.operator is None else "--state"
        raise click.UsageError(f"Missing option '{missing}'; a file holds one state of one operator")
    if request.alone and request.operator is None:
        raise click.UsageError("Missing option '--operator'; --state is the name of one of its states")
    folder = not request.alone or request.partition_by or request.file_format in TABLES
    if folder and request.file_format is None and not request.partition_by:
        raise click.UsageError(
            f"{request.target!r} is the folder of all states; add --as {', '.join((*TABLES, *FORMATS))}, or give "
            "--operator and --state"
        )
    if folder and request.force:
        raise click.UsageError("--force replaces a file; nothing in a folder is replaced")


def _sources(session: Session, address: Address, request: Request) -> tuple[CheckpointStore, Checkpoint, list[Source]]:
    """What is exported. ``InvalidInput`` for an unknown operator, state, subtask or column."""
    from stateformat.backends.exporting import one_checkpoint, several_checkpoints

    store = session.store(address, request.target)
    if request.checkpoints is None:
        store, checkpoint = session.checkpoint(address, request.target)
        states = _states(checkpoint, request)
        where, with_expired = request.where, session.with_expired
        sources = [
            one_checkpoint(checkpoint, one, subtask=request.subtask, where=where, with_expired=with_expired)
            for one in states
        ]
        return store, checkpoint, sources
    history = {int(record.checkpoint_id): record for record in store.history()}
    first, last = request.checkpoints
    for end in (first, last):
        if end is not None and end not in history:
            store.open(end)  # Says why it is not there.
    ids = sorted(number for number in history if (first or 0) <= number <= (last or number))
    if not ids:
        raise click.UsageError(f"no checkpoint from {first} to {last}; FROM comes first, and TO is the greater")
    checkpoint = store.open(ids[-1])
    records, newest = [history[number] for number in ids], history[max(history)]
    return store, checkpoint, [
        several_checkpoints(
            store, records, newest, one.operator, one.name, where=request.where, with_expired=session.with_expired
        )
        for one in _states(checkpoint, request)
    ]  # fmt: skip


def _states(checkpoint: Checkpoint, request: Request) -> Sequence[State]:
    if request.operator is None and checkpoint.states:
        return checkpoint.states
    if request.operator is None:
        raise click.UsageError(f"checkpoint {checkpoint.id} has no states; there is nothing to export")
    uid = checkpoint.operator_uid(request.operator)
    if request.state is not None:
        return [checkpoint.record.state(uid, request.state)]
    found = [state for state in checkpoint.states if state.operator == uid]
    if not found:
        raise click.UsageError(f"operator {uid!r} has no states in checkpoint {checkpoint.id}; name another")
    return found


def _export_folder(session: Session, address: Address, request: Request) -> None:
    """Write tables, or the files of all states, or partitioned Parquet."""
    from stateformat.backends.exporting import Format, Place, TableExport, export_files

    to = Place(request.target, session.options_of(request.target, address.url))
    store, checkpoint, sources = _sources(session, address, request)
    check_outside(request.target, checkpoint.storage.url, checkpoint.system)
    if request.file_format in TABLES:
        session.changes(f"what {label(request.target)} already has is complete; export again")
        with (
            TableExport(sources, Format(request.file_format), to, alone=request.alone) as tables,
            _progress(session, sources) as step,
        ):
            found = tables.run(step)
    else:
        chosen = request.file_format or "parquet"
        session.changes(f"{label(request.target)} was not written")
        with _progress(session, sources) as step:
            found = export_files(
                sources,
                to,
                f".{chosen}",
                lambda file, schema, batches: write_rows(file, chosen, schema, batches),
                partition_by=request.partition_by,
                alone=request.alone,
                step=step,
            )
    session.output.show(_folder_document(store, request, to, sources, found), folder_page)


def _folder_document(
    store: CheckpointStore, request: Request, to: Place, sources: Sequence[Source], found: Sequence[Exported]
) -> Document:
    has_catalog = request.file_format == "iceberg" and to.local is not None
    return {
        "store": store.url,
        "checkpoint_ids": _ids(sources),
        "format": request.file_format or "parquet",
        "path": str(to),
        "catalog": f"{str(to).rstrip('/')}/catalog.db" if has_catalog else None,
        "subtask": request.subtask,
        "where": request.where,
        "partition_by": list(request.partition_by),
        "rows": sum(one.rows for one in found),
        "files": sum(one.files for one in found),
        "bytes": sum(one.bytes for one in found),
        "states": [
            {
                "operator": one.operator,
                "state": one.state,
                "path": one.path,
                "added": list(one.added),
                "present": list(one.present),
                "rows": one.rows,
                "files": one.files,
                "bytes": one.bytes,
                "version": one.version,
                "notes": [{"column": note.column, "message": note.message} for note in one.notes],
            }
            for one in found
        ],
    }


def _ids(sources: Sequence[Source]) -> list[int]:
    return sorted({int(ref.checkpoint_id) for source in sources for ref in source.checkpoints})


@contextmanager
def _progress(session: Session, sources: Sequence[Source]) -> Iterator[Any]:
    """A bar that counts rows. Their total is known for all rows of one checkpoint only."""
    what = str(sources[0]) if len(sources) == 1 else words.plural(len(sources), "state")
    counts = [source.rows for source in sources]
    total = None if None in counts else sum(count or 0 for count in counts)
    with session.output.progress(f"Exporting {what}", unit="rows") as step:
        yield _Counter(step, total)


class _Counter:
    """Adds up rows for a progress bar."""

    def __init__(self, step: Step, total: int | None) -> None:
        self._step, self._total, self._done = step, total, 0

    def __call__(self, rows: int) -> None:
        self._done += rows
        self._step(self._done, self._done if self._total is None else self._total)


def _export_file(session: Session, address: Address, request: Request) -> None:
    """Write one state to one file, or to standard output."""
    from stateformat.backends.exporting import batches_of

    target = request.target
    chosen = format_of(target, request.file_format)
    place = remote_folder(session, address, target, force=request.force)
    store, checkpoint, sources = _sources(session, address, request)
    check_outside(target, checkpoint.storage.url, checkpoint.system)
    source = sources[0]
    stream = source.stream()
    with _progress(session, sources) as step:
        batches = batches_of(stream, step)
        rows, length = write_file(session, target, place, chosen, stream.schema, batches, force=request.force)
    ids = _ids(sources)
    if target == "-":
        where = f"checkpoint {ids[0]}" if len(ids) == 1 else f"checkpoints {ids[0]} to {ids[-1]}"
        session.output.note(f"{words.plural(rows, 'row')} of {source}, {where}")
        return
    document = {
        "store": store.url,
        "checkpoint_id": checkpoint.id,
        "checkpoint_ids": ids,
        "operator": source.state.operator,
        "state": source.state.name,
        "subtask": request.subtask,
        "where": request.where,
        "format": chosen,
        "path": target,
        "rows": rows,
        "bytes": length,
    }
    session.output.show(document, file_page)


def _export_savepoint(session: Session, address: Address, target: str) -> None:
    """Write a checkpoint as a canonical savepoint into an empty folder; show what was written."""
    from stateformat.backends.foreign.flink.writing.savepoint import write_savepoint
    from stateformat.storage import open_storage

    if target == "-":
        raise click.UsageError("--to - is standard output, and a savepoint is a folder; give a path or a URL")
    store, checkpoint = session.checkpoint(address, target)
    folder = open_storage(target, **session.options_of(target, address.url)).folder()
    if folder is None:
        raise click.UsageError(f"{target!r} cannot hold a Flink savepoint; give a path or a URL")
    session.changes(f"{label(target)} has no savepoint yet: _metadata is written last")
    with session.output.progress(f"Writing a savepoint of checkpoint {checkpoint.id}", unit="rows"):
        done = write_savepoint(checkpoint, folder)
    document = {
        "store": store.url,
        "checkpoint_id": checkpoint.id,
        "format": SAVEPOINT,
        "path": target,
        "operators": done.operators,
        "files": done.files,
        "rows": done.rows,
        "bytes": done.bytes,
        "left_out": list(done.left_out),
    }
    session.output.show(document, savepoint_page)


# ---- pages


def file_page(document: Document) -> Page:
    """Make the page of one file: what was written where."""
    owner = "all subtasks" if document["subtask"] is None else f"subtask {document['subtask']}"
    length = f"{words.size(document['bytes'])} of {document['format']}"
    facts = [
        ("store", document["store"]),
        ("state", f"{document['operator']} / {document['state']}, {owner}"),
        ("where", document["where"] or ""),
        ("file", document["path"]),
        ("size", dotted(words.plural(document["rows"], "row"), length)),
    ]
    return [_title(document), Facts(facts)]


def folder_page(document: Document) -> Iterator[Block]:
    """Make the page of a folder: what became of each state, and what is not as it was."""
    states = document["states"]
    size = dotted(
        words.plural(document["rows"], "row"),
        words.plural(document["files"], "file"),
        f"{words.size(document['bytes'])} of {document['format']}",
    )
    is_written = any(len(state["added"]) > 0 for state in states)
    yield _title(document)
    yield Facts(
        [
            ("store", document["store"]),
            ("where", document["where"] or ""),
            ("folder", document["path"]),
            ("catalog", document["catalog"] or ""),
            ("added", size if is_written else "nothing: all of it was already there"),
        ]
    )
    columns = [
        Column("state", flexible=True),
        Column("rows", right=True),
        Column("bytes", right=True),
        Column("checkpoints added", optional=1),
        Column("in", flexible=True),
    ]
    rows = [_state_row(state, document["path"]) for state in states]
    # One state lies in the folder itself, and the title names its checkpoint.
    needed = len(columns) if any(row[-1] for row in rows[:SHOWN]) else len(columns) - 1
    yield Table(columns[:needed], [row[:needed] for row in rows], SHOWN)
    notes: list[Cell] = [
        f"{state['operator']}/{state['state']}: {note['column']} {note['message']}"
        for state in states
        for note in state["notes"]
    ]
    if notes:
        yield Note([*notes[:SHOWN], *([more(len(notes) - SHOWN)] if len(notes) > SHOWN else [])])


def savepoint_page(document: Document) -> Page:
    """Make the page: what was written where, and what Flink's savepoint had that is left out."""
    names = (("rows", "row"), ("operators", "operator"), ("files", "file"))
    counts = [words.plural(document[name], noun) for name, noun in names]
    facts = [
        ("store", document["store"]),
        ("savepoint", document["path"]),
        ("size", dotted(*counts, words.size(document["bytes"]))),
        ("left out", ", ".join(document["left_out"])),
    ]
    return [Heading(f"Savepoint of checkpoint {document['checkpoint_id']}"), Facts(facts)]


def _title(document: Document) -> Heading:
    ids = document["checkpoint_ids"]
    which = f"checkpoint {ids[0]}" if len(ids) == 1 else f"checkpoints {ids[0]} to {ids[-1]}"
    return Heading(f"Exported from {which}")


def _state_row(state: Document, folder: str) -> list[str]:
    there = state["path"].removeprefix(folder).strip("/")
    name, added = f"{state['operator']} / {state['state']}", state["added"]
    if not added:
        return [name, "", "", "was there", there]
    ids = ", ".join(map(str, added)) if len(added) <= _IDS_SHOWN else f"{len(added)}, {added[0]} to {added[-1]}"
    return [name, words.count(state["rows"]), words.size(state["bytes"]), ids, there]

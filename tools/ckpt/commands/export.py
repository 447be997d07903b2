"""``ckpt export``: a state, layers merged, as a file that any program reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ..files import check_target, format_of, new_file, write_rows
from ..options import Address, Session, command
from ..output import Document
from ..text import Look, label, render

if TYPE_CHECKING:
    import pyarrow as pa

    from stateformat.model import State
    from stateformat.reading import Checkpoint, ReadTask

SAVEPOINT: Final = "flink-savepoint"


@command("export", foreign=True)
@click.option("--operator", metavar="UID", help="The operator, by uid or name.")
@click.option("--state", metavar="NAME", help="The state.")
@click.option("--subtask", type=click.IntRange(min=0), metavar="N", help="Only what this subtask owns.")
@click.option(
    "--to",
    "target",
    required=True,
    metavar="FILE",
    help="The file to write, - for standard output; or an empty folder.",
)
@click.option(
    "--as",
    "file_format",
    type=click.Choice(["parquet", "csv", "jsonl", SAVEPOINT]),
    help="The file's format; by default its name's ending decides. flink-savepoint: the whole checkpoint.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def export(
    session: Session,
    address: Address,
    *,
    operator: str | None,
    state: str | None,
    subtask: int | None,
    target: str,
    file_format: str | None,
    force: bool,
) -> None:
    """Write a state to a file, or a checkpoint as a savepoint of Flink's.

    Rows are as a restore would give them: layers merged, with the columns of the current schema,
    without the key group. Of broadcast state one copy is written. CSV and JSON lines have binary
    values as hexadecimal text, and CSV has nested ones as JSON. The file appears when it is whole.

    With --as flink-savepoint the whole checkpoint becomes a canonical savepoint, which Flink
    restores at any parallelism. It was imported from Flink with --key-hash keep, or is Flink's.
    """
    if file_format == SAVEPOINT:
        if operator or state or subtask is not None or force:
            raise click.UsageError(f"--as {SAVEPOINT} writes all operators into an empty folder; give --to alone")
        _export_savepoint(session, address, target)
        return
    if operator is None or state is None:
        missing = "--operator" if operator is None else "--state"
        raise click.UsageError(f"Missing option '{missing}'; a file holds one state of one operator")
    chosen = format_of(target, file_format)
    if target != "-":
        check_target(Path(target), force=force)
    store, checkpoint = session.checkpoint(address)
    _check_outside(target, checkpoint)
    uid = checkpoint.operator_uid(operator)
    declared = checkpoint.record.state(uid, state)
    task = _read_task(checkpoint, declared, subtask)
    effect = "standard output has only what was written before" if target == "-" else f"{label(target)} was not written"
    session.changes(effect)
    with session.output.progress(f"Exporting {state}", unit="rows") as step, new_file(target) as file:
        rows = write_rows(file, chosen, rows_schema(declared), _counted(task, step))
        length = file.tell() if target != "-" else 0
    if target == "-":
        session.output.note(f"{render.plural(rows, 'row')} of {uid}/{state}, checkpoint {checkpoint.id}")
        return
    document = {
        "store": store.url,
        "checkpoint_id": checkpoint.id,
        "operator": uid,
        "state": state,
        "subtask": subtask,
        "format": chosen,
        "path": target,
        "rows": rows,
        "bytes": length,
    }
    session.output.show(document, draw)


def rows_schema(state: State) -> pa.Schema:
    """The columns of a state in a file, without metadata."""
    import pyarrow as pa

    from stateformat.schema import KEY_GROUP, segment_schema

    return pa.schema([item.remove_metadata() for item in segment_schema(state) if item.name != KEY_GROUP.name])


def draw(document: Document, look: Look) -> Iterator[str]:
    """The page: what was written where."""
    owner = "all subtasks" if document["subtask"] is None else f"subtask {document['subtask']}"
    length = f"{render.size(document['bytes'])} of {document['format']}"
    facts = [
        ("store", label(document["store"])),
        ("state", f"{label(document['operator'])} / {label(document['state'])}, {owner}"),
        ("file", label(document["path"])),
        ("size", look.dotted(render.plural(document["rows"], "row"), length)),
    ]
    return render.page_head(f"Exported from checkpoint {document['checkpoint_id']}", facts, look)


def _read_task(checkpoint: Checkpoint, state: State, subtask: int | None) -> ReadTask:
    """What to read; ``InvalidInput`` for a subtask that the operator does not have."""
    from stateformat.errors import ErrorKind, InvalidInput
    from stateformat.model import Mode

    parallelism = checkpoint.graph.operator(state.operator).parallelism
    if subtask is not None and subtask >= parallelism and state.mode is not Mode.COMMITTABLES:
        raise InvalidInput(
            f"operator {state.operator!r} has subtasks 0 to {parallelism - 1}; there is no subtask {subtask}",
            kind=ErrorKind.INVALID_PARALLELISM,
            operator=state.operator,
        )
    if subtask is None and state.mode is Mode.BROADCAST:
        # Every subtask has the same rows; read those of the first that reported some.
        owners = checkpoint.read(state.operator, state.name).slices["subtask"].to_pylist()
        subtask = min(owners, default=None)
    return checkpoint.read(state.operator, state.name, subtask)


def _counted(task: ReadTask, step: Any) -> Iterator[pa.RecordBatch]:
    counts = task.slices["rows"].to_pylist()
    # Other systems do not say how many rows they have.
    done, total = 0, None if -1 in counts else sum(counts)
    for batch in task.batches():
        step(done, done if total is None else total)
        yield batch
        done += batch.num_rows
    step(done, done if total is None else total)


def _check_outside(target: str, checkpoint: Checkpoint) -> None:
    """Refuses a file in the folder of another system, where nothing is ever written."""
    from stateformat.errors import ErrorKind, InvalidInput
    from stateformat.storage import lies_in

    folder = checkpoint.storage.url
    if target != "-" and checkpoint.system is not None and lies_in(target, folder):
        raise InvalidInput(
            f"{target} lies in {folder}, which is {checkpoint.system} and stays as it is; give a file elsewhere",
            kind=ErrorKind.INVALID_URL,
        )


def _export_savepoint(session: Session, address: Address, target: str) -> None:
    """Write a checkpoint as a canonical savepoint into an empty folder; show what was written."""
    from stateformat.backends.foreign.flink.writing import write_savepoint
    from stateformat.storage import folder_of, open_storage

    store, checkpoint = session.checkpoint(address)
    folder = folder_of(open_storage(target)) if target != "-" else None
    if folder is None:
        raise click.UsageError(f"{target!r} is no folder that files of Flink's can lie in; give a path or a URL")
    session.changes(f"{label(target)} has no savepoint, for its _metadata comes last")
    with session.output.progress(f"Writing a savepoint of checkpoint {checkpoint.id}", unit="rows"):
        done = write_savepoint(checkpoint, folder)
    for note in checkpoint.notes:
        if note.kind == "lost":
            session.output.note(f"{note.subject}: {note.message}")
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
    session.output.show(document, draw_savepoint)


def draw_savepoint(document: Document, look: Look) -> Iterator[str]:
    """The page: what was written where, and what Flink's savepoint had that is left out."""
    facts = [
        ("store", label(document["store"])),
        ("savepoint", label(document["path"])),
        ("size", look.dotted(render.plural(document["rows"], "row"), render.plural(document["operators"], "operator"),
                             render.plural(document["files"], "file"), render.size(document["bytes"]))),
    ]  # fmt: skip
    if document["left_out"]:
        facts.append(("left out", ", ".join(label(name) for name in document["left_out"])))
    return render.page_head(f"Savepoint of checkpoint {document['checkpoint_id']}", facts, look)

"""Rows as a file that appears when it is whole, or on standard output.

Formats: ``parquet``, ``csv``, ``jsonl`` (an object a line), ``json`` (an array of them).
"""

from __future__ import annotations

import codecs
import errno
import secrets
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import click

from stateformat.words import label, lines_label

from .options import Address, Session, is_local
from .output import on_standard_output

if TYPE_CHECKING:
    import pyarrow as pa

    from stateformat.backends.exporting import Place

FORMATS: Final = ("parquet", "csv", "jsonl", "json")
SUFFIXES: Final = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
TEXT_BYTES: Final = 4 << 20
"""Bytes of rows that become text at once; the text takes several times as much memory."""


def format_of(target: str, given: str | None) -> str:
    """The format of a file, as given or by its name; a usage error where neither says it."""
    if target == "-" and given == "parquet":
        raise click.UsageError("Parquet cannot be written to standard output; give --to a file, or --as csv or jsonl")
    if given is not None:
        return given
    if target == "-":
        raise click.UsageError("--to - is standard output, so no name tells the format; add --as csv or --as jsonl")
    suffix = SUFFIXES.get(Path(target).suffix.lower())
    if suffix is None:
        known = ", ".join(SUFFIXES)
        raise click.UsageError(f"{target!r} does not say its format; end it with one of {known}, or add --as")
    return suffix


def check_target(target: Path, *, force: bool) -> None:
    """Refuses, before anything is read, a target that cannot be replaced by a file."""
    if target.is_dir():
        raise click.UsageError(f"{target} is a directory; name a file in it")
    if target.exists() and not target.is_file():
        raise click.UsageError(f"{target} is not a regular file; write to standard output with --to -")
    if target.exists() and not force:
        raise click.UsageError(f"{target} exists; give another name, or --force to replace it")
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such directory; make it, or name another", str(target.parent))


def check_outside(target: str, folder: str, system: str | None) -> None:
    """Refuses a place in the folder of another system, or where gc would delete it."""
    from stateformat.errors import ErrorKind, InvalidInput
    from stateformat.storage import check_outside as check, lies_in

    if target != "-" and system is not None and lies_in(target, folder):
        raise InvalidInput(
            f"{target} lies in {folder}, which is {system} and stays as it is; give a file elsewhere",
            kind=ErrorKind.INVALID_URL,
        )
    if target != "-":
        check(target, folder)


def remote_folder(session: Session, address: Address, target: str, *, force: bool) -> Place | None:
    """The folder of a file that is not local. None for standard output, and for a local file, which
    :func:`check_target` has checked then.
    """
    if target == "-":
        return None
    if is_local(target):
        check_target(Path(target), force=force)
        return None
    from stateformat.backends.exporting import Place

    if not target.partition("://")[2].partition("/")[2].rpartition("/")[2]:
        raise click.UsageError(f"{target} names no file; add one after a slash")
    return Place(target.rpartition("/")[0], session.options_of(target, address.url))


class _Terminal:
    """A terminal to which text is written; what a value has of control characters is spelled
    out.
    """

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def write(self, data: Any) -> int:
        self._file.write(lines_label(self._decoder.decode(bytes(data))).encode())
        return len(data)

    def flush(self) -> None:
        self._file.flush()


@contextmanager
def new_file(path: str, place: Place | None, *, force: bool) -> Iterator[Any]:
    """Standard output, or a file that takes the target's name when it is whole."""
    if path == "-":
        with on_standard_output():
            yield _Terminal(sys.stdout.buffer) if sys.stdout.isatty() else sys.stdout.buffer
            sys.stdout.buffer.flush()
        return
    if place is not None:
        with place.new_file(path.rpartition("/")[2], replace=force) as remote:
            yield remote
        return
    final = Path(path)
    draft = final.with_name(f".{final.name}.{secrets.token_hex(8)}.tmp")
    try:
        try:
            file = draft.open("xb")
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error
        with file:
            yield file
        draft.replace(final)
    except OSError as error:
        # A failed write names no file.
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        draft.unlink(missing_ok=True)


def write_file(
    session: Session,
    target: str,
    place: Place | None,
    file_format: str,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    *,
    force: bool,
) -> tuple[int, int]:
    """Write all batches to a file or to standard output. Returns the numbers of rows and bytes.

    ``place``: as :func:`remote_folder` returns it. Bytes on standard output are not counted.
    """
    effect = "standard output has only what was written before" if target == "-" else f"{label(target)} was not written"
    session.changes(effect)
    with new_file(target, place, force=force) as file:
        rows = write_rows(file, file_format, schema, batches)
        return rows, file.tell() if target != "-" else 0


def write_rows(file: BinaryIO, file_format: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
    """Write all batches as they come, in these columns. Returns the number of rows."""
    import pyarrow as pa
    from pyarrow import csv, parquet as pq

    from stateformat.documents import flat, json_lines
    from stateformat.tables import cut

    plain = (pa.RecordBatch.from_arrays([batch[name] for name in schema.names], schema=schema) for batch in batches)
    pieces = (piece for batch in plain for piece in cut(batch, batch.num_rows, TEXT_BYTES))
    rows = 0
    if file_format == "jsonl":
        for batch in pieces:
            file.write(memoryview(json_lines(batch)))
            rows += batch.num_rows
    elif file_format == "json":
        file.write(b"[")
        for batch in pieces:
            # A line end inside a value is escaped: these are between the objects.
            lines = json_lines(batch).to_pybytes().removesuffix(b"\n").replace(b"\n", b",\n")
            file.write(b",\n" + lines if rows and lines else lines)
            rows += batch.num_rows
        file.write(b"]\n")
    elif file_format == "csv":
        empty = flat(pa.RecordBatch.from_pylist([], schema=schema))
        with csv.CSVWriter(file, empty.schema) as writer:
            for batch in pieces:
                writer.write_batch(flat(batch))
                rows += batch.num_rows
    else:
        with pq.ParquetWriter(file, schema, compression="zstd") as parquet:
            for batch in plain:
                parquet.write_batch(batch)
                rows += batch.num_rows
    return rows

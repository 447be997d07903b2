"""DuckDB in memory, with no way out: no files, no network, no extensions, no Python variables."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from stateformat.errors import ErrorKind, InvalidInput

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MEMORY_BYTES: Final = 192 << 20
"""What DuckDB holds in memory at most; the rest lies in files in ``TMPDIR``."""

_CLOSED: Final = {
    "allow_community_extensions": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
}


def duckdb_module() -> Any:
    """DuckDB; ``InvalidInput`` where it is not installed."""
    try:
        import duckdb
    except ImportError as error:
        raise InvalidInput(
            "queries need DuckDB, which is not installed; pip install 'stateformat[sql]'",
            kind=ErrorKind.MISSING_DEPENDENCY,
        ) from error
    return duckdb


@contextmanager
def locked(*, threads: int | None = None, memory_bytes: int = MEMORY_BYTES) -> Iterator[DuckDBPyConnection]:
    """A connection that reads what is registered with it, and nothing else.

    Files, network, extensions and Python variables are out of its reach, and no statement can
    change that. What memory does not hold it sets aside in a directory of its own in ``TMPDIR``,
    which is gone at the end. Rows keep the order of what they come from. Times are shown in UTC.

    Args:
        threads: how many it may use; None: as many as there are cores.
        memory_bytes: what it may hold in memory.

    Raises ``InvalidInput`` where DuckDB is not installed.
    """
    duckdb = duckdb_module()
    aside = tempfile.mkdtemp(prefix="stateformat-sql-")
    settings = {**_CLOSED, "memory_limit": f"{memory_bytes >> 10}KiB", "temp_directory": f"{aside}/spill"}
    if threads is not None:
        settings["threads"] = str(threads)
    try:
        connection: DuckDBPyConnection = duckdb.connect(":memory:", config=settings)
        try:
            connection.execute("set preserve_insertion_order = true")
            connection.execute("set timezone = 'UTC'")
            # Not before: the directory for what memory does not hold would not be let in.
            connection.execute("set enable_external_access = false")
            connection.execute("set lock_configuration = true")
            yield connection
        finally:
            connection.close()
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def quoted(name: str) -> str:
    """A name as SQL."""
    return '"' + name.replace('"', '""') + '"'


_FOLD: Final = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}


def folded(name: str) -> str:
    """What DuckDB compares of a name: ASCII letters are small, all others as they are."""
    return name.translate(_FOLD)


def told_apart(names: Sequence[str], taken: Sequence[str] = (), *, fold: Callable[[str], str] = folded) -> list[str]:
    """Names that differ for DuckDB: of those that differ in case, all but the first get _2, _3.

    ``taken`` are names that none of them may have. ``fold``: what is compared of a name.
    """
    given = {fold(name) for name in names} | {fold(name) for name in taken}
    used = {fold(name) for name in taken}
    found = []
    for name in names:
        chosen, number = name, 2
        while fold(chosen) in used or (number > 2 and fold(chosen) in given):
            chosen, number = f"{name}_{number}", number + 1
        used.add(fold(chosen))
        found.append(chosen)
    return found


def first_line(error: Exception) -> str:
    """The first line of what DuckDB says, without the name of its class."""
    line = str(error).strip().split("\n", 1)[0]
    kind, colon, rest = line.partition(" Error: ")
    return (rest if colon and len(kind) < 30 else line).strip().rstrip("!.:")

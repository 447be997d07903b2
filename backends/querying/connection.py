"""DuckDB in memory, isolated: no files, no network, no extensions, no Python variables.

And how its SQL takes names.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stateformat.errors import ErrorKind, InvalidInput

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MEMORY_BYTES: Final = 192 << 20
"""How much DuckDB holds in memory at most; the rest goes to files in ``TMPDIR``."""

_FOLDER: Final = "stateformat-sql-"
_LOCK: Final = "lock"
_CLOSED: Final = {
    "allow_community_extensions": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
}


def duckdb_module() -> Any:
    """Return DuckDB; ``InvalidInput`` if it is not installed, or too old."""
    try:
        import duckdb
    except ImportError as error:
        raise InvalidInput(
            "queries need DuckDB, which is not installed; pip install 'stateformat[sql]'",
            kind=ErrorKind.MISSING_DEPENDENCY,
        ) from error
    # DuckDB 1 leaves filters of floats to pyarrow, for which NaN is not greater than a number.
    if int(duckdb.__version__.partition(".")[0]) < 2:
        raise InvalidInput(
            f"queries need DuckDB 2.0 or newer, and {duckdb.__version__} is installed, which loses rows with NaN; "
            "pip install --upgrade 'stateformat[sql]'",
            kind=ErrorKind.MISSING_DEPENDENCY,
        )
    return duckdb


@contextmanager
def locked(*, threads: int | None = None, memory_bytes: int = MEMORY_BYTES) -> Iterator[DuckDBPyConnection]:
    """Return a connection that reads what is registered with it, and nothing else.

    It cannot reach files, network, extensions and Python variables, and no statement can change
    that. What does not fit in memory goes to a directory of its own in ``TMPDIR``, which is deleted
    at the end. Rows keep the order of their source. Times are shown in UTC.

    Args:
        threads: how many it may use; None: as many as there are cores.
        memory_bytes: what it may hold in memory.

    Raises ``InvalidInput`` where DuckDB is not installed.
    """
    duckdb = duckdb_module()
    _remove_left_behind()
    aside, lock = _own_folder()
    settings = {**_CLOSED, "memory_limit": f"{memory_bytes >> 10}KiB", "temp_directory": f"{aside}/spill"}
    if threads is not None:
        settings["threads"] = str(threads)
    try:
        connection: DuckDBPyConnection = duckdb.connect(":memory:", config=settings)
        try:
            connection.execute("set preserve_insertion_order = true")
            connection.execute("set timezone = 'UTC'")
            # Not earlier: the directory for what does not fit in memory would be refused.
            connection.execute("set enable_external_access = false")
            connection.execute("set lock_configuration = true")
            yield connection
        finally:
            connection.close()
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        os.close(lock)


def _own_folder() -> tuple[str, int]:
    """Make a folder for what does not fit in memory; its lock is held as long as this process
    lives.
    """
    folder = tempfile.mkdtemp(prefix=_FOLDER)
    lock = os.open(f"{folder}/.{_LOCK}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # It gets its name when it is locked: without, nobody takes the folder for left behind.
    Path(folder, f".{_LOCK}").rename(Path(folder, _LOCK))
    return folder, lock


@cache
def _remove_left_behind() -> None:
    """Remove the folders of processes that were killed: those whose lock nobody holds."""
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*/{_LOCK}"):
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(lock)


def quoted(name: str) -> str:
    """Return a name as SQL."""
    return '"' + name.replace('"', '""') + '"'


_FOLD: Final = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}


def folded(name: str) -> str:
    """Return what DuckDB compares of a name: ASCII letters in lower case, all others unchanged."""
    return name.translate(_FOLD)


def told_apart(names: Sequence[str], taken: Sequence[str] = (), *, fold: Callable[[str], str] = folded) -> list[str]:
    """Return names that DuckDB can distinguish: of those that differ only in case, all but the
    first get _2, _3.

    ``taken`` are names that none of them may have. ``fold``: returns what is compared of a name.
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
    """Return the first line of DuckDB's error, without the name of its class."""
    line = str(error).strip().split("\n", 1)[0]
    kind, colon, rest = line.partition(" Error: ")
    return (rest if colon and len(kind) < 30 else line).strip().rstrip("!.:")


_QUOTED: Final = re.compile(r"""('(?:[^']|'')*'|"(?:[^"]|"")*"|--[^\n]*|/\*.*?\*/)""", re.DOTALL)
"""What names no table in SQL, or names it already as it must: texts, quoted names, comments."""


def outside_quotes(sql: str, pattern: re.Pattern[str], replaced: Callable[[re.Match[str]], str]) -> str:
    """Return SQL with what a pattern finds replaced: not in texts, quoted names and comments."""
    parts = _QUOTED.split(sql)
    return "".join(part if i % 2 else pattern.sub(replaced, part) for i, part in enumerate(parts))


_WORDS: Final = (
    "all analyse analyze and anti any array as asc asof asymmetric at authorization both case cast check collate "
    "column constraint create cross default deferrable desc describe distinct do else end except false fetch for "
    "foreign from full glob group having ilike in initially inner intersect into is isnull join lambda lateral "
    "leading left like limit natural not notnull null offset on only or order outer overlaps pivot pivot_longer "
    "pivot_wider placing positional primary qualify references returning right select semi show similar some "
    "summarize symmetric table tablesample then to trailing true union unique unpivot using variadic when where "
    "window with "
)
RESERVED: Final = frozenset(_WORDS.split())
"""Words of SQL that cannot be names without quotes."""


def words_quoted(sql: str, names: Iterable[str]) -> Iterator[str]:
    """Yield SQL with reserved words quoted where they are names: before a dot, then wherever one
    is among ``names``, the columns and tables that there are.
    """
    for some, after in ((RESERVED, r"(?=\s*\.)"), (RESERVED.intersection(map(folded, names)), "")):
        if some:
            word = re.compile(rf"(?<![\w.])({'|'.join(sorted(some))})\b{after}", re.IGNORECASE)
            yield outside_quotes(sql, word, lambda found: quoted(found[1]))

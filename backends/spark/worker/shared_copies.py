"""Copies of tasks' states on the local disk, shared by all workers of a host.

A worker whose state of a task is missing or too old would have to read all of it from the store.
With many workers, this is the usual case. So a worker that had to read a state in full, or has
written it in full, leaves a copy. Other workers load the copy and read only what has changed since.

A copy is a directory named after its version and token. As in a worker's own cache, a copy counts
only if the driver names its token, so copies of attempts that were not accepted are never used. A
copy appears by a rename and never changes. Its errors are only logged, as the store has everything.

YARN and Spark's standalone workers give all executors of an application on a host one directory,
and remove it with the application. Copies are kept there, in a directory that nobody else may
read or write: they hold states of the job, and are loaded without checks. Elsewhere, copies are
kept in the executor's own directory, which is removed with the executor.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ...dataflow import events as ev
from ...state import SubtaskStates

logger = logging.getLogger(__name__)

_ROOT: Final = "stateformat-copies"
_UNFINISHED: Final = "."
_OF_APPLICATION: Final = "application_", "executor-"
"""Prefixes of the directory of an application on a host: YARN's and the standalone worker's."""


class Copy(NamedTuple):
    """A copy of a task's states, as they were at one report."""

    token: bytes
    version: int
    directory: Path


class SharedCopies:
    """The copies of a host that one executor can use.

    ``directory``: the executor's own directory.
    """

    def __init__(self, directory: str | Path) -> None:
        own = Path(directory)
        common = own.parent / _ROOT
        is_common = own.parent.name.startswith(_OF_APPLICATION) and _is_private(common)
        self._root = common if is_common else own / _ROOT

    def find(self, run: str, task: ev.TaskId, tokens: Mapping[bytes, int]) -> Copy | None:
        """Return the newest copy of a task that has one of these tokens."""
        known = [copy for copy in _copies(self._folder(run, task)) if copy.token in tokens]
        if not known:
            return None
        newest = max(known, key=lambda copy: copy.version)
        try:
            os.utime(newest.directory)  # The least recently used copy is removed first.
        except OSError:
            return None
        return newest

    def add(
        self,
        run: str,
        task: ev.TaskId,
        copy: tuple[bytes, int],
        states: Mapping[str, SubtaskStates],
        *,
        tokens: Mapping[bytes, int],
        limit_bytes: int,
    ) -> bool:
        """Copy states under a token and a version. Return whether it was done.

        ``tokens``: the tokens that count now. Removes the task's older copies except the newest
        with one of these tokens, since this attempt may not be accepted. Then removes the least
        recently used copies of any task, until all copies have at most ``limit_bytes``.
        """
        size = sum(each.size_bytes for each in states.values())
        if size > limit_bytes:
            return False
        token, version = copy
        folder = self._folder(run, task)
        known = sorted(_copies(folder), key=lambda other: other.version)
        accepted = [other for other in known if other.token in tokens]
        for other in known:
            if other.version < version and other not in accepted[-1:]:
                shutil.rmtree(other.directory, ignore_errors=True)
        try:
            self._make_room(limit_bytes - size)
            folder.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder))
            try:
                for uid, each in states.items():
                    each.save(made / file_name(uid))
                made.rename(folder / f"{version}-{token.hex()}")
            except BaseException:
                shutil.rmtree(made, ignore_errors=True)
                raise
        except OSError as error:
            logger.warning("States cannot be copied to the local disk. Others read them from the store: %s", error)
            return False
        return True

    def drop_others(self, runs: Collection[str]) -> None:
        """Remove the copies of all other runs."""
        for folder in _entries(self._root):
            if folder.name not in runs:
                shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, run: str, task: ev.TaskId) -> Path:
        return self._root / run / f"{file_name(task.vertex)}-{task.subtask}"

    def _make_room(self, limit_bytes: int) -> None:
        found = [
            (_modified(copy), _size_of(copy), copy)
            for run in _entries(self._root)
            for task in _entries(run)
            for copy in _entries(task)
        ]
        total = sum(size for _, size, _ in found)
        for _, size, copy in sorted(found):
            if total <= limit_bytes:
                return
            shutil.rmtree(copy, ignore_errors=True)
            total -= size


def _is_private(folder: Path) -> bool:
    """Make a directory if there is none. Return whether nobody else can read or write it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def file_name(uid: str) -> str:
    """Return a file name for a uid, which may contain any character."""
    return uid.encode().hex()


def _copies(folder: Path) -> Iterator[Copy]:
    for found in _entries(folder):
        # Skips unfinished copies and other files.
        named = re.fullmatch(r"([0-9]{1,18})-((?:[0-9a-f]{2})+)", found.name)
        if named is not None:
            yield Copy(bytes.fromhex(named[2]), int(named[1]), found)


def _entries(folder: Path) -> list[Path]:
    """Return the entries of a directory; none if it cannot be read, or no longer exists."""
    try:
        return [Path(entry) for entry in os.scandir(folder)]
    except OSError:
        return []


def _size_of(folder: Path) -> int:
    return sum(
        _file_size(path) for parent, _, names in os.walk(folder) for path in (Path(parent) / name for name in names)
    )


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0

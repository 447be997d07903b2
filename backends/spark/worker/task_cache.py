"""What a Python worker keeps from one epoch to the next: the operator chains of its tasks.

Spark runs a task in any worker, so in time every worker holds every task, a few epochs behind. A
cached task has the token of the report that ended its epoch. It counts only if the driver sends
that token: the driver sends the tokens of accepted reports, with their versions. States over the
limit move to the executor's local disk; Spark removes the files when the executor ends. For a task
that a worker does not have, another worker of its host may have left a copy (``shared_copies``).
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...dataflow import events as ev
from ...dataflow.chain import OperatorChain
from ...state import SubtaskStates
from .shared_copies import SharedCopies, file_name

logger = logging.getLogger(__name__)

Key = tuple[str, ev.TaskId]


@dataclass
class CachedTask:
    """A task as it was at one report."""

    token: bytes
    version: int
    chain: OperatorChain | None
    """None if its states are in ``directory``."""
    output: Any = None
    directory: Path | None = None
    size_bytes: int = 0
    is_shared: bool = False
    """Whether other workers may use the directory, too."""

    def states(self, empty: Mapping[str, SubtaskStates]) -> Mapping[str, SubtaskStates]:
        """Return its states by uid, loaded into ``empty`` if on disk, or raise ``InvalidInput``."""
        if self.chain is not None:
            return self.chain.states
        assert self.directory is not None
        for uid, states in empty.items():
            states.load(self.directory / file_name(uid))
        return empty

    def release(self) -> None:
        if self.chain is not None:
            try:
                self.chain.close()
            except Exception as error:
                logger.warning("A cached operator chain could not be closed: %s", error)
            self.chain = None
        if self.directory is not None and not self.is_shared:
            shutil.rmtree(self.directory, ignore_errors=True)


class TaskCache:
    """The cached tasks of a worker, the least recently used first."""

    def __init__(self, shared: SharedCopies | None = None) -> None:
        self._tasks: dict[Key, CachedTask] = {}
        self._shared = shared

    @property
    def shared(self) -> SharedCopies | None:
        """The copies that workers of this host share; None without a local directory of Spark."""
        directory = local_directory()
        if self._shared is None and directory is not None:
            self._shared = SharedCopies(directory)
        return self._shared

    def copy_of(self, key: Key, tokens: Mapping[bytes, int]) -> CachedTask | None:
        """Return a copy of a task, with one of these tokens, that some worker has left."""
        found = self.shared.find(*key, tokens) if self.shared is not None else None
        if found is None:
            return None
        return CachedTask(found.token, found.version, None, directory=found.directory, is_shared=True)

    def take(self, key: Key, tokens: Mapping[bytes, int]) -> CachedTask | None:
        """Remove a task; return it if its token is one of these."""
        cached = self._tasks.pop(key, None)
        if cached is None or cached.token in tokens:
            return cached
        cached.release()
        return None

    def keep(self, key: Key, cached: CachedTask, *, limit_bytes: int) -> None:
        """Add a task. The least recently used go to disk while memory holds more than the limit."""
        older = self._tasks.pop(key, None)
        if older is not None:
            older.release()
        assert cached.chain is not None
        cached.size_bytes = sum(states.size_bytes for states in cached.chain.states.values())
        self._tasks[key] = cached
        in_memory = sum(other.size_bytes for other in self._tasks.values() if other.chain is not None)
        for other_key, other in list(self._tasks.items()):
            if in_memory <= limit_bytes:
                return
            if other.chain is not None:
                in_memory -= other.size_bytes
                self._spill(other_key, other, other.chain)

    def _spill(self, key: Key, cached: CachedTask, chain: OperatorChain) -> None:
        directory = Path(tempfile.mkdtemp(prefix="stateformat-", dir=local_directory()))
        try:
            for uid, states in chain.states.items():
                states.save(directory / file_name(uid))
        except OSError as error:
            logger.warning("States cannot be put on the local disk. They will be read from the store: %s", error)
            shutil.rmtree(directory, ignore_errors=True)
            self._tasks.pop(key).release()
            return
        cached.release()
        cached.directory = directory

    def drop_others(self, runs: Collection[str]) -> None:
        for key in [key for key in self._tasks if key[0] not in runs]:
            self._tasks.pop(key).release()
        if self.shared is not None:
            self.shared.drop_others(runs)


def local_directory() -> str | None:
    """Return where Spark lets this worker put files; None: in the system's temporary directory."""
    first = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    return first if first and Path(first).is_dir() else None


WORKER_CACHE: Final = TaskCache()

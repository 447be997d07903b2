"""What a Python worker keeps from one epoch to the next: the activations of the tasks that it has served.

Theory of operation. Spark keeps its Python workers, and nothing keeps a task on one of them: with *n* workers each sees a task in
about one epoch of *n*. So every worker comes to hold every task, a few epochs behind. What it holds bears the token of the report
with which it was written; the driver sends with each task the tokens of the reports that it has accepted, with their versions. A
token that is among them is the truth of that version; any other is of an attempt that does not count, and is dropped.

Memory is bounded: what was not used for longest goes to the executor's local disk (states only, without operators), where Spark
removes it when the executor ends.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from backends.dataflow.activation import OperatorChain
from backends.state import SubtaskStates

logger = logging.getLogger(__name__)


@dataclass
class Kept:
    """A task as one report left it. Without an ``activation`` its states lie in ``directory``."""

    token: bytes
    version: int
    activation: OperatorChain | None
    outside: Any = None
    directory: Path | None = None
    size_bytes: int = 0

    def states(self, make: Mapping[str, SubtaskStates]) -> Mapping[str, SubtaskStates]:
        """Its states by operator; ``make``: empty ones, which are filled from the disk where they lie there."""
        if self.activation is not None:
            return self.activation.states
        assert self.directory is not None
        for uid, states in make.items():
            states.load(self.directory / _file_name(uid))
        return make

    def give_up(self) -> None:
        """Let go of what it holds."""
        if self.activation is not None:
            try:
                self.activation.close()
            except Exception as error:
                logger.warning("an activation that is not needed any more could not be closed: %s", error)
            self.activation = None
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


def _file_name(uid: str) -> str:
    return uid.encode().hex()


class Cache:
    """By task, what is kept; the least recently used first."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Kept] = {}

    def take(self, key: Hashable, tokens: Mapping[bytes, int]) -> Kept | None:
        """What is kept of a task, if one of the tokens vouches for it. It is the caller's from here on."""
        kept = self._kept.pop(key, None)
        if kept is None or kept.token in tokens:
            return kept
        kept.give_up()
        return None

    def keep(self, key: Hashable, kept: Kept, *, limit_bytes: int) -> None:
        """Keep a task, the most recently used now; others go to disk until all in memory have at most ``limit_bytes``."""
        older = self._kept.pop(key, None)
        if older is not None:
            older.give_up()
        assert kept.activation is not None
        kept.size_bytes = sum(states.size_bytes for states in kept.activation.states.values())
        self._kept[key] = kept
        in_memory = sum(other.size_bytes for other in self._kept.values() if other.activation is not None)
        for other_key, other in list(self._kept.items()):
            if in_memory <= limit_bytes:
                return
            if other.activation is not None:
                in_memory -= other.size_bytes
                self._spill(other_key, other)

    def _spill(self, key: Hashable, kept: Kept) -> None:
        assert kept.activation is not None
        directory = Path(tempfile.mkdtemp(prefix="stateformat-", dir=local_directory()))
        try:
            for uid, states in kept.activation.states.items():
                states.save(directory / _file_name(uid))
        except OSError as error:
            logger.warning("states could not be put on the local disk, they will be read from the store: %s", error)
            shutil.rmtree(directory, ignore_errors=True)
            self._kept.pop(key).give_up()
            return
        kept.give_up()
        kept.directory = directory

    def drop_others(self, runs: Collection[Hashable]) -> None:
        """Give up what other runs than these have left: a key begins with its run."""
        for key in [key for key in self._kept if isinstance(key, tuple) and key[0] not in runs]:
            self._kept.pop(key).give_up()


def local_directory() -> str | None:
    """Where Spark lets this worker put files, which it removes; None: the system's place for temporary files."""
    first = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    return first if first and Path(first).is_dir() else None


WORKER_CACHE: Final = Cache()
"""That of this process."""

__all__ = ["WORKER_CACHE", "Cache", "Kept", "local_directory"]

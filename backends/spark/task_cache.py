"""What a Python worker keeps from one epoch to the next: the operator chains of its tasks.

Spark runs a task in any worker, so in time every worker holds every task, a few epochs behind. A
cached task has the token of the report that ended its epoch. It counts only if the driver sends
that token: the driver sends the tokens of accepted reports, with their versions. States over the
limit move to the executor's local disk; Spark removes the files when the executor ends.

A worker whose state of a task is missing or too old would have to read all of it from the store.
With many workers, this is the usual case. So a worker that had to read a state in full, or has
written it in full, leaves a copy on the local disk for all workers of the host
(:class:`SharedCopies`). Other workers load the copy and read only what has changed since. A copy is
a directory named after its version and token, and counts only if the driver names its token. It
appears by a rename and never changes. Its errors are only logged, as the store has everything.
YARN and Spark's standalone workers give all executors of an application on a host one directory,
and remove it with the application. Copies are kept there, in a directory that nobody else may
read or write: they hold states of the job, and are loaded without checks. Elsewhere, copies are
kept in the executor's own directory, which is removed with the executor.

Operators with union state are pickled to move between workers. A new chain is normally restored
from the snapshot of the epoch before. But when union state is restored, every subtask gets the
entries of all subtasks and takes its share in ``open``. So all subtasks would have to be restored
together, which is impossible once some have finished. Instead, the operator is pickled after its
snapshot and continues with its own entries, in the context and with the states of its new chain.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from stateformat.errors import ErrorKind, InvalidState
from stateformat.model import Mode

from ..dataflow import events as ev
from ..dataflow.chain import OperatorChain
from ..dataflow.chained_operator import ChainedOperator
from ..dataflow.compile import Job
from ..state import SubtaskStates

if TYPE_CHECKING:
    from ..dataflow.api import Operator


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


def pickle_operators(job: Job, chain: OperatorChain) -> dict[str, bytes]:
    """Pickle those of a chain, by uid. ``InvalidState``, its fault, if one cannot be pickled."""
    union = {uid for uid in chain.operators if any(state.mode is Mode.UNION for state in job.states_of(uid))}
    return {uid: _pickle(operator) for uid, operator in chain.operators.items() if uid in union}


def _pickle(operator: ChainedOperator) -> bytes:
    from pyspark.cloudpickle import CloudPickler

    names = {id(own): name for name, own in _own(operator).items()}

    class Pickler(CloudPickler):  # type: ignore[misc] # pyspark has no types for it
        def persistent_id(self, item: object) -> str | None:
            return names.get(id(item))

    file = io.BytesIO()
    try:
        Pickler(file, protocol=5).dump(operator.logic)
    except Exception as error:
        raise InvalidState(
            f"Operator {operator.uid!r} has union state, so Spark moves it from worker to worker, and it cannot be "
            f"pickled: {error}. Leave files, connections and generators out (__getstate__), and open them again "
            "when they are needed.",
            kind=ErrorKind.UNSUPPORTED_TYPE,
            operator=operator.uid,
        ) from error
    return file.getvalue()


def unpickle_operators(chain: OperatorChain, pickled: Mapping[str, bytes]) -> dict[str, Operator]:
    """Return the pickled operators, with the contexts and states of a new chain."""
    return {uid: _unpickle(data, chain.operators[uid]) for uid, data in pickled.items()}


def _unpickle(data: bytes, operator: ChainedOperator) -> Operator:
    own = _own(operator)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, name: Any) -> object:
            return own[name]

    logic: Operator = Unpickler(io.BytesIO(data)).load()  # From our own worker.
    return logic


def _own(operator: ChainedOperator) -> dict[str, object]:
    """Return what belongs to the chain, not the operator, by a name that is the same everywhere."""
    return {"context": operator.context, **{f"state {name}": state for name, state in operator.states.all.items()}}

"""Runs a repartition: reads and verifies everything, then writes, ``metadata`` last.

What is read waits in a temporary file until all of it is verified, so nothing is written for a
checkpoint that is refused. An engine reads and writes state; this module does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.storage import Storage, lies_in
from stateformat.tables import Spill

from ...limits import read_whole
from ..logs import batches
from .plan import RepartitionPlan, Target, turn
from .work import deal, write_partition

WRITERS: Final = {"hdfs": 4, "rocksdb": 2}
"""Threads that write partitions: most of the time is waiting. Tables take memory."""
Progress = Callable[[str, int, int], None]
"""Called with ``reading`` or ``writing``, how much is done, and of how much: bytes, then
partitions.
"""


class Result(NamedTuple):
    """What was written for one partition of one store."""

    target: Target
    keys: int
    files: int
    size_bytes: int


@dataclass(frozen=True)
class Outcome:
    """What a repartition did."""

    plan: RepartitionPlan
    keys: tuple[npt.NDArray[np.int64], ...]
    """For each unit of the plan, the keys of each new partition."""
    sizes: tuple[npt.NDArray[np.int64], ...]
    """Their bytes, likewise."""
    files: int
    """All files of the copy."""
    size_bytes: int
    """All bytes of the copy."""


class Engine(Protocol):
    """Reads and writes state; nothing may be written before everything is read and verified."""

    def run(
        self, plan: RepartitionPlan, folder: Storage, target: Storage, proven: Callable[[], None], progress: Progress
    ) -> Sequence[Result]:
        """Return a result for every target of the plan; calls ``proven`` before the first write."""


def repartition(
    folder: Storage,
    target: Storage,
    plan: RepartitionPlan,
    *,
    engine: Engine | None = None,
    progress: Progress = lambda *_: None,
) -> Outcome:
    """Write the copy that ``plan`` describes into an empty folder.

    Args:
        folder: the checkpoint; nothing is written there.
        target: an empty or absent folder; ``InvalidInput`` (``STORE_NOT_EMPTY``) for any other.
        plan: of :func:`plan_repartition`.
        engine: who reads and writes state; this process by default.
        progress: told of what is done.

    Raises ``DamagedCheckpoint`` and ``UnsupportedFormat`` before anything is written, and
    ``StorageError`` where the query went on meanwhile, or a storage failed.
    """
    check_target(folder, target)

    def proven() -> None:
        check_still(folder, plan)

    results = (engine or LocalEngine()).run(plan, folder, target, proven, progress)
    keys = tuple(np.zeros(unit.targets, np.int64) for unit in plan.units)
    sizes = tuple(np.zeros(unit.targets, np.int64) for unit in plan.units)
    for result in results:
        keys[result.target.unit][result.target.partition] = result.keys
        sizes[result.target.unit][result.target.partition] = result.size_bytes
    check_still(folder, plan)
    files, size = _write_rest(folder, target, plan)
    return Outcome(
        plan,
        keys,
        sizes,
        files + sum(result.files for result in results),
        size + sum(result.size_bytes for result in results),
    )


def check_target(folder: Storage, target: Storage) -> None:
    """Raise ``InvalidInput`` unless the target is empty or absent, and not the source."""
    if lies_in(target.url, folder.url):
        raise InvalidInput(
            f"{target.url} is the checkpoint itself or lies in it, and it is never changed; name another folder"
        )
    there = [item.path for item in target.list("")] if target.exists() else []
    if not there:
        return
    whole = "metadata" in there
    begun = not whole and any(path.startswith(("state/", "offsets/", "commits/", "sources/")) for path in there)
    if begun:
        why = "it holds a copy that was begun and not ended (`metadata`, which is written last, is missing). "
        advice = "Remove the folder and run the command again"
    else:
        why = "it holds a query's checkpoint. " if whole else f"it holds {there[0]!r}. "
        advice = "Name a folder that is empty or does not exist"
    raise InvalidInput(
        f"{target.url} is not empty: {why}{advice}", kind=ErrorKind.STORE_NOT_EMPTY, url=target.url, begun=begun
    )


def check_still(folder: Storage, plan: RepartitionPlan) -> None:
    """Raise ``StorageError`` if the query has committed a batch since the plan was made."""
    newest = max(batches(folder, "commits"), default=-1)
    if newest != plan.batch:
        raise StorageError(
            f"{folder.url}: the newest batch was {plan.batch} and is {newest} now, so the query is running. Stop it, "
            "then run the command again into an empty folder",
            kind=ErrorKind.HISTORY_UNSTABLE,
        )


@dataclass(frozen=True)
class LocalEngine:
    """Reads one partition at a time in this process, and sets its entries aside by new partition.

    ``TMPDIR`` needs room for the compressed state.
    """

    def run(
        self, plan: RepartitionPlan, folder: Storage, target: Storage, proven: Callable[[], None], progress: Progress
    ) -> list[Result]:
        """Read, prove, then write; see :class:`Engine`."""
        keys: dict[Target, int] = {}
        done, whole = 0, plan.size_bytes
        waiting: Spill[Target] = Spill()
        with waiting:
            for source in plan.sources:
                for piece in deal(folder, source):
                    keys[piece.target] = keys.get(piece.target, 0) + piece.keys
                    waiting.add(piece.target, pa.Table.from_batches([piece.rows]))
                done += source.size_bytes
                progress("reading", done, whole)
            proven()
            targets = list(plan.targets())

            def write(one: Target) -> Result:
                count = keys.get(one, 0)
                written = write_partition(target, plan.units[one.unit], one.partition, waiting.read(one), count)
                return Result(one, count, *written)

            with ThreadPoolExecutor(WRITERS[plan.provider_after], thread_name_prefix="repartition") as pool:
                return list(_counted(pool.map(write, targets), len(targets), progress))


def _counted(results: Iterator[Result], count: int, progress: Progress) -> Iterator[Result]:
    for number, result in enumerate(results, 1):
        progress("writing", number, count)
        yield result


def _write_rest(folder: Storage, target: Storage, plan: RepartitionPlan) -> tuple[int, int]:
    """Copy and edit logs and schemas, in the order of :func:`turn`; returns files and bytes."""
    edits = dict(plan.edits)
    paths = sorted([*(item.path for item in plan.copies), *edits], key=turn)

    def write(path: str) -> int:
        data = edits[path] if path in edits else read_whole(folder, path)
        with target.open_output(path) as output:
            return output.write(memoryview(data))

    size = 0
    with ThreadPoolExecutor(WRITERS["hdfs"], thread_name_prefix="repartition") as pool:
        # One kind after another: while a file is missing, so are all files of later kinds.
        for _, some in groupby(paths, key=lambda path: turn(path)[0]):
            size += sum(pool.map(write, list(some)))
    return len(paths), size

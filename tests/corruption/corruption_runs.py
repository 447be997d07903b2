"""Run all cases of ``corruption``: in this process, or in separate processes.

A process gets a range of cases. Before each case it writes the number into shared memory. So a
crash, or a case that does not end, is attributed to that case. The rest of the range goes back into
the queue, for another process.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from typing import Any

import pyarrow as pa

from stateformat.manifest import codec as manifest
from stateformat.model import ManifestRef
from stateformat.reading import loading, scan as reading
from stateformat.record import codec
from stateformat.rules import content as validation_content
from stateformat.validation import sharing, validator as validation
from tests.corruption.corruption import Bench, Case, Outcome, Stores, cases

CASES_AT_A_TIME = 200
STALL_SECONDS = 60
MEMORY_BYTES_MAX = 8 << 30


class _InThisThread:
    """A pool that starts no threads and runs everything at once in this one."""

    def __init__(self, threads: int, *, thread_name_prefix: str) -> None:
        pass

    def __enter__(self) -> _InThisThread:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    map = staticmethod(map)


@contextmanager
def prepared() -> Iterator[None]:
    """Read small segments in ranges, like large ones; decode and check equal bytes only once; start
    no threads.
    """
    records = lru_cache(32)(codec.decode_record)
    manifests = lru_cache(32)(_decoded)
    judged: dict[int, tuple[Any, Any]] = {}

    def check_content(graph: Any, states: Any, handles: Any, rescaled_from: Any) -> Any:
        if id(handles) not in judged:
            # Keeps the table alive, so that no other gets its id.
            judged[id(handles)] = handles, validation_content.check_content(graph, states, handles, rescaled_from)
        return judged[id(handles)][1]

    changes: list[tuple[Any, str, Any]] = [
        (reading, "_SMALL_BYTES", 0),
        (reading, "prefetch", lambda calls, **_: (call() for call in calls)),
        (loading, "decode_record", lambda data, *, path="": records(data, path=path)),
        (validation, "decode_record", lambda data, *, path="": records(data, path=path)),
        (validation, "read_manifest", lambda data, ref: manifests(data.to_pybytes(), ref)),
        (validation, "check_content", check_content),
        (sharing, "ThreadPoolExecutor", _InThisThread),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _decoded(data: bytes, ref: ManifestRef) -> Any:
    return manifest.read_manifest(pa.py_buffer(data), ref)


def try_here(stores: Stores, *, stride: int) -> Outcome:
    found = Outcome()
    with prepared():
        for name, objects in stores.items():
            bench = Bench(objects)
            for case in cases(name, objects, stride=stride):
                found.add(bench.judge(case))
    return found


def try_apart(stores: Stores, *, stride: int = 1, processes: int = 2) -> Outcome:
    """Try all cases in separate processes. If one dies or stalls, its current case is wrong."""
    waiting: deque[tuple[str, int, int]] = deque()
    for name, objects in stores.items():
        count = len(cases(name, objects, stride=stride))
        waiting += [(name, start, min(count, start + CASES_AT_A_TIME)) for start in range(0, count, CASES_AT_A_TIME)]
    found, workers = Outcome(), [_Worker(stores, stride) for _ in range(processes)]
    try:
        while waiting or any(worker.busy for worker in workers):
            for worker in workers:
                if not worker.busy and waiting:
                    worker.start(waiting.popleft())
            wait([worker.connection for worker in workers if worker.busy], timeout=1)
            for number, worker in enumerate(workers):
                done = worker.outcome()
                if isinstance(done, Outcome):
                    found.add(done)
                elif done is not None:
                    (name, start, stop), at, how = done
                    case = cases(name, stores[name], stride=stride)[at]
                    found.counts[case.line, "tried"] += 1
                    found.wrong.append((case.line, f"{case}: {how}"))
                    waiting += [block for block in ((name, start, at), (name, at + 1, stop)) if block[1] < block[2]]
                    workers[number] = _Worker(stores, stride)
    finally:
        for worker in workers:
            worker.end()
    return found


class _Worker:
    """A process that tries the cases it gets, and reports which one it is at."""

    def __init__(self, stores: Stores, stride: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._at = context.Value("q", -1)
        self._process = context.Process(target=_work, args=(theirs, self._at, stores, stride), daemon=True)
        self._process.start()
        theirs.close()
        self._block: tuple[str, int, int] | None = None
        self._seen, self._since = -1, time.monotonic()

    @property
    def busy(self) -> bool:
        return self._block is not None

    def start(self, block: tuple[str, int, int]) -> None:
        self._block, self._seen, self._since = block, -1, time.monotonic()
        self._at.value = -1
        self.connection.send(block)

    def outcome(self) -> Outcome | tuple[tuple[str, int, int], int, str] | None:
        """Return the outcome of the block; or the block, the case that ended the process, and how;
        None if there is nothing yet.
        """
        block = self._block
        if block is None:
            return None
        try:
            if self.connection.poll():
                found: Outcome = self.connection.recv()
                self._block = None
                return found
            gone = not self._process.is_alive() and not self.connection.poll()
        except EOFError:
            gone = True
        at = self._at.value
        if at != self._seen:
            self._seen, self._since = at, time.monotonic()
        if at < 0:
            # It reads the undamaged store, which takes seconds and is not a case.
            assert not gone, f"a process ended before its first case, with status {self._process.exitcode}"
            return None
        if gone:
            self._process.join()
            return block, at, f"the process ended with status {self._process.exitcode}"
        if time.monotonic() - self._since > STALL_SECONDS:
            self.end()
            return block, at, f"it took more than {STALL_SECONDS} seconds"
        return None

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


def _work(connection: Connection, at: Any, stores: Stores, stride: int) -> None:
    """Run a worker: receive blocks and send outcomes, until the other end is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    with prepared():
        _serve(connection, at, stores, stride)


def _serve(connection: Connection, at: Any, stores: Stores, stride: int) -> None:
    benches: dict[str, tuple[Bench, list[Case]]] = {}
    while True:
        try:
            name, start, stop = connection.recv()
        except EOFError:
            return
        if name not in benches:
            benches[name] = Bench(stores[name]), cases(name, stores[name], stride=stride)
        bench, chosen = benches[name]
        found = Outcome()
        for number in range(start, stop):
            at.value = number
            found.add(bench.judge(chosen[number]))
        connection.send(found)

"""What is fuzzed: the readers of record, manifest and segment, and a whole store with one object changed.

:func:`make` gives a function of bytes. It changes a good object as the bytes say, seals it (digests and sizes are right, so what
is tried lies behind them), reads it, and raises :class:`Finding` for everything but a result or an error of the product's own
tree: another exception, an import, code made, a file or process opened, memory or time beyond any sense. What ends the
process is found by whoever runs it.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.acero
import pyarrow.parquet as pq
import xxhash

from backends.storage.memory import MemoryStorage
from redistribution import plan_restore
from stateformat.codec import decode_record
from stateformat.errors import CheckpointError
from stateformat.manifest import Manifest, decode_manifest, handles_table
from stateformat.model import Handle, ManifestRef, Record
from stateformat.reading import read_slices
from stateformat.schema import SLICE_SCHEMA
from stateformat.store import CheckpointStore
from stateformat.validation import validate
from tests.forgery import Forger, get, put
from tests.fuzz import thrift_tree as thrift
from tests.fuzz.mutations import Choices, changed_bytes, changed_parquet, changed_record
from tests.stores import flights_store

SECONDS_MAX = 5.0
GROWTH_BYTES_MAX = 1 << 30
_FORBIDDEN = (
    "import",
    "exec",
    "compile",
    "open",
    "os.system",
    "os.exec",
    "subprocess.Popen",
    "socket.connect",
    "pickle.find_class",
)


_UNREADABLE = Exception
"""What the tree of the tests raises for a footer that is none: it parses what it is given and promises nothing."""


class Finding(AssertionError):
    """A reader did what no reader may do."""


class _Watch:
    """An audit hook cannot be taken away, so there is one, and it looks only while it is told to."""

    watching = False
    installed = False
    events: list[str] = []  # noqa: RUF012

    @classmethod
    def hook(cls, event: str, arguments: tuple[Any, ...]) -> None:
        if cls.watching and event in _FORBIDDEN:
            cls.events.append(f"{event} {arguments[:1]}")


@contextmanager
def watched() -> Iterator[None]:
    """Let through the errors of the tree; raise :class:`Finding` for everything that must not happen."""
    if not _Watch.installed:
        sys.addaudithook(_Watch.hook)
        _Watch.installed = True
    _Watch.events.clear()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    _Watch.watching = True
    try:
        yield
    except CheckpointError as error:
        if not str(error).strip() or len(str(error)) > 20_000:
            raise Finding(f"a message of {len(str(error))} characters") from error
    finally:
        _Watch.watching = False
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if _Watch.events:
        raise Finding(f"while reading: {_Watch.events[:5]}")
    if grown > GROWTH_BYTES_MAX:
        raise Finding(f"memory grew by {grown:,} bytes")
    if time.process_time() - start > SECONDS_MAX:
        raise Finding(f"took {time.process_time() - start:.1f} s")


def _store() -> CheckpointStore:
    MemoryStorage.reset("fuzzed")
    return flights_store("memory://fuzzed")


def _record_target() -> Callable[[bytes], None]:
    store = _store()
    path = "checkpoints/00000000000000000002.json"
    members = json.loads(get(store.storage, path))
    members.pop("digest")

    def test(data: bytes) -> None:
        changed = changed_record(members, Choices(data))
        with watched():
            decode_record(changed, path=path)

    return test


def _uncompressed(data: bytes, before: int) -> int:
    """What a footer says of it, if it can be read by the tree of the tests."""
    try:
        groups = thrift.get(thrift.split_footer(data)[1], 4)[1]
        return max(0, sum(thrift.unzigzag(thrift.get(group, 2)) for group in groups))
    except _UNREADABLE:
        return before


def _plain(data: bytes, codec: str) -> bytes:
    """The file with another codec: without one, changes of pages reach the decoders undisturbed."""
    sink = pa.BufferOutputStream()
    old = pq.read_metadata(pa.BufferReader(data)).metadata or {}
    table = pq.read_table(pa.BufferReader(data))
    options: dict[str, Any] = {"write_page_checksum": True, "store_schema": False, "compression": codec}
    with pq.ParquetWriter(sink, table.schema, **options) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({key.decode(): value.decode() for key, value in old.items()})
    return sink.getvalue().to_pybytes()


def _manifest_target() -> Callable[[bytes], None]:
    store = _store()
    record = store.open().record
    stored = get(store.storage, record.manifest.path)
    files = [stored, _plain(stored, "none")]

    def test(data: bytes) -> None:
        choices = Choices(data)
        original = choices.of(files)
        changed = changed_parquet(original, choices)
        digest = xxhash.xxh3_128_hexdigest(changed)
        uncompressed = _uncompressed(changed, record.manifest.uncompressed_bytes)
        ref = ManifestRef(record.manifest.path, len(changed), digest, uncompressed)
        with watched():
            manifest = decode_manifest(pa.py_buffer(changed), ref)
            manifest.inline("")
            manifest.full()

    return test


def _vouched(handle: Handle, data: bytes) -> Handle:
    footer = min(len(data), int.from_bytes(data[-8:-4], "little") + 8)
    rows = handle.segment_rows
    try:
        found = sum(thrift.unzigzag(thrift.get(group, 3)) for group in thrift.get(thrift.split_footer(data)[1], 4)[1])
        rows = found if 0 < found < 2**53 else rows
    except _UNREADABLE:
        pass
    return handle._replace(
        size_bytes=len(data),
        digest=xxhash.xxh3_128_digest(data),
        footer_bytes=max(9, footer),
        footer_digest=xxhash.xxh3_128_digest(data[-footer:]),
        uncompressed_bytes=_uncompressed(data, handle.uncompressed_bytes),
        segment_rows=max(rows, handle.row_start + handle.rows),
    )


def _segment_target() -> Callable[[bytes], None]:
    store = _store()
    parts = Forger(store.storage, 2)
    found = [at for at, handle in enumerate(parts.handles) if handle.rows]
    seen: dict[tuple[str, str, int], int] = {}
    for at in found:
        seen.setdefault((parts.handles[at].operator, parts.handles[at].state, parts.handles[at].layer), at)
    seeds = []
    for at in seen.values():
        data = parts.bytes_of(at)
        seeds += [(parts.handles[at], data), *((parts.handles[at], _plain(data, codec)) for codec in ("none", "zstd"))]
    record: Record = parts.record

    def test(data: bytes) -> None:
        choices = Choices(data)
        handle, original = choices.of(seeds)
        changed = changed_parquet(original, choices)
        handle = _vouched(handle._replace(inline=None), changed)
        whole = choices.below(2)
        if whole:
            handle = handle._replace(inline=changed)
        storage = MemoryStorage("fuzzed-segment")
        MemoryStorage.reset("fuzzed-segment")
        put(storage, str(handle.path), changed)
        state = record.state(handle.operator, handle.state)
        alone = replace(record, states=(state,))
        start = handle.row_start + choices.below(handle.rows)
        rows = 1 + choices.below(handle.row_start + handle.rows - start)
        with watched():
            manifest = Manifest(handles_table([handle]))
            for first, count in ((handle.row_start, handle.rows), (start, rows)):
                for _ in read_slices(storage, alone, manifest, _slices(handle, first, count)):
                    pass

    return test


def _slices(handle: Handle, start: int, rows: int) -> pa.Table:
    row = {
        **{name: getattr(handle, name) for name in ("operator", "state", "mode", "subtask", "layer")},
        "handle": 0,
        "row_start": start,
        "rows": rows,
        "first_group": None,
        "last_group": None,
        "bytes": 0,
    }
    return pa.Table.from_pylist([row], schema=SLICE_SCHEMA)


def _store_target() -> Callable[[bytes], None]:
    """One object of a whole store: opened, planned, validated in full, every state read."""
    store = _store()
    storage = store.storage
    path = "checkpoints/00000000000000000002.json"
    parts = Forger(storage, 2)
    objects: dict[str, bytes] = {}
    for prefix in ("checkpoints/", "manifests/", "segments/"):
        objects |= {item.path: get(storage, item.path) for item in storage.list(prefix)}
    members = json.loads(objects[path])
    members.pop("digest")
    filled = [at for at, handle in enumerate(parts.handles) if handle.rows]
    handles = list(parts.handles)

    def test(data: bytes) -> None:
        choices = Choices(data)
        for name, stored in objects.items():
            put(storage, name, stored)
        how = choices.below(4)
        if how == 0:
            put(storage, path, changed_record(members, choices))
        elif how == 1:
            name = choices.of(sorted(objects))
            put(storage, name, changed_bytes(objects[name], choices) or b"\n")
        else:
            parts.handles = list(handles)
            at = choices.of(filled)
            parts.set_bytes(at, changed_parquet(parts.bytes_of(at), choices))
            parts.handles[at] = _vouched(parts.handles[at], parts.bytes_of(at))
            try:
                parts.seal()
            except (pa.ArrowException, ValueError, OverflowError):
                return
        with watched():
            validate(storage, level="full")
            checkpoint = store.open()
            plan = plan_restore(checkpoint, checkpoint.graph.at(3))
            for state in checkpoint.record.states[:20]:
                task = checkpoint.restore(plan, state.operator, 0).get(state.name)
                for _ in task.batches() if task is not None else ():
                    pass

    return test


_TARGETS = {
    "record": _record_target,
    "manifest": _manifest_target,
    "segment": _segment_target,
    "store": _store_target,
}
NAMES = tuple(_TARGETS)


def make(name: str) -> Callable[[bytes], None]:
    """The target of this name, warm: what it imports when it is first used is imported."""
    test = _TARGETS[name]()
    import random

    chosen = random.Random(0)
    for _ in range(30):
        try:
            test(chosen.randbytes(24))
        except Finding as finding:
            if "while reading: ['import" not in str(finding) and "['open" not in str(finding):
                raise
    return test

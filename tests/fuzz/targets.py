"""What is fuzzed: the readers of record, manifest and segment, a whole store with one object
changed, and what ``foreign_targets`` and ``foreign_shapes`` have.

:func:`make` gives a function of bytes. It changes a good object as the bytes say, seals it (digests
and sizes are right), reads it, and raises :class:`Finding` for everything but a result or an error
of the product's own tree: another exception, an import, code made, a file or process opened, too
much memory or processor time. Changes that cannot be made count as :attr:`Target.unmade`.
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

from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import CheckpointError
from stateformat.manifest import Manifest, decode_columns, decode_manifest, handles_table
from stateformat.model import Handle, ManifestRef, Record
from stateformat.reading.scan import SliceReader
from stateformat.record import decode_record
from stateformat.redistribution import plan_restore
from stateformat.store import CheckpointStore
from stateformat.validation import validate
from tests.forgery import Forger, get, put
from tests.fuzz import foreign_shapes, foreign_targets, thrift_tree as thrift
from tests.fuzz.mutations import Choices, changed_bytes, changed_parquet, changed_record
from tests.worlds.segments import slices
from tests.worlds.stores import flights_store

SECONDS_MAX = 5.0
GROWTH_BYTES_MAX = 1 << 30
_FORBIDDEN = {"import", "exec", "compile", "open", "os.system", "os.exec"}
_FORBIDDEN |= {"subprocess.Popen", "socket.connect", "pickle.find_class"}
_SAID_MAX = 2**53 - 1
"""The largest number that a handle or a record can say."""

Reading = Callable[[], None]
Preparation = Callable[[Choices], Reading]


class Finding(AssertionError):
    """A reader did what no reader may do."""


class Slow(Finding):
    """It took more processor time than any changed object can be worth."""


class _Watch:
    """An audit hook cannot be taken away, so there is one, and it looks only while it is told
    to.
    """

    watching = False
    installed = False
    events: list[str] = []  # noqa: RUF012

    @classmethod
    def hook(cls, event: str, arguments: tuple[Any, ...]) -> None:
        if cls.watching and event in _FORBIDDEN:
            cls.events.append(f"{event} {arguments[:1]}")


@contextmanager
def watched() -> Iterator[None]:
    """Let through the errors of the tree; raise :class:`Finding` for everything that must not
    happen.
    """
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
        raise Slow(f"took {time.process_time() - start:.1f} s of processor time")


def _store() -> CheckpointStore:
    MemoryStorage.reset("fuzzed")
    return flights_store("memory://fuzzed")


class Target:
    """Calls with bytes: changes an object as they say, and reads it under watch."""

    def __init__(self, prepare: Preparation) -> None:
        self._prepare = prepare
        self.unmade = 0
        """How many calls tried nothing, because the tests could not make what the bytes ask for."""

    def __call__(self, data: bytes) -> None:
        try:
            read = self._prepare(Choices(data))
        except Exception:
            # The product has been given nothing that was changed, so this is no finding.
            self.unmade += 1
            return
        try:
            with watched():
                read()
        except Slow:
            # A busy machine may have been slow once.
            with watched():
                read()


def _record_target() -> Preparation:
    store = _store()
    path = "checkpoints/00000000000000000002.json"
    members = json.loads(get(store.storage, path))
    members.pop("digest")
    _let_expire(next(state for state in members["states"] if state.get("kind") == "value"))
    members["optional_features"] = ["ttl"]

    def prepare(choices: Choices) -> Reading:
        changed = changed_record(members, choices)

        def read() -> None:
            decode_record(changed, path=path)

        return read

    return prepare


def _let_expire(state: dict[str, Any]) -> None:
    """Add the time of the last access to a state of a record, and how long its rows live."""
    number = state["last_field_id"] = state["last_field_id"] + 1
    last = {"id": number, "name": "ttl_last_access", "type": "timestamp_us", "nullable": False, "default": "0"}
    state["schemas"][-1]["fields"].append(last)
    state["ttl"] = {"field": number, "duration_us": 60_000_000, "clock": "event_time", "refresh": "write", "now_us": 5}


def _said(data: bytes, field: int, otherwise: int) -> int:
    """The sum of a number of each row group, as a footer says it, if it can be read and a record
    can say it.
    """
    try:
        groups = thrift.get(thrift.split_footer(data)[1], 4)[1]
        found = sum(thrift.unzigzag(thrift.get(group, field)) for group in groups)
    except Exception:  # The fields may be of any type, or none.
        return otherwise
    return found if 0 <= found <= _SAID_MAX else otherwise


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


def _manifest_target() -> Preparation:
    store = _store()
    record = store.open().record
    stored = get(store.storage, record.manifest.path)
    files = [stored, _plain(stored, "none")]

    def prepare(choices: Choices) -> Reading:
        original = choices.of(files)
        changed = changed_parquet(original, choices)
        digest = xxhash.xxh3_128_hexdigest(changed)
        uncompressed = _said(changed, 2, record.manifest.uncompressed_bytes)
        ref = ManifestRef(record.manifest.path, len(changed), digest, uncompressed)

        def read() -> None:
            decode_columns(pa.py_buffer(changed), ref, ("operator", "state", "path", "size_bytes", "inline"))
            manifest = decode_manifest(pa.py_buffer(changed), ref)
            manifest.inline("")
            manifest.full()

        return read

    return prepare


def _vouched(handle: Handle, data: bytes) -> Handle:
    footer = min(len(data), int.from_bytes(data[-8:-4], "little") + 8)
    rows = _said(data, 3, 0) or handle.segment_rows
    return handle._replace(
        size_bytes=len(data),
        digest=xxhash.xxh3_128_digest(data),
        footer_bytes=max(9, footer),
        footer_digest=xxhash.xxh3_128_digest(data[-footer:]),
        uncompressed_bytes=_said(data, 2, handle.uncompressed_bytes),
        segment_rows=max(rows, handle.row_start + handle.rows),
    )


def _segment_target() -> Preparation:
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

    def prepare(choices: Choices) -> Reading:
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
        manifest = Manifest(handles_table([handle]))
        places = ((handle.row_start, handle.rows), (start, rows))
        wanted = [slices([(0, handle, first, count)]) for first, count in places]

        def read() -> None:
            for chosen in wanted:
                for _ in SliceReader(storage, alone, manifest, chosen).batches():
                    pass

        return read

    return prepare


def _store_target() -> Preparation:
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

    def prepare(choices: Choices) -> Reading:
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
            parts.seal()
        return read

    def read() -> None:
        validate(storage, level="full")
        checkpoint = store.open()
        plan = plan_restore(checkpoint, checkpoint.graph.at(3))
        for state in checkpoint.record.states[:20]:
            task = checkpoint.restore(plan, state.operator, 0).get(state.name)
            for _ in task.batches() if task is not None else ():
                pass

    return prepare


_TARGETS = {
    "record": _record_target,
    "manifest": _manifest_target,
    "segment": _segment_target,
    "store": _store_target,
    **dict(foreign_targets.all_targets()),
    **dict(foreign_shapes.all_targets()),
}
NAMES = tuple(_TARGETS)


def make(name: str) -> Target:
    """The target of this name, warm: what it imports when it is first used is imported."""
    test = Target(_TARGETS[name]())
    import random

    chosen = random.Random(0)
    for _ in range(30):
        try:
            test(chosen.randbytes(24))
        except Finding as finding:
            if not str(finding).removeprefix("while reading: ")[2:].startswith(("import", "open")):
                raise
    test.unmade = 0
    return test

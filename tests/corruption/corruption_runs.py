"""Run the cases of ``corruption`` on a store.

What does not depend on the damage is decoded and checked only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import pyarrow as pa

from stateformat import record as codec
from stateformat.manifest import codec as manifest
from stateformat.model import ManifestRef
from stateformat.reading import loading, scan as reading
from stateformat.validation import segments, sharing, validator as validation
from tests.corruption.corruption import Bench, Objects, Outcome, cases


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
    record_problems = validation._record_problems
    checked: dict[tuple[Any, ...], Any] = {}

    def check_segment(storage: Objects, record: Any, segment: Any, *, sizes: Any, level: str, done: Any) -> Any:
        # The digest in its record fixes a manifest, and so which handles a segment has.
        data, size = storage.objects.get(segment.path), sizes.get(segment.path)
        key = record.attempt_id, record.manifest.digest, segment.path, data, size, level
        if key not in checked:
            found = segments.check_segment(storage, record, segment, sizes=sizes, level=level, done=done)
            if not found.is_sound:
                return found
            checked[key] = found
        return checked[key]

    changes: list[tuple[Any, str, Any]] = [
        (reading, "_SMALL_BYTES", 0),
        (reading, "prefetch", lambda calls, **_: (call() for call in calls)),
        (loading, "decode_record", lambda data, *, path="": records(data, path=path)),
        (validation, "decode_record", lambda data, *, path="": records(data, path=path)),
        (validation, "read_manifest", lambda data, ref: manifests(data.to_pybytes(), ref)),
        (validation, "check_content", _once(validation.check_content, 2)),
        (validation, "unusable", _once(validation.unusable, 0)),
        (validation, "_record_problems", _once(lambda *given: [*record_problems(*given)], 1)),
        (sharing, "check_segment", check_segment),
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


def _once(function: Callable[..., Any], which: int) -> Callable[..., Any]:
    """Call ``function`` once for each object given as its argument number ``which``."""
    found: dict[int, tuple[Any, Any]] = {}

    def called(*given: Any) -> Any:
        about = given[which]
        if id(about) not in found:
            # Keeps the object alive, so that no other gets its id.
            found[id(about)] = about, function(*given)
        return found[id(about)][1]

    return called


def tried(store: str, objects: Any, *, stride: int = 1) -> Outcome:
    """Try every ``stride``-th case of a store."""
    found = Outcome()
    with prepared():
        bench = Bench(objects)
        for case in cases(store, objects, stride=stride):
            try:
                found.add(bench.judge(case))
            except BaseException as error:
                error.add_note(f"It was about {case}.")
                raise
    return found

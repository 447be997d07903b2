"""Every invariant of SPEC.md as a check that returns problems; nothing raises at the first fault.

Theory of operation. The checks go from the outside in: record, manifest, content, segments. A layer that cannot be read
ends the way inward, for nothing that damaged bytes say is believed: a record or manifest that cannot be decoded is told by
its first fault alone. Within a layer that was decoded everything is looked at. Quick reads record, manifest and the
footer of every segment; full reads every byte and every row. Nothing is ever written.

:func:`check_content` is the same judgement without a store, as publishing uses it; the modules ``rules.graph``,
``rules.content``, ``validation.segments`` and ``validation.rows`` hold the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from threading import Lock
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa

from .. import paths as layout
from ..errors import (
    REPAIR_ADVICE,
    CheckpointError,
    ErrorKind,
    NotFound,
    StorageError,
    UnsupportedFormat,
)
from ..history import Ids, record_ids, record_lost, record_of, require_records, survey
from ..manifest import INLINE_BYTES_MAX, Manifest, integers, read_handles, state_runs, totals, unusable, verify_manifest
from ..model import CheckpointId, Record
from ..problems import ADVICE_OTHER, ADVICE_RESTORE, Counts, Problem, Report, ordered
from ..record import RECORD_BYTES_MAX, decode_record, required_features
from ..rules import check_content
from ..storage import Storage
from .segments import Level, SegmentResult, check_segment, segments_of

Progress = Callable[[int, int], None]
"""Told how many segments are done, of how many."""

THREADS: Final = 4
_WINDOW: Final = 256

_CLAUSES: Final = {
    ErrorKind.UNSUPPORTED_VERSION: "SPEC 3.2",
    ErrorKind.UNSUPPORTED_FEATURE: "SPEC 3.3",
    ErrorKind.STATUS_CONTRADICTION: "SPEC 3.4",
    ErrorKind.UNSUPPORTED_TYPE: "SPEC 3.7",
    ErrorKind.INVALID_PATH: "SPEC 2.2",
    ErrorKind.OBJECT_SIZE_DIFFERS: "SPEC 3.2",
    ErrorKind.OBJECT_DIGEST_DIFFERS: "SPEC 3.1",
    ErrorKind.LIMIT_EXCEEDED: "SPEC 3.1",
}
_MANIFEST_CLAUSES: Final = {
    ErrorKind.OBJECT_SIZE_DIFFERS: "SPEC 3.2",
    ErrorKind.OBJECT_DIGEST_DIFFERS: "SPEC 3.2",
    ErrorKind.LIMIT_EXCEEDED: "SPEC 4.4",
}


class HasStorage(Protocol):
    """A ``CheckpointStore``, as far as validation needs one."""

    @property
    def storage(self) -> Storage:
        """Where the store lies."""
        ...


def validate(
    store: HasStorage | Storage,
    checkpoint_id: int | None = None,
    *,
    level: Level = "quick",
    progress: Progress | None = None,
) -> Report:
    """Everything that is wrong with one checkpoint, the newest where no id is given.

    ``quick`` costs the record, the manifest, one listing and one small read per segment; ``full`` reads every byte and
    checks every row, in bounded memory. Damage, a newer version, and a storage that fails half-way are problems of the
    report. Raises ``NotFound`` where there is no such store or checkpoint, and ``StorageError`` where not even a listing
    can be had.
    """
    storage = store if isinstance(store, Storage) else store.storage
    ids = record_ids(storage)
    if not ids:
        ids = record_ids(storage)
        require_records(storage, ids)
    chosen = CheckpointId(ids[-1] if checkpoint_id is None else checkpoint_id)
    if chosen not in ids:
        record_of(storage, chosen)  # Says whether it never was, has expired, or was lost.
        raise NotFound(f"no checkpoint {chosen} in {storage.url}", checkpoint_id=chosen)
    run = _Run(storage, chosen, level, progress)
    run.whole()
    findings = ordered([*run.findings, *_history_problems(storage, ids, chosen, level)])
    return Report(storage.url, chosen, level, findings, run.counts)


def check_checkpoint(storage: Storage, checkpoint_id: CheckpointId, *, level: Level = "quick") -> tuple[Problem, ...]:
    """Everything that is wrong with one checkpoint by itself, whatever else the store holds: record, manifest, segments."""
    run = _Run(storage, checkpoint_id, level, None)
    run.whole()
    return ordered(run.findings)


class _Run:
    """One validation under way."""

    def __init__(self, storage: Storage, checkpoint_id: CheckpointId, level: Level, progress: Progress | None) -> None:
        self.storage = storage
        self.checkpoint_id = checkpoint_id
        self.level: Level = level
        self.progress = progress or (lambda _done, _total: None)
        self.findings: list[Problem] = []
        self.counts = Counts()

    def whole(self) -> None:
        """From the record inward, as far as what is there can be believed."""
        record = self._record()
        manifest = self._manifest(record) if record is not None else None
        if record is None or manifest is None:
            return
        self.findings += check_content(record.graph, record.states, manifest.handles, record.rescaled_from)
        self.findings += _record_problems(record, manifest)
        self._segments(record, manifest)
        if any(found.kind is ErrorKind.OBJECT_MISSING for found in self.findings) and self._expired(record):
            self.findings = [found for found in self.findings if found.kind is not ErrorKind.OBJECT_MISSING]
            self.findings.append(_expired(self.storage, self.checkpoint_id))

    def _read(self, path: str, clause: str, what: str, size_bytes_max: int) -> pa.Buffer | None:
        try:
            return self.storage.read_range(path, 0, size_bytes_max + 1)
        except FileNotFoundError:
            message, kind, advice = f"{what} {path} is not in the store", ErrorKind.OBJECT_MISSING, ADVICE_RESTORE
        except StorageError as error:
            message, kind = f"{what} {path} could not be read: {error}", error.kind
            advice = "try again; check the storage if it stays so"
        self.findings.append(Problem(kind, clause, message, advice, path=path))
        return None

    def _record(self) -> Record | None:
        path = layout.record_path(self.checkpoint_id)
        data = self._read(path, "SPEC 2.3", "the record", RECORD_BYTES_MAX)
        if data is None:
            return None
        try:
            record = decode_record(data.to_pybytes(), path=path)
        except CheckpointError as error:
            advice = "upgrade stateformat" if isinstance(error, UnsupportedFormat) else ADVICE_RESTORE
            clause = _CLAUSES.get(error.kind, "SPEC 3.2")
            operator = str(error.details.get("operator", ""))
            self.findings.append(Problem(error.kind, clause, _fault(error), advice, path=path, operator=operator))
            return None
        self.counts = Counts(records=1, bytes=data.size)
        return record

    def _manifest(self, record: Record) -> Manifest | None:
        ref = record.manifest
        data = self._read(ref.path, "SPEC 2.3", "the manifest", ref.size_bytes)
        if data is None:
            return None
        try:
            verify_manifest(data, ref)
            self.counts = Counts(records=1, bytes=self.counts.bytes + data.size)
            manifest = Manifest(read_handles(data, ref), data=data)
            manifest.inline("")  # Reads the column, so that damage in it shows here.
        except CheckpointError as error:
            clause = _MANIFEST_CLAUSES.get(error.kind, "SPEC 4")
            self.findings.append(Problem(error.kind, clause, _fault(error), ADVICE_RESTORE, path=ref.path))
            return None
        return manifest

    def _segments(self, record: Record, manifest: Manifest) -> None:
        usable = ~unusable(manifest.handles) & _declared(record, manifest.handles)
        total, segments = segments_of(record, manifest, usable)
        try:
            listed = self.storage.list(layout.SEGMENTS) if total else []
        except StorageError as error:
            message = f"the segments of {self.storage.url} could not be listed: {error}"
            advice = "try again; check the storage if it stays so"
            self.findings.append(Problem(error.kind, "SPEC 2.1", message, advice))
            return
        sizes = {item.path: item.size_bytes for item in listed}
        meter = _Meter(self.progress, record.totals.bytes)
        check = partial(check_segment, self.storage, record, sizes=sizes, level=self.level, done=meter)
        size_bytes = rows = 0
        for result in _in_order(check, segments):
            self.findings += result.problems
            size_bytes, rows = size_bytes + result.bytes, rows + result.rows
        self.counts = Counts(1, manifest.handles.num_rows, total, self.counts.bytes + size_bytes, rows)

    def _expired(self, record: Record) -> bool:
        """Whether the checkpoint went away while it was looked at (section 7.3): then what is missing is no damage."""
        try:
            path = layout.record_path(self.checkpoint_id)
            now = decode_record(self.storage.read_range(path, 0, RECORD_BYTES_MAX + 1).to_pybytes())
        except FileNotFoundError:
            return True
        except CheckpointError:
            return False
        return now.attempt_id != record.attempt_id


class _Meter:
    """Adds up the bytes of segments that have been checked, from any thread."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._lock = Lock()
        progress(0, total)

    def __call__(self, size_bytes: int) -> None:
        with self._lock:
            self._done += size_bytes
            self._progress(self._done, self._total)


def _in_order(check: Callable[..., SegmentResult], segments: Iterator[Any]) -> Iterator[SegmentResult]:
    """Results in the order of the segments, a few at a time: a million segments are not queued at once."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="stateformat-validate") as pool:
        while window := list(islice(segments, _WINDOW)):
            yield from pool.map(check, window)


def _declared(record: Record, handles: pa.Table) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Handles of a state and schema that the record has. Others were told, and their segments cannot be judged."""
    schema_id = integers(handles["schema_id"])
    found = np.zeros(handles.num_rows, bool)
    for key, start, stop in state_runs(handles):
        state = record.by_state.get(key)
        if state is None or key[0] not in record.graph.by_uid:
            continue
        for known in state.by_schema_id:
            found[start:stop] |= schema_id[start:stop] == known
    return found


def _record_problems(record: Record, manifest: Manifest) -> Iterator[Problem]:
    """The record against the manifest: totals, features; and what is inline (section 4.4)."""
    path = layout.record_path(record.checkpoint_id)
    yield from _order_problems(record)
    counted = totals(manifest.handles)
    if counted != record.totals:
        message = f"the record's totals are {record.totals}, the manifest's {counted}"
        yield Problem(ErrorKind.DAMAGED_RECORD, "SPEC 3.2", message, path=path)
    used = required_features(record.graph, record.states, manifest.handles, record.rescaled_from)
    if used != record.required_features:
        message = f"the record requires {list(record.required_features)}, and the checkpoint uses {list(used)}"
        yield Problem(ErrorKind.DAMAGED_RECORD, "SPEC 3.3", message, path=path)
    if record.rescaled_from is not None:
        for former in record.rescaled_from.operators:
            if former.uid not in record.graph.by_uid:
                message = f"rescaled_from names operator {former.uid!r}, which the graph does not have"
                yield Problem(ErrorKind.UNKNOWN_OPERATOR, "SPEC 6.4", message, path=path, operator=former.uid)
    inline_bytes, faults = manifest.inline_faults()
    if inline_bytes > INLINE_BYTES_MAX:
        message = f"{inline_bytes:,} bytes are inline in the manifest; at most {INLINE_BYTES_MAX:,} may be"
        yield Problem(ErrorKind.LIMIT_EXCEEDED, "SPEC 4.4", message, path=record.manifest.path)
    for fault in faults:
        yield Problem(fault.kind, fault.clause, fault.describe(manifest.handles), path=record.manifest.path)


def _fault(error: CheckpointError) -> str:
    """What is wrong, without the advice, which a problem has of its own."""
    return str(error).removesuffix(REPAIR_ADVICE)


def _order_problems(record: Record) -> Iterator[Problem]:
    """Ids follow by one (section 8.2); only a repair may begin a chain with another id than 1."""
    path, here = layout.record_path(record.checkpoint_id), record.checkpoint_id
    if record.parent is None and record.content_of is None and here != 1:
        message = f"record {here} names no parent, and the first checkpoint of a job has id 1"
        yield Problem(ErrorKind.DAMAGED_RECORD, "SPEC 8.2", message, path=path)
    if record.parent is not None and record.parent.checkpoint_id != here - 1:
        message = f"record {here} names {record.parent.checkpoint_id} as its parent; ids follow by one"
        yield Problem(ErrorKind.DAMAGED_RECORD, "SPEC 8.2", message, path=path)


def _expired(storage: Storage, checkpoint_id: CheckpointId) -> Problem:
    message = f"checkpoint {checkpoint_id} of {storage.url} has expired while it was validated; this is not damage"
    return Problem(ErrorKind.CHECKPOINT_EXPIRED, "SPEC 7.3", message, "validate the newest")


def _history_problems(storage: Storage, ids: Ids, chosen: CheckpointId, level: Level) -> Iterator[Problem]:
    """Whether the checkpoint is one, which records were lost, and, in full, which are strays (sections 8.1 and 8.4).

    Quick reads no other record of the newest checkpoint of a store whose ids have no gap.
    """
    gaps = len(ids) != ids[-1] - ids[0] + 1
    if level == "quick" and chosen == ids[-1] and not gaps:
        return
    try:
        found = survey(storage, down_to=1 if gaps or level == "full" else chosen)
    except StorageError as error:
        message = f"the other records of {storage.url} could not be read: {error}"
        advice = "try again; check the storage if it stays so"
        path = str(error.details.get("path", ""))
        yield Problem(error.kind, "SPEC 8.1", message, advice, path=path, severity="warning")
        return
    for ref in found.lost:
        lost = record_lost(storage, ref)
        path = str(lost.details["path"])
        yield Problem(lost.kind, "SPEC 8.4", _fault(lost), "`ckpt repair` says what can be done", path=path)
    if chosen in found.listed and chosen not in {record.checkpoint_id for record in found.checkpoints}:
        newest = found.chain[0].checkpoint_id if found.chain else found.listed[-1]
        if chosen not in found.unreadable:
            message = f"record {chosen} is a stray: no parent link from the newest, {newest}, reaches it, so it is no checkpoint"
            path = layout.record_path(chosen)
            yield Problem(ErrorKind.CHECKPOINT_NOT_FOUND, "SPEC 8.1", message, ADVICE_OTHER, path=path)
    for checkpoint_id, fault in found.unreadable.items():
        # A record that is not this one cannot be read. It is told, and this checkpoint is judged by itself.
        if checkpoint_id != chosen and checkpoint_id in found.damaged:
            clause = _CLAUSES.get(fault.kind, "SPEC 8.1")
            path = layout.record_path(checkpoint_id)
            yield Problem(fault.kind, clause, _fault(fault), ADVICE_RESTORE, path=path, severity="warning")
    if level == "full":
        for ref in found.strays:
            message = f"record {ref.checkpoint_id} is a stray: no checkpoint, and nobody will restore from it"
            path, advice = layout.record_path(ref.checkpoint_id), "nothing: retention removes it (`ckpt gc --keep`)"
            kind = ErrorKind.CHECKPOINT_NOT_FOUND
            yield Problem(kind, "SPEC 8.1", message, advice, path=path, severity="warning")


__all__ = ["Counts", "Level", "Problem", "Progress", "Report", "check_checkpoint", "check_content", "validate"]

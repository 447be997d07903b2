"""Validate a checkpoint: every invariant of SPEC.md, as problems in a report.

The checks go from the outside in: record, manifest, content, segments. If a layer cannot be
decoded, its first fault is reported and nothing inside it is checked. In a decoded layer every
fault is reported. Quick reads record, manifest and the footer of every segment; full reads every
byte and every row. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from threading import Lock
from typing import Final, Protocol

import numpy as np
import pyarrow as pa

from .. import paths as layout
from ..errors import REPAIR_ADVICE, CheckpointError, ErrorKind, NotFound, StorageError, UnsupportedFormat
from ..findings import (
    ADVICE_OTHER,
    ADVICE_RESTORE,
    ADVICE_STORAGE,
    UNDECIDED,
    CheckpointResult,
    Counts,
    Finding,
    Level,
    Recurring,
    Report,
    Standing,
    StoreReport,
    ordered,
)
from ..formats import ForeignCheckpoints, foreign_checkpoints
from ..history import Ids, Survey, record_ids, record_lost, record_of, require_records, survey
from ..manifest import (
    INLINE_BYTES_MAX,
    Manifest,
    Mask,
    integers,
    read_manifest,
    state_runs,
    totals,
    unusable,
    verify_manifest,
)
from ..model import CheckpointId, ParentRef, Record
from ..reading import load_record
from ..record import RECORD_BYTES_MAX, decode_record, optional_features, required_features
from ..rules import check_content
from ..storage import Storage
from .sharing import SharedSegments

Progress = Callable[[int, int], None]
"""Called with the bytes checked so far, and the bytes of all segments."""

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
    """A ``CheckpointStore``, which this module may not import."""

    storage: Storage


def validate(
    store: HasStorage | Storage,
    checkpoint_id: int | None = None,
    *,
    level: Level = "quick",
    progress: Progress | None = None,
) -> Report:
    """Report everything that is wrong with one checkpoint, by default the newest.

    ``quick`` reads the record, the manifest, one listing and a little of each segment. ``full``
    reads every byte and checks every row, in bounded memory. Damage, a newer version, and a storage
    that fails on the way are problems in the report.

    If there is no store but another system's checkpoint, its format checks that.

    Raises ``NotFound`` for a store or checkpoint that does not exist, and ``StorageError`` if the
    store cannot be listed.
    """
    storage = store if isinstance(store, Storage) else store.storage
    name, outside = getattr(store, "format", None), getattr(store, "outside", None)
    ids = [] if name is not None else record_ids(storage)
    if not ids:
        found = foreign_checkpoints(storage, name, outside)
        if found is not None:
            return found.validate(checkpoint_id, level, progress)
        ids = record_ids(storage)
        require_records(storage, ids)
    chosen = CheckpointId(ids[-1] if checkpoint_id is None else checkpoint_id)
    if chosen not in ids:
        record_of(storage, chosen)  # Raises if the record has expired or was lost.
        raise NotFound(f"no checkpoint {chosen} in {storage.url}", checkpoint_id=chosen)
    validation = Validation(SharedSegments(storage, level), chosen, progress)
    validation.run()
    findings = ordered([*validation.findings, *_history_problems(storage, ids, chosen, level)])
    return Report(storage.url, chosen, level, findings, validation.counts)


def check_checkpoint(
    storage: Storage, checkpoint_id: CheckpointId, *, level: Level = "quick", segments: SharedSegments | None = None
) -> tuple[Finding, ...]:
    """Return everything that is wrong with one checkpoint alone, without its history.

    ``segments`` may have checked newer checkpoints already; its level then counts.
    """
    validation = Validation(segments or SharedSegments(storage, level), checkpoint_id)
    validation.run()
    return ordered(validation.findings)


@dataclass
class Validation:
    """The validation of one checkpoint; ``segments`` may have checked others of its store."""

    segments: SharedSegments
    checkpoint_id: CheckpointId
    progress: Progress | None = None

    def __post_init__(self) -> None:
        self.storage = self.segments.storage
        self.findings: list[Finding] = []
        self.counts = Counts()
        self.distinct = Counts()
        """What was read; only segments that no other checkpoint had named before count."""

    def run(self, record: Record | None = None) -> None:
        """Fill ``findings`` and ``counts``. ``record``: the record, if already read."""
        record = self._record() if record is None else record
        if record is not None:
            self._check(record)
        if any(found.kind is ErrorKind.OBJECT_MISSING for found in self.findings) and self._expired(record):
            message = f"checkpoint {self.checkpoint_id} of {self.storage.url} has expired while it was validated"
            advice = "this is not damage; validate the newest"
            self.findings = [Finding(ErrorKind.CHECKPOINT_EXPIRED, "SPEC 7.3", message, advice)]

    def _check(self, record: Record) -> None:
        manifest = self._manifest(record)
        if manifest is not None:
            self.findings += check_content(record.graph, record.states, manifest.handles, record.rescaled_from)
            self.findings += _record_problems(record, manifest)
            self._segments(record, manifest)

    def _read(self, path: str, clause: str, what: str, size_bytes_max: int) -> pa.Buffer | None:
        try:
            return self.storage.read_range(path, 0, size_bytes_max + 1)
        except FileNotFoundError:
            message, kind, advice = f"{what} {path} is not in the store", ErrorKind.OBJECT_MISSING, ADVICE_RESTORE
        except StorageError as error:
            message, kind = f"{what} {path} could not be read: {error}", error.kind
            advice = ADVICE_STORAGE
        self.findings.append(Finding(kind, clause, message, advice, path=path))
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
            self.findings.append(Finding(error.kind, clause, _fault(error), advice, path=path, operator=operator))
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
            manifest = read_manifest(data, ref)
            manifest.inline("")  # Reads the inline column, which may be damaged.
        except CheckpointError as error:
            clause = _MANIFEST_CLAUSES.get(error.kind, "SPEC 4")
            self.findings.append(Finding(error.kind, clause, _fault(error), ADVICE_RESTORE, path=ref.path))
            return None
        return manifest

    def _segments(self, record: Record, manifest: Manifest) -> None:
        usable = ~unusable(manifest.handles) & _declared(record, manifest.handles)
        meter = _Meter(self.progress or (lambda _done, _total: None), record.totals.bytes)
        try:
            checked = self.segments.check(record, manifest, usable, meter)
        except StorageError as error:
            message = f"the segments of {self.storage.url} could not be listed: {error}"
            self.findings.append(Finding(error.kind, "SPEC 2.1", message, ADVICE_STORAGE))
            return
        self.findings += checked.problems
        size_bytes = self.counts.bytes + checked.bytes
        self.counts = Counts(1, manifest.handles.num_rows, checked.segments, size_bytes, checked.rows)
        self.distinct = replace(self.counts, segments=checked.read)

    def _expired(self, record: Record | None) -> bool:
        """Return whether the checkpoint has expired meanwhile; then nothing is damaged (7.3).

        ``record``: as it was; None if it was gone before it could be read.
        """
        try:
            # Whether a record that was never seen has expired or was lost, the others tell.
            look = record_of if record is None else load_record
            now = look(self.storage, self.checkpoint_id)
        except NotFound:
            return True
        except CheckpointError:
            return False
        return record is not None and now.attempt_id != record.attempt_id


class _Meter:
    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._lock = Lock()
        progress(0, total)

    def __call__(self, size_bytes: int) -> None:
        with self._lock:
            self._done += size_bytes
            self._progress(self._done, self._total)


def _declared(record: Record, handles: pa.Table) -> Mask:
    schema_id = integers(handles["schema_id"])
    found = np.zeros(handles.num_rows, bool)
    for key, start, stop in state_runs(handles):
        state = record.by_state.get(key)
        if state is None or key[0] not in record.graph.by_uid:
            continue
        for known in state.by_schema_id:
            found[start:stop] |= schema_id[start:stop] == known
    return found


def _record_problems(record: Record, manifest: Manifest) -> Iterator[Finding]:
    """Compare ids, totals, features and inline segments of record and manifest."""
    path = layout.record_path(record.checkpoint_id)
    yield from _order_problems(record)
    counted = totals(manifest.handles)
    if counted != record.totals:
        message = f"the record's totals are {record.totals!r}, the manifest's {counted!r}"
        yield Finding(ErrorKind.DAMAGED_RECORD, "SPEC 3.2", message, path=path)
    used = required_features(record.graph, record.states, manifest.handles, record.rescaled_from)
    if used != record.required_features:
        message = f"the record requires {list(record.required_features)}, but the checkpoint uses {list(used)}"
        yield Finding(ErrorKind.DAMAGED_RECORD, "SPEC 3.3", message, path=path)
    for feature in optional_features(record.states):
        if feature not in record.optional_features:
            message = f"a state uses {feature!r}, which the record does not list as an optional feature"
            yield Finding(ErrorKind.DAMAGED_RECORD, "SPEC 3.3", message, path=path)
    if record.rescaled_from is not None:
        for former in record.rescaled_from.operators:
            if former.uid not in record.graph.by_uid:
                message = f"rescaled_from names operator {former.uid!r}, which the graph does not have"
                yield Finding(ErrorKind.UNKNOWN_OPERATOR, "SPEC 6.4", message, path=path, operator=former.uid)
    inline_bytes, faults = manifest.inline_faults()
    if inline_bytes > INLINE_BYTES_MAX:
        message = f"{inline_bytes:,} bytes are inline in the manifest; at most {INLINE_BYTES_MAX:,} may be"
        yield Finding(ErrorKind.LIMIT_EXCEEDED, "SPEC 4.4", message, path=record.manifest.path)
    for fault in faults:
        yield replace(fault, path=record.manifest.path, operator="", state="", subtask=None)


def _fault(error: CheckpointError) -> str:
    return str(error).removesuffix(REPAIR_ADVICE)


def _order_problems(record: Record) -> Iterator[Finding]:
    """Check that ids increase by one (section 8.2); a repaired chain may begin above 1."""
    path, here = layout.record_path(record.checkpoint_id), record.checkpoint_id
    if record.parent is None and record.content_of is None and here != 1:
        message = f"record {here} names no parent, and the first checkpoint of a job has id 1"
        yield Finding(ErrorKind.DAMAGED_RECORD, "SPEC 8.2", message, path=path)
    if record.parent is not None and record.parent.checkpoint_id != here - 1:
        message = f"record {here} names {record.parent.checkpoint_id} as its parent; ids follow by one"
        yield Finding(ErrorKind.DAMAGED_RECORD, "SPEC 8.2", message, path=path)


def _history_problems(storage: Storage, ids: Ids, chosen: CheckpointId, level: Level) -> Iterator[Finding]:
    """Report lost records, a record that no parent link reaches, and in full strays (8.1, 8.4).

    Quick reads no other record if this one is the newest and the ids have no gap.
    """
    gaps = len(ids) != ids[-1] - ids[0] + 1
    if level == "quick" and chosen == ids[-1] and not gaps:
        return
    try:
        found = survey(storage, down_to=1 if gaps or level == "full" else chosen)
    except StorageError as error:
        message = f"the other records of {storage.url} could not be read: {error}"
        path = str(error.details.get("path", ""))
        yield Finding(error.kind, "SPEC 8.1", message, ADVICE_STORAGE, path=path, severity="warning")
        return
    for ref in found.lost:
        yield lost_problem(storage, ref)
    # One that is in none of these lists has expired meanwhile.
    if chosen in {ref.checkpoint_id for ref in found.strays} - {*found.unreadable}:
        newest = found.chain[0].checkpoint_id if found.chain else found.listed[-1]
        message = f"record {chosen} is a stray, not a checkpoint: no parent link from the newest, {newest}, reaches it"
        path = layout.record_path(chosen)
        yield Finding(ErrorKind.CHECKPOINT_NOT_FOUND, "SPEC 8.1", message, ADVICE_OTHER, path=path)
    for checkpoint_id, fault in found.unreadable.items():
        # A damaged record of another checkpoint is a warning only.
        if checkpoint_id != chosen and checkpoint_id in found.damaged:
            yield replace(unreadable_problem(checkpoint_id, fault), severity="warning")
    if level == "full":
        yield from map(stray_problem, found.strays)


def lost_problem(storage: Storage, ref: ParentRef) -> Finding:
    """Return the problem of a record that is proven to be lost."""
    lost = record_lost(storage, ref)
    path = str(lost.details["path"])
    return Finding(lost.kind, "SPEC 8.4", _fault(lost), "`ckpt repair` says what can be done", path=path)


def unreadable_problem(checkpoint_id: CheckpointId, fault: CheckpointError) -> Finding:
    """Return the problem of a record whose bytes are not a record this version can read."""
    advice = "upgrade stateformat" if isinstance(fault, UnsupportedFormat) else ADVICE_RESTORE
    path = layout.record_path(checkpoint_id)
    return Finding(fault.kind, _CLAUSES.get(fault.kind, "SPEC 8.1"), _fault(fault), advice, path=path)


def stray_problem(ref: ParentRef) -> Finding:
    """Return the warning about a record that is not a checkpoint."""
    message = f"record {ref.checkpoint_id} is a stray: it is not a checkpoint, and no restore reads it"
    path, advice = layout.record_path(ref.checkpoint_id), "nothing: retention removes it (`ckpt gc --keep`)"
    return Finding(ErrorKind.CHECKPOINT_NOT_FOUND, "SPEC 8.1", message, advice, path=path, severity="warning")


# ---- all checkpoints -----------------------------------------------------------------------------
#
# Validate all checkpoints of a store, and search for the newest that is whole.
#
# Both go from the newest down and share what they have read: a segment that many checkpoints name
# is read once. A fault in it is one finding with the ids of all of them.


def validate_all(
    store: HasStorage | Storage, *, level: Level = "quick", progress: Progress | None = None
) -> StoreReport:
    """Report everything that is wrong with the checkpoints of a store.

    It reads each record and manifest, one listing, and each distinct segment once: a little of it,
    or all its bytes (``full``). Memory is bounded by the largest manifest. Raises ``NotFound`` if
    there is no store, and ``StorageError`` if it cannot be listed.
    """
    return _run(store, level, progress, search=False)


def newest_whole(
    store: HasStorage | Storage, *, level: Level = "quick", progress: Progress | None = None
) -> StoreReport:
    """Validate checkpoints, newest first, and stop at the first without errors.

    ``StoreReport.newest_whole`` is the result; it is never one that may be a stray. Raises as
    :func:`validate_all` does.
    """
    return _run(store, level, progress, search=True)


def _run(store: HasStorage | Storage, level: Level, progress: Progress | None, *, search: bool) -> StoreReport:
    storage = store if isinstance(store, Storage) else store.storage
    name, outside = getattr(store, "format", None), getattr(store, "outside", None)
    found = Survey() if name is not None else survey(storage)
    foreign = None if found.listed else foreign_checkpoints(storage, name, outside)
    report = _Collected(storage, level)
    if foreign is not None:
        report.foreign(foreign, progress, search=search)
    else:
        require_records(storage, found.listed)
        report.own(found, progress, search=search)
    return report.report()


class _Collected:
    """What is found, one checkpoint after another, newest first."""

    def __init__(self, storage: Storage, level: Level) -> None:
        self._storage = storage
        self._level: Level = level
        self._newest: CheckpointId | None = None
        self._results: list[CheckpointResult] = []
        self._findings: dict[object, Recurring] = {}
        self._counts: list[Counts] = []
        self._system: str | None = None

    def report(self) -> StoreReport:
        """Return all that was found."""
        counts = Counts(*(sum(getattr(one, name) for one in self._counts) for name in Counts.__slots__))
        url, findings = self._storage.url, tuple(self._findings.values())
        return StoreReport(url, self._level, self._newest, tuple(self._results), findings, counts, self._system)

    def own(self, found: Survey, progress: Progress | None, *, search: bool) -> None:
        """Validate the checkpoints of a stateformat store."""
        self._newest = found.listed[-1]
        records = {record.checkpoint_id: record for record in found.checkpoints}
        lost = {ref.checkpoint_id: ref for ref in found.lost if ref.checkpoint_id not in records}
        segments = SharedSegments(self._storage, self._level)
        meter = _MeterOfAll(progress, records.values())
        for number in sorted({*records, *lost, *found.damaged}, reverse=True):
            if number in lost:
                self._add(number, None, [lost_problem(self._storage, lost[number])], lost=True)
            elif number in found.damaged:
                self._add(number, None, [unreadable_problem(number, found.unreadable[number])])
            else:
                record = records[number]
                validation = Validation(segments, number, meter.of(record))
                validation.run(record)
                meter.end(record)
                self._counts.append(validation.distinct)
                self._add(number, record, validation.findings, certain=record.ref in found.certain)
            if search and self._results[-1].standing == "whole" and self._results[-1].certain:
                return
        for ref in reversed(found.strays):
            self._note(stray_problem(ref), ref.checkpoint_id)

    def foreign(self, found: ForeignCheckpoints, progress: Progress | None, *, search: bool) -> None:
        """Validate the checkpoints of another system, each by its format."""
        self._system = found.system
        records, damaged = found.history()
        by_id = {record.checkpoint_id: record for record in records}
        ids = sorted({*by_id, *map(CheckpointId, damaged)}, reverse=True)
        self._newest = ids[0] if ids else None
        for number in ids:
            report = found.validate(number, self._level, progress)
            self._counts.append(report.counts)
            self._add(number, by_id.get(number), report.findings)
            if search and self._results[-1].standing == "whole":
                return

    def _add(
        self,
        number: CheckpointId,
        record: Record | None,
        problems: Iterable[Finding],
        *,
        lost: bool = False,
        certain: bool = True,
    ) -> None:
        found = list(dict.fromkeys(problems))
        errors = [problem for problem in found if problem.severity == "error"]
        result = CheckpointResult(
            number,
            record.attempt_id if record is not None else "",
            record.kind if record is not None else None,
            record.created_at_us if record is not None else None,
            "lost" if lost else _standing(errors),
            len(errors),
            len(found) - len(errors),
            certain,
        )
        self._results.append(result)
        if result.standing == "expired":
            return
        for problem in found:
            self._note(problem, number)

    def _note(self, problem: Finding, number: CheckpointId) -> None:
        finding = self._findings.setdefault(_key(problem), Recurring(problem, [(number, number)]))
        finding.add(number)


def _standing(errors: list[Finding]) -> Standing:
    if any(problem.kind is ErrorKind.CHECKPOINT_EXPIRED for problem in errors):
        return "expired"
    if any(problem.kind not in UNDECIDED for problem in errors):
        return "damaged"
    return "undecided" if errors else "whole"


def _key(problem: Finding) -> object:
    """Return what the findings of two checkpoints about one segment have in common."""
    if not problem.path.startswith("segments/"):
        return problem
    # The message names the subtasks, which a rescale changes.
    return problem.severity, problem.kind, problem.clause, problem.path, problem.message.partition(") ")[2]


class _MeterOfAll:
    """Adds up the progress of several validations."""

    def __init__(self, progress: Progress | None, records: Iterable[Record]) -> None:
        self._progress = progress
        self._done, self._total = 0, sum(record.totals.bytes for record in records)

    def of(self, record: Record) -> Progress | None:
        """Return what the validation of one checkpoint calls."""
        if self._progress is None:
            return None
        progress, start, most = self._progress, self._done, record.totals.bytes
        return lambda done, _: progress(start + min(done, most), self._total)

    def end(self, record: Record) -> None:
        """Count one checkpoint as done."""
        self._done += record.totals.bytes

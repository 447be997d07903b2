"""Validate all checkpoints of a store, and search for the newest that is whole.

Both go from the newest down and share what they have read: a segment that many checkpoints name is
read once. A fault in it is one finding with the ids of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import ErrorKind
from ..findings import UNDECIDED, CheckpointResult, Counts, Finding, Level, Recurring, Standing, StoreReport
from ..formats import ForeignCheckpoints, foreign_checkpoints
from ..history import Survey, require_records, survey
from ..model import CheckpointId, Record
from ..storage import Storage
from .sharing import SharedSegments
from .validator import HasStorage, Progress, Validation, lost_problem, stray_problem, unreadable_problem


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
        meter = _Meter(progress, records.values())
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


class _Meter:
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

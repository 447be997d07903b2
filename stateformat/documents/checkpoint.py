"""Facts about checkpoints as JSON documents: the members of the record, sums over the manifest, and
what validation found.

Names are those of SPEC.md. numpy computes the sums over columns of the manifest, so a checkpoint of
a million handles takes no longer than reading its manifest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from .. import words
from ..graph import Operator, Status
from ..manifest import BATCH_ROWS, codes_of, integers, state_runs
from ..model import (
    GIVEN_UP_PROPERTY,
    ORIGIN_PROPERTIES,
    PER_SUBTASK_MODES,
    RESERVED_PROPERTIES,
    Kind,
    Mode,
    ParentRef,
    Record,
    State,
)
from ..record import members_of
from ..rescaling import rescale_of
from ..ttl import NO_TIME_US
from .columns import JsonRows

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..errors import CheckpointError
    from ..findings import CheckpointResult, Finding, Recurring, Report, StoreReport

Document = dict[str, Any]
_GIVEN_UP: Final = (("operator", str), ("state", str), ("effect", str), ("rows", int), ("rows_besides", int))
_SMALL: Final = ("subtask", "layer", "first_group", "last_group")
_LAST: Final = np.iinfo(np.int32).max
_Numbers: TypeAlias = "npt.NDArray[np.integer[Any]]"


def reference(ref: ParentRef | None) -> Document | None:
    """Return a checkpoint by id and attempt, or None."""
    return None if ref is None else {"checkpoint_id": ref.checkpoint_id, "attempt_id": ref.attempt_id}


def record_document(store: str, record: Record) -> Document:
    """Return every member of the record (SPEC.md section 3.2) and its store; missing members are
    null.
    """
    members = members_of(record)
    return {
        "store": store,
        **members,
        "totals": asdict(record.totals),
        "parent": members.get("parent"),
        "content_of": members.get("content_of"),
        "stop": stop_document(record),
        "rescaled_from": members.get("rescaled_from"),
        "created_at": words.moment(record.created_at_us),
        "written_by": origin_document(record.properties),
        "given_up": given_up_told(record.properties),
    }


def checkpoint_document(
    checkpoint: Any,
    chosen: Sequence[State] | None = None,
    *,
    operator: str | None = None,
    state: str | None = None,
) -> Document:
    """Return what record and manifest of a ``Checkpoint`` say: the record, what it holds, the
    chosen states. ``operator`` and ``state`` are what they were chosen by.
    """
    document = record_document(checkpoint.storage.url, checkpoint.record)
    declared = dict(zip(checkpoint.states, document["states"], strict=True))
    holdings = Holdings(checkpoint.record, checkpoint.counted)
    document["totals"]["rows"] = holdings.rows
    states = checkpoint.states if chosen is None else chosen
    return {
        **document,
        "inline_bytes": checkpoint.inline_bytes(),
        "system": checkpoint.system,
        "notes": [note._asdict() for note in checkpoint.notes],
        "selection": {"operator": operator, "state": state},
        "holds": holds_document(checkpoint.record, holdings),
        "states": [holdings.document(one, declared[one]) for one in states],
    }


def stop_document(record: Record) -> Document | None:
    """Return the stop at which the checkpoint was taken; null for any other.

    ``goes_on_at``: at which parallelism the job continues by itself, in words; null if it does not.
    """
    if record.stop is None:
        return None
    wanted = rescale_of(record)
    goes_on_at = None if wanted is None else wanted.describe()
    return {"mode": record.stop.mode.value, "request": record.stop.request, "goes_on_at": goes_on_at}


def given_up_told(properties: Mapping[str, str]) -> Document | None:
    """Return what a checkpoint was published without, according to its record; null if it does not
    say.
    """
    try:
        told = json.loads(properties.get(GIVEN_UP_PROPERTY, "null"))
        states = [{name: kind(each[name]) for name, kind in _GIVEN_UP} for each in told["states"]]
        return {"checkpoint_id": int(told["checkpoint_id"]), "rows": int(told["rows"]), "states": states}
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        # Not in the form that stateformat writes: another program wrote it.
        return None


def origin_document(properties: Mapping[str, str]) -> Document:
    """Return who published a checkpoint; null for what its record does not say."""
    names = {name.removeprefix(RESERVED_PROPERTIES): name for name in ORIGIN_PROPERTIES}
    return {member: properties.get(name) for member, name in names.items()}


def published_document(store: str, record: Record) -> Document:
    """Return a checkpoint that a command has just published."""
    return {
        "store": store,
        "checkpoint_id": record.checkpoint_id,
        "attempt_id": record.attempt_id,
        "kind": record.kind.value,
        "parent": reference(record.parent),
        "totals": asdict(record.totals),
        "operators": [operator_size(operator) for operator in record.graph.operators],
    }


def operator_size(operator: Operator) -> Document:
    """Return an operator's parallelism and status."""
    return {
        "uid": operator.uid,
        "name": operator.name,
        "parallelism": operator.parallelism,
        "max_parallelism": operator.max_parallelism,
        "status": operator.status.value,
    }


class Holdings:
    """What the handles of a checkpoint hold: rows and stored bytes by state, layer and subtask.

    ``handles`` are in the manifest's order. Stored bytes are in proportion to rows. A segment
    shared by several handles counts once. Rows may be null (``Checkpoint.outline``); then those of
    the whole state are, and its skew is that of the bytes.
    """

    def __init__(self, record: Record, handles: pa.Table) -> None:
        self._record = record
        # Half of what int64 takes; there may be a million handles.
        self._columns: dict[str, _Numbers] = {name: integers(handles[name]).astype(np.int32) for name in _SMALL}
        self._unknown = handles["rows"].is_null().to_numpy()
        self._columns["rows"] = integers(handles["rows"], null=0)
        self._path: _Numbers = codes_of(handles["path"])[0].astype(np.int32)
        self._columns["bytes"] = _stored_bytes(handles, self._path, self._columns["rows"])
        if self._unknown.any():
            whole = integers(handles["size_bytes"])
            self._columns["bytes"] = np.where(self._unknown, whole, self._columns["bytes"])
        self._runs = {key: slice(start, stop) for key, start, stop in state_runs(handles)}

    @property
    def rows(self) -> int | None:
        """The rows of all states, of all layers; None if those of one are unknown."""
        return None if self._unknown.any() else int(self._columns["rows"].sum())

    def totals(self, state: State) -> tuple[int | None, int]:
        """Return the rows (None if unknown) and stored bytes of a state, of all layers."""
        run = self._run(state)
        rows = None if self._unknown[run].any() else int(self._columns["rows"][run].sum())
        return rows, int(self._columns["bytes"][run].sum())

    def _run(self, state: State) -> slice:
        return self._runs.get((state.operator, state.name), slice(0, 0))

    def document(self, state: State, declared: Document) -> Document:
        """Return a state's declaration (SPEC.md section 3.6), and its rows and bytes by layer and
        subtask.

        ``declared`` is the state in :func:`record_document`. ``subtasks`` are the owners that
        report rows, in order; ``skew`` is the ratio of the greatest of their rows to the mean.
        """
        run = self._run(state)
        mine = {name: column[run] for name, column in self._columns.items()}
        path = self._path[run]
        subtasks = _subtasks(mine)
        rows, stored = self.totals(state)
        shown = subtasks.arrays["bytes" if rows is None else "rows"]
        if state.mode in PER_SUBTASK_MODES:
            operator = self._record.graph.operator(state.operator)
            silent = max(0, operator.parallelism - len(operator.done) - len(shown))
            shown = np.concatenate([shown, np.zeros(silent, np.int64)])
        by_layer = {
            "handles": np.bincount(mine["layer"]),
            "rows": np.bincount(mine["layer"], mine["rows"]),
            "bytes": np.bincount(mine["layer"], mine["bytes"]),
        }
        if rows is None:
            # A list of numbers says null by a negative one.
            subtasks.arrays["rows"][:] = -1
        return {
            **declared,
            "kind": declared.get("kind"),
            "edge": declared.get("edge"),
            "ttl": _ttl_document(state),
            **clock_members(state),
            "rows": rows,
            "bytes": stored,
            "handles": len(path),
            "segments": _distinct(path[path >= 0]),
            "layers": [
                {
                    "layer": layer,
                    **{
                        name: None if rows is None and name == "rows" else int(values[layer])
                        for name, values in by_layer.items()
                    },
                }
                for layer in np.flatnonzero(by_layer["handles"]).tolist()
            ],
            "subtasks": subtasks,
            "skew": words.skew(shown.tolist()),
        }


def _ttl_document(state: State) -> Document | None:
    """Return how long rows live (SPEC.md section 6.5), and what time it was; null if none
    expires.
    """
    if state.ttl is None:
        return None
    now_us = state.ttl_now_us
    return {
        "field": state.ttl_field.id if state.ttl_field else None,
        **asdict(state.ttl),
        "now_us": now_us,
        "now_at": "none" if now_us is None or now_us <= NO_TIME_US else words.precise_moment(now_us),
    }


def clock_members(state: State) -> Document:
    """Return by which clock timers fire (SPEC.md section 6.6), and its time; null for other
    states.
    """
    now_us = state.clock_now_us
    return {
        "clock": state.clock if state.kind is Kind.TIMERS else None,
        "now_us": now_us,
        "now_at": None if now_us is None else words.precise_moment(now_us),
    }


def holds_document(record: Record, holdings: Holdings) -> Document:
    """Return what a run uses up: rows (of all layers) of timers and committables, in-flight
    records. None where another system's metadata does not count them.
    """
    rows = [(state, holdings.totals(state)[0]) for state in record.states]

    def together(counts: Iterable[int | None]) -> int | None:
        found = [*counts]
        known = [count for count in found if count is not None]
        return sum(known) if len(known) == len(found) else None

    return {
        "timers": together(count for state, count in rows if state.kind is Kind.TIMERS),
        "in_flight": [
            {"edge": state.edge, "operator": state.operator, "rows": count}
            for state, count in rows
            if state.mode is Mode.IN_FLIGHT
        ],
        "committables": together(count for state, count in rows if state.mode is Mode.COMMITTABLES),
    }


def _distinct(codes: _Numbers) -> int:
    # Handles of one segment are nearly always close together. (np.unique would import numpy.ma.)
    codes = np.sort(codes, kind="stable")
    return int(len(codes) and 1 + (codes[1:] != codes[:-1]).sum())


def _stored_bytes(handles: pa.Table, path: _Numbers, rows: _Numbers) -> _Numbers:
    """Return each handle's part of its segment's size, by rows; the sum is never more than that
    size.
    """
    if not len(rows):
        return rows
    sizes, whole = integers(handles["size_bytes"]), integers(handles["segment_rows"])
    # Handles that share rows (a broadcast copy after a rescale) share the bytes too.
    covered = np.bincount(path + 1, weights=rows)
    stored = np.empty(len(rows), np.int64)
    for start in range(0, len(rows), BATCH_ROWS):
        some = slice(start, start + BATCH_ROWS)
        of_segment = np.maximum(np.maximum(whole[some], covered[path[some] + 1]), 1)
        stored[some] = np.rint(sizes[some] * (rows[some] / of_segment))
    return stored


def _subtasks(mine: dict[str, _Numbers]) -> JsonRows:
    """Return one entry per owner, in order; subtask null is the coordinator or owns
    committables.
    """
    owner, last = mine["subtask"], mine["last_group"]
    # The manifest is sorted by subtask: an owner begins where the number changes. (np.unique would
    # import numpy.ma.)
    begins = np.flatnonzero(np.append(True, owner[1:] != owner[:-1])) if len(owner) else np.zeros(0, np.int64)

    def of_owners(reduce: np.ufunc, values: _Numbers) -> _Numbers:
        found: _Numbers = reduce.reduceat(values, begins) if len(begins) else values
        return found

    highest = of_owners(np.maximum, last)
    lowest = of_owners(np.minimum, np.where(last >= 0, mine["first_group"], _LAST))
    return JsonRows(
        subtask=owner[begins],
        rows=of_owners(np.add, mine["rows"]),
        bytes=of_owners(np.add, mine["bytes"]),
        layers=of_owners(np.maximum, mine["layer"] + 1),
        first_group=np.where(highest >= 0, lowest, -1),
        last_group=highest,
    )


def history_document(record: Record) -> Document:
    """Return one line of the history."""
    status = [operator.status for operator in record.graph.operators]
    return {
        "checkpoint_id": record.checkpoint_id,
        "attempt_id": record.attempt_id,
        "kind": record.kind.value,
        "parent": reference(record.parent),
        "job_id": record.job_id,
        "job_name": record.job_name,
        "created_at": words.moment(record.created_at_us),
        "created_at_us": record.created_at_us,
        "operators": len(status),
        "finished": status.count(Status.FULLY_FINISHED),
        "partially_finished": status.count(Status.PARTIALLY_FINISHED),
        "stop": stop_document(record),
        "totals": asdict(record.totals),
        "written_by": origin_document(record.properties),
    }


def fault_document(error: CheckpointError) -> Document:
    """Return why something could not be read."""
    return {"kind": error.kind.value, "message": str(error)}


def problem_document(problem: Finding) -> Document:
    """Return one finding; members that do not apply to it are null."""
    return {
        "kind": str(problem.kind),
        "clause": problem.clause,
        "message": problem.message,
        "advice": problem.advice,
        "path": problem.path or None,
        "operator": problem.operator or None,
        "state": problem.state or None,
        "subtask": problem.subtask,
    }


def report_document(report: Report) -> Document:
    """Return everything that is wrong with one checkpoint."""
    return {
        "store": report.url,
        "checkpoint_id": report.checkpoint_id,
        "level": report.level,
        "ok": report.ok,
        "checked": asdict(report.counts),
        "problems": [problem_document(problem) for problem in report.problems],
        "warnings": [problem_document(problem) for problem in report.warnings],
    }


def store_report_document(report: StoreReport) -> Document:
    """Return what was found in each checkpoint, and each problem once, with the ids that have
    it.
    """
    return {
        "store": report.url,
        "system": report.system,
        "level": report.level,
        "ok": report.ok,
        "newest": report.newest,
        "newest_whole": report.newest_whole,
        "checked": asdict(report.counts),
        "checkpoints": [_result(result) for result in report.checkpoints],
        "problems": [_finding(finding) for finding in report.of("error")],
        "warnings": [_finding(finding) for finding in report.of("warning")],
    }


def _result(result: CheckpointResult) -> Document:
    return {
        "checkpoint_id": result.checkpoint_id,
        "attempt_id": result.attempt_id,
        "kind": None if result.kind is None else result.kind.value,
        "created_at_us": result.created_at_us,
        "standing": result.standing,
        "certain": result.certain,
        "problem_count": result.problems,
        "warning_count": result.warnings,
    }


def _finding(finding: Recurring) -> Document:
    ranges = [list(pair) for pair in reversed(finding.ids)]
    return {**problem_document(finding.problem), "checkpoints": ranges}

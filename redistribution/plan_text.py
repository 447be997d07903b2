"""The data of a restore plan, as a value, as JSON for programs and as text for people."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.findings import Finding, Severity
from stateformat.graph import Edge, JobGraph, Operator, OperatorId, Status
from stateformat.model import AttemptId, CheckpointId, ParentRef
from stateformat.schema import SLICE_SCHEMA

from .columns import ColumnAction, ColumnPlan
from .operator_plan import Action, OperatorPlan

_FORMAT: Final = "stateformat.restore_plan"
_WIDTH: Final = 80
_OF_REFUSALS: Final = ("advice", "details")
_OPERATOR_FIELDS: Final = (
    "uid",
    "parallelism",
    "max_parallelism",
    "name",
    "key_hash",
    "chain",
    "coordinator",
    "pinned",
)


@dataclass(frozen=True)
class PlanDocument:
    """The data of a restore plan."""

    source: ParentRef
    """The checkpoint."""
    job_id: str
    topology: JobGraph
    """Resolved: max parallelism and key hash are filled in, and broken chains are removed."""
    operators: tuple[OperatorPlan, ...]
    """The operators of the topology in its order, then those of the checkpoint that it does not
    have.
    """
    assigned: pa.Table
    """``SLICE_SCHEMA``. A slice that every subtask of its operator reads has a null subtask."""
    refusals: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()
    unchained: tuple[str, ...] = ()
    """The names of the chains that were broken up."""
    drop: tuple[str, ...] = ()
    """What the caller gave up, sorted."""
    columns: tuple[ColumnPlan, ...] = ()
    """The columns of each state that the program declares."""

    def to_json(self) -> str:
        """Return the plan as one JSON object; ``slices`` are those of ``assigned``, as columns."""
        document = self.to_document()
        document["slices"] = {name: column.to_pylist() for name, column in document["slices"].items()}
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False)

    def to_document(self) -> dict[str, Any]:
        """Return the object that :meth:`to_json` writes, with ``slices`` still as Arrow columns."""
        return {
            "format": _FORMAT,
            "version": 1,
            "source": self.source._asdict(),
            "job_id": self.job_id,
            "topology": {
                # A topology's operators have no finished subtasks.
                "operators": [
                    {name: getattr(operator, name) for name in _OPERATOR_FIELDS} for operator in self.topology.operators
                ],
                "edges": [asdict(edge) for edge in self.topology.edges],
            },
            "operators": [asdict(operator) for operator in self.operators],
            "refusals": [_finding(refusal, *_OF_REFUSALS) for refusal in self.refusals],
            "warnings": [_finding(warning) for warning in self.warnings],
            "unchained": list(self.unchained),
            "drop": list(self.drop),
            "columns": [asdict(column) for column in self.columns],
            "slices": {name: self.assigned[name] for name in SLICE_SCHEMA.names},
        }

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the plan that :meth:`to_json` wrote. Raises ``InvalidInput`` for anything else."""
        try:
            value = json.loads(text)
            if value["format"] != _FORMAT or value["version"] != 1:
                raise ValueError(f"its format is {value['format']!r}, version {value['version']!r}")
            source, topology = value["source"], value["topology"]
            return cls(
                source=ParentRef(CheckpointId(source["checkpoint_id"]), AttemptId(source["attempt_id"])),
                job_id=value["job_id"],
                topology=JobGraph(
                    tuple(Operator(**item) for item in topology["operators"]),
                    tuple(Edge(**item) for item in topology["edges"]),
                ),
                operators=tuple(_operator_in(item) for item in value["operators"]),
                refusals=tuple(_finding_in(item, "error") for item in value["refusals"]),
                warnings=tuple(_finding_in(item, "warning") for item in value["warnings"]),
                unchained=tuple(value["unchained"]),
                drop=tuple(value["drop"]),
                columns=tuple(_column_in(item) for item in value.get("columns", ())),
                assigned=pa.table(_columns(value["slices"]), schema=SLICE_SCHEMA),
            )
        except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
            message = f"this is not a restore plan of version 1: {error}; make it again with plan_restore"
            raise InvalidInput(message) from error


def _finding(finding: Finding, *more: str) -> dict[str, Any]:
    of_all = {"code": finding.kind, "operator": finding.operator, "message": finding.message}
    return of_all | {name: getattr(finding, name) for name in more}


def _finding_in(item: Mapping[str, Any], severity: Severity) -> Finding:
    names = ("operator", "message", *(_OF_REFUSALS if severity == "error" else ()))
    rest = {"advice": ""} | {name: item[name] for name in names}
    return Finding(ErrorKind(item["code"]), "", **rest, severity=severity)


def _columns(value: Mapping[str, list[Any]]) -> Iterable[pa.Array]:
    return [pa.array(value[item.name], item.type) for item in SLICE_SCHEMA]


def _column_in(item: dict[str, Any]) -> ColumnPlan:
    return ColumnPlan(**item | {"operator": OperatorId(item["operator"]), "action": ColumnAction(item["action"])})


def _operator_in(item: dict[str, Any]) -> OperatorPlan:
    status = item["status"]
    return OperatorPlan(
        **item | {"action": Action(item["action"]), "status": None if status is None else Status(status)}
    )


def describe(plan: PlanDocument, load: pa.Table, committables: int) -> str:
    """Return the plan in lines of at most 80 columns, unless a uid is longer.

    ``load``: what each new subtask reads (``RestorePlan.load``). ``committables``: rows to commit
    first.
    """
    return "\n".join(_lines(plan, load, committables)) + "\n"


def _lines(plan: PlanDocument, load: pa.Table, committables: int) -> Iterator[str]:
    count = Counter(operator.action for operator in plan.operators)
    yield f"Restore of checkpoint {plan.source.checkpoint_id} of job {plan.job_id}"
    words = {Action.START: "started", Action.NEW: "new", Action.SKIP_FINISHED: "finished", Action.DROPPED: "dropped"}
    yield "operators: " + (
        ", ".join(f"{count[action]} {word}" for action, word in words.items() if count[action]) or "none"
    )
    if not any(operator.starts for operator in plan.operators):
        yield "Nothing is left to run: every operator is finished."
    yield ""
    yield f"{'operator':<24}{'action':<14}{'parallelism':>13}{'rows':>10}{'bytes':>9}{'largest':>10}"
    for operator, rows, stored, largest in _loads(plan, load):
        number = f"{operator.old_parallelism or '-'} -> {operator.parallelism or '-'}"
        yield (
            f"{_short(operator.uid):<24}{operator.action:<14}{number:>13}"
            f"{_count(rows):>10}{_count(stored):>9}{_count(largest):>10}"
        )
    yield "(rows and bytes that subtasks read; largest: rows of the one that reads most)"
    if committables:
        yield f"To commit before anything starts: {committables} rows of committables."
    changed = [column for column in plan.columns if column.action is not ColumnAction.KEPT]
    if changed:
        yield ""
        yield "Columns that change:"
        for column in changed:
            yield from _bullet(f"{column.operator}/{column.state}: {column}")
    if plan.refusals:
        yield ""
        yield f"REFUSED, for {len(plan.refusals)} reason{'s' if len(plan.refusals) > 1 else ''}:"
        for refusal in plan.refusals:
            yield from _bullet(str(refusal))
    if plan.warnings:
        yield ""
        yield "Note:"
        for warning in plan.warnings:
            yield from _bullet(warning.message)


def _loads(plan: PlanDocument, load: pa.Table) -> Iterator[tuple[OperatorPlan, int, int, int]]:
    rows, stored = load["rows"].to_numpy(), load["bytes"].to_numpy()
    start = 0
    for operator in plan.operators:
        stop = start + (operator.parallelism if operator.starts else 0)
        own = rows[start:stop]
        yield operator, int(own.sum()), int(stored[start:stop].sum()), int(own.max(initial=0))
        start = stop


def _count(number: int) -> str:
    """Return at most eight characters: exact below 10⁸, then three digits and a unit."""
    if number < 100_000_000:
        return str(number)
    value, units = float(number), iter("kMGTPE")
    unit = ""
    while value >= 1000:
        value, unit = value / 1000, next(units)
    return f"{value:.3g}{unit}"


def _short(uid: str) -> str:
    return uid if len(uid) <= 23 else f"{uid[:11]}…{uid[-11:]}"


def _bullet(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)

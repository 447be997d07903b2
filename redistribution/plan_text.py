"""A restore plan as text for people and as JSON for programs."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from stateformat.errors import InvalidInput
from stateformat.graph import Edge, JobGraph, Operator, OperatorId, Partitioner, Status
from stateformat.model import AttemptId, CheckpointId, ParentRef
from stateformat.schema import SLICE_SCHEMA

from .columns import ColumnAction, ColumnPlan
from .operator_plan import Action, OperatorPlan
from .rules import PlanWarning, Refusal, RefusalCode, WarningCode

if TYPE_CHECKING:
    from .plan import RestorePlan

_FORMAT: Final = "stateformat.restore_plan"
_WIDTH: Final = 80


def describe(plan: RestorePlan) -> str:
    """The plan in lines of at most 80 columns, as long as no uid makes a line of prose longer."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: RestorePlan) -> Iterator[str]:
    count = Counter(operator.action for operator in plan.operators)
    yield f"Restore of checkpoint {plan.source.checkpoint_id} of job {plan.job_id}"
    told = {Action.START: "started", Action.NEW: "new", Action.SKIP_FINISHED: "finished", Action.DROPPED: "dropped"}
    yield "operators: " + (
        ", ".join(f"{count[action]} {word}" for action, word in told.items() if count[action]) or "none"
    )
    if not any(operator.starts for operator in plan.operators):
        yield "Nothing is left to run: every operator is finished."
    yield ""
    yield f"{'operator':<24}{'action':<14}{'parallelism':>13}{'rows':>10}{'bytes':>9}{'largest':>10}"
    for operator, rows, stored, largest in _loads(plan):
        number = f"{operator.old_parallelism or '-'} -> {operator.parallelism or '-'}"
        yield (
            f"{_short(operator.uid):<24}{operator.action:<14}{number:>13}"
            f"{_count(rows):>10}{_count(stored):>9}{_count(largest):>10}"
        )
    yield "(rows and bytes that subtasks read; largest: rows of the one that reads most)"
    committables = plan.committables
    if committables.num_rows:
        yield f"To commit before anything starts: {_total(committables['rows'])} rows of committables."
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


def _loads(plan: RestorePlan) -> Iterator[tuple[OperatorPlan, int, int, int]]:
    load = plan.load()
    rows, stored = load["rows"].to_numpy(), load["bytes"].to_numpy()
    start = 0
    for operator in plan.operators:
        stop = start + (operator.parallelism if operator.starts else 0)
        own = rows[start:stop]
        yield operator, int(own.sum()), int(stored[start:stop].sum()), int(own.max(initial=0))
        start = stop


def _total(column: pa.ChunkedArray) -> int:
    return int(column.to_numpy().sum())


def _count(number: int) -> str:
    """At most eight characters: exact below a hundred million, then three digits with a unit."""
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


def to_json(plan: RestorePlan) -> str:
    """One JSON object without white space; keys of the plan's parts are their field names."""
    document = to_document(plan)
    document["slices"] = {name: column.to_pylist() for name, column in document["slices"].items()}
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)


def to_document(plan: RestorePlan) -> dict[str, Any]:
    """What :func:`to_json` writes, as a value of JSON but for ``slices``: columns that are Arrow arrays still."""
    return {
        "format": _FORMAT,
        "version": 1,
        "source": plan.source._asdict(),
        "job_id": plan.job_id,
        "topology": {
            "operators": [_operator_out(operator) for operator in plan.topology.operators],
            "edges": [asdict(edge) for edge in plan.topology.edges],
        },
        "operators": [asdict(operator) for operator in plan.operators],
        "refusals": [asdict(refusal) for refusal in plan.refusals],
        "warnings": [asdict(warning) for warning in plan.warnings],
        "unchained": list(plan.unchained),
        "drop": list(plan.drop),
        "columns": [asdict(column) for column in plan.columns],
        "slices": {name: plan.assigned[name] for name in SLICE_SCHEMA.names},
    }


_OPERATOR_FIELDS = ("uid", "parallelism", "max_parallelism", "name", "key_hash", "chain", "coordinator", "pinned")


def _operator_out(operator: Operator) -> dict[str, Any]:
    # A topology's operators have no finished subtasks: those are facts of a checkpoint.
    return {name: getattr(operator, name) for name in _OPERATOR_FIELDS}


def from_json(text: str) -> dict[str, Any]:
    """The fields of the plan that :func:`to_json` wrote. ``InvalidInput`` for a text that it did not write."""
    try:
        value = json.loads(text)
        if value["format"] != _FORMAT or value["version"] != 1:
            raise ValueError(f"its format is {value['format']!r}, version {value['version']!r}")
        return {
            "source": ParentRef(
                CheckpointId(value["source"]["checkpoint_id"]), AttemptId(value["source"]["attempt_id"])
            ),
            "job_id": value["job_id"],
            "topology": JobGraph(
                tuple(Operator(**item) for item in value["topology"]["operators"]),
                tuple(_edge_in(item) for item in value["topology"]["edges"]),
            ),
            "operators": tuple(_operator_in(item) for item in value["operators"]),
            "refusals": tuple(Refusal(**item | {"code": RefusalCode(item["code"])}) for item in value["refusals"]),
            "warnings": tuple(PlanWarning(**item | {"code": WarningCode(item["code"])}) for item in value["warnings"]),
            "unchained": tuple(value["unchained"]),
            "drop": tuple(value["drop"]),
            "columns": tuple(_column_in(item) for item in value.get("columns", ())),
            "assigned": pa.table(_columns(value["slices"]), schema=SLICE_SCHEMA),
        }
    except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise InvalidInput(f"this is no restore plan of version 1: {error}; make it again with plan_restore") from error


def _columns(value: Mapping[str, list[Any]]) -> Iterable[pa.Array]:
    return [pa.array(value[item.name], item.type) for item in SLICE_SCHEMA]


def _edge_in(item: Mapping[str, Any]) -> Edge:
    return Edge(
        **{
            **item,
            "source": OperatorId(item["source"]),
            "target": OperatorId(item["target"]),
            "partitioner": Partitioner(item["partitioner"]),
            "key_columns": tuple(item["key_columns"]),
        }
    )


def _column_in(item: Mapping[str, Any]) -> ColumnPlan:
    return ColumnPlan(**{**item, "operator": OperatorId(item["operator"]), "action": ColumnAction(item["action"])})


def _operator_in(item: Mapping[str, Any]) -> OperatorPlan:
    status = item["status"]
    return OperatorPlan(
        **{**item, "action": Action(item["action"]), "status": None if status is None else Status(status)}
    )

"""A restore plan as a JSON document, with what happens to each state in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from stateformat.documents import Document, JsonColumn, JsonRows

from .columns import ColumnPlan, column_plans
from .operator_plan import Action

if TYPE_CHECKING:
    from stateformat.model import Record, State

    from .plan import RestorePlan


def plan_document(store: str, record: Record, plan: RestorePlan, *, system: str | None = None) -> Document:
    """Return the plan as ``RestorePlan.to_json`` writes it, what each subtask reads, and the
    states.

    Whatever grows with the plan stays in columns (``documents``).
    """
    operators = {operator.uid: operator for operator in plan.operators}
    columns: dict[tuple[str, str], list[ColumnPlan]] = {}
    for column in plan.columns:
        columns.setdefault((column.operator, column.state), []).append(column)
    states = [
        {
            "operator": state.operator,
            "name": state.name,
            "mode": state.mode.value,
            "kind": state.kind.value if state.kind else None,
            "clock": state.clock if state.kind == "timers" else None,
            "rule": rule(record, plan, state.operator, state.name),
            "columns": [_column(column) for column in columns.get((state.operator, state.name)) or _kept(plan, state)],
        }
        for state in record.states
        if state.operator in operators
    ]
    whole = plan.to_document()
    return {
        "store": store,
        "system": system,
        "refused": plan.refused,
        "load": list(_loads(plan)),
        "states": states,
        "committable_rows": int(plan.committables["rows"].to_numpy().sum()),
        "plan": {**whole, "slices": {name: JsonColumn(column) for name, column in whole["slices"].items()}},
    }


def _kept(plan: RestorePlan, state: State) -> tuple[ColumnPlan, ...]:
    """Return the columns of a state that the program does not declare: all, if it is restored."""
    from stateformat.model import Mode

    operator = plan.by_operator[state.operator]
    restored = operator.parallelism > 0 if state.mode is Mode.COMMITTABLES else operator.starts
    return column_plans(state, None, ()) if restored and not plan.gives_up(state.operator, state.name) else ()


def _column(column: ColumnPlan) -> Document:
    whole = asdict(column)
    return {name: value for name, value in whole.items() if name not in ("operator", "state")}


def _loads(plan: RestorePlan) -> Iterator[Document]:
    """Yield what each operator that starts reads, in total and per subtask."""
    load = plan.load()
    columns = {name: load[name].to_numpy() for name in ("subtask", "rows", "bytes")}
    start = 0
    for operator in plan.operators:
        if not operator.starts:
            continue
        own = {name: column[start : start + operator.parallelism] for name, column in columns.items()}
        start += operator.parallelism
        yield {
            "operator": str(operator.uid),
            "rows": int(own["rows"].sum()),
            "bytes": int(own["bytes"].sum()),
            "subtasks": JsonRows(**own),
        }


def rule(record: Record, plan: RestorePlan, uid: str, name: str) -> str:
    """Return what happens to a state, in words (in full: docs/redistribution.md)."""
    from stateformat.graph import Status
    from stateformat.model import Mode

    state = record.state(uid, name)
    operator = plan.by_operator[uid]
    if state.mode is Mode.COMMITTABLES and operator.action is not Action.DROPPED:
        return "committed before anything starts"
    if plan.gives_up(uid, name):
        return "given up"
    if operator.action is Action.DROPPED:
        return "not in the topology"
    if operator.action is Action.SKIP_FINISHED:
        return "none: the operator has finished"
    same = operator.parallelism == operator.old_parallelism and operator.status is Status.RUNNING
    number = operator.parallelism
    return {
        Mode.KEYED: "each keeps its key groups" if same else f"key groups are redistributed over {number} subtasks",
        Mode.EVEN_SPLIT: "each keeps its own entries" if same else f"entries are split into {number} even chunks",
        Mode.UNION: "every subtask gets every entry",
        Mode.BROADCAST: "every subtask gets one copy",
        Mode.COORDINATOR: "handed over whole",
        Mode.PROGRESS: "each keeps its own" if same else "least watermark; ended if all had ended",
        Mode.IN_FLIGHT: (
            "replayed by the owner of the key" if state.key_columns else "replayed in order, channel by channel"
        ),
    }[state.mode]

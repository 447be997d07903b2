"""A restore plan as a value: who reads what, what is not started, and what is refused and why."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.documents import Document, JsonColumn, JsonRows
from stateformat.errors import ErrorKind, InvalidInput, RestoreRefused
from stateformat.findings import Finding, Severity
from stateformat.graph import Edge, JobGraph, Operator, OperatorId, Status, shortened
from stateformat.manifest import Ints, Mask, spread, state_runs
from stateformat.model import AttemptId, CheckpointId, Mode, ParentRef
from stateformat.schema import SLICE_SCHEMA

from .columns import ColumnAction, ColumnPlan, column_plans
from .rules import Match
from .tables import EVERY

if TYPE_CHECKING:
    from stateformat.model import Record, State

# ---- operators -----------------------------------------------------------------------------------
#
# What a plan does with each operator.


class Action(StrEnum):
    """What a plan does with an operator."""

    START = "start"
    SKIP_FINISHED = "skip_finished"
    NEW = "new"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class OperatorPlan:
    """One operator of the topology, or of the checkpoint alone (dropped)."""

    uid: OperatorId
    name: str
    action: Action
    old_parallelism: int
    """The saved parallelism; 0 for a new operator."""
    parallelism: int
    """The resolved parallelism of the topology; 0 for a dropped operator."""
    max_parallelism: int
    """The resolved max parallelism of the topology; 0 for a dropped operator."""
    status: Status | None
    """The checkpoint's status, or the one before a rescale; None for a new operator."""
    saved_rows: int = 0
    """Rows over all handles and layers."""

    def __repr__(self) -> str:
        was = f"{self.old_parallelism} → {self.parallelism}"
        return f"OperatorPlan({shortened(self.uid)}, {self.action}, {was} of {self.max_parallelism})"

    @property
    def starts(self) -> bool:
        """Whether its subtasks are started."""
        return self.action in (Action.START, Action.NEW)


def operator_plans(match: Match, resolved: JobGraph) -> tuple[OperatorPlan, ...]:
    """Plan the operators of the resolved topology in its order, then those not in it."""
    rows: Counter[str] = Counter()
    for (uid, _), count in match.rows.items():
        rows[uid] += count
    saved_by_uid = match.record.graph.by_uid
    plans = []
    for operator in resolved.operators:
        saved, status = saved_by_uid.get(operator.uid), match.statuses.get(operator.uid)
        started = Action.NEW if saved is None else Action.START
        plans.append(
            OperatorPlan(
                uid=operator.uid,
                name=operator.display_name,
                action=Action.SKIP_FINISHED if status is Status.FULLY_FINISHED else started,
                old_parallelism=saved.parallelism if saved else 0,
                parallelism=operator.parallelism,
                max_parallelism=operator.max_parallelism or 0,
                status=status,
                saved_rows=rows[operator.uid],
            )
        )
    for saved in match.record.graph.operators:
        if saved.uid not in resolved.by_uid:
            status, saved_rows = match.statuses[saved.uid], rows[saved.uid]
            plans.append(
                OperatorPlan(saved.uid, saved.display_name, Action.DROPPED, saved.parallelism, 0, 0, status, saved_rows)
            )
    return tuple(plans)


# ---- data ----------------------------------------------------------------------------------------
#
# The data of a restore plan, as a value, as JSON for programs and as text for people.


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


# ---- JSON for pages ------------------------------------------------------------------------------
#
# A restore plan as a JSON document, with what happens to each state in words.


def plan_document(store: str, record: Record | None, plan: RestorePlan, *, system: str | None = None) -> Document:
    """Return the plan as ``RestorePlan.to_json`` writes it, what each subtask reads, and the
    states.

    Whatever grows with the plan stays in columns (``documents``). Without the ``record`` there are
    no states.
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
        for state in (record.states if record else ())
        if record and state.operator in operators
    ]
    whole = plan.to_document()
    return {
        "store": store,
        "system": system,
        "refused": plan.refused,
        "load": list(_load_documents(plan)),
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


def _load_documents(plan: RestorePlan) -> Iterator[Document]:
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


# ---- plan ----------------------------------------------------------------------------------------
#
# A restore plan as a value: who reads what, what is not started, and what is refused and why.


_SHARED = (Mode.UNION.value, Mode.PROGRESS.value)


@dataclass(frozen=True, repr=False)
class RestorePlan(PlanDocument):
    """Who reads what, what is not started, and what is refused and why."""

    def __repr__(self) -> str:
        return (
            f"RestorePlan(checkpoint {self.source.checkpoint_id} of {shortened(self.job_id)}, "
            f"{len(self.operators)} operators, {self.assigned.num_rows} slices, {len(self.refusals)} refusals)"
        )

    def _repr_html_(self) -> str:
        """Which operators start and how, and what is refused, for notebooks."""
        from stateformat.pages.html import notebook
        from stateformat.pages.restore import restore_page

        return notebook(
            f"Restore of checkpoint {self.source.checkpoint_id} of {self.job_id}",
            lambda: restore_page(plan_document("", None, self)),
        )

    @cached_property
    def by_operator(self) -> Mapping[str, OperatorPlan]:
        """Operator plans by uid."""
        return {operator.uid: operator for operator in self.operators}

    def gives_up(self, operator: str, state: str) -> bool:
        """Return whether ``drop`` names a state as a whole, or its operator."""
        # A text that may name two things was refused when the plan was made.
        return not {operator, f"{operator}/{state}"}.isdisjoint(self.drop)

    @property
    def refused(self) -> bool:
        """Whether anything is refused."""
        return bool(self.refusals)

    def check(self, checkpoint: ParentRef | None = None) -> None:
        """Raise ``RestoreRefused`` with every refusal, if there is any.

        Raises ``InvalidInput`` if the plan was made from another checkpoint.
        """
        if checkpoint is not None and checkpoint != self.source:
            raise InvalidInput(
                f"the plan is for checkpoint {self.source.checkpoint_id} of attempt {self.source.attempt_id}, not for "
                f"{checkpoint.checkpoint_id} of attempt {checkpoint.attempt_id}; plan again"
            )
        if self.refusals:
            count = len(self.refusals)
            reasons = f"{count} reason{'s' if count > 1 else ''}:\n" + "\n".join(f"- {item}" for item in self.refusals)
            message = f"checkpoint {self.source.checkpoint_id} cannot be restored into this topology, for {reasons}"
            raise RestoreRefused(message, refusals=self.refusals)

    @cached_property
    def slices(self) -> pa.Table:
        """All slices (``SLICE_SCHEMA``), one per subtask that reads it; null for the driver's.

        For union state their number grows with the old parallelism times the new; that of
        ``assigned`` and :meth:`slices_of` does not.
        """
        every = self._shared
        if not every.any():
            return self.assigned
        blocks = self._blocks
        firsts = np.array([start for start, _ in blocks.values()], dtype=np.int64)
        sizes = np.array([stop - start for start, stop in blocks.values()], dtype=np.int64)
        shared = np.array([bool(every[start]) and self._subtask[start] < 0 for start, _ in blocks.values()])
        copies = np.array([self.by_operator[operator].parallelism for operator, _ in blocks], dtype=np.int64)
        copies = np.where(shared, copies, 1)
        block, nth = spread(sizes * copies)
        subtask, within = nth // sizes[block], nth % sizes[block]
        row = firsts[block] + within
        table = self.assigned.take(pa.array(row))
        values = np.where(shared[block], subtask, self._subtask[row])
        return _with_subtask(table, values)

    def slices_of(self, operator: str, subtask: int | None, state: str | None = None) -> pa.Table:
        """Return the slices (``SLICE_SCHEMA``) that one new subtask reads, of one state or of all.

        With ``subtask`` None, returns what the driver takes: coordinator state and committables.
        Empty for names that do not exist. Costs a lookup and a binary search per state.
        """
        names = [state] if state is not None else self._states_of.get(operator, [])
        found = [self._slices_of(operator, name, subtask) for name in names]
        return pa.concat_tables([part for part in found if part.num_rows] or [SLICE_SCHEMA.empty_table()])

    def _slices_of(self, operator: str, state: str, subtask: int | None) -> pa.Table:
        start, stop = self._blocks.get((operator, state), (0, 0))
        if start == stop:
            return SLICE_SCHEMA.empty_table()
        if self._shared[start] and self._subtask[start] < 0:
            if subtask is None or not 0 <= subtask < self.by_operator[operator].parallelism:
                return SLICE_SCHEMA.empty_table()
            return _with_subtask(self.assigned.slice(start, stop - start), np.full(stop - start, subtask))
        wanted = EVERY if subtask is None else subtask
        first, last = np.searchsorted(self._subtask[start:stop], [wanted, wanted + 1]).tolist()
        return self.assigned.slice(start + first, last - first)

    @property
    def committables(self) -> pa.Table:
        """Slices of prepared output that the driver commits before any subtask starts."""
        return self.assigned.filter(pc.equal(self.assigned["mode"], Mode.COMMITTABLES.value))

    def load(self) -> pa.Table:
        """Return what each new subtask reads: operator (dictionary of utf8), subtask int32, rows
        and bytes int64.

        One row per subtask that is started, in order of ``operators`` and subtask. Bytes are stored
        sizes, and rows of layers are counted as stored. What the driver takes is not included.
        """
        started = [operator for operator in self.operators if operator.starts]
        sizes = np.array([operator.parallelism for operator in started], dtype=np.int64)
        first = np.cumsum(sizes) - sizes
        owner = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        subtask = np.arange(len(owner), dtype=np.int32) - first.astype(np.int32)[owner]
        rank: dict[str, int] = {operator.uid: number for number, operator in enumerate(started)}
        blocks = [(rank[operator], *where) for (operator, _), where in self._blocks.items() if operator in rank]
        totals = []
        for name in ("rows", "bytes"):
            values = self.assigned[name]
            total = np.zeros(len(owner), dtype=np.int64)
            for number, start, stop in blocks:
                begin, size = int(first[number]), int(sizes[number])
                if self._subtask[start] >= 0:
                    own = self._subtask[start:stop]
                    weights = values.slice(start, stop - start).to_numpy()
                    total[begin : begin + size] += np.bincount(own, weights, size).astype(np.int64)
                elif self._shared[start]:
                    total[begin : begin + size] += pc.sum(values.slice(start, stop - start)).as_py()
            totals.append(total)
        uids = pa.array([operator.uid for operator in started], pa.string())
        names = pa.DictionaryArray.from_arrays(pa.array(owner), uids)
        return pa.table({"operator": names, "subtask": pa.array(subtask), "rows": totals[0], "bytes": totals[1]})

    def describe(self) -> str:
        """Return the plan as text of at most 80 columns, for people."""
        return describe(self, self.load(), pc.sum(self.committables["rows"]).as_py() or 0)

    @cached_property
    def _subtask(self) -> Ints:
        found: Ints = pc.fill_null(self.assigned["subtask"], EVERY).to_numpy()
        return found

    @cached_property
    def _shared(self) -> Mask:
        modes = pc.is_in(self.assigned["mode"], value_set=pa.array(_SHARED))
        found: Mask = modes.to_numpy()
        return found

    @cached_property
    def _blocks(self) -> dict[tuple[str, str], tuple[int, int]]:
        return {names: (start, stop) for names, start, stop in state_runs(self.assigned)}

    @cached_property
    def _states_of(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for operator, state in self._blocks:
            found.setdefault(operator, []).append(state)
        return found


def _with_subtask(table: pa.Table, subtask: Ints) -> pa.Table:
    column = SLICE_SCHEMA.get_field_index("subtask")
    values = pa.array(subtask.astype(np.int32), mask=subtask < 0)
    return table.set_column(column, SLICE_SCHEMA.field(column), values)

"""A restore plan as a value: who reads what, what is not started, and what is refused and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import InvalidInput, RestoreRefused
from stateformat.graph import shortened
from stateformat.manifest import Ints, Mask, spread, state_runs
from stateformat.model import Mode, ParentRef
from stateformat.schema import SLICE_SCHEMA

from .operator_plan import OperatorPlan
from .plan_text import PlanDocument, describe
from .tables import EVERY

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
        from stateformat.html import plan_html

        def document() -> dict[str, Any]:
            reads = self.load().group_by("operator").aggregate([("bytes", "sum")])
            return {
                "operators": [asdict(operator) for operator in self.operators],
                "refusals": [{"message": item.message, "advice": item.advice} for item in self.refusals],
                "reads": dict(zip(reads["operator"].to_pylist(), reads["bytes_sum"].to_pylist(), strict=True)),
            }

        return plan_html(f"Restore of checkpoint {self.source.checkpoint_id} of {self.job_id}", document)

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

"""What a restore does with each column of a state that the new program declares."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from stateformat.graph import OperatorId
from stateformat.model import Field, State
from stateformat.schema import children, nesting
from stateformat.states import type_text, widening_faults


class ColumnAction(StrEnum):
    """What happens to a column: the first of these that applies."""

    REFUSED = "refused"
    DROPPED = "dropped"
    ADDED = "added"
    RENAMED = "renamed"
    WIDENED = "widened"
    KEPT = "kept"


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """One column of a state, before and after. A nested field is named by its path, with dots."""

    operator: OperatorId
    state: str
    action: ColumnAction
    column: str | None
    """The name that the program declares; None if the column is dropped."""
    saved: str | None
    """The name in the checkpoint; None if the column is added."""
    type: str | None = None
    """The declared type, as Arrow writes it."""
    saved_type: str | None = None
    default: str | None = None
    """The value of an added column in older rows, as text; None means null."""

    def __str__(self) -> str:
        """Return the column and what happens to it, as a phrase."""
        before, after = f"{self.saved} {self.saved_type}", f"{self.column} {self.type}"
        if self.saved is None:
            then = "null" if self.default is None else repr(self.default)
            return f"{after} added, {then} in older rows" if self.action is ColumnAction.ADDED else f"{after} refused"
        if self.column is None:
            return f"{before} {'dropped' if self.action is ColumnAction.DROPPED else 'refused: not declared'}"
        if before == after:
            return f"{before} {self.action}"
        return f"{before} {self.action}{': would be' if self.action is ColumnAction.REFUSED else ' to'} {after}"


def column_plans(saved: State, wanted: State | None, given_up: Collection[str]) -> tuple[ColumnPlan, ...]:
    """Plan the columns of a state: those that are declared, in their order, then those to be
    dropped.

    ``wanted``: the declaration of the program; None keeps all columns but those ``given_up``.
    Nested fields follow their column if it is kept and they change.
    """
    fixed = {*saved.key_columns, "_map_key"}
    wanted = wanted or _without(saved, given_up)
    before, after = saved.current.fields, wanted.current.fields
    return tuple(_Comparison(saved, given_up, fixed).plans(before, after, "", ""))


def lost_columns(plans: Sequence[ColumnPlan]) -> list[str]:
    """Return the columns that would be dropped although the caller has not given them up."""
    return [str(plan.saved) for plan in plans if plan.action is ColumnAction.REFUSED and plan.column is None]


def _without(saved: State, given_up: Collection[str]) -> State:
    fields = _left(saved.current.fields, given_up, "")
    return replace(saved, schemas=(*saved.schemas[:-1], replace(saved.current, fields=fields)))


def _left(fields: Sequence[Field], given_up: Collection[str], prefix: str) -> tuple[Field, ...]:
    return tuple(
        replace(item, type=nesting(item.type, _left(children(item), given_up, f"{prefix}{item.name}.")))
        if children(item)
        else item
        for item in fields
        if prefix + item.name not in given_up
    )


@dataclass(frozen=True)
class _Comparison:
    state: State
    given_up: Collection[str]
    fixed: Collection[str]

    def plans(self, before: Sequence[Field], after: Sequence[Field], old: str, new: str) -> Iterator[ColumnPlan]:
        """Compare one level of fields; ``old`` and ``new`` are the prefixes of their names."""
        by_id = {item.id: item for item in before}
        for item in after:
            saved = by_id.pop(item.id, None)
            is_key = saved is not None and old + saved.name in self.fixed
            action = _added(item, nested=bool(new)) if saved is None else _action(saved, item, is_key=is_key)
            yield self._plan(action, saved, item, old, new)
            if saved is not None and action is not ColumnAction.REFUSED and saved.type != item.type:
                inner = self.plans(children(saved), children(item), f"{old}{saved.name}.", f"{new}{item.name}.")
                yield from (plan for plan in inner if plan.action is not ColumnAction.KEPT)
        for saved in by_id.values():
            named = old + saved.name in self.given_up and (old + saved.name) not in self.fixed
            yield self._plan(ColumnAction.DROPPED if named else ColumnAction.REFUSED, saved, None, old, new)

    def _plan(self, action: ColumnAction, saved: Field | None, item: Field | None, old: str, new: str) -> ColumnPlan:
        return ColumnPlan(
            self.state.operator,
            self.state.name,
            action,
            column=None if item is None else new + item.name,
            saved=None if saved is None else old + saved.name,
            type=None if item is None else type_text(item.type),
            saved_type=None if saved is None else type_text(saved.type),
            default=item.default if item is not None and saved is None else None,
        )


def _added(item: Field, *, nested: bool) -> ColumnAction:
    fine = item.nullable or (item.default is not None and not nested)
    return ColumnAction.ADDED if fine else ColumnAction.REFUSED


def _action(saved: Field, item: Field, *, is_key: bool) -> ColumnAction:
    if widening_faults(saved, item) or (is_key and (saved.name, saved.type) != (item.name, item.type)):
        return ColumnAction.REFUSED
    if saved.name != item.name:
        return ColumnAction.RENAMED
    return ColumnAction.WIDENED if isinstance(item.type, str) and saved.type != item.type else ColumnAction.KEPT

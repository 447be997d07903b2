"""What a user's text names: ``UID``, ``UID/STATE`` or ``UID/STATE.COLUMN``.

Uids, states and columns may themselves have slashes and dots. So a text may name several things:
then it is refused with all of them, and nothing is decided by chance.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ..errors import InvalidInput
from ..graph import Operator
from ..model import State
from .continuation import full_names


class Named(NamedTuple):
    """An operator by its uid, a state of it, or a column of that state."""

    operator: str
    state: str | None = None
    column: str | None = None

    def __str__(self) -> str:
        operator = f"operator {str(self.operator)!r}"
        if self.state is None:
            return operator
        state = f"state {self.state!r} of {operator}"
        return state if self.column is None else f"column {self.column!r} of {state}"


def named(text: str, states: Iterable[State], labels: Mapping[str, str] | None = None) -> Named | None:
    """Return what a text names; None for nothing that there is.

    ``labels``: what else operators are called, and their uids. A column may also be one that the
    state has not: only if the text names nothing else, and then of the state with the longest name.
    Raises ``InvalidInput`` for a text that names several things.
    """
    by_operator: dict[str, list[State]] = {}
    for state in states:
        by_operator.setdefault(state.operator, []).append(state)
    uids = {uid: uid for uid in by_operator}
    found: dict[Named, None] = {}
    unknown: list[Named] = []
    for label, uid in {**(labels or {}), **uids}.items():
        if text == label:
            found[Named(uid)] = None
        if not text.startswith(f"{label}/"):
            continue
        rest = text[len(label) + 1 :]
        for state in by_operator.get(uid, ()):
            if rest == state.name:
                found[Named(uid, state.name)] = None
            elif rest.startswith(f"{state.name}."):
                column = rest[len(state.name) + 1 :]
                if any(column in full_names(schema.fields) for schema in state.schemas):
                    found[Named(uid, state.name, column)] = None
                else:
                    unknown.append(Named(uid, state.name, column))
    if len(found) > 1:
        raise ambiguous(text, found)
    return next(iter(found), None) or max(unknown, key=lambda one: len(one.state or ""), default=None)


def ambiguous(text: str, found: Collection[Named]) -> InvalidInput:
    """Return the refusal of a text that names several things."""
    several = len({one.operator for one in found}) > 1
    advice = (
        "Give one of the operators another uid first (`ckpt rewrite STORE --rename UID=NEW`)"
        if several
        else "Declare one of the two under another name"
    )
    return InvalidInput(f"{text!r} may be {' or '.join(map(str, found))}. {advice}", name=text)


def labels_of(operators: Iterable[Operator]) -> dict[str, str]:
    """Return what users may call each operator, with its uid: that, or a name that only one has."""
    operators = list(operators)
    names = [operator.name for operator in operators]
    by_name = {
        operator.name: operator.uid for operator in operators if operator.name and names.count(operator.name) == 1
    }
    return {**by_name, **{operator.uid: operator.uid for operator in operators}}


def split_drop(
    drop: Iterable[str], states: Collection[State], uids: Iterable[str] = ()
) -> tuple[list[str], dict[tuple[str, str], frozenset[str]]]:
    """Split ``drop`` into names of operators and states, and columns by (operator, state).

    ``uids``: operators, if not only those of the states. Raises ``InvalidInput`` for a text that
    names several things.
    """
    labels = {uid: uid for uid in uids}
    others: list[str] = []
    columns: dict[tuple[str, str], frozenset[str]] = {}
    for text in drop:
        found = named(text, states, labels)
        if found is None or found.state is None or found.column is None:
            others.append(text)
        else:
            key = (found.operator, found.state)
            columns[key] = columns.get(key, frozenset()) | {found.column}
    return others, columns


def column_name(state: State, column: str) -> str:
    """Return a column as ``drop`` names it: ``UID/STATE.COLUMN``."""
    return f"{state.operator}/{state.name}.{column}"

"""A dataflow as text, drawn from its document (``Dataflow.document``)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

from stateformat.documents import in_order
from stateformat.words import edge_of, field, label, mode_of, named, operator_of, plural

Json = Mapping[str, Any]
WIDTH: Final = 100


def described(document: Json) -> str:
    """Return the operators in order, each after its inputs, with its edges, states and columns."""
    return "\n".join(_lines(document))


def _lines(document: Json) -> Iterator[str]:
    operators = in_order(document["operators"], document["edges"])
    counts = f"{plural(len(operators), 'operator')}, {plural(len(document['states']), 'state')}"
    yield f"Dataflow {named(document['job_id'], document['job_name'])}: {counts}"
    inputs, states = _by(document["edges"], "to"), _by(document["states"], "operator")
    for operator in operators:
        yield ""
        yield f"{operator_of(operator)}: {_size(operator)}"
        yield from (f"  <- {edge_of(edge)}" for edge in inputs.get(operator["uid"], ()))
        yield from (line for state in states.get(operator["uid"], ()) for line in _state(state))
    for sentence in document["warnings"]:
        yield ""
        yield from textwrap.wrap(f"Warning: {label(sentence)}", WIDTH, break_on_hyphens=False)


def _by(members: list[Json], name: str) -> dict[str, list[Json]]:
    found: dict[str, list[Json]] = {}
    for member in members:
        found.setdefault(member[name], []).append(member)
    return found


def _size(operator: Json) -> str:
    facts = [plural(operator["parallelism"], "subtask"), f"max {operator['max_parallelism']}"]
    if operator.get("chain"):
        facts.append(f"chain {label(operator['chain'])}")
    if operator["coordinator"]:
        facts.append("coordinator")
    return ", ".join(facts)


def _state(state: Json) -> Iterator[str]:
    kind = mode_of(state)
    by = f" by {', '.join(map(label, state['key_columns']))}" if state["key_columns"] else ""
    columns = ", ".join(map(field, state["schemas"][-1]["fields"]))
    mode = f" ({kind.replace('_', ' ')}{by})" if kind != state["name"] else ""
    text = f"{label(state['name'])}{mode}{': ' if columns else ''}{columns}"
    yield from textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)

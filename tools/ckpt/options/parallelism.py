"""The options ``--parallelism`` and ``--operator-parallelism UID=N``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .common import operator_uid

if TYPE_CHECKING:
    from stateformat.reading import Checkpoint

F = TypeVar("F", bound=Callable[..., Any])


class PairType(click.ParamType[tuple[str, str]]):
    """Parses ``NAME=VALUE``. The last ``=`` divides, since a uid may contain one."""

    def __init__(self, form: str) -> None:
        self.name = form

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Name and value, neither empty."""
        if isinstance(value, tuple):
            return value
        name, _, given = str(value).rpartition("=")
        if not name or not given:
            self.fail(f"{value!r} is not of the form {self.name}", param, ctx)
        return name, given


class OperatorParallelism(PairType):
    """Parses ``UID=N`` with N at least 1."""

    def __init__(self) -> None:
        super().__init__("UID=N")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Operator and number."""
        uid, given = super().convert(value, param, ctx)
        if not given.isascii() or not given.isdigit() or int(given) < 1:
            self.fail(f"{given!r} in {value!r} is no number of subtasks; give at least 1", param, ctx)
        return uid, int(given)


def parallelism_options(function: F) -> F:
    """Adds both options to a command."""
    function = click.option(
        "--operator-parallelism",
        multiple=True,
        type=OperatorParallelism(),
        metavar="UID=N",
        help="Subtasks of one operator, by uid or name; repeatable. Goes before --parallelism.",
    )(function)
    return click.option(
        "--parallelism",
        type=click.IntRange(min=1),
        metavar="N",
        help="Subtasks of every operator that has not fully finished.",
    )(function)


def per_operator(checkpoint: Checkpoint, pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """``--operator-parallelism`` by uid; ``InvalidInput`` for an unknown operator."""
    return {operator_uid(checkpoint, given): number for given, number in pairs}

"""``--transform`` and ``--rename-column``: which function is applied to which state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from .functions import FunctionName, load_function
from .options import PairType

if TYPE_CHECKING:
    from stateformat.backends.rewrite import Transform
    from stateformat.model import State
    from stateformat.reading import Checkpoint


class TransformName(NamedTuple):
    """A function and the state that it is applied to."""

    state: str | None
    """As the user typed it; None for the only state there is."""
    function: FunctionName


class TransformType(click.ParamType[TransformName]):
    """Parses ``MODULE:FUNCTION`` and ``OPERATOR/STATE=MODULE:FUNCTION``; the last ``=`` divides."""

    name = "[OPERATOR/STATE=]MODULE:FUNCTION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> TransformName:
        state, divider, function = str(value).rpartition("=")
        if divider and not state:
            self.fail(f"{value!r} names no state before its '='; give {self.name}", param, ctx)
        try:
            return TransformName(state or None, FunctionName.parse(function, "fixes:correct or fixes.py:correct"))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def transform_options(function: Any) -> Any:
    """Adds ``--transform``, ``--where``, ``--rename-column`` and ``--rekey`` to a command.

    The command gets a :class:`Chosen` as ``chosen``.
    """

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        names = ("transform", "where", "operator", "state")
        return function(*args, chosen=Chosen(*(options.pop(name) for name in names)), **options)

    for option in (
        click.option("--rekey", is_flag=True, help="The functions change keys: hash their rows to key groups again."),
        click.option(
            "--rename-column",
            multiple=True,
            type=PairType("[OPERATOR/STATE.]OLD=NEW"),
            metavar="[OPERATOR/STATE.]OLD=NEW",
            help="Rename a column of a state; its values keep their field id. Repeatable.",
        ),
        click.option(
            "--where",
            multiple=True,
            metavar="CONDITION",
            help="Delete the rows for which this is true: SQL over the columns, by DuckDB (extra sql), in each state "
            "that has them. Repeatable.",
        ),
        click.option("--state", metavar="NAME", help="The state for --where, or for --transform without a name."),
        click.option("--operator", metavar="UID", help="The operator of these states, by uid or name."),
        click.option(
            "--transform",
            multiple=True,
            type=TransformType(),
            metavar="[OPERATOR/STATE=]MODULE:FUNCTION",
            help="Apply a function to the rows of a state; repeatable.",
        ),
    ):
        run = option(run)
    return run


class Chosen(NamedTuple):
    """What a command line names to be changed."""

    named: Sequence[TransformName]
    where: Sequence[str]
    operator: str | None
    state: str | None

    def states(self, checkpoint: Checkpoint) -> list[State]:
        """The states whose rows are the user's, of the operator and the state, if these are given.

        Raises ``InvalidInput`` for those that are not there.
        """
        from stateformat.errors import ErrorKind, InvalidInput
        from stateformat.model import Mode, known_names

        uid = None if self.operator is None else checkpoint.operator_uid(self.operator)
        closed = {Mode.COMMITTABLES, Mode.IN_FLIGHT, Mode.PROGRESS}
        states = [one for one in checkpoint.record.states if one.mode not in closed and uid in (None, one.operator)]
        found = [one for one in states if self.state in (None, one.name)]
        if not found:
            names = [one.name for one in states]
            message = f"checkpoint {checkpoint.id} has no state {self.state!r}; {known_names(names, self.state or '')}"
            raise InvalidInput(message, kind=ErrorKind.UNKNOWN_STATE, state=self.state)
        return found


def purges_of(
    checkpoint: Checkpoint, chosen: Chosen, follows: Callable[[State], bool]
) -> dict[tuple[str, str], Transform]:
    """The transforms that delete rows, in each state that has the columns of a condition.

    ``follows``: whether a state's rows follow from those of another. Raises ``InvalidInput`` for a
    condition that is none for any state.
    """
    import pyarrow as pa

    from stateformat.backends.querying import Purge
    from stateformat.backends.rewrite import Transform
    from stateformat.errors import InvalidInput
    from stateformat.schema import KEY_GROUP, segment_schema

    conditions: dict[tuple[str, str], list[str]] = {}
    for condition in chosen.where:
        refused: InvalidInput | None = None
        bound = False
        for state in chosen.states(checkpoint):
            # One that the user names is refused later, with the state to change instead.
            if follows(state) and chosen.state is None:
                continue
            names = [item for item in segment_schema(state) if item.name != KEY_GROUP.name]
            try:
                Purge((condition,))(pa.schema(names).empty_table())
            except InvalidInput as error:
                refused = refused or error
            else:
                bound = True
                conditions.setdefault((state.operator, state.name), []).append(condition)
        if refused is not None and not bound:
            raise refused
    return {
        place: Transform(Purge(tuple(some)), name=f"--where {' or '.join(some)}") for place, some in conditions.items()
    }


def transforms_of(
    checkpoint: Checkpoint,
    chosen: Chosen,
    renames: Sequence[tuple[str, str]],
    *,
    rekey: bool,
    follows: Callable[[State], bool] = lambda _: False,
) -> dict[tuple[str, str], Transform]:
    """The transforms by uid and state, with their functions imported.

    Raises ``InvalidInput`` for states and columns that are not there and functions that cannot be
    had, and a usage error for options that contradict each other.
    """
    from stateformat.backends.rewrite import Transform
    from stateformat.model import Mode

    functions: dict[tuple[str, str], FunctionName] = {}
    if (chosen.operator or chosen.state) and not (chosen.named or chosen.where):
        raise click.UsageError("--operator and --state say where --where and --transform apply; give one of these")
    for one in chosen.named:
        if one.state is not None:
            state = _state(checkpoint, one.state)
        else:
            among = [own for own in chosen.states(checkpoint) if chosen.state is not None or not follows(own)]
            state = among[0] if len(among) == 1 else _only_state(checkpoint, "OPERATOR/STATE=MODULE:FUNCTION")
        place = state.operator, state.name
        if place in functions:
            raise click.UsageError(
                f"--transform names two functions for state {'/'.join(place)}: {functions[place]} and {one.function}; "
                "give one that calls the other"
            )
        functions[place] = one.function
    columns: dict[tuple[str, str], dict[str, str]] = {}
    for given, new in renames:
        place, old = _column(checkpoint, given, list(functions))
        columns.setdefault(place, {})[old] = new
    keyed = {place for place in functions if checkpoint.record.state(*place).mode is Mode.KEYED}
    if rekey and not keyed:
        raise click.UsageError("--rekey is for a --transform of keyed state; leave it out")
    made = purges_of(checkpoint, chosen, follows)
    for place in dict.fromkeys((*functions, *columns)):
        if place in made:
            raise click.UsageError(
                f"both --where and {functions.get(place, '--rename-column')} are for state {'/'.join(place)}; delete "
                "first, and then rewrite the copy"
            )
        name = functions.get(place)
        function = None if name is None else load_function(name)
        made[place] = Transform(
            function, columns.get(place, {}), rekey and place in keyed, "" if name is None else str(name)
        )
    return made


def renames_of(
    checkpoint: Checkpoint, renames: Sequence[tuple[str, str]]
) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """The new uids by old ones, and the new names of states by uid and old name, of ``--rename``.

    Raises ``InvalidInput`` for what is not there, and for what may be an operator or a state.
    """
    from stateformat.states import labels_of, named

    operators: dict[str, str] = {}
    names: dict[tuple[str, str], str] = {}
    labels = labels_of(checkpoint.graph.operators)
    called = {operator.name for operator in checkpoint.graph.operators}
    for old, new in renames:
        found = named(old, checkpoint.record.states, labels)
        if found is not None and found.state is None:
            operators[found.operator] = new
        elif found is None and (old in called or "/" not in old):
            operators[checkpoint.operator_uid(old)] = new
        else:
            state = _state(checkpoint, old)
            names[state.operator, state.name] = new
    return operators, names


def _state(checkpoint: Checkpoint, given: str) -> State:
    """The state of ``OPERATOR/STATE``, or of ``STATE`` where only one has this name."""
    from stateformat.errors import ErrorKind, InvalidInput
    from stateformat.model import known_names

    states = _called(checkpoint, given)
    if len(states) == 1:
        return states[0]
    known = [f"{state.operator}/{state.name}" for state in states or checkpoint.record.states]
    if states:
        message = f"{len(states)} states are called {given!r}; give one of {', '.join(known)}"
    else:
        message = f"checkpoint {checkpoint.id} has no state {given!r}; {known_names(known, given)}"
    raise InvalidInput(message, kind=ErrorKind.UNKNOWN_STATE, state=given)


def _called(checkpoint: Checkpoint, given: str) -> list[State]:
    """The states that users may call so: by operator and name, else by the name alone."""
    from stateformat.states import labels_of, named

    found = named(given, checkpoint.record.states, labels_of(checkpoint.graph.operators))
    if found is not None and found.state is not None and found.column is None:
        return [checkpoint.record.state(found.operator, found.state)]
    return [state for state in checkpoint.record.states if state.name == given]


def _only_state(checkpoint: Checkpoint, form: str) -> State:
    """The only state with rows that a function may be applied to; else a usage error.

    ``form`` is how the option names a state.
    """
    import pyarrow.compute as pc

    from stateformat.model import Mode

    handles = checkpoint.handles
    full = handles.filter(pc.greater(handles["rows"], 0))
    rows = set(zip(full["operator"].to_pylist(), full["state"].to_pylist(), strict=True))
    closed = {Mode.COMMITTABLES, Mode.IN_FLIGHT, Mode.PROGRESS}
    states = [state for state in checkpoint.record.states if state.mode not in closed]
    states = [state for state in states if (state.operator, state.name) in rows]
    if len(states) == 1:
        return states[0]
    names = ", ".join(f"{state.operator}/{state.name}" for state in states) or "none"
    raise click.UsageError(
        f"checkpoint {checkpoint.id} has {len(states)} states with rows to transform ({names}); say which, as in {form}"
    )


def _column(checkpoint: Checkpoint, given: str, transformed: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], str]:
    """The state and column of ``OPERATOR/STATE.COLUMN``, or of ``COLUMN`` where it is clear."""
    from stateformat.states import labels_of, named

    found = named(given, checkpoint.record.states, labels_of(checkpoint.graph.operators))
    if found is not None and found.state is not None and found.column is not None:
        return (found.operator, found.state), found.column
    alone = [state.name for state in checkpoint.record.states if given.startswith(f"{state.name}.")]
    if alone:
        longest = max(alone, key=len)
        state = _state(checkpoint, longest)
        return (state.operator, state.name), given[len(longest) + 1 :]
    if len(transformed) == 1:
        return transformed[0], given
    state = _only_state(checkpoint, "OPERATOR/STATE.OLD=NEW")
    return (state.operator, state.name), given

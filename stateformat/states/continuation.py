"""The columns of a state when the program that declares it changes (SPEC.md section 5.7).

A program names renamed and dropped columns in :class:`Changes` at every start: it may start from
checkpoints made before the change, after it, and after a rollback. A change that ``State.schemas``
shows as already made has no effect:

- a rename, if a field had the old name in one schema and the new name in a later one;
- a drop, if a field of that name is missing from a later schema.

So a dropped or renamed column that is declared again is a new field with a new id. A new state of a
program with changes begins with two schemas, before and after them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from ..errors import ErrorKind, InvalidInput, InvalidState
from ..model import Field, FieldType, SchemaVersion, State
from ..schema import children, nesting
from ..ttl import NO_TIME_US, TTL_COLUMN, clock_us
from .evolution import evolution_faults, with_fields

_Fields = Sequence[Field]


@dataclass(frozen=True)
class Changes:
    """Renamed and dropped columns; a nested one as ``"person.age"`` or ``"people.element.age"``."""

    renames: Mapping[str, str] = field(default_factory=dict)
    """From old names to new ones."""
    drops: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.renames or self.drops)


class EvolvedState(NamedTuple):
    """A state after its changes."""

    state: State
    dropped: tuple[str, ...] = ()
    """The columns that the changes drop now, by their saved names."""


def new_state(declared: State, changes: Changes) -> State:
    """Return a state that no checkpoint has, with the schema before ``changes`` as its first."""
    if not changes:
        return declared
    _check(declared, changes)
    blank = replace(declared, schemas=(SchemaVersion(1, ()),), last_field_id=0)
    matching = _Matching(0)
    fields = matching.fields([], _before(declared.current.fields, _Level(changes)), _Level(Changes()), "")
    before = replace(blank, schemas=(SchemaVersion(1, fields),), last_field_id=matching.last)
    try:
        return evolve_state(before, declared, changes).state
    except InvalidState as error:
        raise InvalidInput(str(error), kind=error.kind) from error


def evolve_state(
    saved: State, declared: State, changes: Changes, *, ttl_start_us: int | None = None, check: bool = True
) -> EvolvedState:
    """Return the saved state with the columns declared now; field ids follow names and ``changes``.

    If nothing changes, the state is ``saved`` itself. If its rows begin to expire (a ttl that is
    new, or new again after its column was dropped), they count as last accessed at
    ``ttl_start_us``, on the clock of the ttl; without it, when its clock first has a time.

    Raises ``InvalidInput`` for changes that contradict the columns and for names that the state
    never had, and, if ``check``, ``InvalidState`` (kind ``SCHEMA_CANNOT_EVOLVE``) for what SPEC.md
    section 5.7 forbids.
    """
    _check(declared, changes)
    # A name that a later rename gives may be newer than the checkpoint.
    check_columns_known(saved, {*changes.renames, *changes.drops} - {*changes.renames.values()}, changes)
    matching = _Matching(saved.last_field_id)
    schemas = [schema.fields for schema in saved.schemas]
    fields = matching.fields(schemas, declared.current.fields, _Level(changes), "")
    dropped = tuple(matching.dropped)
    if declared.ttl is not None:
        start = NO_TIME_US if ttl_start_us is None else clock_us(ttl_start_us)
        fields = tuple(_begun(item, saved, start) if item.name == TTL_COLUMN else item for item in fields)
    state = with_fields(saved, fields, matching.last, declared.ttl)
    if state is saved:
        return EvolvedState(saved, dropped)
    faults = evolution_faults(saved, state) if check else []
    if faults:
        raise InvalidState(
            f"state {saved.name!r} of {saved.operator!r} cannot evolve: {'; '.join(faults)}",
            kind=ErrorKind.SCHEMA_CANNOT_EVOLVE,
            faults=faults,
        )
    return EvolvedState(state, dropped)


def _begun(item: Field, saved: State, start_us: int) -> Field:
    """Return the column of the last access: if it is new, older rows hold ``start_us``."""
    known = any(item.id == field.id for schema in saved.schemas for field in schema.fields)
    return item if known else replace(item, default=str(start_us))


def check_columns_known(state: State, columns: Iterable[str], changes: Changes | None = None) -> None:
    """Raise ``InvalidInput`` for a column that no schema of the state has had."""
    level = _Level(changes or Changes())
    known = {name for schema in state.schemas for name in _names(schema.fields, level)}
    unknown = sorted({*columns} - known)
    # If the first schemas are no longer kept, one of them may have had the column.
    if unknown and state.schemas[0].id == 1:
        had = {name for schema in state.schemas for name in full_names(schema.fields)}
        raise InvalidInput(
            f"state {state.name!r} of operator {state.operator!r} never had a column {unknown[0]!r} that could be "
            f"renamed or dropped; its columns have been {', '.join(sorted(had)) or 'none'}",
            operator=state.operator,
            state=state.name,
            column=unknown[0],
        )


def _check(declared: State, changes: Changes) -> None:
    """Raise ``InvalidInput`` for changes that contradict each other, or the declared columns."""
    where = f"state {declared.name!r} of operator {declared.operator!r}"
    names = {*_names(declared.current.fields, _Level(changes))}
    keys = {*declared.key_columns, "_map_key"} & {*changes.renames, *changes.renames.values(), *changes.drops}
    if keys:
        raise InvalidInput(f"{where} renames or drops {sorted(keys)[0]!r}, which is a key; keys never change")
    for old, new in changes.renames.items():
        if old == new:
            raise InvalidInput(f"{where} renames column {old!r} to {new!r}, its own name; leave that out")
        if new not in names and new not in changes.drops and new not in changes.renames:
            raise InvalidInput(
                f"{where} renames column {old!r} to {new!r}, but declares no such column; its columns are "
                f"{', '.join(sorted(names))}"
            )
    if len({*changes.renames.values()}) < len(changes.renames):
        raise InvalidInput(f"{where} renames two columns to one: {dict(changes.renames)}")


@dataclass(frozen=True)
class _Level:
    """The changes within one struct, or at the top."""

    changes: Changes
    prefixes: tuple[str, ...] = ("",)
    """Prefixes of its fields' full names; several if the struct was renamed."""

    @cached_property
    def renames(self) -> Mapping[str, str]:
        """The renames of fields of this level, by their own names."""
        found = {}
        for old, new in self.changes.renames.items():
            before, after = self._own(old), self._own(new)
            if before is not None and after is not None:
                found[before] = after
        return found

    @cached_property
    def drops(self) -> frozenset[str]:
        """The drops of fields of this level, by their own names."""
        return frozenset(own for name in self.changes.drops if (own := self._own(name)) is not None)

    def earlier(self, name: str) -> set[str]:
        """Return the name, and those that renames turn into it."""
        return _reached(name, {new: old for old, new in self.renames.items()})

    def later(self, name: str) -> set[str]:
        """Return the name, and those that renames turn it into."""
        return _reached(name, self.renames)

    def within(self, name: str) -> _Level:
        """Return the level of a struct, list or map that has, had or will have this name."""
        names = sorted(self.earlier(name) | self.later(name))
        return _Level(self.changes, tuple(f"{prefix}{one}." for prefix in self.prefixes for one in names))

    def _own(self, name: str) -> str | None:
        longest = max((prefix for prefix in self.prefixes if name.startswith(prefix)), key=len, default=None)
        return None if longest is None else name[len(longest) :]


def _reached(name: str, steps: Mapping[str, str]) -> set[str]:
    found = {name}
    while name in steps and steps[name] not in found:
        name = steps[name]
        found.add(name)
    return found


def full_names(fields: _Fields) -> set[str]:
    """Return the full names of fields, nested ones too."""
    return {*_names(fields, _Level(Changes()))}


def _names(fields: _Fields, level: _Level) -> Iterator[str]:
    """Yield the full names of fields, nested ones too."""
    for item in fields:
        yield from (prefix + item.name for prefix in level.prefixes)
        yield from _names(children(item), level.within(item.name))


class _Matching:
    """Assigns ids to declared fields."""

    def __init__(self, last: int) -> None:
        self.last = last
        """The greatest id given so far."""
        self.dropped: list[str] = []
        """Full names of the columns in ``drops`` that are dropped now."""

    def fields(self, before: Sequence[_Fields], now: _Fields, level: _Level, saved_as: str) -> tuple[Field, ...]:
        """Return the fields of a level; ``before``: of each schema, oldest first."""
        declared = {item.name for item in now}
        taken: dict[str, Field] = {}
        # A field that is renamed takes the place of one that has its name.
        for item in sorted(before[-1] if before else (), key=lambda item: item.name in level.renames):
            place = self._place(item, before, declared, level, saved_as)
            if place is not None:
                taken[place] = item
        return tuple(self._field(item, taken.get(item.name), before, level, saved_as) for item in now)

    def _place(
        self, item: Field, before: Sequence[_Fields], declared: Collection[str], level: _Level, saved_as: str
    ) -> str | None:
        """Return the name under which a saved field goes on; None if it is dropped."""
        name = target = item.name
        if name in level.renames and not _was_renamed(name, before, level):
            target = _target(name, before, declared, level)
            gone = target not in declared
        else:
            gone = name not in declared or (name in level.drops and not _is_another(item, before, level))
        if gone and level.drops & {name, target}:
            self.dropped.append(saved_as + name)
        return None if gone else target

    def _field(
        self, item: Field, saved: Field | None, before: Sequence[_Fields], level: _Level, saved_as: str
    ) -> Field:
        if saved is None:
            self.last += 1
            return replace(item, id=self.last, type=self._type(item, [], level, ""))
        inner = [
            children(one)
            for fields in before
            for one in fields
            if one.id == saved.id and not isinstance(one.type, str) and one.type[0] == saved.type[0]
        ]
        kind = self._type(item, inner, level, f"{saved_as}{saved.name}.")
        default = saved.default if item.default is None else item.default
        return replace(item, id=saved.id, type=kind, default=default)

    def _type(self, item: Field, before: Sequence[_Fields], level: _Level, saved_as: str) -> FieldType:
        if isinstance(item.type, str):
            return item.type
        return nesting(item.type, self.fields(before, children(item), level.within(item.name), saved_as))


def _was_renamed(name: str, before: Sequence[_Fields], level: _Level) -> bool:
    """Return whether some field went from this name, or an earlier one, to a later one."""
    old, new = level.earlier(name), level.later(name)
    names: dict[int, str] = {}
    for fields in before:
        for item in fields:
            former = names.get(item.id)
            if former is not None and former != item.name and item.name in new and item.name != name:
                return True
            if item.name in old:
                names[item.id] = item.name
    return False


def _is_another(item: Field, before: Sequence[_Fields], level: _Level) -> bool:
    """Return whether a field came to its name after the field of that name was dropped."""
    earlier = level.earlier(item.name)
    bore: set[int] = set()
    for fields in before:
        if bore - {one.id for one in fields}:
            return True
        bore |= {one.id for one in fields if one.name in earlier}
        if any(one.id == item.id and one.name in earlier - {item.name} for one in fields):
            return True
    return False


def _target(name: str, before: Sequence[_Fields], declared: Collection[str], level: _Level) -> str:
    """Return a field's name now, skipping names under which no checkpoint was made."""
    had = {item.name for fields in before for item in fields}
    seen = {name}
    target = level.renames[name]
    while target in level.renames and not (target in declared and target in had):
        seen.add(target)
        if level.renames[target] in seen:
            break
        target = level.renames[target]
    return target


def _before(now: _Fields, level: _Level) -> tuple[Field, ...]:
    """Return the fields as they would have been before the changes; their ids mean nothing."""
    names = {item.name for item in now}
    former: dict[str, str] = {}
    for old in level.renames:
        if old not in level.renames.values():
            former[_target(old, (), (), level)] = old
    circles = {*level.renames} - {name for old in former.values() for name in level.later(old)}
    former |= {level.renames[old]: old for old in circles}
    taken = {*former.values()}
    made = [
        replace(item, name=former.get(item.name, item.name), type=_before_type(item, level))
        for item in now
        # A field that has another field's former name came later.
        if item.name in former or item.name not in taken
    ]
    inner = tuple(
        f"{name}." for item in now if children(item) for name in level.earlier(item.name) | level.later(item.name)
    )
    gone = {old for new, old in former.items() if new not in names} | level.drops
    known = {item.name for item in made}
    made += [
        Field(0, name, "binary", nullable=True)
        for name in sorted(gone - known)
        if not name.startswith(inner) and name not in level.renames.values()
    ]
    return tuple(made)


def _before_type(item: Field, level: _Level) -> FieldType:
    if isinstance(item.type, str):
        return item.type
    return nesting(item.type, _before(children(item), level.within(item.name)))

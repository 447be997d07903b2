"""How the schema of a state may change (SPEC.md section 5.7). Fields are matched by id."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import pyarrow as pa

from ..errors import ErrorKind, InvalidInput, InvalidState
from ..model import Field, FieldType, SchemaVersion, State
from ..schema import INTEGERS, arrow_type, children, make_fields, nesting
from ..ttl import NO_TIME_US, TTL_COLUMN, Ttl, clock_us


def evolve(
    previous: State,
    columns: pa.Schema,
    *,
    defaults: Mapping[str, str] | None = None,
    renames: Mapping[str, str] | None = None,
    ttl: Ttl | None = None,
    check: bool = True,
) -> State:
    """Return the state with ``columns`` as newest schema; ``previous`` itself if nothing changes.

    Ids follow names and ``renames`` (old → new); a dropped column that comes back gets a new id.
    Raises ``InvalidState`` (SCHEMA_CANNOT_EVOLVE) with every forbidden change unless ``check`` is
    False, and ``InvalidInput`` for renames of unknown columns.
    """
    renames = renames or {}
    names = [item.name for item in previous.current.fields]
    _check_renames(previous, names, columns.names, renames)
    # A column whose name another one takes is dropped, whatever the order.
    now = {name: renames.get(name, name) for name in names if name in renames or name not in renames.values()}
    paths = _paths(previous.current.fields)
    known = {(now[path[0]], *path[1:]): field_id for path, field_id in paths if path[0] in now}
    all_defaults = {now[item.name]: item.default for item in previous.current.fields if item.name in now}
    all_defaults |= dict(defaults or {})
    given = {name: text for name, text in all_defaults.items() if text is not None and name in columns.names}
    fields, last = make_fields(columns, defaults=given, last_field_id=previous.last_field_id, known_ids=known)
    state = with_fields(previous, fields, last, ttl)
    faults = evolution_faults(previous, state) if check and state is not previous else []
    if faults:
        raise InvalidState(
            f"state {previous.name!r} of {previous.operator!r} cannot evolve: {'; '.join(faults)}",
            kind=ErrorKind.SCHEMA_CANNOT_EVOLVE,
            faults=faults,
        )
    return state


def with_fields(saved: State, fields: tuple[Field, ...], last_field_id: int, ttl: Ttl | None) -> State:
    """Return the state with these fields as its newest schema, and this ttl; ``saved`` if equal."""
    if ttl != saved.ttl:
        # A time of another clock means nothing on this one.
        now_us = saved.ttl_now_us if ttl and saved.ttl and ttl.clock == saved.ttl.clock else None
        saved = replace(saved, ttl=ttl, ttl_now_us=now_us)
    if fields == saved.current.fields:
        return saved
    version = SchemaVersion(saved.current.id + 1, fields)
    return replace(saved, schemas=(*saved.schemas, version), last_field_id=last_field_id)


def _check_renames(previous: State, before: list[str], after: list[str], renames: Mapping[str, str]) -> None:
    for old, new in renames.items():
        if old not in before:
            raise InvalidInput(f"cannot rename {old!r}: state {previous.name!r} has no such column now")
        if new not in after:
            raise InvalidInput(f"cannot rename {old!r} to {new!r}: that is none of the columns given, {after}")
    if len(set(renames.values())) < len(renames):
        raise InvalidInput(f"two columns of state {previous.name!r} would have one name: {dict(renames)}")


def evolution_faults(saved: State, wanted: State) -> list[str]:
    """Return why ``wanted``'s current schema cannot read what ``saved`` wrote, a sentence each."""
    faults = [
        f"{what} was {before} and would be {after}"
        for what, before, after in (
            ("mode", saved.mode, wanted.mode),
            ("kind", saved.kind, wanted.kind),
            ("clock", saved.clock, wanted.clock),
            ("key columns", list(saved.key_columns), list(wanted.key_columns)),
        )
        if before != after
    ]
    faults += _clock_faults(saved, wanted)
    fixed = {*saved.key_columns, "_map_key"}
    for version in saved.schemas:
        old = {item.id: item for item in version.fields}
        new = {item.id: item for item in wanted.current.fields}
        for item in new.values():
            if item.id not in old:
                if not item.nullable and item.default is None:
                    if item.name == TTL_COLUMN and wanted.ttl is not None:
                        what = "its rows begin to expire, and nothing says from when they count"
                        faults.append(f"{what}; give defaults={{{TTL_COLUMN!r}: '<microseconds>'}}")
                        continue
                    faults.append(f"new column {item.name!r} is neither nullable nor has a default")
            elif old[item.id].name in fixed and replace(old[item.id], nullable=True) != replace(item, nullable=True):
                faults.append(
                    f"key column {old[item.id].name!r} was {type_text(old[item.id].type)} and would be {item.name!r} "
                    f"{type_text(item.type)}; keys never change"
                )
            else:
                faults += widening_faults(old[item.id], item)
        faults += _default_faults(old, saved, wanted)
        faults += [
            f"key column {item.name!r} would be dropped"
            for item in old.values()
            if item.name in fixed and item.id not in new
        ]
    return list(dict.fromkeys(faults))


def _clock_faults(saved: State, wanted: State) -> list[str]:
    before, after = saved.ttl_field, wanted.ttl_field
    if not (before and after and saved.ttl and wanted.ttl and before.id == after.id):
        return []
    if saved.ttl.clock == wanted.ttl.clock:
        return []
    was, would = (ttl.clock.replace("_", " ") for ttl in (saved.ttl, wanted.ttl))
    fault = f"its rows expire by {was} and would by {would}, in which their times mean nothing"
    return [f"{fault}; with {TTL_COLUMN!r} given up as a column all of them begin anew"]


def _default_faults(old: Mapping[int, Field], saved: State, wanted: State) -> list[str]:
    now = {item.id: item for item in saved.current.fields}
    return [
        f"column {item.name!r} has the default {now[item.id].default!r} in rows from before it and would have "
        f"{item.default!r}"
        for item in wanted.current.fields
        if item.id not in old and item.id in now and now[item.id].default != item.default
    ]


def widening_faults(old: Field, new: Field) -> list[str]:
    """Return why a field cannot hold what it held before, a sentence each. Names may differ."""
    if old.nullable and not new.nullable:
        return [f"column {old.name!r} may hold nulls and would be declared without"]
    if old.type == new.type:
        return []
    if isinstance(old.type, str) and isinstance(new.type, str):
        before, after = arrow_type(old.type), arrow_type(new.type)
        fine = (
            (old.type in INTEGERS and new.type in INTEGERS and INTEGERS.index(old.type) < INTEGERS.index(new.type))
            or (old.type, new.type) == ("float", "double")
            or (
                pa.types.is_decimal128(before)
                and pa.types.is_decimal128(after)
                and before.scale == after.scale
                and before.precision < after.precision
            )
        )
        return [] if fine else [f"column {old.name!r} was {old.type} and would be {new.type}, which is no widening"]
    if isinstance(old.type, str) or isinstance(new.type, str) or old.type[0] != new.type[0]:
        return [f"column {old.name!r} was {type_text(old.type)} and would be {type_text(new.type)}"]
    before_by_id = {item.id: item for item in children(old)}
    faults = []
    for item in children(new):
        if item.id in before_by_id:
            faults += widening_faults(before_by_id[item.id], item)
        elif old.type[0] != "struct" or not item.nullable:
            faults.append(f"nested field {old.name}.{item.name} is new and cannot be")
    return faults


def _paths(fields: Iterable[Field], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    for item in fields:
        path = (*above, item.name)
        yield path, item.id
        yield from _paths(children(item), path)


def type_text(kind: FieldType) -> str:
    """Return a type as Arrow writes it."""
    return str(arrow_type(kind))


def rewritten(previous: State, columns: pa.Schema, *, renames: Mapping[str, str] | None = None) -> State:
    """Return the state once all its rows are rewritten with ``columns``.

    It is ``previous`` itself if nothing changes.

    Ids follow names and ``renames`` (old → new) if the type is equal or widens; the field then
    keeps its default, and holds no nulls if it held none before or ``columns`` says so. Every other
    column is a new field. Older schemas are kept, because they show earlier names, if they could
    still be read and no name is new: a program may give a new column any default. Raises
    ``InvalidInput`` for renames of unknown columns.
    """
    renames = renames or {}
    saved = previous.current.fields
    names = [item.name for item in saved]
    _check_renames(previous, names, columns.names, renames)
    now = {name: renames.get(name, name) for name in names if name in renames or name not in renames.values()}
    known = {(now[path[0]], *path[1:]): field_id for path, field_id in _paths(saved) if path[0] in now}
    before = {item.id: item for item in saved}

    def made() -> tuple[tuple[Field, ...], int]:
        return make_fields(columns, defaults={}, last_field_id=previous.last_field_id, known_ids=known)

    retyped = {item.name for item in made()[0] if item.id in before and _cannot_widen(before[item.id], item)}
    known = {path: field_id for path, field_id in known.items() if path[0] not in retyped}
    given, last = made()
    fields = tuple(_kept(before[item.id], item) if item.id in before else item for item in given)
    if fields == saved:
        return previous
    times = previous.ttl_field
    expires = times is not None and any(item.id == times.id and item.name == TTL_COLUMN for item in fields)
    state = replace(
        previous,
        schemas=(SchemaVersion(previous.current.id + 1, fields),),
        key_columns=tuple(now.get(name, name) for name in previous.key_columns),
        last_field_id=last,
        ttl=previous.ttl if expires else None,
        ttl_now_us=previous.ttl_now_us if expires else None,
    )
    if any(item.id not in before and item.name not in names for item in fields) or evolution_faults(previous, state):
        return state
    return replace(state, schemas=(*previous.schemas, *state.schemas))


def _cannot_widen(old: Field, new: Field) -> bool:
    return bool(widening_faults(old, _with_nulls(new)))


def _with_nulls(item: Field) -> Field:
    """Return the field, nullable at every depth."""
    inner = tuple(map(_with_nulls, children(item)))
    kind = item.type if isinstance(item.type, str) else nesting(item.type, inner)
    return replace(item, nullable=True, type=kind)


def _kept(old: Field, new: Field) -> Field:
    """Return a field that keeps its id: without nulls if either is, and with its default."""
    inside = {item.id: item for item in children(old)}
    inner = tuple(_kept(inside[item.id], item) if item.id in inside else item for item in children(new))
    kind = new.type if isinstance(new.type, str) else nesting(new.type, inner)
    return replace(new, nullable=old.nullable and new.nullable, default=old.default, type=kind)


# ---- a user's change to a state ------------------------------------------------------------------
#
# The columns of a state when the program that declares it changes (SPEC.md section 5.7).
#
# A program names renamed and dropped columns in :class:`Changes` at every start: it may start from
# checkpoints made before the change, after it, and after a rollback. A change that
# ``State.schemas`` shows as already made has no effect:
#
# - a rename, if a field had the old name in one schema and the new name in a later one;
# - a drop, if a field of that name is missing from a later schema.
#
# So a dropped or renamed column that is declared again is a new field with a new id. A new state of
# a program with changes begins with two schemas, before and after them.


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

"""How the schema of a state may change (SPEC.md section 5.7). Fields are matched by id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import pyarrow as pa

from ..errors import ErrorKind, InvalidInput, InvalidState
from ..model import Field, FieldType, SchemaVersion, State
from ..schema import INTEGERS, arrow_type, children, make_fields, nesting
from ..ttl import TTL_COLUMN, Ttl


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

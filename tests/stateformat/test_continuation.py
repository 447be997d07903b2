"""What becomes of columns as a program goes from version to version, and back: names and ids,
without any rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest

from stateformat.errors import InvalidInput, InvalidState
from stateformat.model import Field, State
from stateformat.schema import children
from stateformat.states import Changes, evolution_faults, value_state
from stateformat.states.continuation import check_columns_known, evolve_state, new_state

LONG = pa.int64()


@dataclass(frozen=True)
class Version:
    """A version of a program: its columns, and what it says of earlier ones."""

    columns: str | Mapping[str, pa.DataType]
    renames: Mapping[str, str] = field(default_factory=dict)
    drops: tuple[str, ...] = ()

    def declared(self) -> State:
        columns = dict.fromkeys(self.columns.split(), LONG) if isinstance(self.columns, str) else self.columns
        return value_state("op", "s", keys={"k": LONG}, values=columns)

    @property
    def changes(self) -> Changes:
        return Changes(self.renames, frozenset(self.drops))

    def start(self, saved: State | None = None) -> State:
        """The state after a start; after a second one it must be the same."""
        state = new_state(self.declared(), self.changes) if saved is None else self.go_on(saved)
        assert self.go_on(state) is state
        assert (
            evolution_faults(State(**_fields(state, schemas=state.schemas[:-1])), state) == [] or not state.schemas[:-1]
        )
        return state

    def go_on(self, saved: State) -> State:
        return evolve_state(saved, self.declared(), self.changes).state


def _fields(state: State, **changed: Any) -> dict[str, Any]:
    names = ("operator", "name", "mode", "kind", "key_columns", "edge", "last_field_id", "schemas")
    return {name: getattr(state, name) for name in names} | changed


def ids(state: State, fields: tuple[Field, ...] | None = None, above: str = "") -> dict[str, int]:
    found = {}
    for item in state.current.fields if fields is None else fields:
        found[above + item.name] = item.id
        found |= ids(state, children(item), f"{above}{item.name}.")
    return found


V, X, XV = Version("v"), Version("x", {"v": "x"}), Version("x v", {"v": "x"})
NONE, AGAIN = Version("y", drops=("v",)), Version("y v", drops=("v",))
SWAP = Version("a b", {"a": "b", "b": "a"})
A, B, C = Version("a"), Version("b", {"a": "b"}), Version("c", {"a": "b", "b": "c"})
CB, CBA = Version("c b", C.renames), Version("c b a", C.renames)


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        ([V, X], {"x": 2}),
        ([V, X, XV], {"x": 2, "v": 3}),
        ([V, XV], {"x": 2, "v": 3}),
        ([V, X, V], {"v": 3}),
        ([Version("v y"), NONE], {"y": 3}),
        ([Version("v y"), NONE, AGAIN], {"y": 3, "v": 4}),
        ([Version("v y"), AGAIN], {"y": 3, "v": 4}),
        ([Version("v y"), NONE, AGAIN, NONE, AGAIN], {"y": 3, "v": 5}),
        ([Version("a b"), SWAP], {"a": 3, "b": 2}),
        ([Version("a b"), SWAP, SWAP, Version("c a b", SWAP.renames)], {"c": 4, "a": 3, "b": 2}),
        ([A, B, C], {"c": 2}),
        ([A, C], {"c": 2}),
        ([B, C], {"c": 2}),
        ([A, C, CB, CBA], {"c": 2, "b": 3, "a": 4}),
        ([A, CBA], {"c": 2, "b": 3, "a": 4}),
        ([A, B, CBA], {"c": 2, "b": 3, "a": 4}),
        ([Version("v x"), Version("x", {"v": "x"}, ("x",))], {"x": 2}),
        ([Version("v x"), Version("x y", {"v": "x"}, ("x",)), Version("x", {"v": "x"}, ("x", "y"))], {"x": 2}),
        ([V, Version("y", {"v": "x"}, ("x",))], {"y": 3}),
        ([V, Version({"v": pa.string()}, drops=("v",))], {"v": 3}),
    ],
)
def test_ids_follow_the_changes_and_stay(versions: list[Version], found: dict[str, int]) -> None:
    state = None
    for version in versions:
        state = version.start(state)
    assert state is not None
    assert {name: number for name, number in ids(state).items() if name != "k"} == found


@pytest.mark.parametrize(
    "version",
    [X, XV, NONE, AGAIN, SWAP, C, CB, CBA, Version("x", {"v": "x"}, ("x",)), Version("y", {"v": "x"}, ("x",))],
)
def test_a_program_that_names_changes_may_be_the_first_and_starts_again(version: Version) -> None:
    first = version.start()
    assert {*ids(first)} == {"k", *str(version.columns).split()}
    later = Version(f"{version.columns} later", version.renames, version.drops)
    assert {name: ids(later.start(first))[name] for name in ids(first)} == ids(first)


@pytest.mark.parametrize(
    ("before", "version", "said"),
    [
        (V, Version("v", drops=("zz",)), "never had a column 'zz'.*columns have been k, v"),
        (V, Version("v x", {"zz": "x"}), "never had a column 'zz'"),
        (V, Version("v", {"v": "x"}), "declares no such column"),
        (V, Version("v", {"v": "v"}), "its own name"),
        (V, Version("v", {"k": "v"}), "'k', which is a key"),
        (V, Version("v", drops=("k",)), "'k', which is a key"),
        (Version("a b"), Version("c", {"a": "c", "b": "c"}), "two columns to one"),
    ],
)
def test_changes_that_cannot_be(before: Version, version: Version, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        version.start(before.start())


def test_a_column_that_was_dropped_and_is_declared_again_must_not_forbid_nulls() -> None:
    columns = pa.schema([pa.field("v", LONG, nullable=False)])
    declared = value_state("op", "s", keys={"k": LONG}, values=columns)
    changes = Changes(drops=frozenset({"v"}))
    with pytest.raises(InvalidState, match="neither nullable nor has a default"):
        evolve_state(V.start(), declared, changes)
    with pytest.raises(InvalidInput, match="neither nullable nor has a default"):
        new_state(declared, changes)


def struct(**columns: pa.DataType) -> pa.DataType:
    return pa.struct(list(columns.items()))


PERSON = Version({"person": struct(name=pa.string(), age=pa.int32())})


@pytest.mark.parametrize(
    ("version", "found"),
    [
        (Version({"person": struct(name=pa.string())}, drops=("person.age",)), {"person": 2, "person.name": 3}),
        (
            Version({"person": struct(name=pa.string(), years=pa.int64())}, {"person.age": "person.years"}),
            {"person": 2, "person.name": 3, "person.years": 4},
        ),
        (
            Version(
                {"human": struct(years=pa.int64())},
                {"person": "human", "person.age": "person.years"},
                ("human.name",),
            ),
            {"human": 2, "human.years": 4},
        ),
        (
            Version({"person": struct(name=pa.string(), age=pa.string())}, drops=("person.age",)),
            {"person": 2, "person.name": 3, "person.age": 5},
        ),
    ],
)
def test_nested_fields_are_columns_too(version: Version, found: dict[str, int]) -> None:
    went_on = version.start(PERSON.start())
    assert {name: number for name, number in ids(went_on).items() if name != "k"} == found
    first = version.start()
    assert set(ids(first)) == set(ids(went_on))


def test_fields_of_structs_in_lists_are_named_through_the_element() -> None:
    before = Version({"all": pa.list_(struct(a=LONG, b=LONG))}).start()
    went_on = evolve_state(
        before,
        Version({"all": pa.list_(struct(c=LONG))}).declared(),
        Changes({"all.element.a": "all.element.c"}, frozenset({"all.element.b"})),
    )
    assert went_on.dropped == ("all.element.b",)
    assert ids(went_on.state) == {"k": 1, "all": 2, "all.element": 3, "all.element.c": 4}


def test_what_goes_is_named_as_the_saved_state_names_it() -> None:
    saved = Version("a y").start()
    gone = Version("y", {"a": "b"}, ("b",))
    assert evolve_state(saved, gone.declared(), gone.changes).dropped == ("a",)
    assert evolve_state(gone.go_on(saved), gone.declared(), gone.changes).dropped == ()


def test_a_name_may_have_been_in_schemas_that_are_not_kept() -> None:
    saved = Version("v y").start()
    cut = State(**_fields(NONE.go_on(saved), schemas=NONE.go_on(saved).schemas[1:]))
    check_columns_known(cut, ["v"])
    with pytest.raises(InvalidInput, match="never had"):
        check_columns_known(saved, ["w"])

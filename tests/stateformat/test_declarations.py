"""What a declaration may not say is refused when it is made, and found in what others have stored.

What becomes of columns as a program goes from version to version, and back: names and ids, without
any rows. What becomes of the schema of a state whose rows are all written anew: ids, nullability,
defaults and the schemas that are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.errors import InvalidInput, InvalidState
from stateformat.graph import JobGraph, Operator, OperatorId
from stateformat.model import Field, SchemaVersion, State
from stateformat.rules import check_states
from stateformat.schema import KEY_GROUP, children, segment_schema
from stateformat.states import (
    Changes,
    declare,
    evolution_faults,
    list_state,
    progress_state,
    rewritten,
    timers,
    value_state,
)
from stateformat.states.evolution import check_columns_known, evolve_state, new_state

GRAPH = sf.JobGraph((sf.Operator("op", 2, 8, key_hash="spark-murmur3-seed42"),))
VALUES = value_state("op", "s", keys={"k": pa.int64()}, values={"v": pa.int64()})


def with_fields(state: State, *fields: Field) -> State:
    return replace(state, schemas=(SchemaVersion(1, fields),), last_field_id=100)


def messages(state: State) -> str:
    return "; ".join(problem.message for problem in check_states(GRAPH, [state]))


def nested(depth: int) -> Field:
    item = Field(100, "element", "int64")
    for level in range(depth):
        item = Field(99 - level, "element", ("list", item))
    return replace(item, name="deep", id=2)


def test_a_good_declaration_has_no_problem() -> None:
    assert messages(VALUES) == ""
    assert messages(with_fields(VALUES, Field(1, "k", "int64"), nested(8))) == ""


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (replace(with_fields(VALUES, Field(1, "_k", "int64")), key_columns=("_k",)), "such names belong to the format"),
        (replace(VALUES, key_columns=("k", "k")), "has a key column twice"),
        (with_fields(progress_state("op"), Field(1, "x", "int64")), "is progress and has fields"),
        (with_fields(VALUES, Field(1, "k", "int64"), nested(9)), "nested deeper than 8"),
        (
            with_fields(
                VALUES,
                Field(1, "k", "int64"),
                Field(2, "s", ("struct", (Field(3, "a", "int64"), Field(4, "a", "int64")))),
            ),
            "two fields of one name in 's'",
        ),
        (
            with_fields(
                VALUES, Field(1, "k", "int64"), Field(2, "s", ("struct", (Field(3, "a", "int64", default="1"),)))
            ),
            "a default in the nested field s.a",
        ),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_stored_declaration_that_breaks_a_rule_is_a_problem(state: State, message: str) -> None:
    assert message in messages(state)


@pytest.mark.parametrize(
    ("state", "columns"),
    [
        (list_state("op", "s", keys={"k": pa.int64()}, values={"v": pa.int64()}), {"_index": [0, None]}),
        (timers("op", "s", keys={"k": pa.int64()}), {"_timestamp": [1, None], "_tag": ["a", "b"]}),
        (timers("op", "s", keys={"k": pa.int64()}), {"_timestamp": [1, 2], "_tag": ["a", None]}),
    ],
)
def test_the_formats_own_part_of_a_row_key_is_not_null(state: State, columns: dict[str, list[object]]) -> None:
    graph = sf.JobGraph((sf.Operator("op", 1, 8),))
    pending = sf.open("memory://declarations").begin(job_id="j", graph=graph, states=[state], parent=None)
    rows = {"k": [1, 2], **({"v": [1, 2]} if state.kind is sf.Kind.LIST else {}), **columns}
    with pytest.raises(sf.InvalidState, match="null") as caught:
        pending.context.subtask("op", 0).write("s", pa.table(rows))
    assert caught.value.kind is sf.ErrorKind.NULL_NOT_ALLOWED


@pytest.mark.parametrize("rows", [None, {"k": [1], "v": [1]}, [pa.table({"k": [1], "v": [1]})], 7, "rows"])
def test_rows_that_are_not_arrow_are_refused_by_what_they_are(rows: object) -> None:
    graph = sf.JobGraph((sf.Operator("op", 1, 8),))
    pending = sf.open("memory://declarations").begin(job_id="j", graph=graph, states=[VALUES], parent=None)
    with pytest.raises(sf.InvalidInput, match="rows are an Arrow table"):
        pending.context.subtask("op", 0).write("s", rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [2.5, "2", True])
def test_a_parallelism_is_an_integer(number: object) -> None:
    with pytest.raises(sf.InvalidInput, match="a parallelism is"):
        GRAPH.at(number)  # type: ignore[arg-type]


# ---- a declaration after another -----------------------------------------------------------------

INT = pa.int64()
X = pa.struct([("x", pa.int32())])


def value(previous: State | None = None, *, values: Any, **evolution: Any) -> State:
    return value_state("o", "s", keys={"k": INT}, values=values, previous=previous, **evolution)


@pytest.mark.parametrize(("kind", "one", "two"), [(INT, 10, 100), (X, {"x": 1}, {"x": 2})], ids=["flat", "nested"])
def test_a_column_renamed_to_the_name_of_a_dropped_one_keeps_its_own_rows(kind: Any, one: Any, two: Any) -> None:
    old = value(values={"a": kind, "b": kind})
    new = value(old, values={"b": kind}, renames={"a": "b"})
    store, permit = sf.open(f"memory://rename-{kind}"), None
    rows = pa.table({"k": [1], "a": pa.array([one], kind), "b": pa.array([two], kind)})
    for state in (old, new):
        graph = sf.JobGraph((sf.Operator("o", 1, 128),))
        pending = store.begin(job_id="j", graph=graph, states=[state], parent=permit)
        with pending.context.subtask("o", 0) as writer:
            writer.write("s", rows) if state is old else writer.carry("s")
        pending.add(writer)
        permit = pending.publish()
    assert store.open().read("o", "s").table()["b"].to_pylist() == [one]


def test_columns_whose_dotted_names_look_nested_keep_ids_of_their_own() -> None:
    old = value(values={"a": pa.struct([("b", pa.int32())]), "a.b": pa.int32()})
    new = value(old, values={"a": pa.struct([("b", INT)]), "a.b": pa.int32()})
    assert new.current.fields[2] == old.current.fields[2]
    assert new.current.fields[1].id == old.current.fields[1].id


AB = value(values={"a": INT, "b": INT})
WITH_DEFAULT = value(value(values={"a": INT}), values={"a": INT, "b": INT}, defaults={"b": "0"})


@pytest.mark.parametrize(
    ("previous", "declared", "error", "words"),
    [
        (AB, {"values": {"c": INT}, "renames": {"a": "elsewhere"}}, sf.InvalidInput, "cannot rename"),
        (AB, {"values": {"c": INT}, "renames": {"a": "c", "b": "c"}}, sf.InvalidInput, "one name"),
        (
            WITH_DEFAULT,
            {"values": {"a": INT, "b": INT}, "defaults": {"b": "7"}},
            sf.InvalidState,
            "has the default '0' in rows from before it and would have '7'",
        ),
        (
            value(values={"a": INT}),
            {"values": [pa.field("a", INT, nullable=False)]},
            sf.InvalidState,
            "may hold nulls and would be declared without",
        ),
        (
            value(values={"a": X}),
            {"values": {"a": pa.struct([pa.field("x", pa.int32(), nullable=False)])}},
            sf.InvalidState,
            "may hold nulls and would be declared without",
        ),
    ],
    ids=["rename-to-nothing", "renames-collide", "default-changes", "strict", "strict-nested"],
)
def test_a_declaration_that_cannot_follow_another_is_refused(
    previous: State, declared: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        value(previous, **declared)


def test_a_declaration_may_lose_columns_and_allow_nulls() -> None:
    assert value(WITH_DEFAULT, values={"b": INT}).current.fields[1].default == "0"
    for kind in (INT, X):
        strict = value(values=[pa.field("a", kind, nullable=False)])
        assert value(strict, values=[pa.field("a", kind)]).current.id == 2


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (pa.int8(), "1_0"), (pa.int32(), " 5 "), (INT, "٣"), (pa.float64(), "inf"), (pa.float32(), "1e300"),
        (pa.date32(), "20200101"), (pa.decimal128(5, 2), "1e2"),
    ],
)  # fmt: skip
def test_a_default_that_other_readers_would_not_understand_is_refused(kind: pa.DataType, text: str) -> None:
    with pytest.raises(sf.InvalidInput, match="is no default for type"):
        value(value(values={"a": INT}), values={"a": INT, "b": kind}, defaults={"b": text})


def test_a_state_does_not_evolve_from_another_state() -> None:
    with pytest.raises(sf.InvalidInput, match="which is another state"):
        value_state("o", "other", keys={"k": INT}, values={"a": INT}, previous=value(values={"a": INT}))


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


V, ONLY_X, XV = Version("v"), Version("x", {"v": "x"}), Version("x v", {"v": "x"})
NONE, AGAIN = Version("y", drops=("v",)), Version("y v", drops=("v",))
SWAP = Version("a b", {"a": "b", "b": "a"})
A, B, C = Version("a"), Version("b", {"a": "b"}), Version("c", {"a": "b", "b": "c"})
CB, CBA = Version("c b", C.renames), Version("c b a", C.renames)


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        ([V, ONLY_X], {"x": 2}),
        ([V, ONLY_X, XV], {"x": 2, "v": 3}),
        ([V, XV], {"x": 2, "v": 3}),
        ([V, ONLY_X, V], {"v": 3}),
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
    [
        ONLY_X,
        XV,
        NONE,
        AGAIN,
        SWAP,
        C,
        CB,
        CBA,
        Version("x", {"v": "x"}, ("x",)),
        Version("y", {"v": "x"}, ("x",)),
    ],
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


BIGINT, INTEGER, TEXT, FLOAT, DOUBLE = (
    pa.int64(),
    pa.int32(),
    pa.string(),
    pa.float32(),
    pa.float64(),
)
STRICT = pa.struct(
    [
        pa.field("x", INTEGER, nullable=False),
        pa.field("y", pa.list_(pa.field("element", TEXT, nullable=False))),
    ]
)
REWRITTEN = [
    pa.field("n", INTEGER, nullable=False),
    pa.field("s", STRICT),
    pa.field("m", pa.map_(TEXT, pa.field("value", FLOAT, nullable=False))),
    pa.field("d", pa.decimal128(8, 2)),
]
FIRST = declare.value_state("op", "s", keys={"k": TEXT}, values=REWRITTEN)
STATE = declare.value_state(
    "op", "s", keys={"k": TEXT}, values=[*REWRITTEN, pa.field("t", TEXT)], previous=FIRST, defaults={"t": "none"}
)


def seen(state: State) -> pa.Schema:
    """The columns as a function sees them: all nullable."""
    return pa.schema([item.remove_metadata() for item in segment_schema(state) if item.name != KEY_GROUP.name])


def changed(**types: Any) -> pa.Schema:
    """The columns of ``STATE`` with other types; None leaves one out, a new name comes last."""
    known = {item.name: item for item in seen(STATE)} | {
        name: None if kind is None else pa.field(name, kind) if isinstance(kind, pa.DataType) else kind
        for name, kind in types.items()
    }
    return pa.schema([item for item in known.values() if item is not None])


def ids_by_name(state: State) -> dict[str, int]:
    return {item.name: item.id for item in state.current.fields}


def nullable(fields: tuple[Field, ...], above: str = "") -> Iterator[str]:
    """The full names of the fields that may hold nulls."""
    for item in fields:
        if item.nullable:
            yield above + item.name
        yield from nullable(children(item), f"{above}{item.name}.")


def test_columns_as_a_function_sees_them_are_the_same_state() -> None:
    assert rewritten(STATE, seen(STATE)) is STATE
    assert [schema.id for schema in STATE.schemas] == [1, 2]


@pytest.mark.parametrize(
    ("types", "new", "schemas"),
    [
        ({"n": BIGINT}, set(), [1, 2, 3]),
        ({"d": pa.decimal128(12, 2)}, set(), [1, 2, 3]),
        ({"t": None}, set(), [1, 2, 3]),
        ({"n": pa.int16()}, {"n"}, [1, 2, 3]),
        ({"n": TEXT, "t": None}, {"n"}, [1, 2, 3]),
        ({"s": pa.struct([("x", TEXT)])}, {"s"}, [1, 2, 3]),
        ({"s": pa.struct([("x", BIGINT), ("y", pa.list_(TEXT))])}, set(), [1, 2, 3]),
        ({"s": pa.struct([("x", INTEGER), ("y", pa.list_(TEXT)), ("z", TEXT)])}, set(), [1, 2, 3]),
        ({"m": pa.map_(TEXT, DOUBLE)}, set(), [1, 2, 3]),
        ({"m": pa.map_(INTEGER, FLOAT)}, {"m"}, [1, 2, 3]),
        # A name that is new, and what older schemas cannot be read as, begin the history anew.
        ({"u": TEXT}, {"u"}, [3]),
        ({"u": TEXT, "t": None}, {"u"}, [3]),
        ({"t": pa.field("t", TEXT, nullable=False)}, set(), [3]),
        ({"n": pa.field("n", TEXT, nullable=False)}, {"n"}, [3]),
    ],
)
def test_a_column_keeps_its_id_where_its_type_is_equal_or_widens(
    types: dict[str, Any], new: set[str], schemas: list[int]
) -> None:
    found = rewritten(STATE, changed(**types))
    before, after = ids_by_name(STATE), ids_by_name(found)
    assert {name for name, field_id in after.items() if before.get(name) != field_id} == new
    assert all(after[name] > STATE.last_field_id for name in new)
    assert found.last_field_id >= max(after.values())
    assert [schema.id for schema in found.schemas] == schemas
    # What held no nulls still holds none, at any depth, and defaults stay.
    kept = {name for name in after if name not in new and not isinstance(types.get(name), pa.Field)}
    strict = {"n", "s.x", "s.y.element", "m.key", "m.value"}
    assert not {name for name in nullable(found.current.fields) if name in strict and name.partition(".")[0] in kept}
    defaults = {item.name: item.default for item in found.current.fields}
    assert defaults == {name: "none" if name == "t" and "t" not in new else None for name in after}
    graph = JobGraph((Operator(OperatorId("op"), 1, 8, key_hash="spark-murmur3-seed42"),))
    assert list(check_states(graph, [found])) == []


def test_renames_that_are_told_keep_ids_and_a_key_may_have_another_name() -> None:
    names = {"n": "t", "t": "n"}
    columns = pa.schema([item.with_name(names.get(item.name, item.name)) for item in seen(STATE)])
    found = rewritten(STATE, columns, renames=names)
    assert ids_by_name(found) == {**ids_by_name(STATE), "n": ids_by_name(STATE)["t"], "t": ids_by_name(STATE)["n"]}
    assert len(found.schemas) == 3
    columns = pa.schema([item.with_name("key" if item.name == "k" else item.name) for item in seen(STATE)])
    found = rewritten(STATE, columns, renames={"k": "key"})
    assert (found.key_columns, ids_by_name(found)["key"]) == (("key",), ids_by_name(STATE)["k"])
    assert len(found.schemas) == 1
    with pytest.raises(InvalidInput, match="cannot rename 'zz'"):
        rewritten(STATE, columns, renames={"zz": "key"})

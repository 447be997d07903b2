"""What a text names, where uids, states and columns have slashes and dots themselves."""

from __future__ import annotations

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.errors import InvalidInput
from stateformat.graph import JobGraph, Operator, OperatorId
from stateformat.states import Named, labels_of, named, split_drop, value_state
from stateformat.store import CheckpointStore
from tests.stores import Job, open_store, operator

LONG = pa.int64()


def _state(uid: str, name: str, *columns: str) -> sf.State:
    return value_state(uid, name, keys={"k": LONG}, values=dict.fromkeys(columns or ("v",), LONG))


def _operator(uid: str, name: str = "") -> Operator:
    return Operator(OperatorId(uid), 1, 128, name=name)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("a", Named("a")),
        ("a/s", Named("a", "s")),
        ("a/s.v", Named("a", "s", "v")),
        ("a/s.t", Named("a", "s.t")),
        ("a/s.t.v", Named("a", "s.t", "v")),
        ("a/s.w", Named("a", "s", "w")),
        ("a/s.t.w", Named("a", "s.t", "w")),
        ("Sums/s", Named("a", "s")),
        ("b", Named("b")),
        ("b/s", None),
        ("none", None),
    ],
)
def test_a_text_names_an_operator_a_state_or_a_column(text: str, meant: Named | None) -> None:
    labels = labels_of([_operator("a", "Sums"), _operator("b", "twice"), _operator("c", "twice")])
    assert named(text, [_state("a", "s"), _state("a", "s.t")], labels) == meant
    assert named("twice", [], labels) is None


@pytest.mark.parametrize(
    ("text", "states", "uids", "first", "second"),
    [
        (
            "a/b/c",
            [_state("a", "b/c"), _state("a/b", "c")],
            [],
            "state 'b/c' of operator 'a'",
            "state 'c' of operator 'a/b'",
        ),
        ("a/b", [_state("a", "b")], ["a/b"], "operator 'a/b'", "state 'b' of operator 'a'"),
        (
            "a/s.v",
            [_state("a", "s"), _state("a", "s.v")],
            [],
            "column 'v' of state 's' of operator 'a'",
            "state 's.v' of operator 'a'",
        ),
        (
            "a/b/c.v",
            [_state("a", "b/c"), _state("a/b", "c")],
            [],
            "column 'v' of state 'b/c' of operator 'a'",
            "column 'v' of state 'c' of operator 'a/b'",
        ),
    ],
)
def test_what_may_be_two_things_is_refused_with_both(
    text: str, states: list[sf.State], uids: list[str], first: str, second: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        split_drop([text], states, uids)
    assert repr(text) in str(caught.value)
    assert first in str(caught.value)
    assert second in str(caught.value)


def _published(url: str, *states: sf.State) -> sf.Checkpoint:
    rows = {(state.operator, state.name): lambda _: pa.table({"k": pa.array([1], LONG), "v": [2]}) for state in states}
    graph = JobGraph(tuple(operator(uid, 1) for uid in dict.fromkeys(state.operator for state in states)))
    store = CheckpointStore(open_store(url).storage)
    Job("names", graph, states, rows).publish(store, None)
    return store.open()


def test_drop_is_split_into_columns_and_what_goes_as_a_whole() -> None:
    states = [_state("op", "s"), _state("op", "s.t"), _state("op", "t")]
    assert split_drop(["op", "op/s", "op/s.t", "op/s.v", "op/t.a.b", "other/s.v"], states) == (
        ["op", "op/s", "op/s.t", "other/s.v"],
        {("op", "s"): {"v"}, ("op", "t"): {"a.b"}},
    )


def test_a_restore_does_not_guess_which_state_is_given_up() -> None:
    checkpoint = _published("memory://names-states", _state("a", "b/c"), _state("a/b", "c"))
    with pytest.raises(InvalidInput, match=r"'a/b/c' may be state 'b/c' of operator 'a' or state 'c'"):
        checkpoint.plan_restore(checkpoint.graph, drop=["a/b/c"])
    assert checkpoint.plan_restore(checkpoint.graph).drop == ()

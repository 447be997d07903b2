"""How long rows live: what may be declared, how a declaration may change, what has expired."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stateformat.errors import InvalidInput, InvalidState
from stateformat.model import State
from stateformat.states import Changes, evolve_state, list_state, map_state, new_state, value_state
from stateformat.ttl import NO_TIME_US, TIME_MAX_US, Ttl

KEYS, VALUES = {"k": pa.int64()}, {"v": pa.int64()}
TIMES = "ttl_last_access"
DROPPED = Changes(drops=frozenset({TIMES}))


def declared(ttl: Ttl | None = None, **evolution: Any) -> State:
    return value_state("op", "s", keys=KEYS, values=VALUES, ttl=ttl, **evolution)


@pytest.mark.parametrize(
    ("make", "columns"),
    [
        (lambda ttl: declared(ttl), ["k", "v", TIMES]),
        (
            lambda ttl: map_state("op", "s", keys=KEYS, map_key=pa.string(), values=VALUES, ttl=ttl),
            ["k", "_map_key", "v", TIMES],
        ),
        (lambda ttl: list_state("op", "s", keys=KEYS, values=VALUES, ttl=ttl), ["k", "v", TIMES]),
    ],
)
def test_a_ttl_adds_the_last_column_of_a_state(make: Any, columns: list[str]) -> None:
    state: State = make(Ttl(5))
    assert [item.name for item in state.current.fields] == columns
    assert state.ttl == Ttl(5, "event_time", "write")
    last = state.ttl_field
    assert last is not None
    assert (last.id, last.type, last.nullable, last.default) == (len(columns), "timestamp_us", False, None)
    assert make(None).ttl_field is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ttl(0), "from 1 to 2\\*\\*53"),
        (lambda: Ttl(-5), "from 1"),
        (lambda: Ttl(2**53), "from 1"),
        (lambda: Ttl(True), "whole number"),
        (lambda: Ttl(1.5), "whole number"),  # type: ignore[arg-type]
        (lambda: Ttl(1, "sundial"), "'event_time' or 'processing_time'"),  # type: ignore[arg-type]
        (lambda: Ttl(1, refresh="read"), "'write' or 'read_and_write'"),  # type: ignore[arg-type]
        (lambda: declared(3600), "give stateformat.Ttl"),  # type: ignore[arg-type]
        (lambda: value_state("op", "s", keys=KEYS, values={TIMES: pa.int64()}, ttl=Ttl(1)), "adds that column"),
        (lambda: value_state("op", "s", keys={TIMES: pa.int64()}, values=VALUES, ttl=Ttl(1)), "adds that column"),
    ],
)
def test_what_cannot_be_declared(make: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


def test_without_a_ttl_a_column_may_have_any_name() -> None:
    assert value_state("op", "s", keys=KEYS, values={TIMES: pa.int64()}).ttl is None


@pytest.mark.parametrize(
    ("last_access", "duration", "now", "expired"),
    [
        (100, 10, 109, False),
        (100, 10, 110, True),
        (100, 10, 111, True),
        (-50, 10, -41, False),
        (-50, 10, -40, True),
        (100, 10, NO_TIME_US, False),
        (100, 10, -(2**63), False),
        (NO_TIME_US, 10, 100, False),
        (-(2**63), 10, 100, False),
        (100, 10, 2**63 - 1, True),
        (100, TIME_MAX_US, 2**63 - 1, False),
        (2**63 - 1, 1, 2**63 - 1, False),
    ],
)
def test_a_row_expires_when_its_duration_has_passed_since_its_last_access(
    last_access: int, duration: int, now: int, expired: bool
) -> None:
    assert Ttl(duration).expired(np.array([last_access, 0, 2**40], np.int64), now)[0] == expired
    for column in (pa.array([last_access], pa.timestamp("us")), pa.chunked_array([[last_access]], pa.timestamp("us"))):
        assert Ttl(duration).expired(column, now).tolist() == [expired]


def test_a_damaged_row_without_a_time_does_not_expire() -> None:
    assert Ttl(1).expired(pa.array([None, 5], pa.timestamp("us")), 100).tolist() == [False, True]


def test_rows_of_a_state_that_begins_to_expire_count_from_the_restore() -> None:
    begun = evolve_state(declared(), declared(Ttl(5)), Changes(), ttl_start_us=77).state
    assert begun.ttl == Ttl(5)
    assert begun.ttl_field is not None
    assert (begun.ttl_field.id, begun.ttl_field.default, len(begun.schemas)) == (3, "77", 2)
    # The next start finds it so.
    assert evolve_state(begun, declared(Ttl(5)), Changes(), ttl_start_us=99).state is begun
    # Without a time the clock has none yet.
    unknown = evolve_state(declared(), declared(Ttl(5)), Changes()).state.ttl_field
    assert unknown is not None
    assert unknown.default == str(NO_TIME_US)


def test_the_library_asks_from_when_older_rows_count() -> None:
    with pytest.raises(InvalidState, match=r"its rows begin to expire.*give defaults="):
        declared(Ttl(5), previous=declared())
    begun = declared(Ttl(5), previous=declared(), defaults={TIMES: "77"})
    assert begun == evolve_state(declared(), declared(Ttl(5)), Changes(), ttl_start_us=77).state


@pytest.mark.parametrize("ttl", [Ttl(6), Ttl(4), Ttl(5, refresh="read_and_write")])
def test_duration_and_refresh_may_change(ttl: Ttl) -> None:
    for changed in (
        declared(ttl, previous=declared(Ttl(5))),
        evolve_state(declared(Ttl(5)), declared(ttl), Changes())[0],
    ):
        assert changed.ttl == ttl
        assert changed.schemas == declared(Ttl(5)).schemas


def test_a_clock_changes_only_with_the_column_and_rows_begin_anew() -> None:
    saved, wanted = declared(Ttl(5)), declared(Ttl(5, "processing_time"))
    for change in (lambda: declared(wanted.ttl, previous=saved), lambda: evolve_state(saved, wanted, Changes())):
        with pytest.raises(InvalidState, match="expire by event time and would by processing time"):
            change()
    state, dropped = evolve_state(saved, wanted, DROPPED, ttl_start_us=99)
    assert (dropped, state.ttl) == ((TIMES,), wanted.ttl)
    assert state.ttl_field is not None
    assert (state.ttl_field.id, state.ttl_field.default) == (4, "99")
    # The program may keep its drop: it is done.
    assert evolve_state(state, wanted, DROPPED, ttl_start_us=100).state is state


def test_a_ttl_goes_with_its_column() -> None:
    state, dropped = evolve_state(declared(Ttl(5)), declared(), DROPPED)
    assert (dropped, state.ttl, len(state.current.fields)) == ((TIMES,), None, 2)
    assert declared(previous=declared(Ttl(5))).ttl is None


def test_a_column_of_an_older_release_becomes_that_of_the_ttl() -> None:
    """An old release knows the column and not the member: its checkpoints keep the times."""
    times = pa.field(TIMES, pa.timestamp("us"), nullable=False)
    old = value_state("op", "s", keys=KEYS, values=[pa.field("v", pa.int64()), times])
    state = evolve_state(old, declared(Ttl(5)), Changes(), ttl_start_us=99).state
    assert (state.ttl, state.schemas) == (Ttl(5), old.schemas)


def test_a_new_state_of_a_program_that_once_restarted_the_clock_has_a_ttl() -> None:
    state = new_state(declared(Ttl(5)), DROPPED)
    assert state.ttl == Ttl(5)
    assert state.ttl_field is not None

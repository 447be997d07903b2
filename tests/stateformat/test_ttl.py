"""How long rows live: what may be declared, how a declaration may change, what has expired.

What had expired at a checkpoint is shown by no reader, unless it is asked for.
"""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.backends.querying import query
from stateformat.backends.rewrite import RewriteSpec, rewrite
from stateformat.errors import InvalidInput, InvalidState
from stateformat.inspecting import diff_checkpoints, key_history, top_document
from stateformat.model import State, TimerClock
from stateformat.reading import StoreCheckpoint, key_table
from stateformat.states import Changes, evolve_state, list_state, map_state, new_state, value_state
from stateformat.ttl import NO_TIME_US, TIME_MAX_US, TTL_COLUMN, Ttl
from tests.stateformat.changing_histories import KEYS, OWN, ExpiringHistory, joined, random_history
from tests.worlds.data import same_rows

TTL_KEYS, VALUES = {"k": pa.int64()}, {"v": pa.int64()}
TIMES = "ttl_last_access"
DROPPED = Changes(drops=frozenset({TIMES}))


def declared(ttl: Ttl | None = None, **evolution: Any) -> State:
    return value_state("op", "s", keys=TTL_KEYS, values=VALUES, ttl=ttl, **evolution)


@pytest.mark.parametrize(
    ("make", "columns"),
    [
        (lambda ttl: declared(ttl), ["k", "v", TIMES]),
        (
            lambda ttl: map_state("op", "s", keys=TTL_KEYS, map_key=pa.string(), values=VALUES, ttl=ttl),
            ["k", "_map_key", "v", TIMES],
        ),
        (lambda ttl: list_state("op", "s", keys=TTL_KEYS, values=VALUES, ttl=ttl), ["k", "v", TIMES]),
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
        (lambda: value_state("op", "s", keys=TTL_KEYS, values={TIMES: pa.int64()}, ttl=Ttl(1)), "adds that column"),
        (lambda: value_state("op", "s", keys={TIMES: pa.int64()}, values=VALUES, ttl=Ttl(1)), "adds that column"),
    ],
)
def test_what_cannot_be_declared(make: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


def test_without_a_ttl_a_column_may_have_any_name() -> None:
    assert value_state("op", "s", keys=TTL_KEYS, values={TIMES: pa.int64()}).ttl is None


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
    old = value_state("op", "s", keys=TTL_KEYS, values=[pa.field("v", pa.int64()), times])
    state = evolve_state(old, declared(Ttl(5)), Changes(), ttl_start_us=99).state
    assert (state.ttl, state.schemas) == (Ttl(5), old.schemas)


def test_a_new_state_of_a_program_that_once_restarted_the_clock_has_a_ttl() -> None:
    state = new_state(declared(Ttl(5)), DROPPED)
    assert state.ttl == Ttl(5)
    assert state.ttl_field is not None


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.truth) for seed in range(1, 4))]
KINDS = ("value", "map", "list")


@pytest.fixture(scope="module")
def history_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], ExpiringHistory]:
    folder = tmp_path_factory.mktemp("expiring")

    def made(seed: int) -> ExpiringHistory:
        found = random_history(str(folder / str(seed)), seed, of=ExpiringHistory)
        assert isinstance(found, ExpiringHistory)
        return found

    return cache(made)


def stored(history: ExpiringHistory, kind: str, checkpoint_id: int) -> pa.Table:
    """Every row of a checkpoint, expired or not."""
    history.hides = False
    try:
        return history.rows(kind, checkpoint_id, as_of=checkpoint_id)
    finally:
        history.hides = True


@pytest.mark.parametrize("seed", SEEDS)
def test_every_read_of_a_state_leaves_out_what_had_expired(
    history_of: Callable[[int], ExpiringHistory], seed: int
) -> None:
    history = history_of(seed)
    hidden = 0
    for number, kind in itertools.product(history.truth, OWN):
        checkpoint = history.store.open(number)
        rows = checkpoint.state("op", kind)
        live, every = history.rows(kind, number, as_of=number), stored(history, kind, number)
        hidden += len(every) - len(live)
        assert same_rows(rows.table(), live)
        assert same_rows(rows.with_expired().table(), every)
        assert same_rows(checkpoint.with_expired().state("op", kind).table(), every)
        some = ["share", "user"]
        assert same_rows(rows.select(some).table(), live.select(some))
        assert pa.table(rows.select(["n"])).num_rows == len(live)
        parts = [pickle.loads(pickle.dumps(part)).table() for part in rows.split(3)]
        assert same_rows(pa.concat_tables(parts), live)
        keys = [{"user": 3, "town": "t3"}, {"user": 3, "town": None}, {"user": None, "town": "t7"}]
        chosen = [i for i, row in enumerate(live.select(list(KEYS)).to_pylist()) if row in keys]
        assert same_rows(rows.at_keys(keys).table(), live.take(pa.array(chosen, pa.int64())))
        task = checkpoint.read("op", kind)
        assert task.table().num_rows == len(live)
        assert task.with_expired().table().num_rows == len(every)
    assert bool(hidden) == history.time_went_on


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_expires_between_two_checkpoints_is_deleted_there(
    history_of: Callable[[int], ExpiringHistory], seed: int, kind: str
) -> None:
    history = history_of(seed)
    for start, end in itertools.pairwise(history.truth):
        before, after = (history.rows(kind, number, as_of=end) for number in (start, end))
        wanted = joined(before, after, (*KEYS, *OWN[kind]))
        feed = history.store.changes("op", kind, start, end)
        assert same_rows(feed.table().drop_columns(["_checkpoint_id"]), wanted), (start, end)
        parts = pa.concat_tables(part.table() for part in feed.split(3))
        assert same_rows(parts.drop_columns(["_checkpoint_id"]), wanted)
        whole = history.store.changes("op", kind, start, end, with_expired=True)
        history.hides = False
        before, after = (history.rows(kind, number, as_of=end) for number in (start, end))
        history.hides = True
        wanted = joined(before, after, (*KEYS, *OWN[kind]))
        assert same_rows(whole.table().drop_columns(["_checkpoint_id"]), wanted), (start, end)


@pytest.mark.parametrize("seed", SEEDS)
def test_diff_history_and_queries_see_the_same_rows(history_of: Callable[[int], ExpiringHistory], seed: int) -> None:
    history = history_of(seed)
    newest = max(history.truth)
    before, after = history.store.open(1), history.store.open(newest)
    diff = {state.name: state for state in diff_checkpoints(before, after).states}
    for kind in KINDS:
        rows = history.rows(kind, newest, as_of=newest)
        changes = joined(history.rows(kind, 1, as_of=newest), rows, (*KEYS, *OWN[kind]))
        counts = Counter(changes["_change"].to_pylist())
        found = diff[kind].counted
        assert found is not None
        wanted = (counts["insert"], counts["delete"], counts["update_after"])
        assert (found.added, found.removed, found.changed) == wanted
        sizes = diff[kind].sizes_after
        assert sizes is not None
        assert sizes.rows == len(rows)
        over = history.store.states_over("op", kind).table()
        assert Counter(over["_checkpoint_id"].to_pylist()) == Counter(
            {number: len(history.live(kind, number)) for number in history.truth if history.live(kind, number)}
        )
        for all_checkpoints, counted in ((False, len(rows)), (True, len(over))):
            for with_expired in (False, True):
                more = {"all_checkpoints": all_checkpoints, "with_expired": with_expired}
                answer = query(history.store, f'select count(*) as n from op."{kind}"', **more)
                if not with_expired:
                    assert answer.table()["n"].to_pylist() == [counted]
                elif not all_checkpoints:
                    assert answer.table()["n"].to_pylist() == [len(stored(history, kind, newest))]
                else:
                    assert answer.table()["n"].to_pylist()[0] >= counted


@pytest.mark.parametrize("seed", SEEDS)
def test_the_history_of_a_key_shows_when_its_rows_expired(
    history_of: Callable[[int], ExpiringHistory], seed: int
) -> None:
    history = history_of(seed)
    state = history.store.open().record.state("op", "map")
    key = {"user": 3, "town": "t3"}
    checkpoints = history.store.checkpoints()
    seen: dict[int, tuple[int, int]] = {}
    for step in key_history(checkpoints, state, key_table(state, key)):
        assert step.fault is None
        for _ in step.changes:
            pass
        seen[step.record.checkpoint_id] = step.rows
    counts = {
        number: sum({name: row[name] for name in KEYS} == key for row in history.live("map", number))
        for number in history.truth
    }
    for number, (before, now) in seen.items():
        assert now == counts[number]
        assert before == counts.get(number - 1, 0)
    gone = [number for number in history.truth if counts.get(number - 1) and not counts[number]]
    assert {*gone} <= {*seen}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_greatest_keys_are_those_of_rows_that_live(history_of: Callable[[int], ExpiringHistory], seed: int) -> None:
    history = history_of(seed)
    checkpoint = history.store.open()
    (found,) = top_document(checkpoint, [checkpoint.record.state("op", "map")], by="rows", limit=3)
    live = history.live("map", checkpoint.id)
    by_key = Counter((row["user"], row["town"]) for row in live)
    assert (found["keys"]["count"], found["keys"]["rows"]) == (len(by_key), len(live))
    assert [entry["rows"] for entry in found["keys"]["greatest"]] == [n for _, n in by_key.most_common(3)]


# ---- one state, step by step ---------------------------------------------------------------------


def state(ttl: Ttl | None = None, **evolution: Any) -> State:
    return value_state("op", "s", keys={"k": pa.int64()}, values={"v": pa.int64()}, ttl=ttl, **evolution)


def rows(*numbers: tuple[int, int]) -> pa.Table:
    """Rows of keys with their last accesses."""
    keys, times = zip(*numbers, strict=True)
    return pa.table(
        {
            "k": pa.array(keys, pa.int64()),
            "v": pa.array(keys, pa.int64()),
            TTL_COLUMN: pa.array(times, pa.timestamp("us")),
        }
    )


def published(tmp_path: Path, declared: State, table: pa.Table, now_us: int | None) -> sf.CheckpointStore:
    store = sf.open(str(tmp_path / "store"))
    pending = store.begin(job_id="j", graph=sf.JobGraph((sf.Operator("op", 1, 4),)), states=[declared], parent=None)
    with pending.context.subtask("op", 0) as writer:
        writer.write("s", table)
    pending.add(writer)
    if now_us is not None:
        pending.set_now("op", event_time_us=now_us)
    pending.publish()
    return store


def keys_of(store: sf.CheckpointStore) -> list[int]:
    return sorted(store.open().state("op", "s").table()["k"].to_pylist())


@pytest.mark.parametrize(
    ("now", "keys"),
    [(None, [1, 2, 3]), (NO_TIME_US, [1, 2, 3]), (109, [1, 2, 3]), (110, [2, 3]), (120, [3]), (2**63 - 1, [3])],
)
def test_a_row_goes_when_its_time_has_come(tmp_path: Path, now: int | None, keys: list[int]) -> None:
    """Row 3 was written before the clock had a time."""
    store = published(tmp_path, state(Ttl(10)), rows((1, 100), (2, 110), (3, NO_TIME_US)), now)
    assert keys_of(store) == keys
    record = store.open().record
    assert record.optional_features == ("ttl",)
    assert sf.validate(store, level="full").ok


def test_the_clock_of_another_kind_does_not_count(tmp_path: Path) -> None:
    store = published(tmp_path, state(Ttl(10, "processing_time")), rows((1, 100)), 1000)
    assert store.open().states[0].ttl_now_us is None
    assert keys_of(store) == [1]


@pytest.mark.parametrize(
    ("clock", "job_us", "found_us"),
    [
        ("event_time", None, 100),
        ("event_time", 90, 100),
        ("processing_time", None, 109),
        ("processing_time", 90, 109),
        ("processing_time", 120, 120),
    ],
)
def test_of_the_subtasks_times_the_least_of_event_time_counts_and_the_latest_of_processing_time(
    tmp_path: Path, clock: TimerClock, job_us: int | None, found_us: int
) -> None:
    """The second subtask may have dropped at 109 what the first still had at 100."""
    store = sf.open(str(tmp_path))
    graph = sf.JobGraph((sf.Operator("op", 2, 4),))
    pending = store.begin(job_id="j", graph=graph, states=[state(Ttl(10, clock))], parent=None)
    for subtask, now_us in enumerate((100, 109)):
        with pending.context.subtask("op", subtask) as writer:
            writer.empty("s")
            writer.set_now("s", now_us)
        pending.add(writer)
    pending.set_now("op", event_time_us=job_us, processing_time_us=job_us)
    pending.publish()
    assert store.open().states[0].ttl_now_us == found_us


def test_a_restore_hides_by_the_saved_ttl_whatever_the_program_declares(tmp_path: Path) -> None:
    """Otherwise a longer duration, or none, would bring rows back to life."""
    store = published(tmp_path, state(Ttl(10)), rows((1, 100), (2, 110)), 110)
    checkpoint = store.open()
    saved = checkpoint.states[0]
    longer, without = state(Ttl(1000), previous=saved), state(previous=saved)
    for declared in (saved, longer, without):
        plan = checkpoint.plan_restore(
            checkpoint.graph, states=[declared], drop=["op/s.ttl_last_access"] if declared.ttl is None else []
        )
        task = checkpoint.restore(plan, "op", 0)["s"]
        table = task.table(as_schema=declared.current)
        assert table["k"].to_pylist() == [2]
        assert table.column_names == ["_key_group", *(item.name for item in declared.current.fields)]


def test_a_program_that_forgets_the_ttl_is_refused_and_told_the_way(tmp_path: Path) -> None:
    store = published(tmp_path, state(Ttl(10)), rows((1, 100)), 100)
    checkpoint = store.open()
    plan = checkpoint.plan_restore(checkpoint.graph, states=[state(previous=checkpoint.states[0])])
    with pytest.raises(sf.RestoreRefused) as caught:
        plan.check()
    text = str(caught.value)
    assert "expire 10 µs after their last access" in text
    assert "drops=['ttl_last_access']" in text
    assert "drop='op/s.ttl_last_access'" in text


def test_a_release_that_knows_no_ttl_shows_every_row_and_refuses_to_lose_the_column(tmp_path: Path) -> None:
    """What such a reader sees: it ignores the member, and knows the column."""
    store = published(tmp_path, state(Ttl(10)), rows((1, 100), (2, 110)), 110)
    checkpoint = store.open()
    ignored = tuple(replace(one, ttl=None, ttl_now_us=None) for one in checkpoint.states)
    old = StoreCheckpoint(checkpoint.storage, replace(checkpoint.record, states=ignored, optional_features=()))
    assert old.state("op", "s").table().num_rows == 2
    plan = old.plan_restore(old.graph, states=[state(previous=old.states[0])])
    with pytest.raises(
        sf.RestoreRefused, match="has the column 'ttl_last_access' in the checkpoint, which the program"
    ):
        plan.check()


def test_rows_of_before_the_ttl_count_from_the_restore(tmp_path: Path) -> None:
    plain = pa.table({"k": pa.array([1, 2]), "v": pa.array([1, 2])})
    store = published(tmp_path, state(), plain, None)
    permit = store.start("j")
    assert permit is not None
    declared = state(Ttl(10), previous=store.open().states[0], defaults={TTL_COLUMN: "500"})
    pending = store.begin(job_id="j", graph=store.open().graph, states=[declared], parent=permit)
    with pending.context.subtask("op", 0) as writer:
        writer.write("s", rows((2, 505)).append_column("_op", pa.array([0], pa.int8())), delta=True)
    pending.add(writer)
    pending.set_now("op", event_time_us=510)
    pending.publish()
    assert sorted(store.open().state("op", "s").with_expired().table()[TTL_COLUMN].cast(pa.int64()).to_pylist()) == [
        500,
        505,
    ]
    assert keys_of(store) == [2]


def transformed(function: Callable[[pa.Table], pa.Table], **more: Any) -> RewriteSpec:
    from stateformat.backends.rewrite import Transform

    return RewriteSpec(transforms={("op", "s"): Transform(function, name="f", **more)})


def test_a_function_sees_every_row_and_keeps_its_time(tmp_path: Path) -> None:
    store = published(tmp_path, state(Ttl(10)), rows((1, 100), (2, 110)), 110)
    rewrite(store, store.open(), transformed(lambda table: table))
    assert keys_of(store) == [2]
    assert store.open().with_expired().state("op", "s").table().num_rows == 2
    assert store.open().states[0].ttl == Ttl(10)
    assert store.open().states[0].ttl_now_us == 110


def test_a_function_that_returns_no_times_ends_the_ttl_and_brings_nothing_back(tmp_path: Path) -> None:
    store = published(tmp_path, state(Ttl(10)), rows((1, 100), (2, 110)), 110)
    rewrite(store, store.open(), transformed(lambda table: table.drop_columns([TTL_COLUMN])))
    assert store.open().states[0].ttl is None
    assert store.open().record.optional_features == ()
    assert keys_of(store) == [2]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda table: table.rename_columns(["k", "v", "seen"]), None),
        (lambda table: table.set_column(2, TTL_COLUMN, table[TTL_COLUMN].cast(pa.int64())), "column of another type"),
    ],
)
def test_the_time_of_a_row_keeps_its_type(
    tmp_path: Path, function: Callable[[pa.Table], pa.Table], message: str | None
) -> None:
    store = published(tmp_path, state(Ttl(10)), rows((1, 100)), 100)
    spec = transformed(function) if message else transformed(lambda table: table, renames={TTL_COLUMN: "seen"})
    with pytest.raises(sf.InvalidInput, match=message or "renames it to 'seen'"):
        rewrite(store, store.open(), spec)

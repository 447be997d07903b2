"""Checkpoints of every version that was ever released are read as on the day they were written."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import stateformat as sf
from stateformat.storage import open_storage
from tests.golden.make_golden import EXPIRING, HOUR, LATER, NOON, TIMED, rows_of
from tests.servers.server import BUCKET
from tests.worlds.stores import rescale_newest

GOLDEN = sorted(path.parent for path in (Path(__file__).parent.parent / "golden").glob("v*/*/expected.json"))


def test_there_are_golden_checkpoints_of_every_mode_kind_and_feature() -> None:
    checkpoints = [sf.open(str(folder)).open() for folder in GOLDEN]
    states = [state for checkpoint in checkpoints for state in checkpoint.states]
    assert {state.mode for state in states} == set(sf.Mode)
    assert {state.kind for state in states if state.kind} == set(sf.Kind)
    features = {feature for checkpoint in checkpoints for feature in checkpoint.record.required_features}
    assert features == {"finished_operators", "layers", "in_flight", "committables", "rescaled"}


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_golden_store_is_whole_and_gives_the_rows_it_was_written_with(folder: Path) -> None:
    store = sf.open(str(folder))
    expected = json.loads((folder / "expected.json").read_text())
    history = store.history()
    assert {str(record.checkpoint_id) for record in history} == set(expected)
    for record in history:
        assert json.loads(json.dumps(rows_of(store.open(record.checkpoint_id)))) == expected[str(record.checkpoint_id)]
        assert sf.validate(store.storage, record.checkpoint_id, level="full").problems == ()


@pytest.mark.parametrize(("scheme", "server"), [("s3a", "moto"), ("gs", "gcs"), ("az", "azurite")])
def test_a_store_that_an_earlier_release_left_in_a_bucket_is_read_and_goes_on(
    scheme: str, server: str, request: pytest.FixtureRequest
) -> None:
    options = request.getfixturevalue(server).options()
    url = f"{scheme}://{BUCKET}/{uuid.uuid4().hex}"
    there = open_storage(url, **options).folder()
    assert there is not None
    for path in filter(Path.is_file, GOLDEN[0].rglob("*")):
        # Not as this release writes objects of a store.
        with there.open_output(str(path.relative_to(GOLDEN[0]))) as output:
            output.write(path.read_bytes())
    store = sf.open(url, **options)
    expected = json.loads((GOLDEN[0] / "expected.json").read_text())
    newest = store.open()
    assert json.loads(json.dumps(rows_of(newest))) == expected[str(newest.id)]
    assert sf.validate(store.storage, newest.id, level="full").problems == ()
    before = len(store.history())
    rescale_newest(store, 2)
    assert len(store.history()) == before + 1
    assert sf.validate(store.storage, store.open().id, level="full").problems == ()
    assert rows_of(store.open(newest.id)) == rows_of(newest)


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_was_written_then_can_be_restored_at_another_parallelism_today(folder: Path) -> None:
    checkpoint = sf.open(str(folder)).open()
    plan = checkpoint.plan_restore(checkpoint.graph.at(5))
    plan.check()
    keys = [
        row["tailnum"]
        for subtask in range(5)
        for row in checkpoint.restore(plan, "delays", subtask)["sums"].table().to_pylist()
    ]
    assert sorted(keys) == sorted(row["tailnum"] for row in checkpoint.read("delays", "sums").table().to_pylist())


@pytest.mark.parametrize("name", LATER)
def test_a_golden_store_of_what_came_later_is_whole_and_is_restored_with_its_rows(name: str) -> None:
    folder = EXPIRING.parent / name
    expected = json.loads((folder / "expected.json").read_text())["rows"]
    store = sf.open(str(folder / "store"))
    assert {str(record.checkpoint_id) for record in store.history()} == set(expected) == {"1", "2"}
    for checkpoint in store.checkpoints():
        assert json.loads(json.dumps(rows_of(checkpoint))) == expected[str(checkpoint.id)]
        assert sf.validate(store.storage, checkpoint.id, level="full").problems == ()
        plan = checkpoint.plan_restore(checkpoint.graph.at(5))
        plan.check()
        tasks = [checkpoint.restore(plan, "seen", subtask) for subtask in range(5)]
        for state in checkpoint.states:
            users = [user for task in tasks for user in task[state.name].table()["user"].to_pylist()]
            assert sorted(users) == sorted(checkpoint.state(state).table()["user"].to_pylist())


def test_golden_timers_keep_their_clocks() -> None:
    for checkpoint in sf.open(str(TIMED / "store")).checkpoints():
        assert checkpoint.record.required_features[-1:] == ("processing_time_timers",)
        clocks = {state.name: (state.clock, state.clock_now_us) for state in checkpoint.states}
        assert clocks == {"reminders": ("processing_time", _now(checkpoint.id)), "closing": ("event_time", None)}


def test_a_golden_store_whose_rows_expire_shows_those_that_live_and_keeps_all() -> None:
    expected = json.loads((EXPIRING / "expected.json").read_text())
    for checkpoint in sf.open(str(EXPIRING / "store")).checkpoints():
        number = str(checkpoint.id)
        assert checkpoint.record.optional_features == ("ttl",)
        for state in checkpoint.states:
            assert sorted(checkpoint.state(state).table()["user"].to_pylist()) == expected["live"][number][state.name]
            assert state.ttl is not None
            lives = [
                row["user"]
                for key, rows in expected["rows"][number].items()
                for row in rows
                if key.split("/")[1] == state.name and _expires(row, state.ttl.duration_us) > _now(checkpoint.id)
            ]
            assert sorted(lives) == expected["live"][number][state.name]


def _now(checkpoint_id: int) -> int:
    return NOON if checkpoint_id == 1 else NOON + HOUR * 3 // 2


def _expires(row: dict[str, str], duration_us: int) -> int:
    accessed = datetime.fromisoformat(row["ttl_last_access"]).replace(tzinfo=UTC)
    return (accessed - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) + duration_us

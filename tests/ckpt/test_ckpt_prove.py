"""``--prove`` notices every kind of difference: the action is real, but takes another checkpoint
than it was given, which differs in one thing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import stateformat.backends.importing as importing
import stateformat.backends.rewrite as rewriting
from stateformat import model
from stateformat.backends.foreign.flink.metadata import (
    MasterState,
    Metadata,
    Operator,
    decode_metadata,
    encode_metadata,
)
from stateformat.graph import JobGraph, Partitioner
from stateformat.model import CheckpointKind, Mode, State, Stop, StopMode
from stateformat.publication import copying
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store
from stateformat.ttl import Ttl
from tests.ckpt.ckpt_runs import document, page
from tests.stores import KEYS, PARALLELISM, Job, flights_job, operator, owned, tail

Place = tuple[str, str]
Rows = Callable[[int], pa.Table]

ENDED: Mapping[str, Any] = {
    "finished": {"done": range(PARALLELISM), "flights": [0], "airlines": [0]},
    "finishing": {"airlines": [2]},
    "properties": {"owner": "ann", "purpose": "nightly run"},
    "stop": Stop(StopMode.NO_DRAIN, "r" * 32),
}


def whole_job() -> Job:
    """The job of ``flights_store``, and what that lacks: rows that expire, timers of the other
    clock, an operator that has finished.
    """
    job = flights_job()
    planes = [tail(i) for i in range(9)]
    states = (
        declare.value_state("delays", "recent", keys=KEYS, values={"n": pa.int64()}, ttl=Ttl(10**12, "event_time")),
        declare.timers("delays", "alarm", keys=KEYS, clock="processing_time"),
    )
    keyed = {
        "recent": {"tailnum": planes, "n": range(9), "ttl_last_access": pa.array(range(9), pa.timestamp("us"))},
        "alarm": {"tailnum": planes, "_timestamp": range(9), "_tag": ["ring"] * 9},
    }
    rows = {("delays", name): keyed_rows(columns) for name, columns in keyed.items()}
    graph = JobGraph((*job.graph.operators, operator("done")), job.graph.edges)
    return replace(job, graph=graph, states=(*job.states, *states), rows={**job.rows, **rows})


def keyed_rows(columns: Mapping[str, Any]) -> Rows:
    table = pa.table(dict(columns))
    return lambda subtask: owned(table, ["tailnum"], operator("delays"), subtask)


WHOLE = whole_job()
PLACES = {f"{state.operator}/{state.name}": state for state in WHOLE.states}


def last_of(state: State) -> int:
    """The last subtask that writes rows of a state; -1 for a coordinator."""
    if state.mode is Mode.COORDINATOR:
        return -1
    count = WHOLE.graph.operator(state.operator).parallelism
    return max(i for i in range(count) if WHOLE.rows[state.operator, state.name](i).num_rows)


def with_rows(state: State, change: Callable[[pa.Table], pa.Table]) -> Job:
    """The job whose last subtask has other rows of a state."""
    rows, last = WHOLE.rows[state.operator, state.name], last_of(state)
    # Of progress, the least counts after a rescale.
    every = state.mode is Mode.PROGRESS
    changed = {(state.operator, state.name): lambda i: change(rows(i)) if every or i == last else rows(i)}
    return replace(WHOLE, rows={**WHOLE.rows, **changed})


def with_other_value(table: pa.Table, name: str) -> pa.Table:
    *values, last = table[name].to_pylist()
    column = pa.array([*values, another(last)], table[name].type)
    return table.set_column(table.column_names.index(name), name, column)


def another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, str | bytes | list):
        return value[:-1]
    return value.replace(year=value.year + 1) if hasattr(value, "year") else value + 1


def values() -> dict[str, Job]:
    """A job for each column of each state of which the last value is another."""
    found = {}
    for place, state in PLACES.items():
        sample = WHOLE.rows[state.operator, state.name](last_of(state))
        for name in sample.column_names:
            # Another key is another row; the owners of some rows are part of where they lie.
            if name not in ("tailnum", "_edge", "_receiver") and sample[name][-1].is_valid:
                found[f"{place}.{name}"] = with_rows(state, lambda table, name=name: with_other_value(table, name))
    return found


def without_state(place: str) -> Job:
    return replace(WHOLE, states=tuple(state for state in WHOLE.states if state is not PLACES[place]))


GRAPH, DELAYS = WHOLE.graph, WHOLE.graph.operator("delays")


def with_edge(change: Callable[[Any], Any]) -> Job:
    return replace(WHOLE, graph=replace(GRAPH, edges=tuple(change(one) for one in GRAPH.edges)))


def with_delays(**other: Any) -> Job:
    operators = tuple(replace(one, **other) if one is DELAYS else one for one in GRAPH.operators)
    return replace(WHOLE, graph=replace(GRAPH, operators=operators))


def with_state(place: str, **other: Any) -> Job:
    states = tuple(replace(one, **other) if one is PLACES[place] else one for one in WHOLE.states)
    return replace(WHOLE, states=states)


DIFFERENCES: dict[str, tuple[str, Job, Mapping[str, Any]]] = {
    **{name: (name.split(".")[0], job, {}) for name, job in values().items()},
    **{f"rows of {name}": (name, with_rows(state, lambda table: table.slice(1)), {}) for name, state in PLACES.items()},
    "no state": ("delays/wake", without_state("delays/wake"), {}),
    "ttl": ("delays/recent: ttl", with_state("delays/recent", ttl=Ttl(10**12 + 1, "event_time")), {}),
    "no ttl": ("delays/recent: ttl", with_state("delays/recent", ttl=None), {}),
    "clock": ("delays/alarm: clock", with_state("delays/alarm", clock="event_time"), {}),
    "an operator": ("done", replace(WHOLE, graph=replace(GRAPH, operators=GRAPH.operators[:-1])), {"finished": {}}),
    "an edge": ("sink", replace(WHOLE, graph=replace(GRAPH, edges=GRAPH.edges[:-1])), {}),
    "a partitioner": (
        "sink",
        with_edge(lambda one: replace(one, partitioner=Partitioner.RESCALE) if one.target == "sink" else one),
        {},
    ),
    "has finished": ("planes", WHOLE, {"finished": {**ENDED["finished"], "planes": [1]}}),
    "another has finished": ("flights", WHOLE, {"finished": {**ENDED["finished"], "flights": [1]}}),
    "is finishing": ("airlines", WHOLE, {"finishing": {}}),
    "another property": ("properties.owner", WHOLE, {"properties": {**ENDED["properties"], "owner": "bob"}}),
    "no property": ("properties.owner", WHOLE, {"properties": {"purpose": "nightly run"}}),
    "one property more": ("properties.more", WHOLE, {"properties": {**ENDED["properties"], "more": "x"}}),
    "no stop": ("stop", WHOLE, {"stop": None}),
    "a drain": ("stop", WHOLE, {"stop": Stop(StopMode.DRAIN, "r" * 32)}),
    "job id": ("job_id", replace(WHOLE, job_id="other"), {}),
    "job name": ("job_name", replace(WHOLE, name="other"), {}),
}


def published(folder: Path, job: Job, more: Mapping[str, Any]) -> CheckpointStore:
    """A store with one checkpoint, always of one attempt: committables name it."""
    store = open_store(str(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "new_attempt_id", lambda: "a" * 32)
        job.publish(store, None, **{**ENDED, **more})
    return store


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    published(folder, WHOLE, {})
    return folder


def acting_on(monkeypatch: pytest.MonkeyPatch, other: CheckpointStore) -> None:
    """Let copy, rescale and rewrite take this store's checkpoint, whichever they are given."""
    copy, rescaled, rewritten = CheckpointStore.copy, rewriting.publish_rescaled, rewriting.rewrite
    monkeypatch.setattr(CheckpointStore, "copy", lambda _, __, *rest: copy(other, other.open(), *rest))
    monkeypatch.setattr(
        rewriting,
        "publish_rescaled",
        lambda _, __, store, **more: rescaled(other.open(), other.open().graph.at(5), store=other, **more),
    )
    monkeypatch.setattr(
        rewriting, "rewrite", lambda _, __, *rest, **more: rewritten(other, other.open(), *rest, **more)
    )


COMMANDS = {
    "copy": "copy {store} {target}",
    "rescale": "rescale {store} --parallelism 5 --to {target}",
    "rewrite": "rewrite {store} --to {target}",
}


def pairs() -> Iterator[Any]:
    """Each difference with each command; one of the commands at once, the others with the slow
    tests.
    """
    for i, what in enumerate(DIFFERENCES):
        for j, command in enumerate(COMMANDS):
            yield pytest.param(what, command, marks=[] if i % len(COMMANDS) == j else [pytest.mark.truth])


@pytest.mark.parametrize(("what", "command"), [*pairs()])
def test_a_result_that_differs_in_one_thing_is_not_proved(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, command: str
) -> None:
    named, job, more = DIFFERENCES[what]
    acting_on(monkeypatch, published(tmp_path / "other", job, more))
    words = COMMANDS[command].format(store=whole, target=tmp_path / "target").split()
    text = page(*words, "--prove", status=1)
    assert "Not proved" in text
    assert named in text


@pytest.mark.parametrize(
    ("named", "other"),
    [
        ("Delays per plane", {"name": "Other"}),
        ("chain", {"chain": "other"}),
    ],
)
def test_a_savepoint_says_of_its_operators_what_its_source_says(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, other: dict[str, Any]
) -> None:
    acting_on(monkeypatch, published(tmp_path / "other", with_delays(**other), {}))
    text = page("copy", whole, tmp_path / "target", "--prove", status=1)
    assert named in text


def test_a_copy_that_is_no_savepoint_is_not_proved(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "CheckpointKind", SimpleNamespace(SAVEPOINT=CheckpointKind.CHECKPOINT))
    text = page("copy", whole, tmp_path / "target", "--prove", status=1)
    assert "kind: savepoint → checkpoint" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_what_takes_all_over_is_proved(whole: Path, tmp_path: Path, command: str) -> None:
    words = COMMANDS[command].format(store=whole, target=tmp_path / "target").split()
    proof = document(*words, "--prove")["proof"]
    assert (proof["same"], proof["states"]) == (True, len(WHOLE.states))


# ---- imports

FLINK = Path(__file__).parents[1] / "foreign/fixtures/flink-2.3.0/core-hashmap-canonical/savepoint"


def flink(folder: Path, change: Callable[[Metadata], Metadata]) -> Path:
    """A savepoint with a state of the job master, and with another ``_metadata``."""
    shutil.copytree(FLINK, folder)
    read = decode_metadata((FLINK / "_metadata").read_bytes(), "_metadata")
    read = replace(read, master_states=(MasterState("hook", 3, b"master"),))
    (folder / "_metadata").write_bytes(encode_metadata(change(read)))
    return folder


def with_operator(change: Callable[[Operator], Operator]) -> Callable[[Metadata], Metadata]:
    def changed(metadata: Metadata) -> Metadata:
        found = [one for one in metadata.operators if change(one) != one]
        assert found, "the savepoint has none of these"
        return replace(metadata, operators=tuple(change(one) if one is found[0] else one for one in metadata.operators))

    return changed


def without_keyed(operator: Operator) -> Operator:
    return replace(operator, subtasks=tuple(replace(one, managed_keyed=None) for one in operator.subtasks))


def with_coordinator(operator: Operator) -> Operator:
    return replace(operator, coordinator=operator.coordinator and replace(operator.coordinator, data=b"other"))


@pytest.mark.parametrize(
    ("named", "change", "key_hashes"),
    [
        (
            "properties.flink.master_state.hook",
            lambda one: replace(one, master_states=(MasterState("hook", 3, b"other"),)),
            ("rehash", "keep"),
        ),
        ("properties.flink.master_state.hook", lambda one: replace(one, master_states=()), ("rehash", "keep")),
        (
            "flink-savepoint/template",
            lambda one: replace(one, master_states=(MasterState("hook", 4, b"master"),)),
            ("keep",),
        ),
        ("by-string/_timer_state/event_user-timers", with_operator(without_keyed), ("rehash", "keep")),
        ("/coordinator", with_operator(with_coordinator), ("rehash", "keep")),
    ],
)
def test_an_import_that_lost_something_of_flinks_is_not_proved(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: str,
    change: Callable[[Metadata], Metadata],
    key_hashes: tuple[str, ...],
) -> None:
    source, other = flink(tmp_path / "source", lambda one: one), flink(tmp_path / "other", change)
    imported = importing.import_checkpoint
    for key_hash in key_hashes:
        words = ("import", source, "--key-hash", key_hash, "--prove", "--to")
        assert document(*words, tmp_path / key_hash / "whole")["proof"]["same"]
        with monkeypatch.context() as patch:
            taken = open_store(str(other)).open()
            patch.setattr(importing, "import_checkpoint", lambda _, *rest, **more: imported(taken, *rest, **more))  # noqa: B023
            text = page(*words, tmp_path / key_hash / "other", status=1)
        assert "Not proved" in text
        assert named in text

"""``ckpt diff`` and ``--prove``: exit statuses, addresses, what is refused, and results that have
lost something.

``--prove`` notices every kind of difference: the action is real, but takes another checkpoint than
it was given, which differs in one thing.
"""

from __future__ import annotations

import json
import os
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
from stateformat.backends.rewrite import RewriteSpec, Transform, publish_rescaled
from stateformat.graph import JobGraph, Partitioner
from stateformat.model import CheckpointKind, Mode, State, Stop, StopMode
from stateformat.publication import copying
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store
from stateformat.tools.ckpt import text as render
from stateformat.ttl import Ttl
from tests.ckpt.ckpt_runs import document, failure, page, run, words
from tests.worlds.stores import KEYS, PARALLELISM, Job, flights_job, operator, owned, tail

FOREIGN = Path(__file__).parents[1] / "foreign/fixtures"
FLINK = FOREIGN / "flink-2.3.0/finished-hashmap-canonical/savepoint"
SPARK = FOREIGN / "spark-4.3.0/two/checkpoint"


def test_the_exit_status_says_whether_the_content_is_the_same(flights: Path, own_flights: Path) -> None:
    assert document("diff", f"{flights}@1", "@1")["same"]
    assert not document("diff", f"{flights}@1", "@2", "--rows", 2, status=1)["same"]
    assert document("diff", flights, own_flights)["read_bytes"] == 0
    store = open_store(str(own_flights))
    publish_rescaled(store.open(), store.open().graph.at(3), store=store)
    found = document("diff", flights, own_flights)
    assert found["same"]
    assert [one["counts"] for one in found["graph"]["operators"]] == [False] * len(found["graph"]["operators"])
    assert "do not count" in page("diff", flights, own_flights)


def test_at_alone_is_another_checkpoint_of_the_same_store(flights: Path) -> None:
    short = document("diff", f"{flights}@1", "@2", status=1)
    assert short == document("diff", f"{flights}@1", f"{flights}@2", status=1)
    assert document("diff", f"{flights}@1", flights, status=1)["after"]["checkpoint_id"] == 2
    back = document("diff", flights, "@1", status=1)
    assert (back["before"]["checkpoint_id"], back["after"]["checkpoint_id"]) == (2, 1)


def test_pins_are_sides_too(own_flights: Path) -> None:
    assert run("pin", f"{own_flights}@1", "monday").status == 0
    for addresses in ((f"{own_flights}@monday", "@2"), (f"{own_flights}@monday", own_flights)):
        found = document("diff", *addresses, status=1)
        assert (found["before"]["checkpoint_id"], found["after"]["checkpoint_id"]) == (1, 2)
    assert document("diff", f"{own_flights}@1", "@monday")["read_bytes"] == 0


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["@1", "@x"], 3, "no store"),
        (["@1", "@9"], 3, "no checkpoint 9"),
        (["@1", "@0"], 2, "not a checkpoint id"),
        (["@1"], 2, "Missing argument"),
        (["@1", "@2", "--operator", "delay"], 2, "did you mean 'delays'"),
        (["@1", "@2", "--state", "sum"], 2, "did you mean 'sums'"),
        (["@1", "@2", "--rows", "0"], 2, "--rows"),
    ],
)
def test_what_is_not_there_is_a_sentence(flights: Path, arguments: list[str], status: int, words: str) -> None:
    found = run("diff", f"{flights}{arguments[0]}", *arguments[1:])
    assert (found.status, found.out) == (status, "")
    assert words in found.err


def test_damage_on_one_side_is_an_error_and_no_difference(flights: Path, own_flights: Path) -> None:
    record = max((own_flights / "checkpoints").iterdir())
    record.chmod(0o644)
    record.write_bytes(b"{")
    error = failure("diff", flights, own_flights, status=1)
    assert error["kind"] == "damaged_record"


def test_where_the_changes_are_is_drawn_if_they_are_in_few_key_groups(tmp_path: Path) -> None:
    import numpy as np

    from stateformat.graph import JobGraph, Operator
    from stateformat.keys import hash_keys, key_groups
    from stateformat.states import declare

    state = declare.value_state("op", "s", keys={"k": pa.int64()}, values={"n": pa.int64()})
    keys = pa.array(range(4000), pa.int64())
    low = key_groups(hash_keys([pa.chunked_array([keys])]), 128) < 32
    store, permit = open_store(str(tmp_path)), None
    for n in (np.zeros(4000, np.int64), np.where(low, 1, 0)):
        graph = JobGraph((Operator("op", 1, 128),))
        pending = store.begin(job_id="job", graph=graph, states=[state], parent=permit)
        with pending.context.subtask("op", 0) as writer:
            writer.write("s", pa.table({"k": keys, "n": n}))
        pending.add(writer)
        permit = pending.publish()
    [found] = document("diff", f"{tmp_path}@1", "@2", status=1)["states"]
    assert found["pattern"]["groups"] == [[0, 31]]
    assert sum(one["changed"] for one in found["groups"]) == int(low.sum())
    text = page("diff", f"{tmp_path}@1", "@2", status=1)
    assert "100% of the changes lie in key groups 0-31, which had 24% of the rows before." in " ".join(text.split())
    assert any(set(line.strip()) <= {*"▁▂▃▄▅▆▇█·"} and "·" in line for line in text.splitlines() if line.strip())


@pytest.mark.parametrize("columns", [60, 72, 100])
def test_pages_keep_to_the_columns_that_there_are(flights: Path, columns: int) -> None:
    for options in ((), ("--rows", 3)):
        lines = page("diff", f"{flights}@1", "@2", *options, status=1, COLUMNS=str(columns)).splitlines()
        assert max(map(render.text_width, lines)) <= columns


# ---- other systems


@pytest.mark.parametrize("key_hash", ["rehash", "keep"])
@pytest.mark.parametrize("source", [FLINK, SPARK], ids=["flink", "spark"])
def test_an_import_is_proved_and_is_no_difference(tmp_path: Path, source: Path, key_hash: str) -> None:
    target = tmp_path / "store"
    made = document("import", source, "--to", target, "--key-hash", key_hash, "--prove")
    assert made["proof"]["same"]
    found = run("diff", source, target, "--format", "json").document
    # Kept key groups come with what only Flink can say, so that the state can go back.
    added = [state for state in found["states"] if state["change"] == "added"]
    assert [state["change"] for state in found["states"] if state not in added] == ["same"] * made["proof"]["states"]
    assert bool(added) is (source is FLINK and key_hash == "keep")
    rows = sum(state["rows"] for state in _states(target)) - sum(state["after"]["rows"] for state in added)
    assert made["proof"]["rows"] == rows


def _states(store: Path) -> list[Any]:
    states: list[Any] = document("inspect", store)["states"]
    return states


def test_an_import_under_other_names_is_proved(tmp_path: Path) -> None:
    [first, *_] = document("inspect", SPARK)["states"]
    state = f"{first['operator']}/{first['name']}"
    value = next(item["name"] for item in first["schemas"][-1]["fields"] if item["name"] not in first["key_columns"])
    renames = [f"{first['operator']}=totals", f"{state}=sums", f"{state}.{value}=renamed"]
    made = document(
        "import", SPARK, "--to", tmp_path / "store", "--prove", *(part for one in renames for part in ("--map", one))
    )
    assert made["proof"]["same"]
    names = {(one["operator"], one["name"]) for one in _states(tmp_path / "store")}
    assert ("totals", "sums") in names


def test_a_query_at_another_number_of_partitions_is_proved(tmp_path: Path) -> None:
    made = document("rescale", SPARK, "--parallelism", 7, "--to", tmp_path / "query", "--prove")
    assert made["proof"]["same"]
    assert made["proof"]["states"] == 2


# ---- proofs


@pytest.mark.parametrize(
    "command",
    [
        "rewrite {store} --prove",
        "rewrite {store} --parallelism 2 --max-parallelism 16 --rename delays=late --prove",
        "rewrite {store} --rename-column delays/sums.n=count --prove",
        "rewrite {store} --to {other} --prove",
        "rescale {store} --parallelism 3 --prove",
        "rescale {store} --parallelism 3 --to {other} --prove",
        "copy {store} {other} --prove",
    ],
)
def test_what_has_lost_nothing_is_proved_in_a_line(own_flights: Path, tmp_path: Path, command: str) -> None:
    words = command.format(store=own_flights, other=tmp_path / "other").split()
    found = run(*words, "--format", "json")
    assert found.status == 0, found.err
    proof = json.loads(found.out)["proof"]
    assert (proof["same"], proof["states"], proof["problems"], proof["difference"]) == (True, 13, [], None)
    # Where segments were copied, what lies there is read; what digests say is not.
    copied = command.startswith(("copy", "rescale {store} --parallelism 3 --to"))
    assert (proof["verified_bytes"] is not None) is copied
    # A rescale leaves a copy of broadcast state behind: that is compared with one that stays.
    if not command.startswith("rewrite"):
        assert proof["read_bytes"] == (0 if command.startswith("copy") else 1124)


def test_without_prove_nothing_is_compared(own_flights: Path, tmp_path: Path) -> None:
    assert document("copy", own_flights, tmp_path / "other")["proof"] is None
    assert "Proved" not in page("rewrite", own_flights)


def test_a_rewrite_by_a_function_cannot_be_proved(own_flights: Path, tmp_path: Path) -> None:
    (tmp_path / "nothing_changed.py").write_text("def same(table):\n    return table\n")
    before = sorted(own_flights.rglob("*"))
    text = words(
        "rewrite", own_flights, "--transform", f"delays/sums={tmp_path}/nothing_changed.py:same", "--prove", status=2
    )
    assert "changes rows, so there is nothing to prove" in text
    assert sorted(own_flights.rglob("*")) == before


def test_a_rewrite_that_loses_a_row_is_not_proved(own_flights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rewriting.rewrite

    def losing(store: Any, checkpoint: Any, spec: RewriteSpec, **more: Any) -> Any:
        def but_one(table: pa.Table) -> pa.Table:
            return table.filter(pa.compute.not_equal(table["tailnum"], "N004"))

        lost = Transform(but_one, name="but_one")
        return whole(store, checkpoint, RewriteSpec(transforms={("delays", "sums"): lost}), **more)

    monkeypatch.setattr(rewriting, "rewrite", losing)
    text = page("rewrite", own_flights, "--prove", status=1)
    assert "Not proved: the result differs from its source." in text
    assert "delays/sums" in text
    proof = document("rewrite", own_flights, "--prove")["proof"]
    assert proof["same"], "what is lost already cannot be lost again"


def test_a_copy_with_a_flipped_byte_is_not_proved(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = CheckpointStore.copy

    def damaging(self: CheckpointStore, checkpoint: Any, target: CheckpointStore, progress: Any = None) -> Any:
        record = copy(self, checkpoint, target, progress)
        path = next((tmp_path / "other" / "segments").rglob("*.parquet"))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        # The copy may be a link: the source stays as it is.
        path.unlink()
        path.write_bytes(data)
        os.sync()
        return record

    monkeypatch.setattr(CheckpointStore, "copy", damaging)
    text = page("copy", whole, tmp_path / "other", "--prove", status=1)
    assert "Not proved: what was copied is damaged." in text
    assert "digest" in text


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
def proved(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    proved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, command: str
) -> None:
    named, job, more = DIFFERENCES[what]
    acting_on(monkeypatch, published(tmp_path / "other", job, more))
    words = COMMANDS[command].format(store=proved, target=tmp_path / "target").split()
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
    proved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, other: dict[str, Any]
) -> None:
    acting_on(monkeypatch, published(tmp_path / "other", with_delays(**other), {}))
    text = page("copy", proved, tmp_path / "target", "--prove", status=1)
    assert named in text


def test_a_copy_that_is_no_savepoint_is_not_proved(
    proved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "CheckpointKind", SimpleNamespace(SAVEPOINT=CheckpointKind.CHECKPOINT))
    text = page("copy", proved, tmp_path / "target", "--prove", status=1)
    assert "kind: savepoint → checkpoint" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_what_takes_all_over_is_proved(proved: Path, tmp_path: Path, command: str) -> None:
    words = COMMANDS[command].format(store=proved, target=tmp_path / "target").split()
    proof = document(*words, "--prove")["proof"]
    assert (proof["same"], proof["states"]) == (True, len(WHOLE.states))


# ---- imports

FLINK_CORE = Path(__file__).parents[1] / "foreign/fixtures/flink-2.3.0/core-hashmap-canonical/savepoint"


def flink(folder: Path, change: Callable[[Metadata], Metadata]) -> Path:
    """A savepoint with a state of the job master, and with another ``_metadata``."""
    shutil.copytree(FLINK_CORE, folder)
    read = decode_metadata((FLINK_CORE / "_metadata").read_bytes(), "_metadata")
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

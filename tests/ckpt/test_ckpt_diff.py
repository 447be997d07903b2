"""``ckpt diff`` and ``--prove``: exit statuses, addresses, what is refused, and results that have
lost something.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import stateformat.backends.rewrite as rewriting
from stateformat.backends.rewrite import RewriteSpec, Transform, publish_rescaled
from stateformat.store import CheckpointStore, open as open_store
from stateformat.tools.ckpt.text import render
from tests.ckpt.ckpt_runs import document, failure, page, run, words

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

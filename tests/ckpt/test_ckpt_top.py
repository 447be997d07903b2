"""``ckpt top``: its page, its JSON, and that the keys shown are those that ``ckpt get`` takes."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from stateformat.states import declare
from stateformat.store import open as open_store
from tests import stores
from tests.ckpt.ckpt_runs import document, failure, page, run, words
from tests.ckpt.test_ckpt_get import FOREIGN, read_bytes, requests


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Lists by word: "hot's" has 900 entries, nine others have ten each, one of them no word."""
    job = stores.counts_job()
    counter = job.graph.by_uid[job.states[0].operator]
    state = declare.list_state("counter", "log", keys={"word": pa.string()}, values={"t": pa.string()})
    keys = ["hot's"] * 900 + [word for word in (*"abcdefgh", None) for _ in range(10)]
    index = [*range(900), *([*range(10)] * 9)]
    rows = pa.table({"word": keys, "_index": pa.array(index, pa.int64()), "t": ["x" * 1000] * 10 + ["y"] * 980})
    job = replace(job, states=(state,), rows={("counter", "log"): lambda i: stores.owned(rows, ["word"], counter, i)})
    job.publish(open_store(str(tmp_path / "log")), None)
    return tmp_path / "log"


def test_the_keys_with_most_and_the_skew(log: Path) -> None:
    (state,) = document("top", log, "--limit", 2)["states"]
    keys = state["keys"]
    assert (keys["count"], keys["rows"], keys["bytes"], keys["skew"]) == (10, 990, None, round(900 * 10 / 990, 2))
    assert keys["greatest"][0]["key"] == {"word": "hot's"}
    assert [entry["rows"] for entry in keys["greatest"]] == [900, 10]
    groups = state["key_groups"]
    assert (groups["count"], groups["greatest"][0]["rows"]) == (128, 900)
    assert groups["greatest"][0]["key_group"] == keys["greatest"][0]["key_group"]
    assert state["subtasks"]["greatest"][0]["rows"] == max(
        entry["rows"] for entry in document("inspect", log)["states"][0]["subtasks"]
    )
    assert state["subtasks"]["skew"] == document("inspect", log)["states"][0]["skew"]


def test_the_page_ends_with_the_command_that_shows_the_first_key(log: Path) -> None:
    found = " ".join(page("top", log).split())
    (command,) = re.findall(r"`(ckpt get .*)` shows its rows", found)
    shown = run(*shlex.split(command)[1:])
    assert (shown.status, shown.err) == (0, "")
    assert "and 880 more rows" in shown.out


def test_every_key_shown_is_one_that_get_takes(log: Path) -> None:
    (state,) = document("top", log, "--by", "bytes", "--limit", 20)["states"]
    for entry in state["keys"]["greatest"]:
        (key,) = entry["key"].values()
        found = document("get", log, "--key", json.dumps(key))
        assert (found["row_count"], found["key_group"]) == (entry["rows"], entry["key_group"])
    assert sum(entry["bytes"] for entry in state["keys"]["greatest"]) == state["keys"]["bytes"]


def test_of_states_whose_keys_are_all_alike_nothing_is_read(counts: Path) -> None:
    found = run("top", counts, "--verbose")
    assert requests(found.err)["read_range"] == 2, "record and manifest"
    assert "Every key has one row; --by bytes tells their size." in found.out
    (state,) = document("top", counts, "--by", "bytes")["states"]
    assert state["keys"]["count"] == 20


def test_without_keys_record_and_manifest_are_all_that_is_read(log: Path) -> None:
    found = run("top", log, "--no-keys", "--verbose")
    assert requests(found.err) == {"read_range": 2, "list": 2}
    assert document("top", log, "--no-keys")["states"][0]["keys"] is None


def test_by_rows_only_the_key_columns_are_read(tmp_path: Path) -> None:
    job = stores.counts_job(parallelism=1)
    counter = job.graph.by_uid[job.states[0].operator]
    state = declare.list_state("counter", "log", keys={"k": pa.int64()}, values={"t": pa.string()})
    count = 200_000
    numbers = pa.array(range(count), pa.int64())
    texts = [f"{number * 2654435761 % 2**32:032x}" for number in range(count)]
    rows = pa.table({"k": numbers, "_index": pa.array([0] * count, pa.int64()), "t": texts})
    job = replace(job, states=(state,), rows={("counter", "log"): lambda i: stores.owned(rows, ["k"], counter, i)})
    job.publish(open_store(str(tmp_path / "log")), None)
    by = {name: read_bytes(run("top", tmp_path / "log", "--by", name, "--verbose").err) for name in ("rows", "bytes")}
    assert by["rows"] < by["bytes"] / 2


def test_every_mode_of_state_is_shown(flights: Path) -> None:
    states = document("top", flights)["states"]
    assert {state["mode"] for state in states} >= {"keyed", "union", "even_split", "broadcast", "progress", "in_flight"}
    rows = [state["rows"] for state in states]
    assert rows == sorted(rows, reverse=True)
    assert page("top", flights, COLUMNS="60")
    assert "did you mean 'sums'" in failure("top", flights, "--state", "summs", status=2)["message"]


def test_damage_is_a_sentence(whole: Path) -> None:
    for path in (whole / "segments").rglob("*.parquet"):
        path.write_bytes(path.read_bytes()[:-9] + b"123456789")
    assert "digest" in failure("top", whole, "--by", "bytes", status=1)["message"]
    assert document("top", whole, "--no-keys")["states"]


@pytest.mark.parametrize(
    "folder", ["flink-2.3.0/core-rocksdb-canonical/savepoint", "spark-4.3.0/totals-zstd/checkpoint"]
)
@pytest.mark.parametrize("by", ["rows", "bytes"])
def test_foreign_checkpoints_are_counted_too(folder: str, by: str) -> None:
    states = document("top", FOREIGN / folder, "--by", by)["states"]
    keyed = [state for state in states if state["mode"] == "keyed"]
    assert keyed
    for state in keyed:
        sums = document("inspect", FOREIGN / folder, "--operator", state["operator"], "--state", state["state"])
        assert state["bytes"] == sums["states"][0]["bytes"]
        if state["keys"]["count"]:
            assert sum(entry["rows"] for entry in state["keys"]["greatest"]) <= state["keys"]["rows"] == state["rows"]
        assert state["key_groups"]["greatest"][0]["rows"]
    assert words("top", FOREIGN / folder, "--by", by, "--no-keys")

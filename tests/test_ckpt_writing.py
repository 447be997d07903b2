"""The commands that publish, copy or delete: rescale, rewrite, rollback, copy, gc; on real stores, each in a process of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateformat.graph import Status
from stateformat.segments import WriteOptions
from stateformat.store import open as open_store
from tests import stores
from tests.ckpt_runs import CKPT, document, failure, fingerprint, page, run


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("writing") / "flights"
    stores.flights_store(str(folder))
    return folder


@pytest.fixture
def flights(template: Path, tmp_path: Path) -> Path:
    """A store of its own for each test."""
    return Path(shutil.copytree(template, tmp_path / "flights"))


def counts(folder: Path) -> dict[str, int]:
    """The words and their counts in the newest checkpoint, read through the library."""
    rows = open_store(str(folder)).open().read("counter", "counts").table().to_pylist()
    found = {row["word"]: row["n"] for row in rows}
    assert len(found) == len(rows)
    return found


def sums(folder: Path, operator: str = "delays") -> dict[str, tuple[Any, Any]]:
    """The merged state ``sums`` of the newest checkpoint."""
    table = open_store(str(folder)).open().read(operator, "sums").table()
    return {row["tailnum"]: (row["n"], row["minutes"]) for row in table.to_pylist()}


# ---- a segment that is not there -------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["missing", "short"])
@pytest.mark.parametrize(
    "command",
    [
        ("rescale", "--parallelism", 3),
        ("rescale", "--parallelism", 3, "--to", "there"),
        ("rewrite",),
        ("rollback",),
        ("copy", "there"),
    ],
    ids=lambda command: " ".join(map(str, command)),
)
def test_nothing_is_made_of_a_checkpoint_of_which_a_segment_is_not_there(
    tmp_path: Path, command: tuple[Any, ...], what: str
) -> None:
    store = open_store(tmp_path / "store")
    options = WriteOptions(inline_bytes_max=0)
    first = stores.counts_job().publish(store, None, options=options)
    if command[0] == "rollback":
        stores.counts_job().publish(store, first, options=options)
    path = min((tmp_path / "store" / "segments" / f"{1:020}").iterdir())
    if what == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    arguments = [tmp_path / "there" if part == "there" else part for part in command[1:]]
    at = f"{tmp_path / 'store'}@1" if command[0] in ("rollback", "copy") else tmp_path / "store"
    error = failure(command[0], at, *arguments, status=1)
    assert path.name in error["message"]
    assert error["kind"] in ("object_missing", "object_size_differs", "object_digest_differs")
    assert len(list((tmp_path / "store" / "checkpoints").iterdir())) == (2 if command[0] == "rollback" else 1)
    assert not (tmp_path / "there" / "checkpoints").exists() or not any((tmp_path / "there" / "checkpoints").iterdir())


# ---- rescale ---------------------------------------------------------------------------------------------------------


def test_rescale_publishes_the_same_rows_at_another_parallelism(flights: Path) -> None:
    before, segments = sums(flights), fingerprint(flights / "segments") if (flights / "segments").exists() else {}
    found = document("rescale", flights, "--parallelism", 6)
    assert (found["checkpoint_id"], found["kind"], found["source"]["checkpoint_id"]) == (3, "rescale", 2)
    changes = {
        change["uid"]: (change["before"]["parallelism"], change["after"]["parallelism"]) for change in found["changes"]
    }
    assert changes == dict.fromkeys(("flights", "airlines", "rates", "delays", "sink"), (4, 6)) | {"alerts": (2, 6)}
    assert sums(flights) == before
    assert (fingerprint(flights / "segments") if (flights / "segments").exists() else {}) == segments
    assert document("validate", flights, "--level", "full")["ok"]
    graph = open_store(str(flights)).open().graph
    assert {operator.uid: operator.status for operator in graph.operators if operator.status is not Status.RUNNING} == {
        "planes": Status.FULLY_FINISHED
    }


def test_rescale_of_one_operator_leaves_the_others(flights: Path) -> None:
    text = page("rescale", flights, "--operator-parallelism", "Delays per plane=3")
    assert "delays: 4 of 128 running → 3 of 128 running" in text
    assert "rates" not in text
    history = document("history", flights)
    assert [entry["kind"] for entry in history["checkpoints"]] == ["rescale", "checkpoint", "checkpoint"]


def test_a_dry_run_of_rescale_is_the_plan_and_changes_nothing(flights: Path) -> None:
    before = fingerprint(flights)
    found = document("rescale", flights, "--parallelism", 6, "--dry-run")
    assert found["plan"]["source"]["checkpoint_id"] == 2
    assert fingerprint(flights) == before


def test_rescale_to_another_store_leaves_the_first_alone(flights: Path, tmp_path: Path) -> None:
    before, target = fingerprint(flights), tmp_path / "target"
    found = document("rescale", flights, "--parallelism", 2, "--to", target)
    assert found["store"] == f"file://{target}"
    assert found["source"]["store"] == f"file://{flights}"
    assert fingerprint(flights) == before
    shutil.rmtree(flights)
    assert document("validate", target, "--level", "full")["ok"]
    assert len(sums(target)) == 59


def test_rescale_beyond_the_maximum_is_refused_with_every_reason(flights: Path) -> None:
    before = fingerprint(flights)
    error = failure("rescale", flights, "--parallelism", 129, status=1)
    assert error["kind"] == "restore_refused"
    refusals = error["details"]["refusals"]
    assert len(refusals) == 6
    assert "parallelism_above_max" in str(refusals)
    assert fingerprint(flights) == before


def test_rescale_needs_to_be_told_what_to_do(flights: Path) -> None:
    assert "--parallelism" in failure("rescale", flights, status=2)["message"]


# ---- rewrite ---------------------------------------------------------------------------------------------------------


def test_rewrite_merges_layers_and_keeps_every_row(flights: Path) -> None:
    before = sums(flights)
    found = document("rewrite", flights, "--codec", "zstd", "--encoding", "plain")
    assert (found["kind"], found["checkpoint_id"], found["rehashed"]) == ("rewrite", 3, [])
    assert found["written"]["rows"] == found["totals"]["rows"]
    assert sums(flights) == before
    state = document("inspect", flights, "--operator", "delays", "--state", "sums")["states"][0]
    assert [(layer["layer"], layer["rows"]) for layer in state["layers"]] == [(0, 59)]
    assert document("validate", flights, "--level", "full")["ok"]


def test_rewrite_deals_keys_to_more_groups_and_renames(flights: Path, tmp_path: Path) -> None:
    before, target = sums(flights), tmp_path / "target"
    arguments = ["--parallelism", 6, "--max-parallelism", 256, "--rename", "Delays per plane=late", "--to", target]
    found = document("rewrite", flights, *arguments)
    assert {entry["operator"] for entry in found["rehashed"]} == {"late"}
    after = {operator["uid"]: operator for operator in found["operators"]}
    assert (after["late"]["parallelism"], after["late"]["max_parallelism"]) == (6, 256)
    assert next(change for change in found["changes"] if change["uid"] == "late")["before"] is None
    assert sums(target, "late") == before
    assert document("validate", target, "--level", "full")["ok"]


@pytest.mark.spark
def test_rewrite_on_spark_writes_the_same_rows(flights: Path) -> None:
    before = sums(flights)
    found = document("rewrite", flights, "--engine", "spark", "--parallelism", 3, "--max-parallelism", 64)
    assert (found["checkpoint_id"], found["kind"]) == (3, "rewrite")
    assert sums(flights) == before
    assert document("validate", flights, "--level", "full")["ok"]


def test_rewrite_of_an_unknown_operator_is_misuse(flights: Path) -> None:
    before = fingerprint(flights)
    assert "nope" in failure("rewrite", flights, "--rename", "nope=x", status=2)["message"]
    assert "alerts" in failure("rewrite", flights, "--rename", "sink=alerts", status=2)["message"]
    assert fingerprint(flights) == before


# ---- rollback --------------------------------------------------------------------------------------------------------


def test_rollback_makes_an_older_checkpoint_the_newest(flights: Path) -> None:
    text = page("rollback", f"{flights}@1")
    assert text.startswith("Published checkpoint 3\n")
    assert "Left behind: 2. What these checkpoints have committed" in text
    assert len(sums(flights)) == stores.PLANES
    found = document("rollback", f"{flights}@2")
    assert (found["checkpoint_id"], found["kind"], found["parent"]["checkpoint_id"]) == (4, "rollback", 3)
    assert found["source"]["checkpoint_id"] == 2
    assert found["changes"] == []
    assert len(sums(flights)) == 59


def test_rollback_to_the_newest_or_to_nothing_is_refused(flights: Path) -> None:
    before = fingerprint(flights)
    assert "newest" in failure("rollback", f"{flights}@2", status=2)["message"]
    assert "@7" in failure("rollback", flights, status=2)["message"]
    assert "7" in failure("rollback", f"{flights}@7", status=3)["message"]
    assert fingerprint(flights) == before


# ---- copy ------------------------------------------------------------------------------------------------------------


def test_a_copy_stands_on_its_own(flights: Path, tmp_path: Path) -> None:
    target = tmp_path / "savepoint"
    found = document("copy", f"{flights}@1", target)
    assert (found["checkpoint_id"], found["kind"], found["store"]) == (1, "savepoint", f"file://{target}")
    assert found["source"]["store"] == f"file://{flights}"
    shutil.rmtree(flights)
    assert document("validate", target, "--level", "full")["ok"]
    assert len(sums(target)) == stores.PLANES


def test_a_copy_may_be_made_again_and_never_replaces_another(flights: Path, tmp_path: Path) -> None:
    target = tmp_path / "savepoint"
    page("copy", flights, target)
    before = fingerprint(target)
    page("copy", flights, target)
    assert fingerprint(target) == before
    assert failure("copy", f"{flights}@1", target, status=2)["kind"] == "store_not_empty"
    other = tmp_path / "other"
    stores.counts_store(str(other))
    error = failure("copy", other, target, status=1)
    assert error["kind"] == "other_job"
    assert "flights-job" in error["message"]
    assert "own store" in failure("copy", flights, flights, status=2)["message"]
    assert fingerprint(target) == before


# ---- gc --------------------------------------------------------------------------------------------------------------


def test_gc_says_what_it_would_free_and_frees_it_only_when_told_to(tmp_path: Path) -> None:
    store = tmp_path / "store"
    stores.counts_store(str(store), checkpoints=3, keys=4)
    before, words = fingerprint(store), counts(store)
    planned = document("gc", store, "--keep", 1)
    assert (planned["deleted"], planned["newest"], planned["keep"]) == (False, 3, 1)
    assert [item["path"] for item in planned["records"]] == [f"checkpoints/{i:020d}.json" for i in (1, 2)]
    assert len(planned["manifests"]) == 2
    text = page("gc", store, "--keep", 1)
    assert "  would free  2 records, 2 manifests" in text
    assert "Run it again with --delete" in text
    assert fingerprint(store) == before
    done = document("gc", store, "--keep", 1, "--delete")
    assert done["deleted"] is True
    assert (done["records"], done["bytes"]) == (planned["records"], planned["bytes"])
    gone = set(before) - set(fingerprint(store))
    assert gone == {item["path"] for sort in ("records", "manifests", "segments") for item in planned[sort]}
    assert counts(store) == words
    assert "nothing" in page("gc", store)


def test_gc_touches_nothing_that_a_running_job_may_publish(tmp_path: Path) -> None:
    store = tmp_path / "store"
    stores.counts_store(str(store), checkpoints=2)
    ahead = store / "segments" / f"{3:020d}" / f"x-{'0' * 32}.parquet"
    orphan = store / "segments" / f"{2:020d}" / f"x-{'0' * 32}.parquet"
    living = store / "manifests" / f".tmp-{'a' * 16}-{3:020d}-x.parquet"
    dead = store / "checkpoints" / f".tmp-{'b' * 16}-{2:020d}.json"
    for path in (ahead, orphan, living, dead):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"not finished")
    text = page("gc", store)
    assert "would free   1 segment, 1 leftover, 24 B" in text
    assert "not touched  1 temporary file of writers that may be alive" in text
    assert dead.name[:40] in text
    found = document("gc", store, "--delete")
    assert [item["path"] for item in found["segments"]] == [str(orphan.relative_to(store))]
    assert [item["path"] for item in found["leftovers"]] == [str(dead.relative_to(store))]
    assert found["unfinished"] == [{"path": str(living.relative_to(store)), "size_bytes": 12}]
    assert ahead.exists()
    assert living.exists()
    assert not orphan.exists()
    assert not dead.exists()


def test_gc_deletes_nothing_where_it_cannot_tell_what_is_needed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    stores.counts_store(str(store), checkpoints=3)
    manifest = next((store / "manifests").glob(f"{2:020d}-*"))
    manifest.write_bytes(manifest.read_bytes()[:-20])
    before = fingerprint(store)
    found = document("gc", store, "--delete", status=1)
    assert found["deleted"] is False
    assert manifest.name in found["stopped"]
    assert "Stopped: " in page("gc", store, "--delete", status=1)
    assert fingerprint(store) == before


# ---- two stores, and ends --------------------------------------------------------------------------------------------


def test_a_command_whose_reader_leaves_is_quiet(flights: Path) -> None:
    arguments = ["export", str(flights), "--operator", "delays", "--state", "last", "--to", "-", "--as", "jsonl"]
    with subprocess.Popen([CKPT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
        assert process.wait(timeout=60) == 141


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_command_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    stores.counts_store(str(store))
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    # Reading a topology from a pipe that nobody writes to keeps the command where we can find it.
    with (
        subprocess.Popen(
            [CKPT, "explain-restore", store, "--topology", pipe], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process,
        pipe.open("wb"),
    ):
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"interrupted" in told
    assert b"Traceback" not in told


def test_storage_options_that_a_directory_does_not_know_are_misuse(flights: Path) -> None:
    error = failure("history", flights, "--option", "anon=true", status=2)
    assert "anon" in error["message"]
    assert run("history", flights, "--option", "durable=false").status == 0
    assert run("history", flights, "--option", "nonsense").status == 2


def test_sums_are_what_the_example_says(template: Path) -> None:
    found = sums(template)
    assert found[stores.tail(0)] == (1000, 0.5)
    assert stores.tail(10) not in found
    assert found[stores.tail(11)] == (11, 2.75)
    assert isinstance(open_store(str(template)).open().read("delays", "sums").table(), pa.Table)

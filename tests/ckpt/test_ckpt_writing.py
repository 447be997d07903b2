"""The commands that publish, copy or delete: rescale, rewrite, rollback, copy, gc. Their pages:
``test_ckpt_pages``."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stateformat.graph import Status
from stateformat.store import open as open_store
from tests import stores
from tests.ckpt.ckpt_runs import document, failure, fingerprint, page, state_of


def counts_of(folder: Path) -> dict[str, int]:
    """The words and their counts in the newest checkpoint."""
    rows = open_store(str(folder)).open().read("counter", "counts").table().to_pylist()
    found = {row["word"]: row["n"] for row in rows}
    assert len(found) == len(rows)
    return found


def sums(folder: Path, operator: str = "delays") -> dict[str, tuple[Any, Any]]:
    """The merged state ``sums`` of the newest checkpoint."""
    table = open_store(str(folder)).open().read(operator, "sums").table()
    return {row["tailnum"]: (row["n"], row["minutes"]) for row in table.to_pylist()}


# ---- rescale


def test_rescale_publishes_the_same_rows_at_another_parallelism(own_flights: Path) -> None:
    before, data = sums(own_flights), fingerprint(own_flights / "segments")
    found = document("rescale", own_flights, "--parallelism", 6)
    assert (found["checkpoint_id"], found["kind"], found["source"]["checkpoint_id"]) == (3, "rescale", 2)
    changes = {
        change["uid"]: (change["before"]["parallelism"], change["after"]["parallelism"]) for change in found["changes"]
    }
    assert changes == dict.fromkeys(("flights", "airlines", "rates", "delays", "sink"), (4, 6)) | {"alerts": (2, 6)}
    assert sums(own_flights) == before
    assert fingerprint(own_flights / "segments") == data
    assert document("validate", own_flights, "--level", "full")["ok"]
    graph = open_store(str(own_flights)).open().graph
    assert {operator.uid for operator in graph.operators if operator.status is Status.FULLY_FINISHED} == {"planes"}
    assert {operator.status for operator in graph.operators} == {Status.FULLY_FINISHED, Status.RUNNING}


def test_rescale_of_one_operator_leaves_the_others(own_flights: Path) -> None:
    found = document("rescale", own_flights, "--operator-parallelism", "Delays per plane=3")
    assert {one["uid"] for one in found["operators"] if one["parallelism"] == 3} == {"delays"}
    assert "rates" not in {change["uid"] for change in found["changes"]}
    history = document("history", own_flights)
    assert [entry["kind"] for entry in history["checkpoints"]] == ["rescale", "checkpoint", "checkpoint"]


def test_a_dry_run_of_rescale_is_the_plan_and_changes_nothing(flights: Path) -> None:
    before = fingerprint(flights)
    assert document("rescale", flights, "--parallelism", 6, "--dry-run")["plan"]["source"]["checkpoint_id"] == 2
    assert fingerprint(flights) == before


def test_rescale_to_another_store_leaves_the_first_alone(own_flights: Path, tmp_path: Path) -> None:
    before, target = fingerprint(own_flights), tmp_path / "target"
    found = document("rescale", own_flights, "--parallelism", 2, "--to", target)
    assert found["store"] == f"file://{target}"
    assert found["source"]["store"] == f"file://{own_flights}"
    assert fingerprint(own_flights) == before
    shutil.rmtree(own_flights)
    assert document("validate", target, "--level", "full")["ok"]
    assert len(sums(target)) == 59


def test_rescale_beyond_the_maximum_is_refused_with_every_reason(flights: Path) -> None:
    before = fingerprint(flights)
    error = failure("rescale", flights, "--parallelism", 129, status=1)
    assert error["kind"] == "restore_refused"
    assert len(error["details"]["refusals"]) == 6
    assert "parallelism_above_max" in str(error["details"]["refusals"])
    assert fingerprint(flights) == before


# ---- rewrite


def test_rewrite_merges_layers_and_keeps_every_row(own_flights: Path) -> None:
    before = sums(own_flights)
    found = document("rewrite", own_flights, "--codec", "zstd", "--encoding", "plain")
    assert (found["kind"], found["checkpoint_id"], found["rehashed"]) == ("rewrite", 3, [])
    assert found["written"]["rows"] == found["totals"]["rows"]
    assert sums(own_flights) == before
    layers = state_of(own_flights, "delays", "sums")["layers"]
    assert [(layer["layer"], layer["rows"]) for layer in layers] == [(0, 59)]
    assert document("validate", own_flights, "--level", "full")["ok"]


def test_rewrite_hashes_keys_to_more_groups_and_renames(own_flights: Path, tmp_path: Path) -> None:
    before, target = sums(own_flights), tmp_path / "target"
    arguments = ["--parallelism", 6, "--max-parallelism", 256, "--rename", "Delays per plane=late", "--to", target]
    found = document("rewrite", own_flights, *arguments)
    assert {entry["operator"] for entry in found["rehashed"]} == {"late"}
    after = {operator["uid"]: operator for operator in found["operators"]}
    assert (after["late"]["parallelism"], after["late"]["max_parallelism"]) == (6, 256)
    assert next(change for change in found["changes"] if change["uid"] == "late")["before"] is None
    assert sums(target, "late") == before
    assert document("validate", target, "--level", "full")["ok"]


def test_rewrite_gives_a_state_another_name(own_flights: Path, tmp_path: Path) -> None:
    before, target = sums(own_flights), tmp_path / "target"
    operator, name = next(
        (state["operator"], state["name"])
        for state in document("inspect", own_flights)["states"]
        if state["mode"] == "keyed"
    )
    found = document("rewrite", own_flights, "--rename", f"{operator}/{name}=profile", "--to", target, "--prove")
    assert found["proof"]["same"]
    names = {state["name"] for state in document("inspect", target)["states"] if state["operator"] == operator}
    assert "profile" in names
    assert name not in names
    assert before
    assert document("validate", target, "--level", "full")["ok"]
    failed = failure("rewrite", own_flights, "--rename", f"{operator}/nothing=profile", status=2)
    assert f"has no state '{operator}/nothing'" in failed["message"]


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_rewrite_on_spark_writes_the_same_rows(own_flights: Path) -> None:
    before = sums(own_flights)
    found = document("rewrite", own_flights, "--engine", "spark", "--parallelism", 3, "--max-parallelism", 64)
    assert (found["checkpoint_id"], found["kind"]) == (3, "rewrite")
    assert sums(own_flights) == before
    assert document("validate", own_flights, "--level", "full")["ok"]


# ---- rollback


def test_rollback_makes_an_older_checkpoint_the_newest(own_flights: Path) -> None:
    text = page("rollback", f"{own_flights}@1")
    assert text.startswith("Published checkpoint 3\n")
    assert "Left behind: 2. What these checkpoints have committed" in text
    assert len(sums(own_flights)) == stores.PLANES
    found = document("rollback", f"{own_flights}@2")
    assert (found["checkpoint_id"], found["kind"], found["parent"]["checkpoint_id"]) == (4, "rollback", 3)
    assert (found["source"]["checkpoint_id"], found["changes"]) == (2, [])
    assert sums(own_flights)[stores.tail(0)] == (1000, 0.5)
    assert len(sums(own_flights)) == 59


def test_rollback_to_the_newest_or_to_nothing_is_refused(flights: Path) -> None:
    before = fingerprint(flights)
    assert "newest" in failure("rollback", f"{flights}@2", status=2)["message"]
    assert "7" in failure("rollback", f"{flights}@7", status=3)["message"]
    assert fingerprint(flights) == before


def test_a_rollback_to_another_store_leaves_this_one(counts: Path, tmp_path: Path) -> None:
    before = fingerprint(counts)
    assert page("rollback", f"{counts}@1", "--to", tmp_path / "there").startswith("Published checkpoint 2\n")
    assert fingerprint(counts) == before
    assert counts_of(tmp_path / "there") == counts_of(counts)


# ---- copy


def test_a_copy_stands_on_its_own(own_flights: Path, tmp_path: Path) -> None:
    target = tmp_path / "savepoint"
    found = document("copy", f"{own_flights}@1", target)
    assert (found["checkpoint_id"], found["kind"], found["store"]) == (1, "savepoint", f"file://{target}")
    assert found["source"]["store"] == f"file://{own_flights}"
    shutil.rmtree(own_flights)
    assert document("validate", target, "--level", "full")["ok"]
    assert len(sums(target)) == stores.PLANES


def test_a_copy_may_be_made_again_and_never_replaces_another(flights: Path, counts: Path, tmp_path: Path) -> None:
    target = tmp_path / "savepoint"
    page("copy", flights, target)
    before = fingerprint(target)
    page("copy", flights, target)
    assert fingerprint(target) == before
    assert failure("copy", f"{flights}@1", target, status=2)["kind"] == "store_not_empty"
    error = failure("copy", counts, target, status=1)
    assert error["kind"] == "other_job"
    assert "flights-job" in error["message"]
    assert "own store" in failure("copy", flights, flights, status=2)["message"]
    assert fingerprint(target) == before


# ---- gc


def test_gc_says_what_it_would_free_and_frees_it_only_when_told_to(tmp_path: Path) -> None:
    store = tmp_path / "store"
    stores.counts_store(str(store), checkpoints=3, keys=4)
    before, rows = fingerprint(store), counts_of(store)
    planned = document("gc", store, "--keep", 1)
    assert (planned["deleted"], planned["newest"], planned["keep"]) == (False, 3, 1)
    assert [item["path"] for item in planned["records"]] == [f"checkpoints/{i:020d}.json" for i in (1, 2)]
    assert len(planned["manifests"]) == 2
    assert fingerprint(store) == before
    done = document("gc", store, "--keep", 1, "--delete")
    assert done["deleted"] is True
    assert (done["records"], done["bytes"]) == (planned["records"], planned["bytes"])
    gone = set(before) - set(fingerprint(store))
    assert gone == {item["path"] for sort in ("records", "manifests", "segments") for item in planned[sort]}
    assert counts_of(store) == rows
    assert "nothing" in page("gc", store)


def test_gc_touches_nothing_that_a_running_job_may_publish(tmp_path: Path) -> None:
    stores.counts_store(str(tmp_path), checkpoints=2)
    ahead, orphan, living, dead = (
        f"segments/{3:020d}/x-{'0' * 32}.parquet",
        f"segments/{2:020d}/x-{'0' * 32}.parquet",
        f"manifests/.tmp-{'a' * 16}-{3:020d}-x.parquet",
        f"checkpoints/.tmp-{'b' * 16}-{2:020d}.json",
    )
    for path in (ahead, orphan, living, dead):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"not finished")
    text = page("gc", tmp_path)
    assert "would free   1 segment, 1 leftover, 24 B" in text
    assert "not touched  1 temporary file of writers that may be alive" in text
    assert Path(dead).name[:40] in text
    found = document("gc", tmp_path, "--delete")
    assert [item["path"] for item in (*found["segments"], *found["leftovers"])] == [orphan, dead]
    assert found["unfinished"] == [{"path": living, "size_bytes": 12}]
    assert [(tmp_path / path).exists() for path in (ahead, living, orphan, dead)] == [True, True, False, False]


def test_gc_deletes_nothing_if_it_cannot_tell_what_is_needed(tmp_path: Path) -> None:
    stores.counts_store(str(tmp_path), checkpoints=3)
    manifest = next((tmp_path / "manifests").glob(f"{2:020d}-*"))
    manifest.write_bytes(manifest.read_bytes()[:-20])
    before = fingerprint(tmp_path)
    found = document("gc", tmp_path, "--delete", status=1)
    assert found["deleted"] is False
    assert manifest.name in found["stopped"]
    assert "Stopped: " in page("gc", tmp_path, "--delete", status=1)
    assert fingerprint(tmp_path) == before


def test_a_name_that_may_be_an_operator_or_a_state_is_refused(tmp_path: Path) -> None:
    made = stores.counts_job()
    graph = replace(made.graph, operators=(*made.graph.operators, stores.operator("counter/counts", 2)))
    replace(made, graph=graph).publish(open_store(str(tmp_path)), None)
    failed = failure("rewrite", tmp_path, "--rename", "counter/counts=sums", status=2)
    assert "may be state 'counts' of operator 'counter' or operator 'counter/counts'" in failed["message"]
    assert "ckpt rewrite STORE --rename UID=NEW" in failed["message"]
    page("rewrite", tmp_path, "--rename", "counter=numbers")
    assert document("rewrite", tmp_path, "--rename", "counter/counts=sums")["operators"][-1]["uid"] == "sums"

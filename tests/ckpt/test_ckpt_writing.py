"""The commands that publish, copy or delete: rescale, rewrite, rollback, copy, gc. Their pages:
``test_ckpt_pages``.

``ckpt pin``, ``unpin``, and the address ``STORE@NAME`` in every command. ``ckpt gc --older-than``:
how an age is written, and what goes.
"""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stateformat.graph import Status
from stateformat.store import open as open_store
from stateformat.tools.ckpt.main import COMMANDS
from tests.ckpt.ckpt_runs import document, failure, fingerprint, page, run, state_of, words
from tests.worlds import stores


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


@pytest.fixture
def pinned(five: Path) -> Path:
    """Checkpoints 2 to 6, of which 3 is pinned as ``keep-me``."""
    page("pin", f"{five}@3", "keep-me")
    return five


def test_a_pin_is_made_told_listed_and_removed(five: Path) -> None:
    before = fingerprint(five)
    made = document("pin", f"{five}@3", "keep-me")
    assert (made["checkpoint_id"], made["kind"], made["name"], made["made"]) == (3, "savepoint", "keep-me", True)
    assert made["store"] == f"file://{five}/savepoints/keep-me"
    assert document("pin", f"{five}@3", "keep-me")["made"] is False
    assert "Pinned before: checkpoint 3 as keep-me" in page("pin", f"{five}@3", "keep-me")
    assert document("pin", five, "newest")["checkpoint_id"] == 6
    listed = document("history", five)["savepoints"]
    assert [(one["name"], one["checkpoint"]["checkpoint_id"], one["claimed"]) for one in listed] == [
        ("keep-me", 3, False),
        ("newest", 6, False),
    ]
    assert "keep-me" in page("history", five)
    assert document("gc", five, "--keep", 1, "--delete")["deleted"]
    assert document("validate", f"{five}@keep-me", "--level", "full")["ok"]
    assert document("unpin", f"{five}@keep-me")["removed"]["checkpoint_id"] == 3
    assert document("unpin", five, "newest")["name"] == "newest"
    assert not (five / "savepoints").exists()
    assert set(fingerprint(five)) < set(before)


@pytest.mark.parametrize(
    "command",
    [
        ("inspect",),
        ("validate", "--level", "full"),
        ("explain-restore", "--parallelism", 3),
        ("sql", "SELECT count(*) FROM counter.counts"),
        ("history", "--limit", 1),
    ],
    ids=lambda command: command[0],
)
def test_what_reads_a_store_reads_a_pin_by_its_name_and_whole_stores_are_told_apart(
    command: tuple[object, ...], pinned: Path
) -> None:
    name, *more = command
    if name == "history":
        assert "is the savepoint keep-me of" in words(name, f"{pinned}@keep-me", *more, status=2)
        return
    found = run(name, f"{pinned}@keep-me", *more)
    assert (found.status, found.err) == (0, "")
    by_path = run(name, f"{pinned}/savepoints/keep-me", *more)
    ages = r"\d+ s ago"
    assert re.sub(ages, "", found.out) == re.sub(ages, "", by_path.out)


def test_a_pin_is_copied_exported_and_rescaled_elsewhere_and_never_published_in(pinned: Path, tmp_path: Path) -> None:
    before = fingerprint(pinned)
    assert document("copy", f"{pinned}@keep-me", tmp_path / "copy")["checkpoint_id"] == 3
    assert document("rescale", f"{pinned}@keep-me", "--parallelism", 3, "--to", tmp_path / "to")["checkpoint_id"] == 4
    assert document("rollback", f"{pinned}@keep-me@3", "--to", tmp_path / "back")["checkpoint_id"] == 4
    for command in (("rescale", "--parallelism", 3), ("rewrite", "--codec", "zstd")):
        assert "stays as it is" in words(command[0], f"{pinned}@keep-me", *command[1:], status=2)
    for target in (("copy", f"{pinned}@3"), ("pin", f"{pinned}@4")):
        assert run(*target, f"{pinned}@keep-me").status == 2
    assert fingerprint(pinned) == before


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        (("pin", "{store}@3", "7"), 2, "it would be the id of a checkpoint"),
        (("pin", "{store}@4", "keep-me"), 2, "holds savepoint 3 .* so checkpoint 4 .* was not pinned"),
        (("pin", "{store}@9", "p"), 3, "no checkpoint 9"),
        (("pin", "{store}@1", "p"), 3, "expired"),
        (("pin", "{store}/nowhere", "p"), 3, "there is no store"),
        (("unpin", "{store}@none"), 3, "has no savepoint 'none'; it has keep-me"),
        (("unpin", "{store}@3"), 2, "give the name of a pin"),
        (("unpin", "{store}"), 2, "give the name of a pin"),
        (("inspect", "{store}@none"), 3, "no store at .* has no savepoint 'none'; `ckpt history"),
        (("gc", "{store}@keep-me"), 2, "a whole store is meant here"),
        (("stop", "{store}@keep-me"), 2, "a whole store is meant here"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_changes_nothing(
    given: tuple[str, ...], status: int, said: str, pinned: Path
) -> None:
    before = fingerprint(pinned)
    error = failure(*(text.format(store=pinned) for text in given), status=status)
    assert len(error["message"]) < 500
    assert re.search(said, error["message"])
    assert fingerprint(pinned) == before


def test_the_pages_fit_and_know_what_they_are_about(pinned: Path) -> None:
    assert {"pin", "unpin"} <= set(COMMANDS)
    for width in ("60", "80"):
        shown = page("history", pinned, COLUMNS=width)
        assert max(map(len, shown.splitlines())) <= int(width)
        assert "savepoint" in shown


def test_an_age_keeps_what_is_younger_and_the_number_keeps_its_own(five: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, now_ns = fingerprint(five), time.time_ns()
    for age in ("1d", "24h", "90m", "2w", "1.5 h"):
        found = document("gc", five, "--keep", 2, "--older-than", age, "--delete")
        assert (found["records"], found["keep"]) == ([], 2)
    assert fingerprint(five) == before
    assert "the newest 2 checkpoints, and what is younger than 90 min" in page(
        "gc", five, "--keep", 2, "--older-than", "90m"
    )
    # A day later, by a clock that may be wrong.
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + 86_400 * 10**9)
    planned = document("gc", five, "--keep", 2, "--older-than", "12h")
    assert planned["older_than_us"] == 12 * 3600 * 10**6
    assert [int(item["path"][12:32]) for item in planned["records"]] == [2, 3, 4]
    assert "the newest checkpoint, and what is younger than 12 h" in page("gc", five, "--older-than", "12h")
    document("gc", five, "--older-than", "12h", "--delete")
    assert [entry["checkpoint_id"] for entry in document("history", five)["checkpoints"]] == [6]


@pytest.mark.parametrize("age", ["7", "d", "-1d", "1y", "1 d 2 h", "inf", "1e3s", ""])
def test_what_is_no_length_of_time_is_refused(age: str, five: Path) -> None:
    assert "not a length of time" in failure("gc", five, f"--older-than={age}", status=2)["message"]

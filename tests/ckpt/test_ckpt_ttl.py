"""States whose rows expire: hidden, shown with ``--with-expired``, counted by ``ckpt inspect``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import stateformat as sf
from stateformat.states import list_state
from tests.ckpt.ckpt_runs import document, run, words

HOUR = 3_600_000_000
NOON = 1_790_000_000_000_000
TIMES = "ttl_last_access"


def visits(ttl: sf.Ttl | None) -> sf.State:
    return list_state("counter", "visits", keys={"user": pa.string()}, values={"page": pa.int64()}, ttl=ttl)


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Two checkpoints, half an hour apart; in each the rows of "ann" and "bob" are the same."""
    url = str(tmp_path / "store")
    graph = sf.JobGraph((sf.Operator("counter", 1, 8),))
    permit = None
    for now in (NOON, NOON + HOUR // 2):
        pending = sf.open(url).begin(
            job_id="j", graph=graph, states=[visits(sf.Ttl(HOUR, "processing_time", "read_and_write"))], parent=permit
        )
        with pending.context.subtask("counter", 0) as writer:
            times = [NOON - HOUR, NOON - HOUR // 2, NOON - HOUR // 2, NOON]
            writer.write(
                "visits",
                pa.table(
                    {
                        "user": ["ann", "ann", "bob", "bob"],
                        "_index": pa.array([0, 1, 0, 1], pa.int64()),
                        "page": pa.array([1, 2, 3, 4], pa.int64()),
                        TIMES: pa.array(times, pa.timestamp("us")),
                    }
                ),
            )
        pending.add(writer)
        pending.set_now("counter", processing_time_us=now)
        permit = pending.publish()
    return url


AT = ("--operator", "counter", "--state", "visits")


def test_inspect_says_how_long_rows_live_and_how_many_go(store: str) -> None:
    (state,) = document("inspect", store)["states"]
    assert state["ttl"] == {
        "field": 3,
        "duration_us": HOUR,
        "clock": "processing_time",
        "refresh": "read_and_write",
        "now_us": NOON + HOUR // 2,
        "now_at": "2026-09-21T14:43:20Z",
    }
    assert "1 hour · processing time" in words("inspect", store)
    (state,) = document("inspect", store, *AT)["states"]
    assert state["contents"] == {"rows": 4, "expired": 3}
    narrowed = words("inspect", store, *AT)
    assert "3 of 4 rows; the next base leaves them out" in narrowed
    assert "refreshed by reading too" in narrowed


@pytest.mark.parametrize(("more", "pages"), [((), [4]), (("--with-expired",), [1, 2, 3, 4])])
def test_what_had_expired_is_shown_only_when_it_is_asked_for(
    store: str, tmp_path: Path, more: tuple[str, ...], pages: list[int]
) -> None:
    (state,) = document("inspect", store, "--rows", 9, *more)["states"]
    assert sorted(row["page"] for row in state["sample"]) == pages
    document("export", store, *AT, "--to", tmp_path / "rows.parquet", *more)
    assert sorted(pq.read_table(tmp_path / "rows.parquet")["page"].to_pylist()) == pages
    answer = document("sql", store, "select page from counter.visits order by all", *more)
    assert [row["page"] for row in answer["rows"]] == pages
    (found,) = document("top", store, *more)["states"]
    assert found["keys"]["rows"] == len(pages)
    key = document("get", store, "--key", '"bob"', *more)
    assert sorted(row["page"] for row in key["rows"]) == [page for page in pages if page > 2]
    every = document("sql", store, "--all-checkpoints", "select _checkpoint_id as id, page from counter.visits", *more)
    assert len(every["rows"]) == (8 if more else 1 + 3)


def test_a_key_whose_rows_have_expired_has_none(store: str) -> None:
    assert run("get", store, "--key", '"ann"').status == 1
    assert run("get", store, "--key", '"ann"', "--with-expired").status == 0
    history = document("get", store, "--key", '"ann"', "--all")["history"]
    assert [(entry["checkpoint_id"], entry["event"]) for entry in history] == [(2, "removed"), (1, "added")]


def test_time_alone_makes_a_difference_between_two_checkpoints(store: str) -> None:
    found = run("diff", f"{store}@1", "@2", "--format", "json")
    (state,) = found.document["states"]
    assert found.status == 1
    assert (state["added"], state["removed"], state["changed"]) == (0, 2, 0)
    assert run("diff", f"{store}@1", "@2", "--with-expired").status == 0


def topology(ttl: dict[str, Any] | None) -> str:
    state: dict[str, Any] = {
        "operator": "counter",
        "name": "visits",
        "mode": "keyed",
        "kind": "list",
        "key_columns": ["user"],
        "columns": [{"name": "user", "type": "utf8"}, {"name": "page", "type": "int64"}],
    }
    state |= {"ttl": ttl} if ttl is not None else {}
    return json.dumps({"operators": [{"uid": "counter", "parallelism": 1}], "states": [state]})


@pytest.mark.parametrize(
    ("ttl", "message"),
    [
        ({"duration_us": 2 * HOUR, "clock": "processing_time"}, None),
        ({"duration_us": HOUR, "clock": "processing_time", "refresh": "write"}, None),
        ({"duration_us": HOUR}, "expire by processing time and would by event time"),
        (None, "expire 1 hour after their last access in the checkpoint, and the program declares no ttl"),
    ],
)
def test_a_plan_says_what_becomes_of_the_ttl(
    store: str, tmp_path: Path, ttl: dict[str, Any] | None, message: str | None
) -> None:
    (tmp_path / "job.json").write_text(topology(ttl))
    found = run("explain-restore", store, "--topology", tmp_path / "job.json")
    assert found.status == (0 if message is None else 1)
    if message is not None:
        assert message in " ".join(found.out.split())
        given_up = run(
            "explain-restore", store, "--topology", tmp_path / "job.json", "--drop", f"counter/visits.{TIMES}"
        )
        assert given_up.status == 0, given_up.out


def test_a_page_of_the_checkpoint_is_a_topology(store: str, tmp_path: Path) -> None:
    (tmp_path / "same.json").write_text(run("inspect", store, "--format", "json").out)
    assert run("explain-restore", store, "--topology", tmp_path / "same.json").status == 0


def test_rescale_copy_and_rollback_keep_what_has_expired(store: str, tmp_path: Path) -> None:
    for command in (
        ("rescale", store, "--parallelism", "3", "--prove"),
        ("rewrite", store, "--max-parallelism", "16", "--prove"),
        ("copy", store, tmp_path / "copy", "--prove"),
        ("rollback", f"{store}@2"),
    ):
        assert run(*command).status == 0, command
        here = str(tmp_path / "copy") if command[0] == "copy" else store
        (state,) = document("inspect", here, *AT)["states"]
        assert (state["ttl"]["duration_us"], state["ttl"]["now_us"]) == (HOUR, NOON + HOUR // 2)
        assert state["contents"] == {"rows": 4, "expired": 3}
        assert run("validate", here, "--level", "full").status == 0


def test_a_report_says_how_long_rows_live_and_what_time_it_was(store: str, tmp_path: Path) -> None:
    assert run("report", store, "--to", tmp_path / "page.html").status == 0
    told = "1 hour, processing time, refreshed by reading too, now 2026-09-21 14:43:20"
    assert told in " ".join((tmp_path / "page.html").read_text().split())


def test_a_diff_tells_that_rows_live_longer(store: str) -> None:
    now = sf.open(store)
    permit = now.start("j")
    checkpoint = now.open()
    longer = visits(sf.Ttl(2 * HOUR, "processing_time"))
    pending = now.begin(job_id="j", graph=checkpoint.graph, states=[longer], parent=permit)
    with pending.context.subtask("counter", 0) as writer:
        rows = checkpoint.with_expired().state("counter", "visits").table()
        writer.write("visits", rows)
    pending.add(writer)
    pending.publish()
    (state,) = document("diff", f"{store}@2", "@3", "--with-expired", status=1)["states"]
    assert (state["change"], state["added"], state["removed"]) == ("changed", 0, 0)
    (member,) = state["declared"]
    assert member == {
        "member": "ttl",
        "before": "1 hour after its last access, by processing time",
        "after": "2 hours after it was written, by processing time",
    }
    assert "2 hours after it was written" in words("diff", f"{store}@2", "@3", "--with-expired", status=1)

"""``ckpt gc --older-than``: how an age is written, and what goes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.ckpt.ckpt_runs import document, failure, fingerprint, page


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

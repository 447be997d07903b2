"""``ckpt pin``, ``unpin``, and the address ``STORE@NAME`` in every command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stateformat.tools.ckpt.main import COMMANDS
from tests.ckpt.ckpt_runs import document, failure, fingerprint, page, run, words


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

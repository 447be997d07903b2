"""What a page leaves out is shown by the command or option that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.advice.sentences import HOLE
from tests.advice.world import Case, tried

PAGES = [
    Case(
        "--limit N reads more",
        "report {long} --to -",
        "report {long} --to - --limit 300",
        shows="202 checkpoints as a table",
    ),
    Case(
        "ckpt history lists all",
        "report {long} --to - --limit 300",
        "history {long}",
        shows=r" 2 checkpoint 2\d{3}-",
    ),
    Case(
        f"would have to be read; `ckpt du {HOLE}",
        "report {long} --to -",
        "du {long}",
        shows=r"garbage\s+nothing",
    ),
    Case(
        "with --keep 1",
        "report {five} --to -",
        "gc {five} --keep 1 --delete ; report {five} --to -",
        shows="with --keep 1</dt><dd>nothing",
    ),
    Case(
        "ckpt du --format json lists all",
        "report {many_pinned} --to -",
        "du {many_pinned} --format json",
        shows="savepoints/kept-44/",
    ),
    Case(
        "ckpt inspect --format json lists all",
        "report {many} --to -",
        "inspect {many} --format json",
        shows='"operator-309"',
    ),
    Case(
        "segments were not, for there are many",
        "report {many} --to - --level metadata",
        "report {many} --to - --level quick",
        shows="and the size and footer of each segment were checked",
    ),
    Case(
        "ckpt validate lists all",
        "report {many_lost} --to -",
        "validate {many_lost}",
        shows="operator-308",
    ),
    Case(
        f"{HOLE} `ckpt repair {HOLE}` says what to do.",
        "report {cut} --to -",
        "repair {cut}@4 --yes ; report {cut} --to -",
    ),
    Case("--operator UID shows one, --format json all", "inspect {many}", "inspect {many} --operator operator-309"),
    Case("--operator UID shows one, --format json all", "inspect {many}", "inspect {many} --format json"),
    Case(
        "marks values that are cut",
        "get {wide} --key '\"w\"'",
        "get {wide} --key '\"w\"' --format json",
        shows="and the end",
    ),
    Case("Show, or with --delete remove", "--help", "gc {five} --keep 1 --delete", shows="freed 4 records"),
]


@pytest.mark.parametrize("case", PAGES, ids=lambda case: f"{case.says[:40]} {case.then.split()[0]}")
def test_what_a_page_leaves_out_is_shown_by_what_it_names(case: Case, tmp_path: Path) -> None:
    tried(case, tmp_path)

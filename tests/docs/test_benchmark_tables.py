"""The benchmarks' tables: which lines are marked as missed, and how a table is replaced on its page
and in the README.
"""

from __future__ import annotations

import pytest

from benchmarks import asked
from benchmarks.__main__ import PAGE, README, replace_section
from benchmarks.measuring import MISSED, MISSED_BY_CPU, Row


@pytest.mark.parametrize(
    ("ours", "ratio", "budget", "cpu", "mark"),
    [
        ("1 ms", "1.30 ×", "≤ 1.3 ×", None, ""),
        ("1 ms", "1.31 ×", "≤ 1.3 ×", None, MISSED),
        ("1 ms", "2.90 ×", "≥ 3 ×", None, MISSED),
        ("1 ms", "3.00 ×", "≥ 3 ×", None, ""),
        ("1 ms", "9.00 ×", "–", (9.0, 1.0), ""),
        ("401 MB", "–", "≤ 400 MB", None, MISSED),
        ("3.7 GiB", "–", "≤ 24 GiB", None, ""),
        ("1 ms", "1.00 ×", "≤ 1.2 ×", (1.75, 1.0), ""),
        ("1 ms", "1.00 ×", "≤ 1.2 ×", (1.81, 1.0), MISSED_BY_CPU),
        ("1 ms", "3.00 ×", "≥ 3 ×", (1.0, 2.0), ""),
        ("1 ms", "3.00 ×", "≥ 3 ×", (1.0, 1.9), MISSED_BY_CPU),
    ],
)
def test_a_line_that_misses_its_budget_is_marked(
    ours: str, ratio: str, budget: str, cpu: tuple[float, float] | None, mark: str
) -> None:
    assert Row("what", ours, "theirs", ratio, budget, cpu, faster=budget.startswith("≥")).mark == mark


def test_the_table_of_one_module_is_replaced_and_the_others_stay() -> None:
    page = "before\n<!-- bench:end -->\nafter\n"
    for name in ("bench_a", "bench_b"):
        page = replace_section(page, name, f"Of {name}.", [Row("old", "1 ms", "x", "1.00 ×", "–")], "a machine")
    once = replace_section(page, "bench_a", "Of a.", [Row("new", "2 ms", "x", "2.00 ×", "≤ 1 ×")], "a machine")
    assert once.count("| old |") == 1
    assert "| new | 2 ms | x | 2.00 × | – | ≤ 1 × **missed** |" in once
    assert once.index("| new |") < once.index("<!-- bench_b -->") < once.index("| old |") < once.index("<!-- bench:end")
    assert once == replace_section(once, "bench_a", "Of a.", [Row("new", "2 ms", "x", "2.00 ×", "≤ 1 ×")], "a machine")


def test_the_readme_has_the_rows_that_users_ask_for_as_they_stand_on_the_page() -> None:
    assert asked.with_table(README.read_text(), PAGE.read_text()) == README.read_text()


@pytest.mark.parametrize("line", asked.ASKED, ids=lambda line: line.what)
def test_every_row_that_users_ask_for_was_measured(line: asked.Asked) -> None:
    rows = {row.what for row in asked.rows_of(PAGE.read_text()) if row.against.startswith(line.against)}
    assert set(line.names) <= rows


def test_figures_that_stand_in_one_line_have_their_marks() -> None:
    rows = [
        Row("read, 5 keys", "1 ms", "theirs: 2 ms", "0.50 ×", "≤ 1 ×"),
        Row("read, 6 keys", "3 ms", "theirs: 2 ms", "1.50 ×", "≤ 1 ×"),
        Row("read, 6 keys", "3 ms", "others: 1 ms", "3.00 ×", "≤ 4 ×"),
        Row("share, 5 keys", "0.0 %", "tasks", "–", "≤ 5 %"),
    ]
    page = asked.rows_of(replace_section("<!-- bench:end -->", "bench_a", "Of a.", rows, "a machine"))
    two = asked.Asked("reads", ("read, {5|6} keys",), "theirs")
    assert asked.line(two, page) == "| reads | theirs | 0.50 × · 1.50 × **missed** | ≤ 1 × |"
    both = asked.Asked("both", ("{read|share}, 5 keys",))
    assert asked.line(both, page) == "| both | theirs, tasks | 0.50 × · 0.0 % | ≤ 1 ×, ≤ 5 % |"

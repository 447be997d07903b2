"""Two processes share the files of tests: each goes through its own, and then helps the other."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.side_by_side import ROOT, SUITES, Shared

FILES = ("tests/a.py", "tests/b.py", "tests/c.py", "tests/spark/d.py", "tests/spark/e.py", "tests/heavy.py")
BESIDE = ("tests/heavy.py", "tests/spark")


def part_of(claims: Path, *, is_beside: bool) -> tuple[Shared, list[Any]]:
    """A process and its tests in the order in which it comes to them, two of each file."""
    shared = Shared(claims, BESIDE, is_beside=is_beside)
    items: list[Any] = [SimpleNamespace(path=ROOT / file, number=number) for file in FILES for number in (1, 2)]
    shared.pytest_collection_modifyitems(items)
    return shared, items


def names(items: list[Any]) -> list[str]:
    return [f"{item.path.stem}{item.number}" for item in items]


def test_a_process_comes_to_its_own_files_first_and_to_those_of_the_other_from_the_last_one(tmp_path: Path) -> None:
    _, first = part_of(tmp_path, is_beside=False)
    assert names(first) == ["a1", "a2", "b1", "b2", "c1", "c2", "e1", "e2", "d1", "d2", "heavy1", "heavy2"]
    _, beside = part_of(tmp_path, is_beside=True)
    assert names(beside) == ["heavy1", "heavy2", "d1", "d2", "e1", "e2", "c1", "c2", "b1", "b2", "a1", "a2"]


def test_every_test_runs_in_one_of_the_two_however_fast_each_is(tmp_path: Path) -> None:
    for number, (fast, slow) in enumerate([(1, 1), (1, 9), (9, 1), (3, 2)]):
        claims = tmp_path / str(number)
        claims.mkdir()
        both = [part_of(claims, is_beside=is_beside) for is_beside in (False, True)]
        ran: list[list[Any]] = [[], []]
        for turns in zip_longest(range(12 * fast), range(12 * slow)):
            for part, (shared, items) in enumerate(both):
                turn, pace = turns[part], (fast, slow)[part]
                if turn is not None and turn % pace == 0:
                    item = items[turn // pace]
                    if shared.pytest_runtest_protocol(item) is None:
                        ran[part].append(item)
        assert sorted(names(ran[0]) + names(ran[1])) == sorted(
            f"{Path(file).stem}{n}" for file in FILES for n in (1, 2)
        )
        assert not {item.path for item in ran[0]} & {item.path for item in ran[1]}


def test_what_runs_beside_is_there() -> None:
    assert [path for suite in SUITES.values() for path in suite.beside if not (ROOT / path).exists()] == []

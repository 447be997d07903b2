"""Mistakes planted in every room are noticed by the tests that each names."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path
from typing import Any

import pytest

from tests.mutations.planted import ROOT, Mutation, planted, read, try_all, why_not_applied
from tests.test_tree import budgets


def test_every_patch_still_applies() -> None:
    reasons = {mutation.name: why_not_applied(mutation, ROOT, check=True) for mutation in planted()}
    assert not {name: reason for name, reason in reasons.items() if reason}


def test_every_room_has_a_mutation() -> None:
    assert not budgets().keys() - {"all"} - {mutation.room for mutation in planted()}


def test_the_tests_that_a_patch_names_exist() -> None:
    def exists(test: str) -> bool:
        path, *parts = test.split("::")
        node: Any = ast.parse((ROOT / path).read_text())
        for part in parts:
            inherits = bool(getattr(node, "bases", ()))
            node = next((child for child in node.body if getattr(child, "name", "") == part), None)
            if node is None:
                return inherits
        return bool(parts)

    assert not [(mutation.name, test) for mutation in planted() for test in mutation.tests if not exists(test)]


@pytest.mark.truth
@pytest.mark.timeout(900)
def test_the_first_mutation_of_each_house_is_found() -> None:
    by_house = {mutation.room.partition("/")[0]: mutation for mutation in reversed(planted())}
    assert by_house.keys() == {"stateformat", "redistribution", "backends", "tools"}
    assert {trial.mutation.name: trial.reason for trial in try_all(list(by_house.values())) if trial.reason} == {}


def made(folder: Path, file: str, old: str, new: str, test: str) -> Mutation:
    """A patch that replaces one string."""
    before = (ROOT / file).read_text()
    assert before.count(old) == 1
    lines = (text.splitlines(keepends=True) for text in (before, before.replace(old, new)))
    diff = "".join(difflib.unified_diff(*lines, f"a/{file}", f"b/{file}"))
    path = folder / "made.patch"
    path.write_text(f"A user suffers.\nfound by: {test}\n\ndiff --git a/{file} b/{file}\n{diff}")
    return read(path)


SHOWN = "tests/html/test_reprs.py::test_text_and_attributes_come_back_as_they_went_in"


@pytest.mark.truth
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("return ''", ""),
        ("return str(text)", "not noticed"),
        ("return lines", f"{SHOWN}: NameError: name 'lines' is not defined"),
        ("return (line", "the tests did not run"),
    ],
)
def test_a_mutation_counts_only_if_a_test_notices_what_it_does(tmp_path: Path, label: str, reason: str) -> None:
    old = "    if line.isprintable():\n        return line\n"
    new = f"    {label}\n" if not reason else f"    if line.isprintable():\n        {label}\n"
    (trial,) = try_all([made(tmp_path, "stateformat/words.py", old, new, SHOWN)])
    assert trial.reason.startswith(reason)
    assert bool(trial.reason) is bool(reason)


@pytest.mark.truth
@pytest.mark.timeout(900)
def test_tests_that_cannot_be_run_prove_nothing(tmp_path: Path) -> None:
    mutation = made(
        tmp_path, "stateformat/words.py", "return line\n", "return text\n", "tests/test_tree.py::test_nobody"
    )
    with pytest.raises(ValueError, match="the tests cannot be run on the tree as it is"):
        [*try_all([mutation])]


def test_a_patch_for_code_that_is_gone_is_said_to_need_a_new_one(tmp_path: Path) -> None:
    mutation = made(tmp_path, "stateformat/words.py", "return line\n", "return text\n", SHOWN)
    mutation.path.write_text(mutation.path.read_text().replace("isprintable", "is_gone"))
    assert "Make the same mistake in the new code" in why_not_applied(mutation, ROOT, check=True)

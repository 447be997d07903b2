"""The three walks lead through functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "design" / "walks.md"
STEPS = sorted(set(re.findall(r"\[`([\w.]+)`\]\(([^)]+\.py)\)", PAGE.read_text())))


def defined(file: Path) -> set[str]:
    """Functions and classes of a file, methods by the class's name."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return found


def test_every_walk_has_steps() -> None:
    assert PAGE.read_text().count("\n## ") == 3
    assert len(STEPS) > 30


@pytest.mark.parametrize(("name", "file"), STEPS)
def test_a_step_names_a_function_that_exists(name: str, file: str) -> None:
    assert name in defined((PAGE.parent / file).resolve())

"""What the README and the guides show runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
SNIPPETS = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL), 1)
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_a_python_snippet_runs_as_it_stands(code: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_readme_shows_the_library_in_twenty_five_lines_and_what_it_prints(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    code, printed = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", text, re.DOTALL).groups()  # type: ignore[union-attr]
    assert len([line for line in code.splitlines() if line.strip()]) <= 25
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == printed


def test_the_dataflow_of_the_readme_prints_what_it_shows(tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().partition("## A dataflow")[2]
    code, printed = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", section, re.DOTALL).groups()  # type: ignore[union-attr]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == printed


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in [*PAGES, ROOT / "CHANGELOG.md"]
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken


def test_every_make_target_the_readme_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert named
    assert named <= targets

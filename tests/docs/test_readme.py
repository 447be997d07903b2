"""What the README and the guides show runs as it stands, each snippet with names of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stateformat.backends.storage.memory import MemoryStorage
from tests.worlds import recipes

ROOT = Path(__file__).resolve().parents[2]
PAGES = recipes.PAGES
ONE_PROGRAM = ROOT / "docs" / "operators.md"
"""Its snippets go on from each other, and run in this process."""
ELSEWHERE = tuple(ROOT / "docs" / name for name in ("data.md", "bootstrap.md", "moving-from-structured-streaming.md"))
"""Their recipes need a store, files or Spark, and run in tests/data, bootstrap and spark."""
SNIPPETS = recipes.snippets(page for page in PAGES if page not in (ONE_PROGRAM, *ELSEWHERE))


def those_that_start_spark(yes: bool) -> list[Any]:
    return [
        pytest.param(code, printed, id=name)
        for name, code, printed in SNIPPETS
        if (recipes.STARTS_SPARK in code) is yes
    ]


@pytest.mark.parametrize(("code", "printed"), those_that_start_spark(False))
def test_a_python_snippet_runs_as_it_stands_and_prints_what_is_shown(
    code: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})
    assert capfd.readouterr().out == printed or not printed


@pytest.mark.truth
@pytest.mark.parametrize(("code", "printed"), those_that_start_spark(True))
def test_a_snippet_that_starts_spark_runs_as_a_program_and_prints_what_is_shown(
    code: str, printed: str, tmp_path: Path
) -> None:
    # tests/spark has the same in the session that is there.
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed or not printed


def test_the_snippets_of_the_page_on_operators_run_one_after_another_and_print_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "operators"}
    snippets = re.findall(recipes.SNIPPET, ONE_PROGRAM.read_text(), re.DOTALL)
    assert len(snippets) >= 14
    for code, printed in snippets:
        exec(compile(code, str(ONE_PROGRAM), "exec"), names)
        assert capsys.readouterr().out == printed
    MemoryStorage.reset("halves")


def test_the_readme_shows_what_its_examples_print() -> None:
    shown = [printed for _, printed in re.findall(recipes.SNIPPET, (ROOT / "README.md").read_text(), re.DOTALL)]
    assert len(shown) == 5
    assert all(shown)


def test_the_readme_shows_the_library_in_twenty_five_lines() -> None:
    code = re.findall(recipes.SNIPPET, (ROOT / "README.md").read_text(), re.DOTALL)[4][0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 25


MADE_FOR_THE_SITE = {"spec.md", "api/index.md"}


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in [*PAGES, ROOT / "CHANGELOG.md"]
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
        if "://" not in target and target not in MADE_FOR_THE_SITE and not (page.parent / target).exists()
    ]
    assert not broken


def test_every_make_target_the_readme_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert named
    assert named <= targets


def test_the_snippets_of_the_readme_run_one_after_another_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    MemoryStorage.reset("readme")
    for code, printed in re.findall(recipes.SNIPPET, (ROOT / "README.md").read_text(), re.DOTALL):
        if recipes.STARTS_SPARK not in code:
            exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
            assert capfd.readouterr().out == printed
    MemoryStorage.reset("readme")
    named = set(re.findall(r"`ckpt \w+ ([\w-]+-store)\b", (ROOT / "README.md").read_text()))
    assert named <= {path.name for path in tmp_path.iterdir()}


def test_the_loggers_that_the_docs_name_are_those_of_modules_that_log() -> None:
    log = re.compile(r"^logger = logging\.getLogger\(__name__\)$", re.MULTILINE)
    folders = [ROOT / name for name in ("stateformat", "redistribution", "backends", "tools")]
    logging = {
        ".".join(("stateformat", *file.relative_to(ROOT).with_suffix("").parts[file.is_relative_to(folders[0]) :]))
        for folder in folders
        for file in folder.rglob("*.py")
        if not any(parent.is_symlink() for parent in file.parents) and log.search(file.read_text())
    }
    named = {
        (page.name, name)
        for page in PAGES
        for line in page.read_text().splitlines()
        if re.match(r"\| `(WARNING|INFO|DEBUG)` \|", line)
        for name in re.findall(r"`((?:\w+|)\.[\w.]+\*?)`", line)
    } | {
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"\b(?:DEBUG|INFO|WARNING|ERROR) ([a-z_]+\.[\w.]+)", page.read_text())
    }
    assert len(named) > 10
    assert not [
        (page, name)
        for page, name in sorted(named)
        if not any(module == name or (name[-1] == "*" and module.startswith(name[:-1])) for module in logging)
    ]
    roots = {name for page in PAGES for name in re.findall(r"log to loggers [^`.]*`(\w+)`", page.read_text())}
    assert roots == {"stateformat"}

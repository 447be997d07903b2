"""docs/night.md, followed word by word: every block runs, and prints what the page shows."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worlds.recipes import DOCS, Recipe, RecipePage, shell

_VARYING = (
    (r"[0-9a-f]{32}", "ID"),
    (r"[0-9a-f]{12}(-dirty)?", "VERSION"),
    (r"\d{4}-\d\d-\d\d\d\d:\d\d(:\d\d)?", "TIME"),
    (r"savepoints/\d+-[0-9a-f]{8}", "SAVEPOINT"),
    (r"\d+(s|min|h|d)(?=ago|[^a-z]|$)", "AGE"),
    (r"[\d.,]+[KM]?i?B", "SIZE"),
)
_OF_A_RUNNING_JOB = ("savepoint", "--running", "watch", "stop", "report")
"""What these show depends on when they ask."""


def same(recipe: Recipe, printed: str) -> bool:
    """Whether two outputs differ at most in ids, times, sizes, and in how lines break for them."""

    def plain(text: str) -> str:
        if "watch" in recipe.code:
            return text.partition("\n")[0]
        text = "".join(text.split())
        for pattern, name in _VARYING:
            text = re.sub(pattern, name, text)
        running = any(word in recipe.code for word in _OF_A_RUNNING_JOB)
        return re.sub(r"[\d.,]+", "N", text) if running else text

    return not recipe.shown or plain(printed) == plain(recipe.shown)


PAGE = RecipePage(DOCS / "night.md", same)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, of a short name, as lines break at names. A job that the page has
    started and a failure has left is ended.
    """
    tmp_path = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NIGHT_FOLDER", str(tmp_path))
    (tmp_path / "examples").symlink_to(DOCS.parent / "examples")
    yield tmp_path
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                process.name != f"{os.getpid()}"
                and f"NIGHT_FOLDER={tmp_path}\0".encode() in (process / "environ").read_bytes()
            ):
                os.kill(int(process.name), signal.SIGKILL)
    shutil.rmtree(tmp_path)


@pytest.mark.truth
def test_the_page_runs_from_top_to_bottom_and_prints_what_it_shows(folder: Path, pytestconfig: pytest.Config) -> None:
    recipes = [recipe for some in PAGE.sections().values() for recipe in some]
    ran = [(recipe, shell(recipe.code, os.environ, errors=True).replace(f"{folder}", "/data")) for recipe in recipes]
    PAGE.check(ran, update=pytestconfig.getoption("--update"))

"""The table with which docs/foreign.md begins says what can be done with the checkpoints of Spark
and Flink: each command in it is called, and what it says cannot be done is refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from stateformat.backends.foreign.advice import FLINK, SPARK, TASKS
from stateformat.tools.ckpt.docs import FOREIGN_PAGE, with_tasks
from tests.advice.following import copied
from tests.advice.sentences import commands_in
from tests.ckpt.ckpt_runs import run

FIXTURES = Path(__file__).resolve().parents[1] / "foreign" / "fixtures"
FOLDERS = {
    SPARK: FIXTURES / "spark-4.3.0" / "two" / "checkpoint",
    FLINK: FIXTURES / "flink-2.3.0" / "core-rocksdb-canonical" / "savepoint",
}
NAMES: dict[str, Mapping[str, str]] = {
    SPARK: {
        "OPERATOR.STATE": "operator-0.default",
        "UID/STATE": "operator-0/default",
        "OLD=NEW": "operator-0=totals",
        "SOURCE=OFFSET": "0=-",
    },
    FLINK: {"OPERATOR.STATE": "by-long.words", "UID/STATE": "by-long/words", "OLD=NEW": "by-long=numbers-by-key"},
}
"""What stands for the names of the table in each folder."""
CANNOT = {
    ("rename", SPARK): ("rewrite {url} --rename operator-0=totals --to {new}",),
    ("rename", FLINK): (
        "import {url} --to {store} --key-hash keep --map by-long=numbers-by-key",
        "export {store} --as flink-savepoint --to {new}",
    ),
    ("drop a state", SPARK): ("rewrite {url} --drop operator-0/default --to {new}",),
    ("let its sources go on elsewhere", FLINK): ("copy {url} --to {new} --offsets 0=-",),
    ("repair it", FLINK): ("repair {url} --to {new}",),
    ("go back to its system after an import", SPARK): (
        "import {url} --to {store}",
        "export {store} --as spark --to {new}",
    ),
}
"""What somebody would call for what the table says cannot be done; the last is refused."""
NAMED = {SPARK: "spark", FLINK: "flink"}
CELLS = [pytest.param(task, system, id=f"{task}: {NAMED[system]}") for task in TASKS for system in (SPARK, FLINK)]


@pytest.mark.parametrize(("task", "system"), CELLS)
def test_each_command_of_the_table_does_something(task: str, system: str, tmp_path: Path) -> None:
    url = copied(FOLDERS[system], tmp_path / "theirs")
    told = TASKS[task][system].told.format(url=url)
    given = {"STORE": str(tmp_path / "store"), "COPY": str(tmp_path / "copy"), "N": "5", **NAMES[system]}
    (tmp_path / f"unchanged_{NAMED[system]}.py").write_text("def same(rows):\n    return rows\n")
    given |= {
        "OPERATOR/STATE=FILE:FUNCTION": f"{NAMES[system]['UID/STATE']}={tmp_path}/unchanged_{NAMED[system]}.py:same"
    }
    given |= {"CONDITION": "n = 1"}
    lines = [line for line in commands_in(told) if " " in line]
    if any(line.startswith("export STORE") for line in lines) and not any(line.startswith("import") for line in lines):
        lines.insert(0, f"import {url} --to STORE --key-hash keep")
    for line in lines:
        words = [given.get(word, word) for word in shlex.split(line.replace("@ID", "@2"))]
        words = [re.sub(r"OPERATOR\.STATE", given["OPERATOR.STATE"], word) for word in words]
        found = run(*words)
        assert found.status == 0, f"{shlex.join(words)}: {found.err}"
    assert lines or "flink run" in told or not TASKS[task][system].can


@pytest.mark.parametrize(("task", "system"), CANNOT)
def test_what_the_table_says_cannot_be_done_is_refused(task: str, system: str, tmp_path: Path) -> None:
    (tmp_path / "fixes.py").write_text("def same(rows):\n    return rows\n")
    places = {name: str(tmp_path / name) for name in ("new", "store")}
    places |= {"url": str(copied(FOLDERS[system], tmp_path / "theirs")), "functions": str(tmp_path / "fixes.py")}
    *before, last = [shlex.split(line.format(**places)) for line in CANNOT[task, system]]
    assert [run(*words).status for words in before] == [0] * len(before)
    assert run(*last).status == 2


def test_what_cannot_be_done_is_all_tried() -> None:
    cannot = {(task, system) for task, ways in TASKS.items() for system, way in ways.items() if not way.can}
    assert cannot == set(CANNOT)


def test_the_page_begins_with_the_table() -> None:
    page = FOREIGN_PAGE.read_text()
    assert with_tasks(page) == page, "run `make docs` (python -m stateformat.tools.ckpt.docs)"
    assert page.index("| task |") < page.index("\n## ")
    assert page.count("\n| ") - 1 > len(TASKS)


RECIPES = re.findall(r"^\| [^|]* \| `ckpt (sql .*)` \|$", FOREIGN_PAGE.read_text(), re.MULTILINE)
QUERIES = {
    "from default group": FIXTURES / "spark-4.3.0/aggregate/checkpoint",
    "window.start": FIXTURES / "spark-4.3.0/window/checkpoint",
    "left-keyWithIndexToValue": FIXTURES / "spark-4.3.0/join-inner/checkpoint",
    "sql PATH": FOLDERS[FLINK],
}
"""Of a recipe, by a piece of it, the folder that it is for."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_of_sql_finds_rows(recipe: str) -> None:
    url = next(folder for piece, folder in QUERIES.items() if piece in recipe)
    words = [str(url) if word in ("QUERY", "PATH") else word for word in shlex.split(recipe)]
    found = run(*words)
    assert found.status == 0, found.err
    assert "0 rows" not in found.out.splitlines()[-1:]
    assert re.search(r"^[1-5] rows$", found.out, re.MULTILINE), found.out


def test_there_are_recipes_of_both_systems() -> None:
    assert {recipe.split()[1] for recipe in RECIPES} == {"QUERY", "PATH"}
    assert len(RECIPES) >= 6

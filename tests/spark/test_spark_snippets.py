"""What the pages about Spark show runs as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stateformat.backends.spark import register_data_source
from tests.worlds import recipes, recipes as data_recipes
from tests.worlds.data import data_store

pytestmark = pytest.mark.spark
SNIPPETS = [
    pytest.param(code, printed, id=name)
    for name, code, printed in recipes.snippets(recipes.PAGES)
    if recipes.STARTS_SPARK in code
]


@pytest.mark.parametrize(("code", "printed"), SNIPPETS)
def test_a_snippet_for_spark_runs_as_it_stands_and_prints_what_is_shown(
    code: str,
    printed: str,
    spark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stopped: list[Any] = []
    monkeypatch.setattr(type(spark), "stop", lambda self: stopped.append(self))
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})
    said = capfd.readouterr().out
    assert len(stopped) == 1
    assert said == printed or not printed


# ---- the recipes of docs/data.md for Spark run as they stand and print what the page shows


@pytest.mark.parametrize("heading", data_recipes.headings(spark=True))
def test_a_recipe_for_spark_runs_as_it_stands_and_prints_what_is_shown(
    heading: str, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    data_store(str(tmp_path / "shop"), durable=False)
    monkeypatch.chdir(tmp_path)  # The JVM stays where it was.
    register_data_source(spark)
    ran = list(data_recipes.run(heading, given={"spark": spark}, url=str(tmp_path / "shop")))
    data_recipes.PAGE.check(ran, update=pytestconfig.getoption("--update"))

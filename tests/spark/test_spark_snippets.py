"""The programs of the README and the guides that start Spark run as they stand and print what is
shown, here in the session of the tests, which they leave running.

tests/docs runs each with a Spark of its own, among the tests that take longer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.worlds import recipes

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

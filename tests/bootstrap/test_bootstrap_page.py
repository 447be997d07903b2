"""The guide and the example run as they stand."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest

from stateformat.store import open as open_store

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "bootstrap.md"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import history_begins

    yield history_begins
    del sys.modules["history_begins"]


def test_a_job_begins_with_the_history_of_a_year(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.go_on(tmp_path)
    assert "the job begins with 7 cities, behind 6 files\n" in capsys.readouterr().out
    assert example.committed(tmp_path / "totals") == example.wanted()


def test_the_guide_runs_as_it_stands(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The orders of 2026 come between the bootstrap and the run."""
    monkeypatch.chdir(tmp_path)
    Path("orders").mkdir()
    names: dict[str, Any] = {}
    text = PAGE.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4
    for number, block in enumerate(blocks):
        year = {0: 2025, 2: 2026}.get(number)
        for day in example.DAYS.get(year, ()):
            pq.write_table(example.orders(year, day), f"orders/{year}-{day}.parquet")
        if year == 2026:
            Path("orders/_END").touch()
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    found = {row["city"]: row["amount"] for row in pq.read_table("totals").to_pylist()}
    assert found == {city: amount for city, (_, amount) in example.wanted().items()}
    assert f"It prints:\n\n```text\n{capsys.readouterr().out}```" in text
    assert open_store("store").history()[-1].properties["bootstrap.source.orders"] == "behind 6 files"

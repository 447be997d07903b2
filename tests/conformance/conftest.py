"""Where the jobs of conformance tests run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worlds.stages import PlayedStage


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> PlayedStage:
    """Where a job runs; a real Spark is started when it is needed."""
    return PlayedStage(tmp_path, monkeypatch, lambda: request.getfixturevalue("spark"))

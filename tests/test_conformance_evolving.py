"""Columns of states change from version to version of a program, on both executors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance import EXECUTORS, Stage
from tests.conformance_evolving import rename_drop_and_roll_back
from tests.played_stage import PlayedStage


@pytest.mark.parametrize("executor", EXECUTORS)
def test_columns_are_renamed_and_dropped_and_again_after_a_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    rename_drop_and_roll_back(PlayedStage(tmp_path, monkeypatch), executor)


@pytest.mark.spark
@pytest.mark.truth
def test_columns_are_renamed_and_dropped_and_again_after_a_rollback_on_a_cluster(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rename_drop_and_roll_back(Stage(tmp_path, lambda: request.getfixturevalue("spark")), "spark")

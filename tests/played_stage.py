"""A stage for conformance tests whose Spark is played in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import Stage
from tests.spark_in_process import Stand

EVERYWHERE = pytest.mark.parametrize(
    "executor", ["local", "spark", pytest.param("cluster", marks=[pytest.mark.spark, pytest.mark.truth])]
)
"""Runs a test on both executors, and among the truth tests on a real Spark."""
ON_BOTH = pytest.mark.parametrize("executor", ["local", "spark"])
"""Where a real Spark adds nothing to what another test of the same says on it."""


def other(executor: str) -> str:
    """Another executor, for a job to go on."""
    return "spark" if executor == "local" else "local"


class PlayedStage(Stage):
    """A place for one job. ``spark`` is played by ``stand``, ``cluster`` is a real Spark."""

    def __init__(self, directory: Path, monkeypatch: Any, cluster: Callable[[], Any] | None = None) -> None:
        super().__init__(directory, cluster or (lambda: None))
        self._monkeypatch = monkeypatch
        self._stand: Stand | None = None

    @property
    def stand(self) -> Stand:
        """What plays Spark, in place of every Spark of the test, once it was asked for."""
        if self._stand is None:
            self._stand = Stand(self._monkeypatch, workers=2)
        return self._stand

    def at(self, name: str) -> PlayedStage:
        """A stage in a directory below, on the same stand."""
        made = PlayedStage(self.directory / name, self._monkeypatch, self.spark)
        made._stand = self._stand
        return made

    def runtime(self, executor: str, **options: Any) -> Any:
        """A runtime of this executor."""
        if executor == "spark":
            return self.stand.runtime(options.pop("store", self.store), **options)
        return super().runtime("spark" if executor == "cluster" else executor, **options)

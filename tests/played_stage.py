"""A stage for conformance tests whose Spark is played in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.conformance import Stage
from tests.spark_in_process import Stand


class PlayedStage(Stage):
    """A place for one job. Its ``spark`` runtime runs epochs in this process, on ``stand``."""

    def __init__(self, directory: Path, monkeypatch: Any) -> None:
        self.stand = Stand(monkeypatch, workers=2)
        super().__init__(directory, lambda: self.stand)

    def at(self, name: str) -> PlayedStage:
        """A stage in a directory below, on the same stand."""
        made = PlayedStage.__new__(PlayedStage)
        made.stand = self.stand
        Stage.__init__(made, self.directory / name, self.spark)
        return made

    def runtime(self, executor: str, **options: Any) -> Any:
        """A runtime of this executor."""
        if executor == "spark":
            return self.stand.runtime(options.pop("store", self.store), **options)
        return super().runtime(executor, **options)


__all__ = ["PlayedStage"]

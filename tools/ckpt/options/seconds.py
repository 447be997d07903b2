"""Options that are a number of seconds."""

from __future__ import annotations

import math
from typing import Any

import click


class SecondsType(click.FloatRange):
    """A finite number of seconds within a range; click's own range accepts ``inf`` and ``nan``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number."""
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is no number of seconds", param, ctx)
        return seconds

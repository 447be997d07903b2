"""The picture of docs/scale.md: time against handles, and time against bytes, both logarithmic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

_COLORS: Final = {
    "open": "#0072B2",
    "inspect": "#56B4E9",
    "plan": "#009E73",
    "validate quick": "#E69F00",
    "rescale": "#D55E00",
    "restore": "#CC79A7",
    "validate full": "#5B3A00",
    "reading": "#000000",
}
_MARKS: Final = dict(zip(_COLORS, "osD^vPX.", strict=True))


class Point(NamedTuple):
    """One action at one size."""

    action: str
    size: int
    """Handles or bytes."""
    seconds: float
    """The best of some rounds."""
    reading: float
    """The best time of reading the manifest's planning columns, without any check, in between."""
    peak_bytes: int
    """Of the process."""


def magnitude(number: float) -> str:
    """A number by its size: ``1k``, ``100k``, ``1M``, ``1G``, rounded to a digit."""
    for factor, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= 0.95 * factor:
            return f"{number / factor:.0f}{unit}"
    return f"{number:.0f}"


def _time(value: float, _: object = None) -> str:
    return f"{value:g} s" if value >= 1 else f"{value * 1000:g} ms"


def _panel(axes: Any, points: Sequence[Point], title: str, unit: str) -> None:
    for action in dict.fromkeys(point.action for point in points):
        own = [point for point in points if point.action == action]
        columns = [point.size for point in own], [point.seconds for point in own]
        look: dict[str, Any] = {"marker": _MARKS[action], "color": _COLORS[action], "linewidth": 1.8, "markersize": 6}
        axes.plot(*columns, label=action, **look)
    # A line of slope one: what is parallel to it or flatter is linear or better.
    smallest, largest = min(point.size for point in points), max(point.size for point in points)
    first = {point.action: point.seconds for point in reversed(points)}
    grown = [point.seconds for point in points if point.size == largest and point.seconds > 5 * first[point.action]]
    base = min(grown, default=1.0) / largest / 2
    ends = [smallest, largest], [base * smallest, base * largest]
    axes.plot(*ends, color="#888888", linestyle=":", label="linear", linewidth=1.5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(title)
    axes.set_xlabel(unit)
    axes.set_ylabel("time")
    axes.xaxis.set_major_locator(LogLocator(base=10))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: magnitude(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(_time))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def _reading(points: Sequence[Point]) -> list[Point]:
    sizes = dict.fromkeys(point.size for point in points)
    least = {size: min(point.reading for point in points if point.size == size) for size in sizes}
    return [Point("reading", size, seconds, seconds, 0) for size, seconds in least.items()]


def draw(by_handles: Sequence[Point], by_bytes: Sequence[Point], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8), dpi=120, layout="constrained")
    _panel(left, [*by_handles, *_reading(by_handles)], "By handles", "handles in the checkpoint")
    _panel(right, by_bytes, "By bytes", "bytes of state, as stored")
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)

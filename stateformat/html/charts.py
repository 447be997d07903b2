"""Charts as inline SVG: each value is a shape with its text as a tooltip.

Shapes stretch with the page. Text is HTML beside them, so it is as large as all other text on every
screen. What a chart shows is also in a table near it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from .. import words
from .elements import Element, element as e

BARS_MAX: Final = 256
"""With more values, neighbors share a bar, which shows the greatest of them."""
_HEIGHT: Final = 100
_PITCH: Final = 10

Text = Callable[[int], str]


def columns(
    title: str,
    values: Sequence[int | None],
    labels: Sequence[str],
    *,
    text: Text = words.count,
    ends: tuple[str, str] = ("", ""),
    marked: Sequence[bool] = (),
    at: int | None = None,
) -> Element:
    """Return a figure with one vertical bar for each value.

    ``labels`` name the values; ``marked`` ones have another color. ``ends`` are shown below the
    first and the last bar. ``at``: the value to accent and to state. An unknown value has no bar.
    """
    known = [value for value in values if value is not None]
    top = max(known, default=0)
    told = None if at is None else values[at]
    bars, width = _bars(values, labels, top, text, marked, at)
    shape = e(
        "svg",
        e("title", f"{title}: {_summary(known, text)}"),
        bars,
        class_="plot",
        viewBox=f"0 0 {width} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
    )
    head = (e("span", title), e("strong", "–" if told is None else text(told)) if at is not None else None)
    foot = (e("span", ends[0]), e("span", f"up to {text(top)}" if known else ""), e("span", ends[1]))
    return e("figure", e("figcaption", head), shape, e("div", foot, class_="axis"))


def _summary(known: Sequence[int], text: Text) -> str:
    if not known:
        return "nothing is known"
    return f"{words.plural(len(known), 'value')} from {text(min(known))} to {text(max(known))}"


def _bars(
    values: Sequence[int | None],
    labels: Sequence[str],
    top: int,
    text: Text,
    marked: Sequence[bool],
    accent: int | None,
) -> tuple[list[Element], int]:
    """Return the bars, and their total width in units of the drawing."""
    count = min(len(values), BARS_MAX) or 1
    bounds = [len(values) * i // count for i in range(count + 1)]
    # A few bars do not grow as wide as the page.
    broad = 0.8 * _PITCH * min(1.0, max(count, 2) / 12)
    paths: dict[str, list[str]] = {}
    tooltips = []
    for i in range(count if values else 0):
        chosen = range(bounds[i], bounds[i + 1])
        place = max(chosen, key=lambda one: -1 if (found := values[one]) is None else found)
        value = values[place]
        if value is None:
            continue
        height = max(1.5, _HEIGHT * value / top) if top > 0 and value > 0 else 1.0
        accented = accent in chosen
        tone = "z" if value <= 0 else "e" if any(marked[one] for one in chosen if marked) else "n" if accented else "b"
        left = i * _PITCH + (_PITCH - broad) / 2
        paths.setdefault(tone, []).append(f"M{left:g} {_HEIGHT}v{-height:.1f}h{broad:g}v{height:.1f}z")
        tooltip = e("title", f"{labels[place]}: {text(value)}")
        tooltips.append(e("rect", tooltip, class_="hit", x=i * _PITCH, width=_PITCH, height=_HEIGHT))
    shapes = [e("path", class_=tone, d="".join(parts)) for tone, parts in paths.items()]
    return [*shapes, *tooltips], count * _PITCH


def spark(values: Sequence[int | None], title: str) -> Element:
    """Return a line chart as high as text."""
    points = [(i, value) for i, value in enumerate(values) if value is not None]
    top = max((value for _, value in points), default=0) or 1
    step = 96 / max(1, len(values) - 1)
    path = " ".join(f"{i * step:.1f},{20 - 18 * value / top:.1f}" for i, value in points)
    area = f"{points[0][0] * step:.1f},22 {path} {points[-1][0] * step:.1f},22" if points else ""
    return e(
        "svg",
        e("title", title),
        e("polygon", class_="b", points=area) if len(points) > 1 else None,
        class_="spark",
        viewBox="0 0 96 22",
        role="img",
    )


def share(value: int, top: int, title: str) -> Element:
    """Return a horizontal bar, in proportion to the greatest."""
    part = 100 * value / top if top > 0 else 0
    return e(
        "svg",
        e("title", title),
        e("rect", class_="b", x=0, y=0, width=f"{max(part, 1.0 if value > 0 else 0):.1f}%", height=8, rx=4),
        class_="share",
        role="img",
    )


def status_mark(status: str) -> Element:
    """Return a disc that fills as subtasks finish: a ring, half a disc, a full disc."""
    return e("svg", disc(status, 7, 7), width=14, height=14, viewBox="0 0 14 14")


def disc(status: str, x: float, y: float) -> list[Element]:
    """Return the mark of a status for a drawing, around a point."""
    tone = {"fully_finished": "finished", "partially_finished": "partly"}.get(status, "")
    half = e("path", class_="half", d=f"M{x} {y - 4.5} a4.5 4.5 0 0 0 0 9 z") if tone == "partly" else None
    return [part for part in (half, e("circle", class_=f"mark {tone}".rstrip(), cx=x, cy=y, r=4.5)) if part]

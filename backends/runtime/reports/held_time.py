"""A warning that names the input that has held back event time for long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from stateformat.words import age, label, precise_moment

from ...dataflow.source_reader import Holder

HELD_US: Final = 60_000_000
"""How long an input must have held back event time to be worth a warning."""
LOOK_EVERY_US: Final = 5_000_000


class TimeWatch:
    """Looks for the input that is behind the others, which have gone on.

    ``idle_after_us``: the value that the user gave for each source with event time, by uid.
    """

    def __init__(self, idle_after_us: Mapping[str, int | None]) -> None:
        self.sources = idle_after_us
        self.next_us = 0
        """When to look again, by the executor's clock."""
        self._held: tuple[str, str | None, int | None] | None = None
        """The source and split that is behind, and its watermark."""
        self._since_us = 0
        self._furthest_us = 0
        """Where the others were at that time."""
        self._told: tuple[str, str | None] | None = None

    def look(self, now_us: int, readers: Iterable[tuple[str, Holder]]) -> str | None:
        """Return a warning if the input that is behind is not the one of the last time.

        ``readers``: those that run and are not idle, with the uid of their source.
        """
        self.next_us = now_us + LOOK_EVERY_US
        known = list(readers)
        if not known:
            return None
        uid, last = min(known, key=lambda item: _time(item[1].watermark))
        furthest_us = max(_time(max(each.furthest, each.watermark, key=_time)) for _, each in known)
        held = (uid, last.split, last.watermark)
        if held != self._held or furthest_us <= _time(last.watermark):
            self._held, self._since_us, self._furthest_us = held, now_us, furthest_us
            return None
        gone_on = last.watermark is None or furthest_us > self._furthest_us
        if now_us - self._since_us < HELD_US or not gone_on or self._told == held[:2]:
            return None
        self._told = held[:2]
        return self._words(uid, last, furthest_us, age(0, now_us - self._since_us))

    def _words(self, uid: str, last: Holder, furthest_us: int, long: str) -> str:
        what = f"source {uid!r}" if last.split is None else f"split {label(last.split)!r} of source {uid!r}"
        if last.watermark is None:
            stands, why = f"Event time has not begun for {long}", "has had no row"
        else:
            stands, why = f"Event time has stood at {precise_moment(last.watermark)} for {long}", "has had no later row"
        idle_after_us = self.sources.get(uid)
        advice = (
            "If it may be without rows, give the source idle_after=."
            if idle_after_us is None
            else f"It does so until it has been without rows for {age(0, idle_after_us)}."
        )
        return (
            f"{stands}: {what} {why}, and others are at {precise_moment(furthest_us)}. Windows and "
            f"timers wait for it. {advice}"
        )


def _time(watermark: int | None) -> int:
    return -(2**63) if watermark is None else watermark

"""Lengths of time as users give them."""

from __future__ import annotations

import datetime
from typing import TypeAlias

from stateformat.errors import InvalidInput

Duration: TypeAlias = "int | datetime.timedelta"
"""A number of whole microseconds, or a timedelta."""


def microseconds(what: str, given: Duration) -> int:
    """Return a duration in µs. Raises ``InvalidInput`` for other values, and for less than 1."""
    if isinstance(given, datetime.timedelta):
        given = given // datetime.timedelta(microseconds=1)
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise InvalidInput(
            f"{what} is {given!r}. Give whole microseconds, at least 1 (a minute is 60_000_000), or a "
            "datetime.timedelta."
        )
    return given

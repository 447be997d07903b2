"""Checks of options, before anything begins."""

from __future__ import annotations

from stateformat.errors import InvalidInput


def check_whole(options: object, **least: int) -> None:
    """``InvalidInput`` for a field that is no whole number or below its least; None is allowed."""
    for name, at_least in least.items():
        value = getattr(options, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < at_least):
            raise InvalidInput(f"{name} is {value!r}; it is a whole number, at least {at_least}")

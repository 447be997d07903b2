"""Read members of a JSON object. Each fault names its member: ``operators[2].parallelism``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, Final, TypeVar

from ..errors import ErrorKind

INTEGER_MAX: Final = 2**53 - 1
"""The greatest integer that every JSON parser reads exactly."""

_HEX = re.compile(r"[0-9a-f]{32}")
_JSON_NAMES: Final = {str: "a string", int: "an integer", bool: "true or false", list: "an array", dict: "an object"}

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


class RecordFault(Exception):
    """What is wrong with a record, and where. ``codec`` turns it into ``DamagedCheckpoint``."""

    def __init__(self, where: str, message: str, kind: ErrorKind = ErrorKind.DAMAGED_RECORD, **details: Any) -> None:
        super().__init__(f"{where} {message}" if where else message)
        self.where = where
        self.kind = kind
        self.details = details


class Members:
    """One JSON object and its place in the record, ``""`` for the record itself."""

    __slots__ = ("place", "values")

    def __init__(self, values: dict[str, Any], place: str) -> None:
        self.values = values
        self.place = place

    def at(self, name: str) -> str:
        """Return the JSON path of a member."""
        return f"{self.place}.{name}" if self.place else name

    def fault(self, name: str, message: str, kind: ErrorKind = ErrorKind.DAMAGED_RECORD) -> RecordFault:
        """Return a fault of a member, for the caller to raise."""
        return RecordFault(self.at(name), message, kind)

    def has(self, name: str) -> bool:
        """Return whether the object has a member."""
        return name in self.values

    def get(self, name: str, kind: type[T]) -> T:
        """Return a member of exactly this JSON type."""
        if name not in self.values:
            raise self.fault(name, "is missing")
        return typed(self.values[name], kind, self.at(name))

    def text(self, name: str, *, least: int = 0) -> str:
        """Return a string of at least ``least`` characters."""
        value = self.get(name, str)
        if len(value) < least:
            raise self.fault(name, "is empty")
        return value

    def integer(self, name: str, least: int = 0, most: int = INTEGER_MAX) -> int:
        """Return an integer from ``least`` to ``most``."""
        value = self.get(name, int)
        if not least <= value <= most:
            raise self.fault(name, f"is {value}; it must be from {least} to {most}")
        return value

    def hexadecimal(self, name: str) -> str:
        """Return an attempt id or a digest."""
        value = self.get(name, str)
        if not _HEX.fullmatch(value):
            raise self.fault(name, f"is {value!r:.80}, not 32 lower-case hexadecimal digits")
        return value

    def one_of(self, name: str, values: type[E]) -> E:
        """Return a member of an enumeration."""
        value = self.get(name, str)
        try:
            return values(value)
        except ValueError:
            raise self.fault(name, f"is {value!r:.80}, not one of {', '.join(values)}") from None

    def texts(self, name: str) -> tuple[str, ...]:
        """Return an array of strings."""
        return tuple(typed(item, str, f"{self.at(name)}[{i}]") for i, item in enumerate(self.get(name, list)))

    def object(self, name: str) -> Members:
        """Return a member that is an object."""
        return Members(self.get(name, dict), self.at(name))

    def objects(self, name: str) -> Iterator[Members]:
        """Yield the objects of an array."""
        for i, item in enumerate(self.get(name, list)):
            place = f"{self.at(name)}[{i}]"
            yield Members(typed(item, dict, place), place)

    def optional(self, name: str, read: Callable[[str], T]) -> T | None:
        """Return what ``read`` returns for a member, or None if it is absent."""
        return read(name) if self.has(name) else None


def typed(value: Any, kind: type[T], place: str) -> T:
    """Return ``value`` if it has exactly this type; here bool is not int."""
    if type(value) is not kind:
        raise RecordFault(place, f"is {_JSON_NAMES.get(type(value), 'null')} where {_JSON_NAMES[kind]} is expected")
    return value

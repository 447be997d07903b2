"""What arguments and options parse to: addresses, storage options, pairs, numbers of seconds.

An object key may contain ``@``, so only a *trailing* ``@`` followed by nothing but digits is an id.
A store whose name really ends so is written with a final slash (``backups@42/``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

_AGE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([smhdw])")
_UNIT_US = {"s": 10**6, "m": 60 * 10**6, "h": 3600 * 10**6, "d": 86_400 * 10**6, "w": 7 * 86_400 * 10**6}
_SECONDS_MAX = 10**9


@dataclass(frozen=True)
class Address:
    """A store by path or URL, and the id of one of its checkpoints; None is the newest."""

    url: str
    checkpoint_id: int | None = None
    format: str | None = None
    """Another system's format, where the address names it: ``flink:PATH``."""
    whole: bool = False
    """Whether a whole store is meant, and so no savepoint by its name (``STORE@NAME``)."""

    def __str__(self) -> str:
        place = self.url if self.format is None else f"{self.format}:{self.url}"
        return place if self.checkpoint_id is None else f"{place}@{self.checkpoint_id}"


class AddressType(click.ParamType[Address]):
    """Parses ``STORE``, ``STORE[@ID]`` or ``STORE@ID``, as ``checkpoint`` says."""

    def __init__(self, checkpoint: str = "optional") -> None:
        self.checkpoint = checkpoint
        self.name = {"never": "STORE", "optional": "STORE[@ID]", "always": "STORE@ID"}[checkpoint]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Address:
        from stateformat.formats import split_format
        from stateformat.storage import is_id, resolved, split_id, without_secrets

        text = str(value)
        place, digits = split_id(text)
        form, url = split_format(place)
        url = resolved(url)
        shown = without_secrets(url)
        if not url.strip():
            self.fail(f"{text!r} names no store. Give a path or URL: /data/store, s3://bucket/store", param, ctx)
        if digits is None:
            if self.checkpoint == "always":
                command = f"`ckpt history {shown}` lists them"
                self.fail(f"{shown!r} names no checkpoint. Add an id, as in {shown}@7; {command}", param, ctx)
            return Address(url, format=form, whole=self.checkpoint == "never")
        id_text = f"{digits:.40}"
        whole = f"{shown}@{id_text}"
        if self.checkpoint == "never":
            self.fail(
                f"this command is about the whole store. Leave @{id_text} out of {whole!r} (a store whose name ends so "
                f"is written {whole}/)",
                param,
                ctx,
            )
        if not is_id(digits):
            self.fail(f"{id_text} in {whole!r} is not a checkpoint id; ids go from 1 to 2^53 - 1", param, ctx)
        return Address(url, int(digits), form)


class TargetType(click.ParamType[str]):
    """A file or folder to write: a path, a URL, or ``-``. A ``file:`` URL becomes its path."""

    name = "FILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ARG002
        from stateformat.storage import local_path, open_storage, resolved

        target = resolved(str(value))
        # Opening it refuses what is no address of a folder.
        return local_path(open_storage(target).url) or target if target[:6].lower() == "file:/" else target


class CheckpointsType(click.ParamType[tuple[int | None, int | None]]):
    """Parses ``FROM..TO``, ``FROM..`` and ``..TO``."""

    name = "FROM..TO"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int | None, int | None]:
        from stateformat.storage import is_id

        first, dots, last = str(value).partition("..")
        ends = [text for text in (first, last) if text]
        if not dots or not ends or not all(text.isascii() and text.isdigit() and is_id(text) for text in ends):
            self.fail(
                f"{str(value)!r:.60} is not a range of checkpoints. Give two ids, as in 3..7, 3.. or ..7", param, ctx
            )
        if len(ends) == 2 and int(first) > int(last):
            self.fail(f"{value!r} ends before it begins. Give the lower id first: {last}..{first}", param, ctx)
        return int(first) if first else None, int(last) if last else None


class StorageOptionType(click.ParamType[tuple[str, Any]]):
    """Parses ``KEY=VALUE``; ``true`` and ``false`` are booleans, everything else is text."""

    name = "KEY=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        key, separator, text = str(value).partition("=")
        if not key or not separator:
            self.fail(f"{value!r} is not of the form KEY=VALUE", param, ctx)
        return key, {"true": True, "false": False}.get(text.lower(), text)


class PairType(click.ParamType[tuple[str, Any]]):
    """Parses ``NAME=VALUE``. The last ``=`` divides, as a uid may contain one; or the ``first``."""

    def __init__(self, form: str, *, first: bool = False) -> None:
        self.name = form
        self._first = first

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        name, _, given = str(value).partition("=") if self._first else str(value).rpartition("=")
        if not name or not given:
            self.fail(f"{value!r} is not of the form {self.name}", param, ctx)
        return name, given


class OperatorParallelism(PairType):
    """Parses ``UID=N`` with N at least 1."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        uid, given = super().convert(value, param, ctx)
        if not given.isascii() or not given.isdigit() or not 1 <= len(given.lstrip("0")) <= 40:
            self.fail(f"{given!r:.60} in {value!r:.60} is not a number of subtasks; give at least 1", param, ctx)
        return uid, int(given)


class Whole(click.IntRange):
    """A whole number from ``least`` on that its use, an int64 or a number of JSON, can take."""

    def __init__(self, least: int = 1, most: int = 2**53 - 1) -> None:
        super().__init__(min=least)
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number > self._most:
            self.fail(f"{str(value)!r:.60} is too large; the greatest that it can be is {self._most}", param, ctx)
        return number


class SecondsType(click.FloatRange):
    """A number of seconds within a range, at most thirty years; click's own accepts ``nan``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not seconds <= _SECONDS_MAX:
            self.fail(f"{str(value)!r:.60} is not a number of seconds up to {_SECONDS_MAX:,}", param, ctx)
        return seconds


class AgeType(click.ParamType[int]):
    """Parses a length of time, ``90s``, ``30m``, ``12h``, ``7d``, ``2w``: whole microseconds."""

    name = "AGE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _AGE.fullmatch(str(value).strip())
        if match is None:
            self.fail(
                f"{str(value)!r:.60} is not a length of time; give a number and its unit: 90s, 30m, 12h, 7d, 2w",
                param,
                ctx,
            )
        return round(float(match[1]) * _UNIT_US[match[2]])


def is_local(url: str) -> bool:
    """Whether a store is a directory: a plain path or a ``file:`` URL."""
    from stateformat.storage import is_local as of_storage

    return of_storage(url)


def options_for(url: str, given: Mapping[str, Any], others: tuple[str, ...] = ()) -> Mapping[str, Any]:
    """The storage options for ``url``, in a command that also works on ``others``.

    Options are for remote stores. A local store gets them only if the command has no remote one,
    and then refuses what it does not know.
    """
    if is_local(url) and not all(is_local(other) for other in others):
        return {}
    return given

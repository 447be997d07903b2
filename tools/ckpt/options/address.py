"""Where a command works: ``STORE[@ID]``, and the options that go to a storage.

An address is a path or URL, and after it ``@`` and digits for one checkpoint. An object key may itself contain ``@``, so
only a *trailing* ``@`` with nothing but digits behind it is an id; a store whose name really ends so is written with a
final slash (``backups@42/``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class Address:
    """A store by path or URL, and the id of one checkpoint in it; None is the newest."""

    url: str
    checkpoint_id: int | None = None

    def __str__(self) -> str:
        return self.url if self.checkpoint_id is None else f"{self.url}@{self.checkpoint_id}"


class AddressType(click.ParamType[Address]):
    """Parses ``STORE``, ``STORE[@ID]`` or ``STORE@ID``; every other form is misuse, told in a sentence."""

    def __init__(self, checkpoint: str = "optional") -> None:
        self.checkpoint = checkpoint
        self.name = {"never": "STORE", "optional": "STORE[@ID]", "always": "STORE@ID"}[checkpoint]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Address:
        """The address of a command-line argument."""
        if isinstance(value, Address):
            return value
        from stateformat.storage import is_id, split_id, without_secrets

        text = str(value)
        url, digits = split_id(text)
        shown = without_secrets(url)
        whole = shown if digits is None else f"{shown}@{digits:.40}"
        if not url.strip():
            self.fail(
                f"{text!r} names no store; give a path or URL, as in /data/store or s3://bucket/store", param, ctx
            )
        if digits is None:
            if self.checkpoint == "always":
                self.fail(
                    f"{shown!r} names no checkpoint; add its id, as in {shown}@7 (`ckpt history {shown}`)", param, ctx
                )
            return Address(url)
        if self.checkpoint == "never":
            self.fail(
                f"this command is about the whole store; leave @{digits:.40} out of {whole!r} (a store whose name ends so "
                f"is written {whole}/)",
                param,
                ctx,
            )
        if not is_id(digits):
            self.fail(f"checkpoint ids go from 1 to 2^53 - 1; {digits:.40} in {whole!r} is none", param, ctx)
        return Address(url, int(digits))


class StorageOptionType(click.ParamType[tuple[str, Any]]):
    """Parses ``KEY=VALUE``; ``true`` and ``false`` are booleans, everything else is text."""

    name = "KEY=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        """One storage option."""
        if isinstance(value, tuple):
            return value
        key, separator, text = str(value).partition("=")
        if not key or not separator:
            self.fail(f"{value!r} is not of the form KEY=VALUE", param, ctx)
        return key, {"true": True, "false": False}.get(text.lower(), text)


def is_local(url: str) -> bool:
    """Whether a store is a directory: a plain path or a ``file://`` URL."""
    return not _SCHEME.match(url) or url.lower().startswith("file://")


def options_for(url: str, given: Mapping[str, Any], others: tuple[str, ...] = ()) -> Mapping[str, Any]:
    """The storage options that are meant for ``url``, of a command that works on it and on ``others``.

    Options are for remote stores; a local one gets them only where the command has no remote one (and then refuses what
    it does not know), so that ``copy /data/store s3://bucket/copy --endpoint-url ...`` does what it says.
    """
    if is_local(url) and not all(is_local(other) for other in others):
        return {}
    return given


__all__ = ["Address", "AddressType", "StorageOptionType", "is_local", "options_for"]

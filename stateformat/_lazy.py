"""Packages that import a name when it is first used, so a program pays only for what it uses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package that imports names lazily.

    ``homes`` maps a module, relative to the package, to its public names, separated by spaces.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home_of[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        # What a door needs itself, such as `lazy`, is nobody's.
        return sorted({*home_of, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return get, names, sorted(home_of)

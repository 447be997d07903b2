"""Packages that import a name when it is first used, so a program pays only for what it uses."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import resolve_name
from types import MappingProxyType
from typing import Any


def lazy(
    package: str,
    homes: Mapping[str, str],
    *,
    moved: Mapping[str, str] = MappingProxyType({}),
    leaves_in: str = "",
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package that imports names lazily.

    ``homes`` maps a module, relative to the package, to its public names, separated by spaces.
    ``moved`` does the same for names that users shall import from that module instead. They warn
    with ``DeprecationWarning`` until the release ``leaves_in``.
    """
    home_of, new_home_of = _by_name(homes), _by_name(moved)

    def get(name: str) -> Any:
        if home := new_home_of.get(name):
            new = resolve_name(home, package)
            warnings.warn(
                f"{package}.{name} moves to {new} and leaves here in {leaves_in}: import it from there",
                DeprecationWarning,
                stacklevel=2,
            )
            return getattr(import_module(home, package), name)
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home_of[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        # What a door needs itself, such as `lazy`, is nobody's.
        return sorted({*home_of, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return get, names, sorted(home_of)


def _by_name(homes: Mapping[str, str]) -> dict[str, str]:
    return {name: home for home, names in homes.items() for name in names.split()}

"""Packages that import a name when it is first used, so a program pays only for what it uses."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
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
    ``moved`` does the same for names that users shall import from that module instead, perhaps
    under another name (``old=new``). They warn with ``DeprecationWarning`` until the release
    ``leaves_in``.
    """
    home_of = _by_name(homes)
    new_home_of = {old: (home, new or old) for (old, _, new), home in _parted(moved)}

    def get(name: str) -> Any:
        if name in new_home_of:
            home, new = new_home_of[name]
            place = resolve_name(home, package).rstrip(".")
            said = f"moves to {place} and leaves here in {leaves_in}: import it from there"
            if new != name:
                said = f"leaves in {leaves_in}: it is {place}.{new} now"
            warnings.warn(f"{package}.{name} {said}", DeprecationWarning, stacklevel=2)
            return getattr(import_module(home, package), new)
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home_of[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        # What a door needs itself, such as `lazy`, is nobody's.
        return sorted({*home_of, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return get, names, sorted(home_of)


def former(module: str, names: Mapping[str, tuple[Any, str]], leaves_in: str) -> Callable[[str], Any]:
    """Return ``__getattr__`` of a module for names that it had: by name, what stands in its place,
    and what to write instead. Each use warns with ``DeprecationWarning``.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value, advice = names[name]
        warnings.warn(f"{module}.{name} leaves in {leaves_in}: {advice}", DeprecationWarning, stacklevel=2)
        return value

    return get


def _by_name(homes: Mapping[str, str]) -> dict[str, str]:
    return {name: home for home, names in homes.items() for name in names.split()}


def _parted(moved: Mapping[str, str]) -> Iterator[tuple[tuple[str, str, str], str]]:
    for name, home in _by_name(moved).items():
        yield name.partition("="), home

"""Functions that users name on a command line: ``fixes:correct``, ``fixes.py:correct``.

A module is looked for where Python looks (``PYTHONPATH``, what is installed), then in the current
directory; a file is imported under its own name.
"""

from __future__ import annotations

import contextlib
import filecmp
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from stateformat.errors import CheckpointError, InvalidInput

T = TypeVar("T")


class FunctionName(NamedTuple):
    """A function by the place where it is."""

    where: str
    """A file that ends with ``.py``, or a module."""
    function: str

    def __str__(self) -> str:
        return f"{self.where}:{self.function}"

    @property
    def shown(self) -> str:
        """Its name without the folder of the file."""
        return f"{Path(self.where).name}:{self.function}" if self.is_file else str(self)

    @property
    def is_file(self) -> bool:
        """Whether it names a file."""
        return self.where.endswith(".py")

    @classmethod
    def parse(cls, text: str, example: str) -> FunctionName:
        """Return what a user typed. Raises ``ValueError``, also for a file that is not there."""
        where, _, function = text.rpartition(":")
        if not where or not function.isidentifier():
            raise ValueError(f"{text!r} names no function; give a file or module and a function, as in {example}")
        if where.endswith(".py") and not Path(where).is_file():
            raise ValueError(f"there is no file {where!r}, seen from {Path.cwd()}")
        return cls(where, function)


def load_function(name: FunctionName) -> Callable[..., Any]:
    """Return the function; ``InvalidInput`` if there is none, and for what its module raises.

    The directory of its file, or the current one, is then the last of ``sys.path``, so that it
    finds other modules there.
    """

    def call(what: str, code: Callable[[], T]) -> T:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                return code()
        except CheckpointError:
            raise
        except (Exception, SystemExit) as error:
            raise InvalidInput(f"{what} cannot be imported: it raised {type(error).__name__}: {error}") from error

    add_to_path(name)
    return function_of(module_of(name, call), name)


def add_to_path(name: FunctionName) -> None:
    """Let the function's module find others beside its file, or in the current directory."""
    here = str(Path(name.where).resolve().parent if name.is_file else Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def module_of(name: FunctionName, call: Callable[[str, Callable[[], Any]], Any]) -> Any:
    """Return the module or the file's; ``InvalidInput`` if it is not there.

    ``call`` runs the user's code; its first argument is what raises, if that does.
    """
    return _file(name, call) if name.is_file else _module(name, call)


def function_of(module: Any, name: FunctionName) -> Callable[..., Any]:
    """Return the function of a module; ``InvalidInput`` with those that it has."""
    found: Callable[..., Any] | None = getattr(module, name.function, None)
    if not callable(found):
        functions = inspect.getmembers(module, inspect.isfunction)
        own = [other for other, one in functions if one.__module__ == module.__name__ and not other.startswith("_")]
        raise InvalidInput(
            f"{name.where} has no function {name.function!r}; its functions are: {', '.join(own) or 'none'}"
        )
    return found


def _file(job: FunctionName, call: Callable[[str, Callable[[], Any]], Any]) -> Any:
    path = Path(job.where).resolve()
    name = path.stem
    other = None if "." in name else _other_module(name, path)
    if "." in name or other is not None:
        why = "has a dot in its name" if other is None else f"would replace the module {name!r} ({other})"
        raise InvalidInput(f"{path} {why}; give the file another name")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader = spec.loader
    call(f"{path}", lambda: loader.exec_module(module))
    return module


def _other_module(name: str, path: Path) -> str | None:
    """Where another module of this name is; None if there is none, or a copy (``--py-files``)."""
    known = sys.modules.get(name)
    place = getattr(known, "__file__", None)
    if known is None:
        spec = importlib.util.find_spec(name)
        if spec is None:
            return None
        place = spec.origin
    if place is not None and Path(place).is_file() and filecmp.cmp(place, path, shallow=False):
        return None
    return place or "part of Python"


def _module(job: FunctionName, call: Callable[[str, Callable[[], Any]], Any]) -> Any:
    def load() -> Any:
        try:
            return importlib.import_module(job.where)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{job.where}.".startswith(f"{error.name}."):
                raise InvalidInput(f"{job.where} imports {error.name!r}, which is not installed here") from error
            raise InvalidInput(
                f"there is no module {error.name!r} in {sys.executable} or {Path.cwd()}; install it, or name a file: "
                f"{job.where}.py:{job.function}"
            ) from error

    return call(job.where, load)

"""Sends a user's functions to Spark's workers.

Plain pickle sends a function by the name of its module. A worker may not have that module, if it is
a file in the driver's directory. So functions of such modules are sent by value, with what they use
from other modules that are not installed. Installed modules are sent by name.
"""

from __future__ import annotations

import pickle
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from stateformat.errors import ErrorKind, InvalidInput

from ...rewrite import RewritePlan, Transformation

_INSTALLED: Final = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class Shipped:
    """A function that was pickled by value. A worker loads it once."""

    data: bytes

    def __call__(self, rows: Any) -> Any:
        """Call the function."""
        return _loaded(self.data)(rows)


@lru_cache(maxsize=16)
def _loaded(data: bytes) -> Any:
    # Our own driver pickled it for this job. Nothing from a store is ever unpickled.
    return pickle.loads(data)  # noqa: S301


def with_shipped_functions(plan: RewritePlan) -> RewritePlan:
    """Return the plan with functions that any worker can load.

    Raises ``InvalidInput`` for a function that uses something that cannot be sent.
    """
    known: dict[tuple[str, str], Transformation] = {}

    def shipped(shape: Any) -> Any:
        if not isinstance(shape, Transformation) or shape.transform.function is None:
            return shape
        place = shape.state.operator, shape.state.name
        if place not in known:
            transform = shape.transform
            function = Shipped(_by_value(transform.function, transform.label))
            known[place] = replace(shape, transform=replace(transform, function=function, name=transform.label))
        return known[place]

    return replace(
        plan,
        moves=tuple(replace(move, shape=shipped(move.shape)) for move in plan.moves),
        sources=tuple(replace(source, shape=shipped(source.shape)) for source in plan.sources),
    )


def _by_value(function: Any, label: str) -> bytes:
    from pyspark import cloudpickle

    own = set(_own_modules()) - set(cloudpickle.list_registry_pickle_by_value())
    for name in own:
        cloudpickle.register_pickle_by_value(sys.modules[name])
    try:
        data: bytes = cloudpickle.dumps(function)
    except Exception as error:
        raise InvalidInput(
            f"{label} cannot be sent to Spark's workers: {type(error).__name__}: {error}. Open files, connections and "
            "locks inside of the function, not beside it",
            kind=ErrorKind.TRANSFORM_FAILED,
        ) from error
    finally:
        for name in own:
            cloudpickle.unregister_pickle_by_value(sys.modules[name])
    return data


def _own_modules() -> Iterator[str]:
    """Names of the imported modules that are Python files, neither installed nor part of Python."""
    paths = sysconfig.get_paths()
    installed = tuple(f"{Path(paths[name]).resolve()}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "none").resolve()
        if file.suffix != ".py" or _INSTALLED & set(file.parts) or str(file).startswith(installed):
            continue
        if getattr(module, "__name__", None) == name and name.partition(".")[0] not in ("stateformat", "__main__"):
            yield name

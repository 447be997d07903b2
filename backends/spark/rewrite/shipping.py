"""A user's functions on their way to Spark's workers.

Plain pickle sends a function as the name of its module, which a worker may not have: a file in the
driver's directory. Functions and classes of such modules are sent by value instead, with those that
they use of other modules in the same directory. Installed modules go by name.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from stateformat.errors import ErrorKind, InvalidInput

_INSTALLED: Final = {"site-packages", "dist-packages"}


def functions_by_value(task: Any) -> bytes:
    """Pickle a task whose functions may be of modules that are not installed.

    Raises ``InvalidInput`` for a function that holds what cannot be sent.
    """
    from pyspark import cloudpickle

    ours = set(_own_modules()) - set(cloudpickle.list_registry_pickle_by_value())
    for name in ours:
        cloudpickle.register_pickle_by_value(sys.modules[name])
    try:
        data: bytes = cloudpickle.dumps(task)
    except Exception as error:
        raise InvalidInput(
            f"a function cannot be sent to Spark's workers: {type(error).__name__}: {error}. Open files, connections "
            "and locks inside of the function, not beside it",
            kind=ErrorKind.TRANSFORM_FAILED,
        ) from error
    finally:
        for name in ours:
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

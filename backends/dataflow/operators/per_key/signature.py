"""What a function of a key takes: how many arguments, and its rows in which form."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from stateformat.errors import InvalidInput

from .grouping import RowsAs

_FORMS: Final = (
    "Annotate it as pa.RecordBatch, pa.Table, np.ndarray, list[tuple] or a list of a NamedTuple, or not at all."
)
_LEAST, _MOST = 2, 4
# Texts that need no value: list, typing.Sequence[Any], "list[tuple[str, Hidden]]".
_TUPLES: Final = re.compile(r"[\w.]+\s*(\[\s*([\w.]+\.)?(tuple|Tuple|Any)\b.*\])?\s*", re.DOTALL)


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name of a function for errors."""
    fn = _bare(fn)
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


def _bare(fn: Any) -> Any:
    """Return what is called when a ``functools.partial`` is."""
    return _bare(fn.func) if isinstance(fn, partial) else fn


def count_arguments(fn: object, what: str, arguments: Sequence[str]) -> int:
    """With how many of ``arguments`` to call ``fn``. ``InvalidInput`` for another number."""
    if not callable(fn):
        raise InvalidInput(f"{what} of apply_per_key is {fn!r}. Give a function ({', '.join(arguments)}).")
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return _LEAST + 1
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(parameter.default is parameter.empty for parameter in by_place)
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    count = _MOST if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters) else needed
    # What has a default is the function's own, unless its name says otherwise: ``state=None``.
    while count < min(len(by_place), len(arguments)) and by_place[count].name == arguments[count]:
        count += 1
    if named or not _LEAST <= count <= _MOST:
        raise InvalidInput(
            f"{what} of apply_per_key, {name_of(fn)}, takes {inspect.signature(fn)}. It is called with "
            f"({', '.join(arguments)}), or the first {_LEAST} or {_LEAST + 1} of these."
        )
    return count


def rows_form(fn: Callable[..., Any]) -> tuple[RowsAs, type[Any] | None]:
    """How ``fn`` wants its rows, by the annotation of its second argument; and of what class tuples
    are, if they have names.

    ``InvalidInput`` for one that says nothing of Arrow, numpy or tuples.
    """
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return RowsAs.TUPLES, None
    if len(parameters) < _LEAST or parameters[1].annotation is inspect.Parameter.empty:
        return RowsAs.TUPLES, None
    asked = _evaluated(parameters[1].annotation, fn)
    form = _form_of_text(asked) if isinstance(asked, str) else _form(asked)
    if form is None:
        raise InvalidInput(
            f"the rows of {name_of(fn)} are annotated as {_shown(asked)}, which apply_per_key does not know. {_FORMS}"
        )
    if form is RowsAs.TUPLES and isinstance(asked, str) and not _TUPLES.fullmatch(asked):
        raise InvalidInput(
            f"the rows of {name_of(fn)} are annotated as {asked}, and not all of these names are known in its module. "
            "Define or import them there, not within a function and not for type checkers only."
        )
    named = [one for one in typing.get_args(asked) if form is RowsAs.TUPLES and hasattr(one, "_fields")]
    return form, named[0] if named else None


def _evaluated(asked: Any, fn: Callable[..., Any]) -> Any:
    """Return an annotation of ``fn``; one that names what has no value, as text."""
    fn = _bare(fn)
    plain: Any = inspect.unwrap(fn if inspect.isroutine(fn) else type(fn).__call__)
    plain = getattr(plain, "__func__", plain)
    # Of this argument only: the others may name what is imported for type checkers.
    alone = SimpleNamespace(__annotations__={"rows": asked})
    within = inspect.getclosurevars(plain).nonlocals if inspect.isfunction(plain) else {}
    with suppress(NameError, AttributeError, TypeError, SyntaxError):
        asked = typing.get_type_hints(alone, getattr(plain, "__globals__", {}), dict(within))["rows"]
    return asked


def _shown(asked: Any) -> str:
    return asked.__qualname__ if isinstance(asked, type) and not typing.get_args(asked) else str(asked)


def _form(asked: Any) -> RowsAs | None:
    origin = typing.get_origin(asked) or asked
    if asked is Any:
        return RowsAs.TUPLES
    if not isinstance(origin, type):
        return None
    if origin is pa.RecordBatch:
        return RowsAs.BATCH
    if origin is pa.Table:
        return RowsAs.TABLE
    if issubclass(origin, np.ndarray):
        return RowsAs.NUMPY
    arguments = typing.get_args(asked)
    of_tuples = not arguments or arguments[0] is Any or _is_tuple(arguments[0])
    sequences = issubclass(list, origin) or issubclass(origin, list | Iterable)
    unfit = issubclass(origin, dict | str | bytes) or not (origin is list or origin.__module__ == "collections.abc")
    return RowsAs.TUPLES if sequences and of_tuples and not unfit else None


def _is_tuple(asked: Any) -> bool:
    origin = typing.get_origin(asked) or asked
    return isinstance(origin, type) and issubclass(origin, tuple)


def _form_of_text(text: str) -> RowsAs | None:
    bare = text.partition("[")[0].rpartition(".")[2].strip()
    known = {
        "RecordBatch": RowsAs.BATCH,
        "Table": RowsAs.TABLE,
        "ndarray": RowsAs.NUMPY,
        "NDArray": RowsAs.NUMPY,
        "list": RowsAs.TUPLES,
        "Sequence": RowsAs.TUPLES,
        "Iterable": RowsAs.TUPLES,
        "Any": RowsAs.TUPLES,
    }
    return known.get(bare)

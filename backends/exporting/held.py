"""Which checkpoints are in a table, and the errors for a table that belongs to something else."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version

from stateformat.errors import ErrorKind, InvalidInput, StorageError

from .place import Place
from .source import Source


def require(library: str, module: str, least: tuple[int, int], extra: str) -> None:
    """Raise ``InvalidInput`` if a library is missing, or too old to work as promised.

    ``least`` is the first suitable release, as (major, minor).
    """
    try:
        import_module(module)
    except ImportError as error:
        raise InvalidInput(
            f"tables of this format need {library}, and {error.name or module} is not installed: pip install "
            f"'stateformat[{extra}]'",
            kind=ErrorKind.MISSING_DEPENDENCY,
        ) from error
    installed = version(library)
    if tuple(int(part) for part in installed.split(".")[:2]) < least:
        raise InvalidInput(
            f"{library} {installed} is installed, and tables of this format need {'.'.join(map(str, least))} "
            f"or newer: pip install --upgrade 'stateformat[{extra}]'",
            kind=ErrorKind.MISSING_DEPENDENCY,
        )


def attempt_of(source: Source, attempt_id: str) -> str:
    """Return what identifies an export among those of checkpoints with the same id."""
    return attempt_id if source.several else f"{attempt_id}/{source.selection_digest}"


def missing_of(source: Source, place: Place, has: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ids of the checkpoints that a table does not have.

    Raises ``InvalidInput`` for a table with the rows of another checkpoint of the same id.
    """
    missing = []
    for number, attempt in source.checkpoints:
        known = has.get(int(number))
        if known == attempt_of(source, attempt):
            continue
        if known is not None and source.several:
            raise InvalidInput(
                f"the table in {place} has checkpoint {number} of attempt {known}, and the store's is of attempt "
                f"{attempt}: another history; export to another folder",
                kind=ErrorKind.OTHER_JOB,
            )
        missing.append(int(number))
    return tuple(missing)


def other_table(place: Place, what: str, found: str | None, wanted: str) -> InvalidInput:
    """Return the error for a table that holds something else."""
    if found is None:
        message = f"{place} has a table that no export of a state has written"
    elif what == "rows":
        message = f"the table in {place} holds the rows {found}, and this export has those {wanted}"
    elif what == "selection":
        message = f"the table in {place} holds other rows of this state: not those of the choice {wanted}"
    else:
        message = f"the table in {place} is of {f'{what} {found!r}' if what else found}, and this export is of "
        message += repr(wanted) if what else wanted
    return InvalidInput(f"{message}; export to another folder", kind=ErrorKind.STORE_NOT_EMPTY)


def lost_race(place: Place) -> StorageError:
    """Return the error for a commit that another commit preceded."""
    return StorageError(
        f"another export or program changed the table in {place} meanwhile; nothing was added: export again"
    )

"""The objects under ``requests/``: listed by their names, read strictly, created once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from .. import paths as layout
from ..errors import CheckpointError, OutcomeUnknown, StorageError
from ..record import RecordFault
from ..storage import REFUSALS, CreateOutcome, ObjectInfo, Storage
from .encoding import BYTES_MAX

logger = logging.getLogger(__name__)

READ_AT_ONCE_MAX: Final = 100
"""How many requests of one listing are read, the first by name."""
TRIES: Final = 5
"""How often a create is tried if the storage does not answer, or gc deletes the object."""
PAUSE_S: Final = 0.05

T = TypeVar("T")
Sleep = Callable[[float], None]


class Named(NamedTuple):
    """An object whose name is that of a request, or of an answer (then ``kind`` is ``answer``)."""

    item: ObjectInfo
    newest: int
    kind: str
    request_id: str


class Listed(NamedTuple):
    """The objects under ``requests/``, by what their names say."""

    requests: list[Named]
    answers: list[Named]
    others: list[ObjectInfo]


def list_objects(storage: Storage) -> Listed:
    """Return the objects under ``requests/``, by one listing."""
    listed = Listed([], [], [])
    for item in storage.list(layout.REQUESTS):
        if (named := layout.request_of(item.path)) is not None:
            listed.requests.append(Named(item, *named))
        elif (answered := layout.answer_of(item.path)) is not None:
            newest, request_id = answered
            listed.answers.append(Named(item, newest, "answer", request_id))
        else:
            listed.others.append(item)
    return listed


def read_object(storage: Storage, item: ObjectInfo, decode: Callable[[bytes], T], warned: set[str]) -> T | None:
    """Return what a listed object holds; None if it is gone, or not what its name says."""
    if item.size_bytes > BYTES_MAX:
        what = f"has {item.size_bytes:,} bytes, more than {BYTES_MAX:,}; it is ignored"
        warn_once(storage, item.path, what, warned)
        return None
    try:
        return decode(storage.read_range(item.path, 0, BYTES_MAX + 1).to_pybytes())
    except FileNotFoundError:
        return None
    except (RecordFault, CheckpointError) as error:
        if isinstance(error, StorageError) and error.kind not in REFUSALS:
            raise
        warn_once(storage, item.path, f"{error}; it is ignored", warned)
        return None


def warn_once(storage: Storage, path: str, what: str, warned: set[str]) -> None:
    """Warn once per object: a run lists all of them again after each checkpoint."""
    if path not in warned and len(warned) < 10 * READ_AT_ONCE_MAX:
        warned.add(path)
        logger.warning("%s of %s %s", json.dumps(path), storage.url, what)


def create_object(storage: Storage, path: str, data: bytes, sleep: Sleep) -> bool:
    """Create an object. Return False if one with other bytes has the name."""
    last: StorageError | None = None
    for attempt in range(TRIES):
        if attempt:
            sleep(PAUSE_S * 2 ** (attempt - 1))
        try:
            outcome = storage.create(path, data)
            if outcome is CreateOutcome.CREATED:
                return True
            existing = storage.read_range(path, 0, BYTES_MAX + 1).to_pybytes()
        except FileNotFoundError:
            continue
        except StorageError as error:
            if error.kind in REFUSALS or error.details.get("visible"):
                raise
            last = error
            continue
        return bool(existing == data)
    raise OutcomeUnknown(
        f"{storage.url} does not say whether {path} was created{f': {last}' if last else ''}. Ask again when the "
        "storage answers",
        path=path,
    ) from last

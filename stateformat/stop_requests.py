"""What users ask of a running job, as objects in its store (SPEC.md section 2.4): a request to stop, and its answer.

Theory of operation. A program that asks and the run that is asked share nothing but the store. So the one creates an
object under ``requests/``, the other lists that folder between two checkpoints, does what it is asked and creates an answer,
and the one who asked reads it and removes both. Every object is created once and never changed; whether a request is
still to be looked at follows from which objects are there:

=======================  ===================================================================
request alone            it waits; a run for which it counts does it
request and answer       it is done, one way or another; no run looks at it any more
neither                  never made, or taken back by who made it
answer alone             what a crash left of a removal; nothing rests on it
=======================  ===================================================================

A request says which checkpoint was the newest when it was made. It counts for runs that restored from that one or an
older one: a job that was stopped by it, and is started again, restores from a newer one and is not stopped a second time
by what nobody had time to remove (:func:`counts_for`).

Nothing here is part of a checkpoint, and no clock is asked. What stands in ``requests/`` was written by somebody else: it
is bounded before it is read, read strictly, and what cannot be read is told once and left alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeVar

from . import paths as layout
from .errors import (
    CheckpointError,
    ErrorKind,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
    StorageError,
)
from .history import record_ids
from .model import MAX_CHECKPOINT_ID, Record, StopMode
from .record import Members, RecordFault, refuse_null, sealed, unsealed
from .storage import REFUSALS, CreateOutcome, ObjectInfo, Storage, check_no_secrets, check_outside

logger = logging.getLogger(__name__)

REQUEST_FORMAT: Final = "stateformat-request"
ANSWER_FORMAT: Final = "stateformat-answer"
VERSIONS: Final = (1,)
BYTES_MAX: Final = (64 << 10) - 1
"""A request, or an answer."""
SAVEPOINT_CHARACTERS_MAX: Final = 4096
SAVEPOINT_PROPERTY: Final = "savepoint"
"""The property of the record of a stop that says where its copy is wanted; absent: the default place."""
MESSAGE_CHARACTERS_MAX: Final = 2000
READ_AT_ONCE_MAX: Final = 100
"""Requests that are read of one listing, the first by name. There is rarely more than one."""
TRIES: Final = 5
"""How often an object is tried to be created where the storage gives no answer, or gc took what was being written."""
PAUSE_S: Final = 0.05

T = TypeVar("T")
Sleep = Callable[[float], None]


class StopOutcome(StrEnum):
    """What became of a request to stop. The list is closed; whoever meets another word refuses the answer."""

    STOPPED = "stopped"
    """The job has stopped at a checkpoint, everything prepared for it is committed, and all tasks have ended. Without a
    savepoint the copy has failed; the stop stands."""
    FAILED = "failed"
    """The stop did not come about. The job goes on as if nothing had been asked, or has restarted; the message says why."""
    REFUSED = "refused"
    """The run would not begin it."""
    FINISHED = "finished"
    """The job came to its own end meanwhile."""
    MISSED = "missed"
    """The run that it was made for ended before it looked; the one that goes on has restored from a newer checkpoint."""


@dataclass(frozen=True)
class StopRequest:
    """Somebody wants the job to stop with a savepoint.

    ``id``: 32 hexadecimal digits, which the record of the checkpoint repeats as ``stop.request``. ``newest``: the id of the
    newest checkpoint when it was made, 0 if there was none. ``savepoint``: the URL of the store to make, None for the
    default place. ``created_at_us``: µs since 1970 UTC, informational.
    """

    id: str
    mode: StopMode
    newest: int
    savepoint: str | None = None
    created_at_us: int = 0

    def savepoint_at(self, store_url: str, checkpoint_id: int) -> str:
        """The URL of the savepoint that this request makes of a checkpoint of the store."""
        return self.savepoint or default_savepoint(store_url, checkpoint_id, self.id)


@dataclass(frozen=True)
class StopAnswer:
    """What became of a request, in a word, a sentence, and for a stop the checkpoint and the savepoint's URL.

    ``savepoint`` is None where none was made, for whatever reason; the message says which.
    """

    request: str
    outcome: StopOutcome
    message: str = ""
    checkpoint_id: int | None = None
    savepoint: str | None = None


def counts_for(request: StopRequest, restored_from: int) -> bool:
    """Whether a run that restored from this checkpoint (0: from none) is one that the request was made for."""
    return restored_from <= request.newest


def asking_order(request: StopRequest) -> tuple[bool, int, str]:
    """The order in which a run obeys requests that it sees at once: no drain first, since a drain cannot be undone; then
    the earlier one; then by name.
    """
    return request.mode is StopMode.DRAIN, request.created_at_us, layout.request_path(request.newest, request.id)


def default_savepoint(store_url: str, checkpoint_id: int, request_id: str) -> str:
    """Where a savepoint goes if nobody says where: ``savepoints/<checkpoint id>-<first 8 digits of the request id>``."""
    return layout.savepoint_url(store_url, f"{checkpoint_id}-{request_id[:8]}" if request_id else str(checkpoint_id))


def savepoint_of_stop(store_url: str, record: Record) -> str:
    """Where the savepoint of the stop in a record is to lie: where its request said, or at the default place."""
    request = record.stop.request if record.stop else ""
    return record.properties.get(SAVEPOINT_PROPERTY) or default_savepoint(store_url, record.checkpoint_id, request)


# ---- who asks --------------------------------------------------------------------------------------------------------


def request_stop(
    storage: Storage, mode: StopMode, savepoint: str | None = None, *, sleep: Sleep = time.sleep
) -> StopRequest:
    """Make a request, durably. Raises ``NotFound`` where there is no store, ``InvalidInput``, ``StorageError``."""
    if savepoint is not None and not 0 < len(savepoint) <= SAVEPOINT_CHARACTERS_MAX:
        raise InvalidInput(
            f"the savepoint's URL has {len(savepoint):,} characters; from 1 to {SAVEPOINT_CHARACTERS_MAX:,} are allowed",
            kind=ErrorKind.INVALID_URL,
        )
    if savepoint is not None:
        check_no_secrets(savepoint, "the savepoint's URL")
        check_outside(savepoint, storage.url)
    if not storage.exists():
        raise NotFound(
            f"there is no store at {storage.url}, so no job is asked; check the address, or wait for the job's first "
            "checkpoint",
            kind=ErrorKind.STORE_NOT_FOUND,
            url=storage.url,
        )
    newest = max(record_ids(storage), default=0)
    request = StopRequest(os.urandom(16).hex(), mode, newest, savepoint, time.time_ns() // 1000)
    path, data = layout.request_path(newest, request.id), encode_request(request)
    try:
        _create(storage, path, data, sleep)
    except BaseException:
        # It may stand all the same, and then a job would stop for somebody who has been told that it was not asked.
        with contextlib.suppress(StorageError):
            storage.delete([path])
        raise
    logger.info("asked the job of %s to stop (%s), request %s, newest %d", storage.url, mode, request.id, newest)
    return request


def stop_answer(storage: Storage, request_id: str, *, told: set[str]) -> StopAnswer | None:
    """The answer to a request, if there is one that can be read."""
    for item in storage.list(layout.REQUESTS):
        named = layout.answer_of(item.path)
        if named is not None and named[1] == request_id:
            return _look(storage, item, lambda data: decode_answer(data, request_id), told)
    return None


def withdraw_stop(storage: Storage, request_id: str) -> None:
    """Remove a request and its answer; fine if they are gone. A run that has begun to stop may still do so.

    Called by who made the request, when it has the answer or gives up.
    """
    listed = [item.path for item in storage.list(layout.REQUESTS)]
    # The request first: the answer alone means nothing, the request alone would be looked at again.
    for name_of in (layout.request_of, layout.answer_of):
        paths = [path for path in listed if (name_of(path) or (0, ""))[1] == request_id]
        if paths:
            storage.delete(paths)


# ---- who is asked ----------------------------------------------------------------------------------------------------


def stop_requests(storage: Storage, *, told: set[str]) -> list[StopRequest]:
    """The requests that wait for an answer, in the order of their names: the least ``newest`` first.

    One listing, and one read for each. What is damaged, of a newer version, too large or no request at all is passed
    over, with a warning the first time (``told`` remembers). Raises ``StorageError``. Called by a run between two checkpoints.
    """
    listed = storage.list(layout.REQUESTS)
    answered = {named[1] for named in (layout.answer_of(item.path) for item in listed) if named is not None}
    waiting: list[tuple[ObjectInfo, tuple[int, str]]] = []
    for item in listed:
        named = layout.request_of(item.path)
        if named is not None and named[1] not in answered:
            waiting.append((item, named))
        elif named is None and layout.answer_of(item.path) is None:
            _tell(storage, item.path, "is no request that this program knows; it is left alone", told)
    if len(waiting) > READ_AT_ONCE_MAX:
        _tell(storage, layout.REQUESTS, f"holds {len(waiting)} requests; the first {READ_AT_ONCE_MAX} are read", told)
    found = (
        _look(storage, item, lambda data, named=named: decode_request(data, *named), told)  # type: ignore[misc]
        for item, named in waiting[:READ_AT_ONCE_MAX]
    )
    return [request for request in found if request is not None]


def answer_stop(storage: Storage, answer: StopAnswer, *, sleep: Sleep = time.sleep) -> bool:
    """Answer a request, durably. False where nobody waits for it: it was taken back, or has an answer, which stays.

    May be repeated, also by a restart. Raises ``StorageError`` and ``OutcomeUnknown``; the answer is then owed still.
    """
    listed = [item.path for item in storage.list(layout.REQUESTS)]
    names = [named for named in map(layout.request_of, listed) if named is not None and named[1] == answer.request]
    if not names or any((layout.answer_of(path) or (0, ""))[1] == answer.request for path in listed):
        logger.info("nobody waits for an answer to request %s of %s", answer.request, storage.url)
        return False
    return _create(storage, layout.answer_path(*names[0]), encode_answer(answer), sleep)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def encode_request(request: StopRequest) -> bytes:
    """The bytes of a request. Raises ``InvalidInput`` for one that could not be read back."""
    members: dict[str, Any] = {
        "format": REQUEST_FORMAT,
        "version": 1,
        "request": request.id,
        "kind": "stop",
        "mode": request.mode,
        "newest": request.newest,
    }
    if request.savepoint is not None:
        members["savepoint"] = request.savepoint
    members["created_at_us"] = request.created_at_us
    return _encoded(members, lambda data: decode_request(data, request.newest, request.id), request.id)


def decode_request(data: bytes, newest: int, request_id: str) -> StopRequest:
    """The request of these bytes, which lies under the name of ``newest`` and ``request_id``.

    Raises ``RecordFault`` and ``UnsupportedFormat`` with the rest of a sentence. Members that are not known are ignored.
    """
    members, tokens = _members(data, REQUEST_FORMAT, "request to a job", request_id)
    _word(members, "kind", "stop")
    if members.integer("newest", 0, MAX_CHECKPOINT_ID) != newest:
        raise members.fault("newest", f"is {members.values['newest']}, but the object's name says {newest}")
    request = StopRequest(
        id=request_id,
        mode=members.one_of("mode", StopMode),
        newest=newest,
        savepoint=members.optional("savepoint", lambda name: _bounded(members, name, SAVEPOINT_CHARACTERS_MAX)),
        created_at_us=members.integer("created_at_us"),
    )
    refuse_null(tokens)
    return request


def encode_answer(answer: StopAnswer) -> bytes:
    """The bytes of an answer; a message that is too long is cut. Raises ``InvalidInput`` for what could not be read back."""
    # What an exception says may hold half characters, which UTF-8 has no bytes for.
    message = answer.message.encode("utf-8", "backslashreplace").decode()
    if len(message) > MESSAGE_CHARACTERS_MAX:
        message = message[: MESSAGE_CHARACTERS_MAX - 1] + "…"
    members: dict[str, Any] = {
        "format": ANSWER_FORMAT,
        "version": 1,
        "request": answer.request,
        "outcome": answer.outcome,
        "message": message,
    }
    if answer.checkpoint_id is not None:
        members["checkpoint_id"] = answer.checkpoint_id
    if answer.savepoint is not None:
        members["savepoint"] = answer.savepoint
    return _encoded(members, lambda data: decode_answer(data, answer.request), answer.request)


def decode_answer(data: bytes, request_id: str) -> StopAnswer:
    """The answer of these bytes, to this request. Raises as :func:`decode_request` does."""
    members, tokens = _members(data, ANSWER_FORMAT, "answer to a request", request_id)
    answer = StopAnswer(
        request=request_id,
        outcome=members.one_of("outcome", StopOutcome),
        message=_bounded(members, "message", MESSAGE_CHARACTERS_MAX, least=0),
        checkpoint_id=members.optional("checkpoint_id", lambda name: members.integer(name, 1, MAX_CHECKPOINT_ID)),
        savepoint=members.optional("savepoint", lambda name: _bounded(members, name, SAVEPOINT_CHARACTERS_MAX)),
    )
    refuse_null(tokens)
    return answer


def _encoded(members: Mapping[str, Any], read_back: Callable[[bytes], object], request_id: str) -> bytes:
    try:
        data = sealed(members)
        read_back(data)
    except (RecordFault, TypeError, ValueError) as error:
        raise InvalidInput(f"request {request_id} or its answer cannot be written: {error}") from error
    return data


def _members(data: bytes, format_name: str, noun: str, request_id: str) -> tuple[Members, bytes]:
    found, tokens = unsealed(data, format_name=format_name, versions=VERSIONS, bytes_max=BYTES_MAX, noun=noun)
    members = Members(found, "")
    if members.hexadecimal("request") != request_id:
        raise members.fault("request", f"is {found['request']}, but the object's name says {request_id}")
    return members, tokens


def _word(members: Members, name: str, expected: str) -> None:
    if members.text(name) != expected:
        raise members.fault(name, f"is {members.values[name]!r:.80}, not {expected!r}")


def _bounded(members: Members, name: str, most: int, *, least: int = 1) -> str:
    text = members.text(name, least=least)
    if len(text) > most:
        raise members.fault(name, f"has {len(text):,} characters; at most {most:,} are allowed")
    return text


# ---- objects ---------------------------------------------------------------------------------------------------------


def _look(storage: Storage, item: ObjectInfo, read: Callable[[bytes], T], told: set[str]) -> T | None:
    """What an object that was listed holds; None where it is gone, or is not what its name says."""
    if item.size_bytes > BYTES_MAX:
        _tell(storage, item.path, f"has {item.size_bytes:,} bytes, more than {BYTES_MAX:,}; it is left alone", told)
        return None
    try:
        return read(storage.read_range(item.path, 0, BYTES_MAX + 1).to_pybytes())
    except FileNotFoundError:
        return None
    except (RecordFault, CheckpointError) as error:
        if isinstance(error, StorageError) and error.kind not in REFUSALS:
            raise
        _tell(storage, item.path, f"{error}; it is left alone", told)
        return None


def _tell(storage: Storage, path: str, what: str, told: set[str]) -> None:
    """A warning, once for each object: a run looks at all of them again after each checkpoint."""
    if path not in told and len(told) < 10 * READ_AT_ONCE_MAX:
        told.add(path)
        logger.warning("%s of %s %s", json.dumps(path), storage.url, what)


def _create(storage: Storage, path: str, data: bytes, sleep: Sleep) -> bool:
    """Create an object that nobody else creates with these bytes. False where another's stands under the name."""
    last: StorageError | None = None
    for attempt in range(TRIES):
        if attempt:
            sleep(PAUSE_S * 2 ** (attempt - 1))
        try:
            outcome = storage.create(path, data)
            if outcome is CreateOutcome.CREATED:
                return True
            stands = storage.read_range(path, 0, BYTES_MAX + 1).to_pybytes()
        except FileNotFoundError:
            continue
        except StorageError as error:
            if error.kind in REFUSALS or error.details.get("visible"):
                raise
            last = error
            continue
        return bool(stands == data)
    raise OutcomeUnknown(
        f"{storage.url} does not say whether {path} was created{f': {last}' if last else ''}. Ask again when the storage "
        "answers",
        path=path,
    ) from last


__all__ = [
    "SAVEPOINT_PROPERTY",
    "StopAnswer",
    "StopOutcome",
    "StopRequest",
    "answer_stop",
    "asking_order",
    "counts_for",
    "decode_answer",
    "decode_request",
    "default_savepoint",
    "encode_answer",
    "encode_request",
    "request_stop",
    "savepoint_of_stop",
    "stop_answer",
    "stop_requests",
    "withdraw_stop",
]

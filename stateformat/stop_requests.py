"""What users ask of a running job, as objects in its store (SPEC.md section 2.4).

A program creates a request under ``requests/``. The run lists that folder between two checkpoints,
stops, and creates an answer. The program reads it and removes both. Which objects exist tells what
to do:

=======================  ============================================================
request alone            it waits; a run for which it counts obeys it
request and answer       it is done; no run reads it any more
neither                  never made, or withdrawn
answer alone             a crash interrupted the removal; it means nothing
=======================  ============================================================

Objects are not trusted: their size is checked first, they are read strictly, and a warning is
logged once for each that cannot be read.
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
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from . import paths as layout
from .errors import CheckpointError, ErrorKind, InvalidInput, NotFound, OutcomeUnknown, StorageError
from .formats import refuse_foreign
from .history import record_ids
from .model import MAX_CHECKPOINT_ID, Record, StopMode
from .record import Members, RecordFault, refuse_null, sealed, unsealed
from .storage import REFUSALS, CreateOutcome, ObjectInfo, Storage, check_no_secrets, check_outside

logger = logging.getLogger(__name__)

REQUEST_FORMAT: Final = "stateformat-request"
ANSWER_FORMAT: Final = "stateformat-answer"
VERSIONS: Final = (1,)
BYTES_MAX: Final = (64 << 10) - 1
"""Of a request or an answer."""
SAVEPOINT_CHARACTERS_MAX: Final = 4096
SAVEPOINT_PROPERTY: Final = "savepoint"
"""The property of a stop's record with the savepoint's URL; absent: the default place."""
MESSAGE_CHARACTERS_MAX: Final = 2000
READ_AT_ONCE_MAX: Final = 100
"""How many requests of one listing are read, the first by name."""
TRIES: Final = 5
"""How often a create is tried where the storage does not answer, or gc deletes the object."""
PAUSE_S: Final = 0.05

T = TypeVar("T")
Sleep = Callable[[float], None]


class StopOutcome(StrEnum):
    """What became of a request to stop. Readers refuse an answer with any other word."""

    STOPPED = "stopped"
    """The job has stopped at a checkpoint and committed it. No savepoint: the copy has failed."""
    FAILED = "failed"
    """The job did not stop: it goes on, or has restarted; the message says why."""
    REFUSED = "refused"
    """The run did not begin to stop."""
    FINISHED = "finished"
    """The job has finished by itself meanwhile."""
    MISSED = "missed"
    """Its run ended before it read the request; the next one restored from a newer checkpoint."""


@dataclass(frozen=True)
class StopRequest:
    """A request to stop the job with a savepoint."""

    id: str
    """32 hexadecimal digits; the checkpoint's record repeats them as ``stop.request``."""
    mode: StopMode
    newest: int
    """The id of the newest checkpoint when the request was made; 0 if there was none."""
    savepoint: str | None = None
    """The URL of the store to make; None for the default place."""
    created_at_us: int = 0
    """µs since 1970 UTC, for people."""

    def savepoint_at(self, store_url: str, checkpoint_id: int) -> str:
        """Return the URL of the savepoint that this request makes of a checkpoint of the store."""
        return self.savepoint or default_savepoint(store_url, checkpoint_id, self.id)


@dataclass(frozen=True)
class StopAnswer:
    """What became of a request."""

    request: str
    outcome: StopOutcome
    message: str = ""
    checkpoint_id: int | None = None
    """Of a stop."""
    savepoint: str | None = None
    """The savepoint's URL; None where there is none, and the message says why."""


def counts_for(request: StopRequest, restored_from: int) -> bool:
    """Return whether a request counts for a run restored from this checkpoint (0: from none)."""
    return restored_from <= request.newest


def asking_order(request: StopRequest) -> tuple[bool, int, str]:
    """Sort key of requests: no drain first, since a drain cannot be undone; then the earlier."""
    return request.mode is StopMode.DRAIN, request.created_at_us, layout.request_path(request.newest, request.id)


def default_savepoint(store_url: str, checkpoint_id: int, request_id: str) -> str:
    """Return the default URL: ``savepoints/<checkpoint id>-<first 8 digits of the request>``."""
    return layout.savepoint_url(store_url, f"{checkpoint_id}-{request_id[:8]}" if request_id else str(checkpoint_id))


def savepoint_of_stop(store_url: str, record: Record) -> str:
    """Return the URL of the savepoint of a stop: as requested, or the default."""
    request = record.stop.request if record.stop else ""
    return record.properties.get(SAVEPOINT_PROPERTY) or default_savepoint(store_url, record.checkpoint_id, request)


# ---- the program that asks ----------------------------------------------------------------------


def request_stop(
    storage: Storage, mode: StopMode, savepoint: str | None = None, *, sleep: Sleep = time.sleep
) -> StopRequest:
    """Create a durable request. Raises ``NotFound``, ``InvalidInput``, ``StorageError``."""
    if savepoint is not None and not 0 < len(savepoint) <= SAVEPOINT_CHARACTERS_MAX:
        raise InvalidInput(
            f"the savepoint's URL has {len(savepoint):,} characters; from 1 to {SAVEPOINT_CHARACTERS_MAX:,} are "
            "allowed",
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
    if not newest:
        refuse_foreign(storage)
    request = StopRequest(os.urandom(16).hex(), mode, newest, savepoint, time.time_ns() // 1000)
    path, data = layout.request_path(newest, request.id), encode_request(request)
    try:
        _create(storage, path, data, sleep)
    except BaseException:
        # It may exist all the same, and the caller is about to learn that nothing was asked.
        with contextlib.suppress(StorageError):
            storage.delete([path])
        raise
    logger.info("asked the job of %s to stop (%s), request %s, newest %d", storage.url, mode, request.id, newest)
    return request


def stop_answer(storage: Storage, request_id: str, *, warned: set[str]) -> StopAnswer | None:
    """Return the answer to a request, if there is one that can be read."""
    for found in _list(storage).answers:
        if found.request_id == request_id:
            return _read(storage, found.item, lambda data: decode_answer(data, request_id), warned)
    return None


def withdraw_stop(storage: Storage, request_id: str) -> None:
    """Remove a request and its answer. A run that has begun to stop may still do so."""
    listed = _list(storage)
    # The request first: an answer alone means nothing, but a run would read a request alone.
    for objects in (listed.requests, listed.answers):
        paths = [found.item.path for found in objects if found.request_id == request_id]
        if paths:
            storage.delete(paths)


# ---- the run that is asked ----------------------------------------------------------------------


def stop_requests(storage: Storage, *, warned: set[str]) -> list[StopRequest]:
    """Return unanswered requests, the least ``newest`` first; warn once of unreadable ones."""
    listed = _list(storage)
    for item in listed.others:
        _warn_once(storage, item.path, "is no request that this program knows; it is left alone", warned)
    answered = {found.request_id for found in listed.answers}
    waiting = [found for found in listed.requests if found.request_id not in answered]
    if len(waiting) > READ_AT_ONCE_MAX:
        what = f"holds {len(waiting)} requests; the first {READ_AT_ONCE_MAX} are read"
        _warn_once(storage, layout.REQUESTS, what, warned)
    requests = []
    for item, newest, request_id in waiting[:READ_AT_ONCE_MAX]:
        request = _read(storage, item, partial(decode_request, newest=newest, request_id=request_id), warned)
        if request is not None:
            requests.append(request)
    return requests


def answer_stop(storage: Storage, answer: StopAnswer, *, sleep: Sleep = time.sleep) -> bool:
    """Create a durable answer; return False where the request was withdrawn or answered."""
    listed = _list(storage)
    requests = [found for found in listed.requests if found.request_id == answer.request]
    if not requests or any(found.request_id == answer.request for found in listed.answers):
        logger.info("nobody waits for an answer to request %s of %s", answer.request, storage.url)
        return False
    return _create(storage, layout.answer_path(requests[0].newest, answer.request), encode_answer(answer), sleep)


# ---- bytes --------------------------------------------------------------------------------------


def encode_request(request: StopRequest) -> bytes:
    """Return the bytes of a request. Raises ``InvalidInput`` if it could not be read back."""
    members = {
        "format": REQUEST_FORMAT,
        "version": 1,
        "request": request.id,
        "kind": "stop",
        "mode": request.mode,
        "newest": request.newest,
        "savepoint": request.savepoint,
        "created_at_us": request.created_at_us,
    }
    return _encoded(members, lambda data: decode_request(data, request.newest, request.id), request.id)


def decode_request(data: bytes, newest: int, request_id: str) -> StopRequest:
    """Return the request of these bytes. Raises ``RecordFault`` and ``UnsupportedFormat``."""
    members, tokens = _members(data, REQUEST_FORMAT, "request to a job", request_id)
    if members.text("kind") != "stop":
        raise members.fault("kind", f"is {members.values['kind']!r:.80}, not 'stop'")
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
    """Return the bytes of an answer, its message cut. Raises ``InvalidInput`` as for a request."""
    # The message of an exception may hold surrogates, which UTF-8 cannot encode.
    message = answer.message.encode("utf-8", "backslashreplace").decode()
    if len(message) > MESSAGE_CHARACTERS_MAX:
        message = message[: MESSAGE_CHARACTERS_MAX - 1] + "…"
    members = {
        "format": ANSWER_FORMAT,
        "version": 1,
        "request": answer.request,
        "outcome": answer.outcome,
        "message": message,
        "checkpoint_id": answer.checkpoint_id,
        "savepoint": answer.savepoint,
    }
    return _encoded(members, lambda data: decode_answer(data, answer.request), answer.request)


def decode_answer(data: bytes, request_id: str) -> StopAnswer:
    """Return the answer of these bytes to this request. Raises as :func:`decode_request` does."""
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
        data = sealed({name: value for name, value in members.items() if value is not None})
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


def _bounded(members: Members, name: str, most: int, *, least: int = 1) -> str:
    text = members.text(name, least=least)
    if len(text) > most:
        raise members.fault(name, f"has {len(text):,} characters; at most {most:,} are allowed")
    return text


# ---- objects ------------------------------------------------------------------------------------


class _Named(NamedTuple):
    item: ObjectInfo
    newest: int
    request_id: str


class _Listed(NamedTuple):
    """The objects under ``requests/``, by what their names say."""

    requests: list[_Named]
    answers: list[_Named]
    others: list[ObjectInfo]


def _list(storage: Storage) -> _Listed:
    listed = _Listed([], [], [])
    for item in storage.list(layout.REQUESTS):
        if (named := layout.request_of(item.path)) is not None:
            listed.requests.append(_Named(item, *named))
        elif (named := layout.answer_of(item.path)) is not None:
            listed.answers.append(_Named(item, *named))
        else:
            listed.others.append(item)
    return listed


def _read(storage: Storage, item: ObjectInfo, decode: Callable[[bytes], T], warned: set[str]) -> T | None:
    """Return what a listed object holds; None where it is gone, or not what its name says."""
    if item.size_bytes > BYTES_MAX:
        what = f"has {item.size_bytes:,} bytes, more than {BYTES_MAX:,}; it is left alone"
        _warn_once(storage, item.path, what, warned)
        return None
    try:
        return decode(storage.read_range(item.path, 0, BYTES_MAX + 1).to_pybytes())
    except FileNotFoundError:
        return None
    except (RecordFault, CheckpointError) as error:
        if isinstance(error, StorageError) and error.kind not in REFUSALS:
            raise
        _warn_once(storage, item.path, f"{error}; it is left alone", warned)
        return None


def _warn_once(storage: Storage, path: str, what: str, warned: set[str]) -> None:
    """Warn once for each object: a run lists all of them again after each checkpoint."""
    if path not in warned and len(warned) < 10 * READ_AT_ONCE_MAX:
        warned.add(path)
        logger.warning("%s of %s %s", json.dumps(path), storage.url, what)


def _create(storage: Storage, path: str, data: bytes, sleep: Sleep) -> bool:
    """Create an object. Returns False where one with other bytes has the name."""
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

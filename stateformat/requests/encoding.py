"""Requests and answers as bytes: one JSON object each, as in SPEC.md section 3.1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from ..errors import InvalidInput
from ..keys import MAX_PARALLELISM_LIMIT
from ..model import MAX_CHECKPOINT_ID, StopMode
from ..record import Members, RecordFault, refuse_null, sealed, unsealed
from .values import JobRequest, RequestAnswer, RequestKind, RequestOutcome

REQUEST_FORMAT: Final = "stateformat-request"
ANSWER_FORMAT: Final = "stateformat-answer"
VERSIONS: Final = (1,)
BYTES_MAX: Final = (64 << 10) - 1
"""The most bytes of a request or an answer."""
PARALLELISM_MAX: Final = MAX_PARALLELISM_LIMIT
"""No operator has more subtasks than the format allows key groups."""
SAVEPOINT_CHARACTERS_MAX: Final = 4096
MESSAGE_CHARACTERS_MAX: Final = 2000


def encode_request(request: JobRequest) -> bytes:
    """Return the bytes of a request. Raises ``InvalidInput`` if it could not be read back."""
    members: dict[str, Any] = {
        "format": REQUEST_FORMAT,
        "version": 1,
        "request": request.id,
        "kind": request.kind,
        "mode": request.mode,
        "newest": request.newest,
        "savepoint": request.savepoint,
        "created_at_us": request.created_at_us,
        "expires_at_us": request.expires_at_us,
        "parallelism": request.parallelism,
        "operators": dict(request.operators) or None,
    }
    return _encoded(members, lambda data: decode_request(data, request.newest, request.id, request.kind), request.id)


def decode_request(data: bytes, newest: int, request_id: str, kind: RequestKind | str = RequestKind.STOP) -> JobRequest:
    """Return the request of these bytes, under a name with this newest id, request id and kind.

    Raises ``RecordFault`` and ``UnsupportedFormat``.
    """
    members, tokens = _members(data, REQUEST_FORMAT, "request to a job", request_id)
    if members.text("kind") != kind:
        raise members.fault("kind", f"is {members.values['kind']!r:.80}, not '{kind}'")
    if members.integer("newest", 0, MAX_CHECKPOINT_ID) != newest:
        raise members.fault("newest", f"is {members.values['newest']}, but the object's name says {newest}")
    common: dict[str, Any] = {
        "id": request_id,
        "newest": newest,
        "savepoint": members.optional("savepoint", lambda name: _bounded(members, name, SAVEPOINT_CHARACTERS_MAX)),
        "created_at_us": members.integer("created_at_us"),
        "expires_at_us": members.optional("expires_at_us", members.integer),
    }
    if kind == RequestKind.STOP:
        common["mode"] = members.one_of("mode", StopMode)
    if kind == RequestKind.RESCALE:
        each = partial(members.integer, least=1, most=PARALLELISM_MAX)
        common |= {"parallelism": members.optional("parallelism", each), "operators": _parallelisms(members)}
    refuse_null(tokens)
    return JobRequest(RequestKind(kind), **common)


def _parallelisms(members: Members) -> dict[str, int]:
    """Return the parallelism by uid; at least one of the two members must be there."""
    operators = members.optional("operators", members.object)
    if operators is None or not operators.values:
        if not members.has("parallelism"):
            raise members.fault("parallelism", "is missing, and operators names no operator either")
        return {}
    return {uid: operators.integer(uid, 1, PARALLELISM_MAX) for uid in operators.values}


def encode_answer(answer: RequestAnswer) -> bytes:
    """Return an answer's bytes, its message truncated. Raises ``InvalidInput`` as for a request."""
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


def decode_answer(data: bytes, request_id: str) -> RequestAnswer:
    """Return the answer of these bytes to this request. Raises as :func:`decode_request` does."""
    members, tokens = _members(data, ANSWER_FORMAT, "answer to a request", request_id)
    answer = RequestAnswer(
        request=request_id,
        outcome=members.one_of("outcome", RequestOutcome),
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

"""The asking program's side: a request, its answer, and the removal of both."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import Any

from ..errors import ErrorKind, InvalidInput, NotFound, StorageError
from ..formats import refuse_foreign
from ..history import record_ids
from ..storage import Storage, absolute, check_savepoint_place
from .encoding import SAVEPOINT_CHARACTERS_MAX, decode_answer, encode_request
from .objects import Sleep, create_object, list_objects, read_object
from .values import JobRequest, RequestAnswer, RequestKind

logger = logging.getLogger(__name__)


def ask(
    storage: Storage,
    kind: RequestKind,
    savepoint: str | None = None,
    *,
    timeout_us: int | None = None,
    sleep: Sleep = time.sleep,
    **members: Any,
) -> JobRequest:
    """Create a durable request of this kind, with the members that only this kind has.

    ``timeout_us``: how long the caller waits before it withdraws the request; None: for ever.
    Raises ``NotFound``, ``InvalidInput``, ``StorageError``.
    """
    if savepoint is not None and not 0 < len(savepoint) <= SAVEPOINT_CHARACTERS_MAX:
        raise InvalidInput(
            f"the savepoint's URL has {len(savepoint):,} characters; from 1 to {SAVEPOINT_CHARACTERS_MAX:,} are "
            "allowed",
            kind=ErrorKind.INVALID_URL,
        )
    if savepoint is not None:
        savepoint = absolute(savepoint)
        check_savepoint_place(savepoint, storage.url)
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
    now_us = time.time_ns() // 1000
    expires_at_us = None if timeout_us is None else now_us + timeout_us
    request = JobRequest(kind, os.urandom(16).hex(), newest, savepoint, now_us, expires_at_us, **members)
    data = encode_request(request)
    try:
        create_object(storage, request.path, data, sleep)
    except BaseException:
        # It may exist anyway, while the caller is about to learn that nothing was requested.
        with contextlib.suppress(StorageError):
            storage.delete([request.path])
        raise
    said = ", ".join([kind, *(f"{name} {value}" for name, value in members.items() if value)])
    logger.info("asked the job of %s (%s), request %s, newest %d", storage.url, said, request.id, newest)
    return request


def request_answer(storage: Storage, request_id: str, *, warned: set[str]) -> RequestAnswer | None:
    """Return the answer to a request, if there is one that can be read."""
    for found in list_objects(storage).answers:
        if found.request_id == request_id:
            return read_object(storage, found.item, lambda data: decode_answer(data, request_id), warned)
    return None


def withdraw_request(storage: Storage, request_id: str) -> None:
    """Remove a request and its answer. A run that has started on it may still carry it out."""
    listed = list_objects(storage)
    # The request first: an answer alone means nothing, but a run would read a request alone.
    for objects in (listed.requests, listed.answers):
        paths = [found.item.path for found in objects if found.request_id == request_id]
        if paths:
            storage.delete(paths)

"""The run's side: which requests are waiting, and their answers."""

from __future__ import annotations

import logging
import time
from functools import partial

from .. import paths as layout
from ..storage import Storage
from .encoding import decode_request, encode_answer
from .objects import READ_AT_ONCE_MAX, Sleep, create_object, list_objects, read_object, warn_once
from .values import JobRequest, RequestAnswer

logger = logging.getLogger(__name__)


def waiting_requests(storage: Storage, *, warned: set[str]) -> list[JobRequest]:
    """Return unanswered requests, the lowest ``newest`` first; warn once of unreadable ones."""
    listed = list_objects(storage)
    for item in listed.others:
        warn_once(storage, item.path, "is not a request that this program knows; it is ignored", warned)
    answered = {found.request_id for found in listed.answers}
    waiting = [found for found in listed.requests if found.request_id not in answered]
    if len(waiting) > READ_AT_ONCE_MAX:
        what = f"holds {len(waiting)} requests; the first {READ_AT_ONCE_MAX} are read"
        warn_once(storage, layout.REQUESTS, what, warned)
    requests = []
    for item, newest, kind, request_id in waiting[:READ_AT_ONCE_MAX]:
        decode = partial(decode_request, newest=newest, request_id=request_id, kind=kind)
        request = read_object(storage, item, decode, warned)
        if request is not None:
            requests.append(request)
    return requests


def answer_request(storage: Storage, answer: RequestAnswer, *, sleep: Sleep = time.sleep) -> bool:
    """Create a durable answer; return False if the request was withdrawn or answered."""
    listed = list_objects(storage)
    requests = [found for found in listed.requests if found.request_id == answer.request]
    if not requests or any(found.request_id == answer.request for found in listed.answers):
        logger.info("nobody waits for an answer to request %s of %s", answer.request, storage.url)
        return False
    path = layout.answer_path(requests[0].newest, answer.request)
    return create_object(storage, path, encode_answer(answer), sleep)

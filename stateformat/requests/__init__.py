"""Users' requests to a running job, as objects in its store (SPEC.md section 2.4).

A program creates a request under ``requests/``. The run lists that folder between two checkpoints,
carries the request out, and creates an answer. The program reads it and removes both. The objects
that exist tell what to do:

=======================  ============================================================
request alone            it waits; a run for which it counts obeys it
request and answer       it is done; no run reads it any more
neither                  never made, or withdrawn
answer alone             a crash interrupted the removal; it means nothing
=======================  ============================================================

Objects are not trusted: their size is checked first, they are read strictly, and a warning is
logged once for each that cannot be read. Read ``values``, ``encoding``, ``objects``; then
``asking`` (the program that asks) and ``answering`` (the run that answers).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .._lazy import former
from .answering import answer_request as answer_request, waiting_requests as waiting_requests
from .asking import ask as ask, request_answer as request_answer, withdraw_request as withdraw_request
from .encoding import (
    BYTES_MAX as BYTES_MAX,
    decode_answer as decode_answer,
    decode_request as decode_request,
    encode_answer as encode_answer,
    encode_request as encode_request,
)
from .unanswered import rescale_outcome as rescale_outcome
from .values import (
    SAVEPOINT_PROPERTY as SAVEPOINT_PROPERTY,
    JobRequest as JobRequest,
    RequestAnswer as RequestAnswer,
    RequestKind as RequestKind,
    RequestOutcome as RequestOutcome,
    asking_order as asking_order,
    counts_for as counts_for,
    default_savepoint as default_savepoint,
    savepoint_of_stop as savepoint_of_stop,
)

if not TYPE_CHECKING:
    __getattr__ = former(
        __name__,
        {
            f"{kind.value.capitalize()}Request": (
                partial(JobRequest, kind),
                f"write JobRequest(RequestKind.{kind.name}, ...)",
            )
            for kind in RequestKind
        },
        leaves_in="0.3",
    )

"""What became of a rescale whose run ended before it answered, according to the records."""

from __future__ import annotations

from typing import Final

from ..graph import OperatorId
from ..history import find_record, record_ids
from ..model import Record
from ..storage import Storage
from .values import JobRequest, RequestAnswer, RequestOutcome

RECORDS_MAX: Final = 100
"""How many records are read."""


def rescale_outcome(storage: Storage, request: JobRequest) -> RequestAnswer | None:
    """Return the answer of the run that stopped for a rescale; None if the records do not tell.

    Reads the records from the request on, so a stop that has expired is not found.
    """
    stop: Record | None = None
    for checkpoint_id in [known for known in record_ids(storage) if known > request.newest][:RECORDS_MAX]:
        record = find_record(storage, checkpoint_id)
        if record is None:
            continue
        if stop is not None:
            return _outcome_after(stop, record, request)
        if record.stop is not None and record.stop.request == request.id:
            stop = record
    return None


def _outcome_after(stop: Record, first: Record, request: JobRequest) -> RequestAnswer:
    known = first.graph.by_uid
    wanted = {OperatorId(uid): size for uid, size in request.wanted.of(stop.graph).items()}
    reached = all(uid in known and known[uid].parallelism == size for uid, size in wanted.items())
    went = "at the new parallelism" if reached else "at another parallelism than was asked for"
    message = (
        f"the job has stopped at checkpoint {stop.checkpoint_id} and gone on {went}, where its first checkpoint is "
        f"{first.checkpoint_id}. The run that did it ended before it could answer"
    )
    outcome = RequestOutcome.RESCALED if reached else RequestOutcome.FAILED
    return RequestAnswer(request.id, outcome, message, first.checkpoint_id)

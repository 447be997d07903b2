"""Requests and answers as values: what is asked, for which runs it counts, what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from .. import paths as layout
from ..model import Record, StopMode
from ..rescaling import WantedParallelism

SAVEPOINT_PROPERTY: Final = "savepoint"
"""The property of a stop's record with the savepoint's URL; absent: the default place."""


class RequestKind(StrEnum):
    """What is asked, as the name of the object says it."""

    STOP = "stop"
    SAVEPOINT = "savepoint"
    RESCALE = "rescale"


class RequestOutcome(StrEnum):
    """What became of a request. Readers refuse an answer with any other word."""

    STOPPED = "stopped"
    """The job stopped at a checkpoint and committed it. No savepoint: the copy failed."""
    FAILED = "failed"
    """The request was not done: the job goes on, or has restarted; the message says why."""
    REFUSED = "refused"
    """The run did not start on the request."""
    FINISHED = "finished"
    """The job finished by itself in the meantime."""
    MISSED = "missed"
    """The run ended before it read the request; the next one restored a newer checkpoint."""
    SAVED = "saved"
    """The savepoint of this checkpoint exists; the message says whether the job goes on."""
    RESCALED = "rescaled"
    """The job stopped at a checkpoint and resumes from it at the requested parallelism."""


@dataclass(frozen=True)
class JobRequest:
    """A request to a job: to stop with a savepoint; for a savepoint, while the job goes on; or to
    stop with a savepoint and resume from it at another parallelism.
    """

    kind: RequestKind
    id: str
    """32 hexadecimal digits. The record of a stop holds it."""
    newest: int
    """The id of the newest checkpoint when the request was made; 0 if there was none."""
    savepoint: str | None = None
    """The URL of the savepoint's store; None for the default, below the job's store."""
    created_at_us: int = 0
    """µs since 1970 UTC. For display only."""
    expires_at_us: int | None = None
    """When whoever asks has given up, in µs since 1970 UTC by its own clock; None: it may wait for
    ever."""
    mode: StopMode | None = None
    """Of a stop."""
    parallelism: int | None = None
    """Of a rescale: that of every operator not in ``operators``; None: each keeps its own."""
    operators: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Of a rescale: the parallelism by uid."""

    @property
    def path(self) -> str:
        """The request's path in its store."""
        return layout.request_path(self.newest, self.id, self.kind)

    @property
    def wanted(self) -> WantedParallelism:
        """The parallelism that a rescale requests, as the record of the stop keeps it."""
        return WantedParallelism(self.parallelism, self.operators)

    def savepoint_at(self, store_url: str, checkpoint_id: int) -> str:
        """Return the URL of the savepoint that this request makes of a checkpoint of the store."""
        return self.savepoint or default_savepoint(store_url, checkpoint_id, self.id)


@dataclass(frozen=True)
class RequestAnswer:
    """What became of a request."""

    request: str
    outcome: RequestOutcome
    message: str = ""
    checkpoint_id: int | None = None
    """The checkpoint that a stop, rescale or savepoint made."""
    savepoint: str | None = None
    """The savepoint's URL; None if there is none: then the message says why."""


def counts_for(request: JobRequest, restored_from: int) -> bool:
    """Return whether a request counts for a run restored from this checkpoint (0: from none).

    A savepoint is wanted of every run: it is no danger to a job that was started again.
    """
    return request.kind == RequestKind.SAVEPOINT or restored_from <= request.newest


def asking_order(request: JobRequest) -> tuple[int, int, str]:
    """Sort key of requests: first what leaves the most open; then the earlier.

    A savepoint changes nothing; a drain cannot be undone; a rescale has no use in a stopped job.
    """
    ranks = {RequestKind.SAVEPOINT: 0, RequestKind.STOP: 2 if request.mode is StopMode.DRAIN else 1}
    return ranks.get(request.kind, 3), request.created_at_us, request.path


def default_savepoint(store_url: str, checkpoint_id: int, request_id: str) -> str:
    """Return the default URL: ``savepoints/<checkpoint id>-<first 8 digits of the request>``."""
    return layout.savepoint_url(store_url, f"{checkpoint_id}-{request_id[:8]}" if request_id else str(checkpoint_id))


def savepoint_of_stop(store_url: str, record: Record) -> str:
    """Return the URL of the savepoint of a stop: as requested, or the default."""
    request = record.stop.request if record.stop else ""
    return record.properties.get(SAVEPOINT_PROPERTY) or default_savepoint(store_url, record.checkpoint_id, request)

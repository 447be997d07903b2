"""The parallelism that a rescale requests, and how a stop's record passes it to the next run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from .graph import JobGraph, Status
from .model import RESCALE_PROPERTY, CheckpointKind, Record, Stop, StopMode
from .words import label


@dataclass(frozen=True)
class WantedParallelism:
    """The requested parallelism. It does not apply to operators that have fully finished."""

    parallelism: int | None = None
    """The parallelism of every operator not in ``operators``; None: each keeps its own."""
    operators: Mapping[str, int] = field(default_factory=dict)
    """The parallelism by uid."""

    def of(self, graph: JobGraph) -> dict[str, int]:
        """Return the parallelism of each operator that has not fully finished, by uid."""
        return {
            operator.uid: self.operators.get(operator.uid, self.parallelism or operator.parallelism)
            for operator in graph.operators
            if operator.status is not Status.FULLY_FINISHED
        }

    def describe(self) -> str:
        """Return it in words: ``parallelism 4, 'planes' at 1``."""
        every = [] if self.parallelism is None else [f"parallelism {self.parallelism}"]
        own = [f"{label(uid)!r} at {number}" for uid, number in self.operators.items()]
        more = [f"{len(own) - 5} more"] if len(own) > 5 else []
        return ", ".join([*every, *own[:5], *more])

    def encode(self) -> str:
        """Return the value of the record's property."""
        members = {"parallelism": self.parallelism, "operators": dict(self.operators)}
        return json.dumps({name: value for name, value in members.items() if value}, separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> WantedParallelism:
        """Return what was encoded. Raises ``ValueError`` for text not made by :meth:`encode`."""
        # Few records have one, and every reader of a record would import the code for key hashes.
        from .keys import MAX_PARALLELISM_LIMIT

        try:
            members = json.loads(text)
        except RecursionError as error:
            raise ValueError("is nested too deeply") from error
        operators = members.get("operators", {}) if isinstance(members, dict) else None
        if not isinstance(operators, dict):
            raise ValueError("is no object")
        every = members.get("parallelism")
        for number in (every, *operators.values()):
            if number is not None and (type(number) is not int or not 1 <= number <= MAX_PARALLELISM_LIMIT):
                raise ValueError(f"{number!r} is no parallelism")
        if None in operators.values():
            raise ValueError("an operator has no parallelism")
        return cls(every, operators)


def rescale_of(record: Record) -> WantedParallelism | None:
    """Return the parallelism at which the job resumes from this checkpoint, the stop of a rescale.

    None for every other checkpoint, and for a copy, which is no longer part of that job.
    """
    stop, text = record.stop, record.properties.get(RESCALE_PROPERTY)
    if (
        text is None
        or stop is None
        or stop.mode is not StopMode.NO_DRAIN
        or record.kind is not CheckpointKind.CHECKPOINT
    ):
        return None
    try:
        return WantedParallelism.decode(text)
    except (ValueError, RecursionError):
        return None


def lasting_stop(record: Record) -> Stop | None:
    """Return the stop that ended the job at this checkpoint; None if the job goes on by itself."""
    return None if rescale_of(record) is not None else record.stop

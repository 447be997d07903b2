"""The parallelism that a rescale asks for, and how a stop's record hands it to the next run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from .graph import JobGraph, Status
from .model import RESCALE_PROPERTY, CheckpointKind, Record, Stop, StopMode
from .words import label


@dataclass(frozen=True)
class WantedParallelism:
    """The parallelism that is asked for. Operators that have fully finished have no part in it."""

    parallelism: int | None = None
    """Of every operator that ``operators`` does not name; None: each keeps its own."""
    operators: Mapping[str, int] = field(default_factory=dict)
    """By uid."""

    def of(self, graph: JobGraph) -> dict[str, int]:
        """The parallelism of every operator of a graph that has not fully finished, by uid."""
        return {
            operator.uid: self.operators.get(operator.uid, self.parallelism or operator.parallelism)
            for operator in graph.operators
            if operator.status is not Status.FULLY_FINISHED
        }

    def describe(self) -> str:
        """In words: ``parallelism 4, 'planes' at 1``."""
        every = [] if self.parallelism is None else [f"parallelism {self.parallelism}"]
        own = [f"{label(uid)!r} at {number}" for uid, number in self.operators.items()]
        more = [f"{len(own) - 5} more"] if len(own) > 5 else []
        return ", ".join([*every, *own[:5], *more])

    def encode(self) -> str:
        """The value of the record's property."""
        members = {"parallelism": self.parallelism, "operators": dict(self.operators)}
        return json.dumps({name: value for name, value in members.items() if value}, separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> WantedParallelism:
        """Raises ``ValueError`` for what :meth:`encode` cannot have made."""
        # Few records say one, and whoever reads a record would import how keys are hashed.
        from .keys import MAX_PARALLELISM_LIMIT

        members = json.loads(text)
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
    """The parallelism at which the job goes on from this checkpoint, a stop of a rescale.

    None for every other checkpoint. So it is for a copy: it has left the job whose run was asked.
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
    """The stop that ended the job at this checkpoint; None where it goes on by itself."""
    return None if rescale_of(record) is not None else record.stop

"""The graph of a job: operators, edges, and which subtasks have finished.

Only types are checked here; ``rules`` checks whether the parts fit together, so that the
graph of a damaged record can be shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from numbers import Integral
from typing import Any, TypeAlias, TypeVar

from .errors import ErrorKind, InvalidInput

OperatorId: TypeAlias = str
"""The uid that the user gave; it survives every change of the graph."""

T = TypeVar("T")


class Partitioner(StrEnum):
    """How an edge routes records to channels."""

    FORWARD = "forward"
    RESCALE = "rescale"
    REBALANCE = "rebalance"
    HASH = "hash"
    BROADCAST = "broadcast"

    @property
    def all_to_all(self) -> bool:
        """Whether every upstream subtask reaches every downstream one (else POINTWISE)."""
        return self not in (Partitioner.FORWARD, Partitioner.RESCALE)


class Status(StrEnum):
    """The status of an operator, derived from its subtasks (FLIP-147)."""

    RUNNING = "running"
    PARTIALLY_FINISHED = "partially_finished"
    FULLY_FINISHED = "fully_finished"


@dataclass(frozen=True, slots=True)
class SubtaskSet:
    """A set of subtask indexes as sorted, disjoint, non-adjacent, inclusive ranges."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, indexes: Iterable[int]) -> SubtaskSet:
        """Return the set of these indexes; they may come in any order and repeat."""
        ranges: list[tuple[int, int]] = []
        for index in sorted(set(indexes)):
            if ranges and ranges[-1][1] == index - 1:
                ranges[-1] = (ranges[-1][0], index)
            else:
                ranges.append((index, index))
        return cls(tuple(ranges))

    @classmethod
    def all(cls, parallelism: int) -> SubtaskSet:
        """Return every subtask of an operator."""
        return cls(((0, parallelism - 1),))

    def __contains__(self, index: int) -> bool:
        return any(first <= index <= last for first, last in self.ranges)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.ranges)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __iter__(self) -> Iterator[int]:
        for first, last in self.ranges:
            yield from range(first, last + 1)

    def __or__(self, other: SubtaskSet) -> SubtaskSet:
        return SubtaskSet.of([*self, *other])

    def __and__(self, other: SubtaskSet) -> SubtaskSet:
        # Range by range: a record may say that millions have finished, at the cost of a few bytes.
        ranges: list[tuple[int, int]] = []
        left, right = [*self.ranges], [*other.ranges]
        while left and right:
            first, last = max(left[-1][0], right[-1][0]), min(left[-1][1], right[-1][1])
            if first <= last:
                ranges.append((first, last))
            (left if left[-1][0] >= right[-1][0] else right).pop()
        return SubtaskSet(tuple(reversed(ranges)))

    def __str__(self) -> str:
        return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in self.ranges)


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of the job graph."""

    uid: OperatorId
    parallelism: int
    max_parallelism: int | None = None
    """None is allowed only in a topology, and means the checkpoint's value, or else
    ``key_groups.default_max_parallelism``.
    """
    name: str = ""
    key_hash: str | None = None
    """A registered name. None is allowed only in a topology, and means the checkpoint's, or else
    the default.
    """
    chain: str | None = None
    finished: SubtaskSet = SubtaskSet()
    """Empty in a topology, like ``finishing``."""
    finishing: SubtaskSet = SubtaskSet()
    coordinator: bool = False
    pinned: bool = False
    """In a topology: the operator's chain must not be split."""

    def __post_init__(self) -> None:
        if not isinstance(self.uid, str):
            raise InvalidInput(f"the uid of an operator is text, not {self.uid!r}", kind=ErrorKind.INVALID_GRAPH)
        for name in ("parallelism", "max_parallelism"):
            number = getattr(self, name)
            if type(number) is not int and (name == "parallelism" or number is not None):
                what = f"the {name.replace('_', ' ')} of operator {self.uid!r}"
                object.__setattr__(self, name, integer(what, number, ErrorKind.INVALID_PARALLELISM))

    def __repr__(self) -> str:
        of = "" if self.max_parallelism is None else f" of {self.max_parallelism}"
        return f"Operator({shortened(self.uid)}, {self.parallelism}{of}, {self.status})"

    @property
    def done(self) -> SubtaskSet:
        """Finished and finishing subtasks together."""
        return self.finished | self.finishing

    @property
    def status(self) -> Status:
        """The status; fully finished when every subtask is finished or finishing."""
        if not (self.finished or self.finishing):
            return Status.RUNNING
        count = len(self.finished) + len(self.finishing)
        return Status.FULLY_FINISHED if count >= self.parallelism else Status.PARTIALLY_FINISHED

    @property
    def display_name(self) -> str:
        """The name, or the uid if the operator has no name."""
        return self.name or self.uid


@dataclass(frozen=True, slots=True)
class Edge:
    """A connection between two operators."""

    id: str
    source: OperatorId
    target: OperatorId
    partitioner: Partitioner = Partitioner.REBALANCE
    input: int = 0
    """The index of the input of ``target`` that the edge feeds."""
    key_columns: tuple[str, ...] = ()
    feedback: bool = False

    def __post_init__(self) -> None:
        where = f"edge {self.id!r} from {self.source!r} to {self.target!r}"
        if not all(isinstance(name, str) for name in (self.id, self.source, self.target)):
            raise InvalidInput(f"{where}: its id and the uids that it joins are text", kind=ErrorKind.INVALID_GRAPH)
        object.__setattr__(self, "input", integer(f"the input of {where}", self.input, ErrorKind.INVALID_GRAPH))
        partitioner: Any = self.partitioner
        if not isinstance(partitioner, Partitioner):
            if partitioner not in list(Partitioner):
                known = ", ".join(Partitioner)
                raise InvalidInput(
                    f"{where} has partitioner {partitioner!r}; give one of {known}", kind=ErrorKind.INVALID_GRAPH
                )
            object.__setattr__(self, "partitioner", Partitioner(partitioner))
        object.__setattr__(self, "key_columns", all_of(str, self.key_columns, f"the key columns of {where}"))

    def __repr__(self) -> str:
        by = f" by {shortened(', '.join(self.key_columns), 30)}" if self.key_columns else ""
        return f"Edge({shortened(self.id)}, {self.partitioner}{by}{', feedback' if self.feedback else ''})"


@dataclass(frozen=True)
class JobGraph:
    """The operators of a job, stateless ones too, in the user's order, and the edges."""

    operators: tuple[Operator, ...]
    edges: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in (("operators", Operator), ("edges", Edge)):
            object.__setattr__(self, name, all_of(kind, getattr(self, name), f"the {name} of a job graph"))

    def __repr__(self) -> str:
        uids = ", ".join(operator.uid for operator in self.operators)
        return f"JobGraph({len(self.operators)} operators, {len(self.edges)} edges: {shortened(uids, 50)})"

    @cached_property
    def by_uid(self) -> Mapping[OperatorId, Operator]:
        """Operators by uid."""
        return {operator.uid: operator for operator in self.operators}

    @cached_property
    def by_edge(self) -> Mapping[str, Edge]:
        """Edges by id."""
        return {edge.id: edge for edge in self.edges}

    @property
    def is_finished(self) -> bool:
        """Whether every operator has fully finished, so no checkpoint follows."""
        return bool(self.operators) and all(one.status is Status.FULLY_FINISHED for one in self.operators)

    def operator(self, uid: str) -> Operator:
        """Return the operator with this uid.

        Raises ``InvalidInput`` (kind ``UNKNOWN_OPERATOR``) if there is none.
        """
        found = self.by_uid.get(OperatorId(uid))
        if found is None:
            raise InvalidInput(
                f"no operator {uid!r} in the job graph; it has {', '.join(self.by_uid) or 'none'}",
                kind=ErrorKind.UNKNOWN_OPERATOR,
                operator=uid,
            )
        return found

    def inputs(self, uid: str) -> tuple[Edge, ...]:
        """Return the edges into an operator except feedback edges, in order of definition."""
        return tuple(edge for edge in self.edges if edge.target == uid and not edge.feedback)

    def with_operators(self, change: Mapping[OperatorId, Operator]) -> JobGraph:
        """Return the same graph with some operators replaced, by uid."""
        return replace(self, operators=tuple(change.get(op.uid, op) for op in self.operators))

    def at(
        self,
        parallelism: int | None = None,
        *,
        per_operator: Mapping[str, int] | None = None,
        max_parallelism: int | None = None,
    ) -> JobGraph:
        """Return the topology of the same job at another parallelism, with no subtask finished.

        ``parallelism`` applies to every operator that is not fully finished; ``per_operator``, by
        uid, takes precedence. Without ``max_parallelism`` the checkpoint's is used. The planner
        checks ranges.

        Raises ``InvalidInput`` for an unknown uid and for a number that is no integer.
        """
        chosen = dict(per_operator or {})
        for uid in chosen:
            self.operator(uid)
        for number in (parallelism, max_parallelism, *chosen.values()):
            if number is not None:
                integer("a parallelism", number, ErrorKind.INVALID_PARALLELISM)
        operators = []
        for op in self.operators:
            wanted = op.parallelism
            if parallelism is not None and op.status is not Status.FULLY_FINISHED:
                wanted = parallelism
            fresh = replace(op, max_parallelism=max_parallelism, finished=SubtaskSet(), finishing=SubtaskSet())
            operators.append(replace(fresh, parallelism=chosen.get(op.uid, wanted)))
        return replace(self, operators=tuple(operators))


def shortened(text: str, length: int = 24) -> str:
    """Return the ``repr`` of ``text``, cut to about ``length`` characters."""
    return repr(text if len(text) <= length else text[: length - 1] + "…")


def brief(value: object, *facts: str) -> str:
    """Return a ``repr`` on one line: the class, and what tells this value from others."""
    return f"{type(value).__name__}({', '.join(shortened(fact, 60)[1:-1] for fact in facts)})"


def all_of(kind: type[T], values: Iterable[Any], what: str) -> tuple[T, ...]:
    """Return ``values`` as a tuple. Raises ``InvalidInput`` unless all are of type ``kind``."""
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes)):
        found = tuple(values)
        wrong = [value for value in found if not isinstance(value, kind)]
        if not wrong:
            return found
        values = wrong[0]
    raise InvalidInput(
        f"{what} are {kind.__name__} values; {values!r} is of type {type(values).__name__}",
        kind=ErrorKind.INVALID_GRAPH,
    )


def integer(what: str, value: object, kind: ErrorKind) -> int:
    """Return an integer of Python or numpy as ``int``. Raises ``InvalidInput`` of this kind."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidInput(f"{what} is {value!r}; give an integer", kind=kind)
    return int(value)

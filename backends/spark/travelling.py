"""Operators that go from worker to worker as they are, between two epochs.

Theory of operation. Where a worker has not kept an activation it begins a new one from the snapshot of the epoch before, and calls
``open``. Of all states but one that is what any restore at the same parallelism would do. Union state is the exception: at a restore
every subtask is given the entries of all and takes its share, in ``open``; so all would have to begin anew together, and while some
subtasks have finished there is no restore at all. An operator with union state is therefore not begun anew within a run: it is pickled
behind its snapshot, and goes on with its own entries, as it does in an executor that never moves it. What belongs to its new place (its
context, its states) is put in where its old ones were.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from backends.dataflow.activation import OperatorChain
from backends.dataflow.compile import Job
from backends.dataflow.member import ChainedOperator
from stateformat.errors import ErrorKind, InvalidState
from stateformat.model import Mode

if TYPE_CHECKING:
    from backends.dataflow.api import Operator


def travels(job: Job, uid: str) -> bool:
    """Whether an operator keeps union state."""
    return any(state.mode is Mode.UNION for state in job.states_of(uid))


def packed(job: Job, activation: OperatorChain) -> dict[str, bytes]:
    """The operators of an activation that travel, by uid. ``InvalidState``, the operator's fault, for one that cannot be pickled."""
    return {uid: _pack(member) for uid, member in activation.operators.items() if travels(job, uid)}


def _pack(member: ChainedOperator) -> bytes:
    from pyspark.cloudpickle import CloudPickler

    places = {id(own): name for name, own in _own(member)}

    class Pickler(CloudPickler):  # type: ignore[misc] # pyspark has no types for it
        def persistent_id(self, item: object) -> str | None:
            return places.get(id(item))

    file = io.BytesIO()
    try:
        Pickler(file, protocol=5).dump(member.logic)
    except Exception as error:
        raise InvalidState(
            f"operator {member.uid!r} keeps union state, so on Spark it goes from worker to worker as it is, and it cannot be pickled: "
            f"{error}. Leave files, connections and generators out (__getstate__), and open them again when they are needed",
            kind=ErrorKind.UNSUPPORTED_TYPE,
            operator=member.uid,
        ) from error
    return file.getvalue()


def unpacked(activation: OperatorChain, operators: Mapping[str, bytes]) -> dict[str, Operator]:
    """Operators that have travelled, for the members of a new activation."""
    return {uid: _unpack(data, activation.operators[uid]) for uid, data in operators.items()}


def _unpack(data: bytes, member: ChainedOperator) -> Operator:
    places: Mapping[Any, object] = dict(_own(member))

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, name: Any) -> object:
            return places[name]

    logic: Operator = Unpickler(io.BytesIO(data)).load()  # From a worker of ours.
    return logic


def _own(member: ChainedOperator) -> Iterator[tuple[str, object]]:
    """What belongs to the place of an operator, by a name that it has everywhere."""
    yield "context", member.context
    for name, kept in member.states.all.items():
        yield f"state {name}", kept


__all__ = ["packed", "travels", "unpacked"]

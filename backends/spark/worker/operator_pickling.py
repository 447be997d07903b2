"""Operators with union state, which are pickled to move between workers from epoch to epoch.

A new chain is normally restored from the snapshot of the epoch before. But when union state is
restored, every subtask gets the entries of all subtasks and takes its share in ``open``. So all
subtasks would have to be restored together, which is impossible once some have finished. Instead,
the operator is pickled after its snapshot and continues with its own entries, in the context and
with the states of its new chain.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stateformat.errors import ErrorKind, InvalidState
from stateformat.model import Mode

from ...dataflow.chain import OperatorChain
from ...dataflow.chained_operator import ChainedOperator
from ...dataflow.compile import Job

if TYPE_CHECKING:
    from ...dataflow.api import Operator


def pickle_operators(job: Job, chain: OperatorChain) -> dict[str, bytes]:
    """Pickle those of a chain, by uid. ``InvalidState``, its fault, if one cannot be pickled."""
    union = {uid for uid in chain.operators if any(state.mode is Mode.UNION for state in job.states_of(uid))}
    return {uid: _pickle(operator) for uid, operator in chain.operators.items() if uid in union}


def _pickle(operator: ChainedOperator) -> bytes:
    from pyspark.cloudpickle import CloudPickler

    names = {id(own): name for name, own in _own(operator).items()}

    class Pickler(CloudPickler):  # type: ignore[misc] # pyspark has no types for it
        def persistent_id(self, item: object) -> str | None:
            return names.get(id(item))

    file = io.BytesIO()
    try:
        Pickler(file, protocol=5).dump(operator.logic)
    except Exception as error:
        raise InvalidState(
            f"Operator {operator.uid!r} has union state, so Spark moves it from worker to worker, and it cannot be "
            f"pickled: {error}. Leave files, connections and generators out (__getstate__), and open them again "
            "when they are needed.",
            kind=ErrorKind.UNSUPPORTED_TYPE,
            operator=operator.uid,
        ) from error
    return file.getvalue()


def unpickle_operators(chain: OperatorChain, pickled: Mapping[str, bytes]) -> dict[str, Operator]:
    """Return the pickled operators, with the contexts and states of a new chain."""
    return {uid: _unpickle(data, chain.operators[uid]) for uid, data in pickled.items()}


def _unpickle(data: bytes, operator: ChainedOperator) -> Operator:
    own = _own(operator)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, name: Any) -> object:
            return own[name]

    logic: Operator = Unpickler(io.BytesIO(data)).load()  # From our own worker.
    return logic


def _own(operator: ChainedOperator) -> dict[str, object]:
    """Return what belongs to the chain, not the operator, by a name that is the same everywhere."""
    return {"context": operator.context, **{f"state {name}": state for name, state in operator.states.all.items()}}

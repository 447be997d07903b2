"""Operators with union state, which go from worker to worker pickled between two epochs.

A new chain would be restored from the snapshot of the epoch before. At a restore of union state
every subtask gets the entries of all and takes its share in ``open``, so all would have to be
restored together, which is impossible while some have finished. So the operator is pickled behind
its snapshot and goes on with its own entries, with the context and states of its new chain.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stateformat.errors import ErrorKind, InvalidState
from stateformat.model import Mode

from ...dataflow.chain import ChainedOperator, OperatorChain
from ...dataflow.graph import Job

if TYPE_CHECKING:
    from ...dataflow.api import Operator


def pickle_operators(job: Job, chain: OperatorChain) -> dict[str, bytes]:
    """By uid, those of a chain. ``InvalidState``, its fault, if one cannot be pickled."""
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
    """Return the operators that were pickled, with the contexts and states of a new chain."""
    return {uid: _unpickle(data, chain.operators[uid]) for uid, data in pickled.items()}


def _unpickle(data: bytes, operator: ChainedOperator) -> Operator:
    own = _own(operator)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, name: Any) -> object:
            return own[name]

    logic: Operator = Unpickler(io.BytesIO(data)).load()  # From a worker of ours.
    return logic


def _own(operator: ChainedOperator) -> dict[str, object]:
    """What belongs to a chain and not to the operator, by a name that it has in every worker."""
    return {"context": operator.context, **{f"state {name}": state for name, state in operator.states.all.items()}}

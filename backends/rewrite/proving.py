"""Proof that a rewrite has lost nothing: compares its source and its result row by row."""

from __future__ import annotations

from collections.abc import Callable

from stateformat.errors import InvalidInput
from stateformat.inspecting import CheckpointDiff, Renames, prove_checkpoints
from stateformat.model import Record
from stateformat.reading import Checkpoint

from .naming import Names
from .spec import RewriteSpec


def check_provable(spec: RewriteSpec) -> None:
    """Raise ``InvalidInput`` for a rewrite that changes rows on purpose, by a function."""
    changed = [transform.label for transform in spec.transforms.values() if transform.function is not None]
    if changed:
        raise InvalidInput(
            f"{changed[0]} changes rows, so there is nothing to prove; rewrite without the proof, and look at what "
            "became of them with `ckpt diff`"
        )


def prove_rewrite(
    source: Checkpoint,
    result: Checkpoint,
    spec: RewriteSpec,
    *,
    apart: frozenset[str] = frozenset(),
    progress: Callable[[int, int], None] | None = None,
) -> CheckpointDiff:
    """Compare a checkpoint with the result of its rewrite; ``same`` if nothing was lost.

    What the spec renames is not a difference. ``apart``: operators that the result has in addition.
    Raises ``InvalidInput`` as :func:`check_provable`, and as ``diff_checkpoints``.
    """
    check_provable(spec)
    renames = _renames(source.record, spec, apart)
    return prove_checkpoints(source, result, renames=renames, progress=progress)


def _renames(record: Record, spec: RewriteSpec, apart: frozenset[str]) -> Renames:
    names = Names.planned(spec, record, ())
    shapes = {(state.operator, state.name): names.shape(state) for state in record.states}
    return Renames(
        operators={old: str(names.uid(old)) for old in spec.renames},
        states={(state.operator, state.name): names.state(state) for state in record.states},
        shapes={place: shape for place, shape in shapes.items() if shape is not None},
        apart=apart,
    )

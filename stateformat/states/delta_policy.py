"""Decide whether a state is written whole or as a delta, and how many layers stay below the delta.

Theory of operation. A delta also absorbs the top layers that are not much larger: it holds the
changes since the layer below them. So each delta is smaller than the one below by
:data:`_FOLD_FACTOR`, and there are logarithmically many. When they reach half of the base, the
state is written whole. Users of the library choose between a delta and the whole:
:func:`should_fold`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

_FOLD_FACTOR: Final = 2
# Besides its rows, a layer costs a segment with its footer and its handle: about as much as this
# many small rows.
_LAYER_ROWS: Final = 256
UNKNOWN_MAX: Final = 16
"""The most layers below a delta that cannot be folded."""
LAYERS_MAX: Final = 64
"""A state of a subtask SHOULD have no more layers (SPEC.md section 5.4)."""


class Layer(NamedTuple):
    """A layer of one keyed state of one subtask. ``version`` None: older than the state."""

    version: int | None
    rows: int
    size_bytes: int


def layers_kept(
    layers: Sequence[Layer], sinces: Mapping[int, int], changed_since: Callable[[int], int], live_rows: int
) -> int:
    """Return how many of the lowest ``layers`` stay below a delta; 0: the state is written whole.

    ``sinces`` maps a number of layers that may stay to the version whose later changes they lack;
    ``changed_since(version)`` is the row count of such a delta.
    """
    kept = len(layers)
    rows = changed_since(sinces[kept])
    if not rows:
        return kept
    while kept - 1 in sinces and layers[kept - 1].rows + _LAYER_ROWS <= _FOLD_FACTOR * (rows + _LAYER_ROWS):
        kept -= 1
        rows = changed_since(sinces[kept])
    base, deltas = layers[0], layers[1:kept]
    if rows >= live_rows or 2 * (rows + sum(layer.rows for layer in deltas)) >= base.rows:
        return 0
    size_bytes = rows * base.size_bytes // base.rows + sum(layer.size_bytes for layer in deltas)
    return 0 if base.size_bytes and 2 * size_bytes >= base.size_bytes else kept


def should_fold(layers: Sequence[Layer], rows: int) -> bool:
    """Return whether to write a state whole rather than as ``rows`` more on these layers.

    The layers are given lowest first.
    """
    if not layers or len(layers) > UNKNOWN_MAX:
        return True
    return rows > 0 and layers_kept(layers, {len(layers): 0}, lambda _: rows, layers[0].rows) == 0


def warn_of_layers(handles: pa.Table) -> None:
    """Warn of states whose layers have just passed :data:`LAYERS_MAX`, or a power of two."""
    import pyarrow.compute as pc

    if (pc.max(handles["layer"]).as_py() or 0) < LAYERS_MAX:
        return
    stored = handles.filter(pc.and_(pc.equal(handles["mode"], "keyed"), pc.greater(handles["rows"], 0)))
    of_subtask = stored.group_by(["operator", "state", "subtask"]).aggregate([("layer", "count_distinct")])
    most = of_subtask.group_by(["operator", "state"]).aggregate([("layer_count_distinct", "max")]).to_pylist()
    for found in most:
        count = found["layer_count_distinct_max"]
        if count == LAYERS_MAX + 1 or (count > LAYERS_MAX and count & (count - 1) == 0):
            logger.warning(
                "state %r of operator %r lies in %d layers; at most %d are advised (SPEC.md section 5.4), for each "
                "costs every read and publish: write it whole when Checkpoint.should_fold says so, or run ckpt rewrite",
                found["state"],
                found["operator"],
                count,
                LAYERS_MAX,
            )

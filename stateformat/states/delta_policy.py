"""How many of the layers below stay when a state is written: what a delta is put on, and what it takes into itself.

Theory of operation. A state lies in layers, a base and deltas on it, and each snapshot may put a delta on top. To keep the
deltas few, the one that is written takes in those on top that are not much greater than it is: it holds what has changed since
the one below them, which the stamps of rows tell (``changes``), so nothing is read. After that every delta is smaller than the
one below it by :data:`_FOLD_FACTOR`, so there are only as many as the logarithm of base by delta, and a change is written again
only when what it lies in has grown by a factor, so about as often. When the deltas come to half of the base, the state is written
whole, which is paid for by the changes since the last time.

A writer that cannot make the changes of several layers again, as a program that uses the library alone, only chooses between a
delta and the whole state: :func:`should_fold`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

_FOLD_FACTOR: Final = 2
# A layer costs a segment, with its footer and its handle, besides its rows: about what so many small rows cost.
_LAYER_ROWS: Final = 256
UNKNOWN_MAX: Final = 16
"""So many layers that cannot be folded may lie in a state to which a delta is added."""
LAYERS_MAX: Final = 64
"""A state of a subtask SHOULD lie in no more layers (SPEC.md section 5.4); publishing one that does is warned about."""


class Layer(NamedTuple):
    """A layer of one keyed state of one subtask. ``version`` None: it was there before anything that the state knows of."""

    version: int | None
    rows: int
    size_bytes: int


def layers_kept(
    layers: Sequence[Layer], sinces: Mapping[int, int], changed_since: Callable[[int], int], live_rows: int
) -> int:
    """How many of the lowest ``layers`` stay underneath a delta; 0: the state is to be written whole.

    ``sinces``: how many layers may stay, and the version after which what has changed is not in them; it has the number of all
    layers. ``changed_since(version)``: about how many rows such a delta has.
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
    """Whether a state that lies in these layers, lowest first, is better written whole than as a delta of ``rows`` rows.

    True where the deltas would come to half of the base, where they are :data:`UNKNOWN_MAX` already, and without layers.
    """
    if not layers or len(layers) > UNKNOWN_MAX:
        return True
    return rows > 0 and layers_kept(layers, {len(layers): 0}, lambda _: rows, layers[0].rows) == 0


def warn_of_layers(handles: pa.Table) -> None:
    """Log a warning for every state of which a subtask has come to more than :data:`LAYERS_MAX` layers, and to twice as many.

    ``handles``: the planning columns of a manifest.
    """
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
                "state %r of operator %r lies in %d layers; at most %d are advised (SPEC.md section 5.4), for each costs every "
                "read and publish: write it whole when Checkpoint.should_fold says so, or run ckpt rewrite",
                found["state"],
                found["operator"],
                count,
                LAYERS_MAX,
            )

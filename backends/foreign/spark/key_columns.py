"""Which columns determine the partition of a store's key: the first of its key row; how many
depends on the operator.

Spark partitions rows by ``pmod(murmur3(columns, seed 42), partitions)``, which is stateformat's
default key hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import ErrorKind, UnsupportedFormat
from stateformat.keys import hash_keys, key_groups

from ..framing import damaged
from .logs import OperatorInfo, StoreInfo
from .schemas import SparkField, StoreSchema, has_values

NESTED_KEY_HASH: Final = "spark-murmur3-seed42-nested"
"""For operators whose keys have arrays or maps, which stateformat's key hash does not support."""
UNKNOWN_KEY_HASH: Final = "spark-murmur3-seed42-unknown-columns"
"""For operators whose columns no file names (Spark before 3.1)."""
_LONGEST_ARRAY: Final = 4096
_EXPANDED_ROWS: Final = 1 << 15

JOIN_STORES: Final = (
    "left-keyToNumValues",
    "left-keyWithIndexToValue",
    "right-keyToNumValues",
    "right-keyWithIndexToValue",
)
_WHOLE_KEY: Final = (
    "stateStoreSave",
    "dedupe",
    "dedupeWithinWatermark",
    "flatMapGroupsWithState",
    "applyInPandasWithState",
    "globalLimit",
)
_GROUPED_BY_USER: Final = (
    "transformWithStateExec",
    "transformWithStateInPandasExec",
    "transformWithStateInPySparkExec",
)


def hashed_columns(operator: OperatorInfo, store: StoreInfo, schema: StoreSchema) -> int:
    """Return how many columns of the key row, from the first on, determine its partition.

    0 if the operator has no keys: one partition has everything. Raises ``UnsupportedFormat`` for an
    unknown operator, by its name.
    """
    count = len(schema.key)
    if not schema.known:
        return count
    if not 0 <= store.prefix_columns <= count:
        raise damaged(
            operator.path or f"state/{operator.id}",
            f"store {store.name!r} has {store.prefix_columns} prefix columns, and its key has {count}",
            kind=ErrorKind.DAMAGED_MANIFEST,
        )
    if operator.name in _WHOLE_KEY:
        return _non_empty(schema.key, count)
    if operator.name == "sessionWindowStateStoreSaveExec":
        return store.prefix_columns or count - 1
    if operator.name == "symmetricHashJoin":
        name = schema.family if schema.family in JOIN_STORES else store.name
        return count - 1 if name.endswith("keyWithIndexToValue") else count
    if operator.name in _GROUPED_BY_USER:
        return _non_empty(schema.key, count)
    raise UnsupportedFormat(
        f"operator {operator.id} is {operator.name!r}, which is not known: which columns its keys are dealt by is not "
        "known either. Use a newer stateformat",
        kind=ErrorKind.UNSUPPORTED_FEATURE,
        operator=operator.uid,
    )


def spark_hashes(columns: Sequence[pa.Array]) -> npt.NDArray[np.int32]:
    """Return Spark's hash of each row, over the columns that determine its partition.

    Supports types that Spark can hash and stateformat keys cannot have: arrays and maps, at any
    depth.
    """
    if not any(pa.types.is_nested(column.type) for column in columns):
        return hash_keys(columns)
    rows = len(columns[0])
    # An array becomes as many columns as it has items, so rows are processed in pieces.
    starts = range(0, rows, _EXPANDED_ROWS) or (0,)
    slices = ([column.slice(start, _EXPANDED_ROWS) for column in columns] for start in starts)
    return np.concatenate([hash_keys([part for column in some for part in _expanded(column)]) for some in slices])


def partitions_of(columns: Sequence[pa.Array], partitions: int) -> npt.NDArray[np.int32]:
    """Return the partition of each row: its hash, floor-mod the number of partitions."""
    return key_groups(spark_hashes(columns), partitions)


def _expanded(column: pa.Array) -> list[pa.Array]:
    """Return columns that together have the hash of one.

    Spark hashes the items of an array one after another, each seeded by the one before, and a null
    not at all: as it hashes columns. So an array is a column for each position, null where the
    array is shorter; a map is an array of keys and values by turns.
    """
    kind = column.type
    if pa.types.is_struct(kind):
        return [part for field in column.flatten() for part in _expanded(field)]
    if not (pa.types.is_list(kind) or pa.types.is_map(kind)):
        return [column]
    offsets = column.offsets.to_numpy().astype(np.int64)
    starts = offsets[:-1]
    lengths = np.where(column.is_valid().to_numpy(zero_copy_only=False), np.diff(offsets), 0)
    items = [column.keys, column.items] if pa.types.is_map(kind) else [column.values]
    longest = int(lengths.max()) if len(lengths) else 0
    if longest > _LONGEST_ARRAY:
        raise UnsupportedFormat(
            f"a key holds an array of {longest} items; keys of up to {_LONGEST_ARRAY} can be compared with their "
            "partition",
            kind=ErrorKind.LIMIT_EXCEEDED,
        )
    if not longest:
        # Nothing to hash: like a column of nulls.
        return [pa.nulls(len(column), pa.int8())]
    found = []
    for index in range(longest):
        places = pa.array(starts + index, mask=index >= lengths)
        found += [part for values in items for part in _expanded(values.take(places))]
    return found


def _non_empty(key: tuple[SparkField, ...], count: int) -> int:
    # The key of a limit is one column of the type void.
    return count if any(has_values(item.type) for item in key) else 0


def infer_operator(operator: int, stores: dict[str, StoreSchema], partitions: int) -> OperatorInfo:
    """Return the operator for Spark 3.5, which writes no operator metadata, from its stores and
    schemas.
    """
    names = tuple(sorted(stores))
    prefix = 0
    missing = sorted({*JOIN_STORES} - stores.keys()) if stores.keys() & {*JOIN_STORES} else []
    if missing:
        path = f"state/{operator}/0/{missing[0]}/_metadata/schema"
        raise damaged(path, "it is missing, and other stores of the join are there", kind=ErrorKind.OBJECT_MISSING)
    if names == tuple(sorted(JOIN_STORES)):
        kind = "symmetricHashJoin"
    else:
        schema = stores.get("default") or next(iter(stores.values()))
        key, value = [item.name for item in schema.key], [item.name for item in schema.value]
        kind = "stateStoreSave" if schema.known else ""
        if key and key[-1] == "sessionStartTime" and value[:1] == ["session_window"]:
            kind, prefix = "sessionWindowStateStoreSaveExec", len(key) - 1
        elif value == ["expiresAtMicros"]:
            kind = "dedupeWithinWatermark"
        elif value == ["__dummy__"]:
            kind = "dedupe"
        elif value and value[0] == "groupState":
            kind = "flatMapGroupsWithState"
        elif len(key) == 1 and not has_values(schema.key[0].type):
            kind = "globalLimit"
    infos = tuple(StoreInfo(name, prefix, partitions) for name in names)
    return OperatorInfo(operator, kind, infos, None, {}, {})

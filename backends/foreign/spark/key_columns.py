"""Which columns a store's key is dealt by: the first of its key row; how many says the operator.

Spark deals rows by ``pmod(murmur3(columns, seed 42), partitions)``, which is our default key hash.
"""

from __future__ import annotations

from typing import Final

from stateformat.errors import ErrorKind, UnsupportedFormat

from .logs import OperatorInfo, StoreInfo
from .schemas import SparkField, StoreSchema, has_values

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
    """Return how many columns of the key row, from the first on, its partition follows from.

    0 where the operator has no keys: one partition holds all. Raises ``UnsupportedFormat`` for an
    operator that is not known, by its name.
    """
    count = len(schema.key)
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


def _non_empty(key: tuple[SparkField, ...], count: int) -> int:
    # The key of a limit is one column of the type void.
    return count if any(has_values(item.type) for item in key) else 0


def infer_operator(operator: int, stores: dict[str, StoreSchema], partitions: int) -> OperatorInfo:
    """Return what Spark 3.5, which writes no operator metadata, says by its stores and schemas."""
    names = tuple(sorted(stores))
    prefix = 0
    if names == tuple(sorted(JOIN_STORES)):
        kind = "symmetricHashJoin"
    else:
        schema = stores.get("default") or next(iter(stores.values()))
        key, value = [item.name for item in schema.key], [item.name for item in schema.value]
        kind = "stateStoreSave"
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

"""What the format requires of a storage, how a URL selects one, and how its requests are counted.

Read ``protocol`` first, then ``addresses``, ``stats`` and ``instrumented``.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterator
from typing import Any, Final

from .._lazy import former
from .addresses import (
    CONTAINER_SCHEMES,
    OBJECT_SCHEMES,
    absolute,
    as_url,
    check_lasting,
    check_no_secrets,
    check_outside,
    check_savepoint_place,
    checkpoint_address,
    is_id,
    is_local,
    lies_in,
    local_path,
    named_address,
    named_below,
    open_storage,
    resolved,
    split_id,
    split_name,
    stores_around,
    without_secrets,
)
from .instrumented import InFront, instrumented, read_input, remembered, whole
from .protocol import (
    REFUSALS,
    TOP_LEVEL,
    CreateOutcome,
    Leftover,
    Link,
    Look,
    ObjectInfo,
    OutputObject,
    Storage,
    check_path,
    check_relative,
    is_object_name,
    is_object_path,
)
from .stats import Stats, retried, stats_of

__all__ = [
    "CONTAINER_SCHEMES",
    "OBJECT_SCHEMES",
    "REFUSALS",
    "TOP_LEVEL",
    "CreateOutcome",
    "InFront",
    "Leftover",
    "Link",
    "Look",
    "ObjectInfo",
    "OutputObject",
    "Stats",
    "Storage",
    "absolute",
    "as_url",
    "check_lasting",
    "check_no_secrets",
    "check_outside",
    "check_path",
    "check_relative",
    "check_savepoint_place",
    "checkpoint_address",
    "instrumented",
    "is_id",
    "is_local",
    "is_object_name",
    "is_object_path",
    "lies_in",
    "local_path",
    "named_address",
    "named_below",
    "open_storage",
    "read_input",
    "remembered",
    "resolved",
    "retried",
    "split_id",
    "split_name",
    "stats_of",
    "stores_around",
    "whole",
    "without_secrets",
]


def _former_folders(storage: Any) -> Iterator[tuple[str, Storage]]:
    folder = whole(storage).folder()
    inside = {} if folder is None else folder.look().folders
    return ((name, inside[name]) for name in sorted(inside) if is_object_name(name))


_PROTOCOLS: Final = (
    *("HasFolder", "HoldsSavepoints", "LinksObjects", "ListsNames"),
    *("MakesDurable", "ReadsAtOnce", "SharesBytes", "TellsLeftovers"),
)
_FORMER: dict[str, Any] = {
    **{name: ABCMeta(name, (), {}) for name in _PROTOCOLS},
    "folder_of": lambda storage: whole(storage).folder(),
    "folders_in": _former_folders,
    "make_durable": lambda storage, paths: whole(storage).make_durable(paths),
    "names": lambda storage, folder: whole(storage).names(folder),
    "names_after": lambda storage, path: whole(storage).names_after(path),
    "reads_at_once": lambda storage: whole(storage).reads_at_once,
}
"""What 0.1 had for methods that only some storages had."""
for _name in _PROTOCOLS:
    # A class may name them as bases beside Storage.
    _FORMER[_name].register(Storage)
_NOW = "every Storage has all methods now, so call them"

__getattr__ = former(__name__, {name: (value, _NOW) for name, value in _FORMER.items()}, leaves_in="0.3")

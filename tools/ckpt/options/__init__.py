"""Arguments and options that commands share.

``common`` declares a command and opens its stores: read it first. ``values`` parses what users
type.
"""

from __future__ import annotations

from .common import (
    STORAGE_OPTIONS,
    Session,
    command,
    engine_option,
    id_of,
    other_store,
    parallelism_options,
    per_operator,
    storage_options,
)
from .values import (
    Address,
    AddressType,
    AgeType,
    CheckpointsType,
    PairType,
    SecondsType,
    TargetType,
    Whole,
    is_local,
    options_for,
)

__all__ = [
    "STORAGE_OPTIONS",
    "Address",
    "AddressType",
    "AgeType",
    "CheckpointsType",
    "PairType",
    "SecondsType",
    "Session",
    "TargetType",
    "Whole",
    "command",
    "engine_option",
    "id_of",
    "is_local",
    "options_for",
    "other_store",
    "parallelism_options",
    "per_operator",
    "storage_options",
]

"""Arguments and options that commands share.

``common`` declares a command and opens its stores: read it first. ``address``, ``parallelism`` and
``seconds`` parse values.
"""

from __future__ import annotations

from .address import Address, AddressType, StorageOptionType, is_local, options_for
from .common import Session, command, id_of, operator_uid, other_store
from .parallelism import PairType, parallelism_options, per_operator
from .seconds import SecondsType

__all__ = [
    "Address",
    "AddressType",
    "PairType",
    "SecondsType",
    "Session",
    "StorageOptionType",
    "command",
    "id_of",
    "is_local",
    "operator_uid",
    "options_for",
    "other_store",
    "parallelism_options",
    "per_operator",
]

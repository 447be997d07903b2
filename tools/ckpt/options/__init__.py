"""Arguments and options that commands share, and the session behind them."""

from __future__ import annotations

from .address import Address, AddressType, StorageOptionType, is_local, options_for
from .common import Session, command, operator_uid, other_store
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
    "is_local",
    "operator_uid",
    "options_for",
    "other_store",
    "parallelism_options",
    "per_operator",
]

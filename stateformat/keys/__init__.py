"""Which key group a key is in, and which subtask owns it (SPEC.md section 5.3).

Read ``groups`` first, then ``hashing``.
"""

from __future__ import annotations

from .groups import (
    MAX_PARALLELISM_LIMIT,
    check_parallelism,
    default_max_parallelism,
    key_group_count,
    key_group_range,
    key_groups,
    range_bounds,
    subtask_of_key_group,
)
from .hashing import (
    DEFAULT_KEY_HASH,
    check_key_types,
    hash_keys,
    key_hash,
    mixed_hashes,
    normalize_key_column,
    register_key_hash,
)

__all__ = [
    "DEFAULT_KEY_HASH",
    "MAX_PARALLELISM_LIMIT",
    "check_key_types",
    "check_parallelism",
    "default_max_parallelism",
    "hash_keys",
    "key_group_count",
    "key_group_range",
    "key_groups",
    "key_hash",
    "mixed_hashes",
    "normalize_key_column",
    "range_bounds",
    "register_key_hash",
    "subtask_of_key_group",
]

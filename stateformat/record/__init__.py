"""The publication record (SPEC.md section 3): the small JSON object that makes a checkpoint exist.

Read ``codec`` (framing, digest, versions), then ``v1`` (the members of version 1), then
``json_members`` (how one member is read, and how its fault is named).
"""

from __future__ import annotations

from .codec import (
    RECORD_BYTES_MAX,
    decode_record,
    encode_record,
    optional_features,
    refuse_null,
    required_features,
    sealed,
    unsealed,
)
from .json_members import Members, RecordFault
from .v1 import MANIFEST_BYTES_MAX, graph_members, members_of, record_of

__all__ = [
    "MANIFEST_BYTES_MAX",
    "RECORD_BYTES_MAX",
    "Members",
    "RecordFault",
    "decode_record",
    "encode_record",
    "graph_members",
    "members_of",
    "optional_features",
    "record_of",
    "refuse_null",
    "required_features",
    "sealed",
    "unsealed",
]

"""The publication record (SPEC.md section 3) and its bytes: ``codec`` chooses a version, ``v1`` is version 1, ``json_members`` reads JSON."""

from __future__ import annotations

from .codec import RECORD_BYTES_MAX, decode_record, encode_record, refuse_null, required_features, sealed, unsealed
from .json_members import Members, RecordFault
from .v1 import MANIFEST_BYTES_MAX, members_of, record_of

__all__ = [
    "MANIFEST_BYTES_MAX",
    "RECORD_BYTES_MAX",
    "Members",
    "RecordFault",
    "decode_record",
    "encode_record",
    "members_of",
    "record_of",
    "refuse_null",
    "required_features",
    "sealed",
    "unsealed",
]

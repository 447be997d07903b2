"""Stores in a bucket of S3.

``storage`` implements the protocol, on a ``place`` in a bucket. ``client`` sends requests,
``obstore`` sends some of the reads, ``errors`` interprets responses, and ``files`` has objects that
are being written or read.
"""

from __future__ import annotations

from .files import PartsUpload, abort_upload, complete_upload, uploads_under
from .place import S3Place, address_of
from .storage import S3Storage, from_url

__all__ = [
    "PartsUpload",
    "S3Place",
    "S3Storage",
    "abort_upload",
    "address_of",
    "complete_upload",
    "from_url",
    "uploads_under",
]

"""Stores on S3: ``storage`` implements the protocol; ``client``, ``errors``, ``files``, ``obstore`` and ``place`` are its parts."""

from __future__ import annotations

from .files import abort_upload, uploads_under
from .place import S3Place, address_of
from .storage import S3Storage, from_url

__all__ = ["S3Place", "S3Storage", "abort_upload", "address_of", "from_url", "uploads_under"]

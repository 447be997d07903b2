"""Storages: where the objects of a store live.

``memory`` is the model, ``local`` (on ``local_tree``) a directory, ``objects`` (on
``object_clients`` and ``object_answers``) a bucket; ``s3`` adds what only S3 has. All use
``checks``, and pass the suite in ``testing``. ``filesystems`` reads what fsspec reaches.
docs/storages.md shows how to write another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stateformat._lazy import lazy

if TYPE_CHECKING:
    from .checks import (
        NewObject as NewObject,
        check_created as check_created,
        check_options as check_options,
        check_prefix as check_prefix,
        check_range as check_range,
        missing as missing,
    )
    from .filesystems import FsspecStorage as FsspecStorage
    from .local import LocalStorage as LocalStorage
    from .memory import MemoryStorage as MemoryStorage
    from .objects import ObjectStorage as ObjectStorage
    from .s3 import S3Storage as S3Storage
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".checks": "NewObject check_created check_options check_prefix check_range missing",
            ".filesystems": "FsspecStorage",
            ".local": "LocalStorage",
            ".memory": "MemoryStorage",
            ".objects": "ObjectStorage",
            ".s3": "S3Storage",
        },
    )

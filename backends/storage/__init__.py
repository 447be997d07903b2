"""Storages: where the objects of a store live.

``memory`` is the model, ``local`` a directory, ``s3`` a bucket.

To write another storage, implement :class:`stateformat.storage.protocol.Storage` and a function
``from_url(url: str, options: Mapping[str, Any]) -> Storage``. Name the function in the entry-point
group ``stateformat.storages`` of your package, under the scheme of its URLs::

    [project.entry-points."stateformat.storages"]
    gs = "mypackage.gcs:from_url"

Three guarantees make a storage fit for checkpoints: everybody reads at once what was written;
``create`` is atomic, and exactly one of many wins; a listing holds every name that existed during
the whole of it. A storage that cannot give one of them raises a ``StorageError`` of kind
``STORAGE_UNSUITABLE`` at the first ``create``.

Then subclass ``StorageConformance`` of ``stateformat.backends.storage.testing.conformance`` (which needs pytest), give
it a ``storage`` fixture that yields an empty storage, and run pytest. Each test checks one
behaviour on which the format rests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stateformat._lazy import lazy

if TYPE_CHECKING:
    from .checks import check_options as check_options
    from .local import LocalStorage as LocalStorage, open_local as open_local
    from .memory import MemoryStorage as MemoryStorage
    from .s3 import S3Storage as S3Storage
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".checks": "check_options",
            ".local": "LocalStorage open_local",
            ".memory": "MemoryStorage",
            ".s3": "S3Storage",
        },
    )

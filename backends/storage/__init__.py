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

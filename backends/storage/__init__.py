"""Storages: where the objects of a store live. ``memory`` is the model, ``local`` a directory, ``s3`` a bucket.

How to write another storage. Write a class that implements :class:`stateformat.storage.Storage` and a function
``from_url(url: str, options: Mapping[str, Any]) -> Storage``, and name the function in the entry-point group
``stateformat.storages`` of your package, under the scheme of its URLs::

    [project.entry-points."stateformat.storages"]
    gs = "mypackage.gcs:from_url"

Three things decide whether a storage is fit for checkpoints: what has been written is read at once by everybody;
``create`` is atomic and lets exactly one of many win; a listing holds every name that existed during the whole of it.
A storage that cannot promise one of them must say so with a ``StorageError`` of kind ``STORAGE_UNSUITABLE`` at the first
``create``, not publish and hope.

Then subclass ``StorageConformance`` of ``backends.storage.conformance`` (which needs pytest), give it a
``storage`` fixture that yields an empty storage, and run pytest: every behaviour that the format rests on is one test.
"""

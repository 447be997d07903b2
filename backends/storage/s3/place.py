"""A prefix of a bucket: the common base of a store and a sink that keep objects there.

Clients belong to the process that made them: they are made on first use, again after a fork, and
never pickled. The options, which may contain credentials, are pickled, but are in no URL, ``repr``
or message.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Final

from stateformat.errors import CheckpointError, ErrorKind, InvalidInput, StorageError
from stateformat.storage import without_secrets

from ..checks import check_options
from .client import S3Client, check_endpoint, check_types, client_of
from .errors import client_errors, endpoint_name, secrets_of, storage_error
from .obstore import check_client

OPTIONS: Final = (
    "anon",
    "client",
    "client_kwargs",
    "config_kwargs",
    "endpoint_url",
    "key",
    "profile",
    "s3_additional_kwargs",
    "secret",
    "token",
    "use_ssl",
)
"""The options, as s3fs names them, and ``client``: what small reads use (``s3.obstore``)."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


def address_of(url: str, options: Mapping[str, Any]) -> tuple[str, str]:
    """Return bucket and prefix of ``s3://bucket/prefix``; checks the options. Raises
    ``InvalidInput``.
    """
    check_options("s3://", options, OPTIONS)
    check_types(options)
    check_client(options)
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if "@" in bucket or ":" in bucket:
        # The address is not repeated: there is a secret before the @.
        raise InvalidInput(
            "an s3:// address names a bucket and nothing else before the first slash. Pass credentials and the "
            "endpoint as options (key, secret, endpoint_url) or in the environment",
            kind=ErrorKind.INVALID_URL,
        )
    parts = prefix.rstrip("/").split("/") if prefix.rstrip("/") else []
    if not _BUCKET.fullmatch(bucket) or any(part in ("", ".", "..") or not part.isprintable() for part in parts):
        raise InvalidInput(
            f"{without_secrets(url)!r} is no address of a store. Write s3://bucket/prefix", kind=ErrorKind.INVALID_URL
        )
    check_endpoint(options)
    if find_spec("s3fs") is None:
        raise InvalidInput(
            f"{url} needs s3fs, which is not installed: pip install 'stateformat[s3]'",
            kind=ErrorKind.MISSING_DEPENDENCY,
        )
    return bucket, "/".join(parts)


class S3Place:
    """The base of classes that work on a prefix of a bucket. Thread-safe, picklable, survives a
    fork.
    """

    def __init__(self, bucket: str, prefix: str, options: dict[str, Any]) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._options = options

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self._bucket, self._prefix, self._options))

    @property
    def _client(self) -> S3Client:
        return client_of(self._options)

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}" if self._prefix else path

    @property
    def _where(self) -> str:
        return f"{self.url} at {endpoint_name(self._options)}"

    def _storage_error(self, error: BaseException, operation: str, path: str) -> StorageError:
        where = f"{path} in {self._where}" if path else self._where
        return storage_error(error, operation, where=where, bucket=self._bucket, secrets=secrets_of(self._options))

    @contextlib.contextmanager
    def _translated(self, operation: str, path: str) -> Iterator[None]:
        """Turn an error of the client into a ``StorageError`` with a sentence."""
        try:
            yield
        except CheckpointError:
            raise
        except client_errors() as error:
            raise self._storage_error(error, operation, path) from error

"""The options of an ``s3://`` storage, under the names of pyiceberg and deltalake."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from .place import Place

_PATIENCE: Final = {"max_retries": "5", "retry_timeout": "30s", "connect_timeout": "4s"}
"""For deltalake, the same as for stateformat's storages; its defaults would wait for minutes."""


def iceberg_properties(place: Place) -> dict[str, str]:
    """Return the properties of a catalog whose tables are there."""
    if place.local is not None:
        return {"py-io-impl": "pyiceberg.io.pyarrow.PyArrowFileIO"}
    names = {
        "endpoint": "s3.endpoint",
        "key": "s3.access-key-id",
        "secret": "s3.secret-access-key",
        "token": "s3.session-token",
        "region": "s3.region",
    }
    found = {names[name]: value for name, value in _access(place.options).items() if name in names}
    anonymous = {"s3.anonymous": "true"} if place.options.get("anon") else {}
    # s3fs looks for credentials where the store's client does.
    return {"py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO", **found, **anonymous}


def delta_options(place: Place) -> dict[str, str]:
    """Return the storage options of a Delta table that is there."""
    if place.local is not None:
        return {}
    names = {
        "endpoint": "AWS_ENDPOINT_URL",
        "key": "AWS_ACCESS_KEY_ID",
        "secret": "AWS_SECRET_ACCESS_KEY",
        "token": "AWS_SESSION_TOKEN",
        "region": "AWS_REGION",
    }
    access = {"region": "us-east-1", **_access(place.options)}
    found = {names[name]: value for name, value in access.items() if name in names}
    plain = {"AWS_ALLOW_HTTP": "true"} if access.get("endpoint", "").startswith("http://") else {}
    anonymous = {"AWS_SKIP_SIGNATURE": "true"} if place.options.get("anon") else {}
    # A commit creates its log entry if it is absent; servers that ignore that condition would lose
    # one.
    return {"AWS_CONDITIONAL_PUT": "etag", **_PATIENCE, **found, **plain, **anonymous}


def _access(options: Mapping[str, Any]) -> dict[str, str]:
    """Return where the server is, and the credentials: options take precedence over the
    environment.
    """
    client = options.get("client_kwargs") or {}
    found = {
        "endpoint": options.get("endpoint_url") or client.get("endpoint_url") or os.environ.get("AWS_ENDPOINT_URL"),
        "key": options.get("key"),
        "secret": options.get("secret"),
        "token": options.get("token"),
        "region": client.get("region_name") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
    }
    profile = options.get("profile")
    if profile is not None or not (found["key"] or options.get("anon")):
        from botocore.session import Session

        session = Session(profile=profile)
        credentials = session.get_credentials()
        if credentials is not None:
            frozen = credentials.get_frozen_credentials()
            found |= {"key": frozen.access_key, "secret": frozen.secret_key, "token": frozen.token}
        found["region"] = found["region"] or session.get_config_variable("region")
    return {name: str(value) for name, value in found.items() if value}

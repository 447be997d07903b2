"""Reading objects of S3 with obstore, if it is installed: an eighth of s3fs's processor time.

Theory of operation. obstore is asked once for a range of an object. After any failure the other
client reads the same range, with its retries and its messages, so errors read the same with obstore
and without it. botocore decides on server, region, addressing and credentials. If obstore might
interpret a setting differently, the other client reads (:class:`Unsuitable`).

obstore's threads do not survive in a forked child, and a read there would wait forever. So it
serves only the process that imported it, and only if no other code imported it before.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import Any, Final
from urllib.parse import urlsplit

from stateformat.errors import ErrorKind, InvalidInput

logger = logging.getLogger(__name__)

CLIENTS: Final = ("obstore", "s3fs")
"""The values of the option ``client``. By default obstore reads if it is installed and can."""
FAILURES_MAX: Final = 8

# obstore asks for credentials again five minutes before they expire, botocore ten.
_CREDENTIALS_FOR: Final = timedelta(minutes=10)
_REQUEST_TIMEOUT: Final = timedelta(hours=1)
_CLIENT_SETTINGS: Final = frozenset(
    ("aws_access_key_id", "aws_secret_access_key", "aws_session_token", "endpoint_url", "region_name", "use_ssl")
)
_S3_SETTINGS: Final = frozenset(("addressing_style", "payload_signing_enabled", "us_east_1_regional_endpoint"))
_CONFIG_SETTINGS: Final = ("proxies", "client_cert", "use_dualstack_endpoint", "use_fips_endpoint")
_CERTIFICATES: Final = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")

_imported_by = 0
"""The process in which this module imported obstore."""


class Unsuitable(Exception):
    """obstore cannot read here. The text is half a sentence that says why."""


def check_client(options: Mapping[str, Any]) -> None:
    """Raise ``InvalidInput`` for a ``client`` option that is unknown or not installed."""
    wanted = options.get("client")
    if wanted is None:
        return
    if wanted not in CLIENTS:
        raise InvalidInput(f"s3:// storage has no client {wanted!r}. Known are {', '.join(CLIENTS)}")
    if wanted == "obstore" and find_spec("obstore") is None:
        raise InvalidInput(
            "client is 'obstore', and obstore is not installed: pip install 'stateformat[obstore]'",
            kind=ErrorKind.MISSING_DEPENDENCY,
        )


class Reader:
    """Reads ranges with obstore if it can, in the process that made it. Thread-safe.

    ``options`` are those of ``s3.from_url``; ``client`` makes botocore's S3 client for them.
    """

    def __init__(self, options: Mapping[str, Any], client: Callable[[], Any]) -> None:
        self._options = options
        self._client = client
        self._stores: dict[str, Any] = {}
        self._failures = 0
        self._off = options.get("client") == "s3fs" or find_spec("obstore") is None

    def read(
        self, bucket: str, key: str, ranges: Sequence[tuple[int, int]], otherwise: Callable[[], list[Any]]
    ) -> list[Any]:
        """Return the bytes of each range (offset, length > 0) of an object, fewer if the object
        ends.

        ``otherwise`` reads what obstore does not, and large reads, which are several ranges. Raises
        what ``otherwise`` raises, and ``InvalidInput`` if ``client="obstore"`` was requested and
        obstore does not know a setting.
        """
        store = self._stores.get(bucket) or self._open(bucket) if len(ranges) == 1 and not self._off else None
        if store is None:
            return otherwise()
        data = _read_range(store, key, *ranges[0])
        if data is not None:
            self._failures = 0
            return [data]
        found = otherwise()
        self._failures += 1
        if self._failures >= FAILURES_MAX:
            self._off = True
            logger.warning(
                "obstore failed %d times in a row where s3fs succeeds. It is not used any more", FAILURES_MAX
            )
        return found

    def _open(self, bucket: str) -> Any:
        try:
            if _is_ours():
                return self._stores.setdefault(bucket, open_store(bucket, self._options, self._client()))
            logger.info(
                "obstore is not used: other code imported it, or it was imported before this process was forked"
            )
        except Unsuitable as why:
            if self._options.get("client") == "obstore":
                raise InvalidInput(f"client is 'obstore', and {why}. Leave the option out, and s3fs reads") from None
            logger.info("obstore is not used: %s", why)
        except Exception as error:
            # The other client finds what is wrong with options and configuration, and reports it.
            logger.info("obstore is not used: %s", type(error).__name__)
        self._off = True
        return None


def _read_range(store: Any, key: str, offset: int, length: int) -> Any:
    """Return the bytes of a range, or ``None``, which says nothing about the object."""
    try:
        found = store.get(key, options={"range": (offset, offset + length)})
        start, stop = found.range
        data = found.buffer()
    except Exception as error:
        # obstore raises built-in errors too: a ValueError for a key that it cannot name.
        logger.debug("obstore does not give %s (%s); s3fs is asked", key, type(error).__name__)
        return None
    return data if start == offset and len(data) == stop - start <= length else None


def _is_ours() -> bool:
    """Return whether this module imported obstore in this process. Imports it if nothing has."""
    global _imported_by
    if not _imported_by and "obstore" not in sys.modules:
        import obstore  # noqa: F401

        _imported_by = os.getpid()
    return _imported_by == os.getpid()


def open_store(bucket: str, options: Mapping[str, Any], client: Any) -> Any:
    """Return obstore's ``S3Store`` that reads what a botocore client reads. Raises
    :class:`Unsuitable`.
    """
    _check_settings(options, client)
    import obstore.store

    s3_store: Any = obstore.store.S3Store
    endpoint = urlsplit(client.meta.endpoint_url)
    style = (client.meta.config.s3 or {}).get("addressing_style", "auto")
    of_amazon = (endpoint.hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
    # As botocore does: the bucket is in the host's name at Amazon, and in the path elsewhere.
    in_host = style == "virtual" or (style != "path" and of_amazon and "." not in bucket)
    url = f"{endpoint.scheme}://{bucket}.{endpoint.netloc}" if in_host else client.meta.endpoint_url
    region = client.meta.region_name
    timeouts = {
        name: timedelta(seconds=getattr(client.meta.config, name)) for name in ("connect_timeout", "read_timeout")
    }
    return s3_store(
        bucket,
        config={
            "endpoint": url,
            # Otherwise the environment's would go before the other one.
            "aws_endpoint_url_s3": url,
            "virtual_hosted_style_request": in_host,
            "region": region if region and region != "aws-global" else "us-east-1",
            "skip_signature": bool(options.get("anon")),
        },
        client_options={**timeouts, "timeout": _REQUEST_TIMEOUT, "allow_http": endpoint.scheme == "http"},
        retry_config={"max_retries": 0},
        credential_provider=None if options.get("anon") else _credentials(options),
    )


def _check_settings(options: Mapping[str, Any], client: Any) -> None:
    """Refuse settings that obstore would interpret differently from botocore."""
    config, of_client = client.meta.config, options.get("client_kwargs") or {}
    endpoint = urlsplit(client.meta.endpoint_url)
    secure = endpoint.scheme == "https"
    read_arguments = client.meta.service_model.operation_model("GetObject").input_shape.members
    found = {
        **{f"client_kwargs {name}": name not in _CLIENT_SETTINGS for name in of_client},
        **{
            f"s3_additional_kwargs {name}": name in read_arguments for name in options.get("s3_additional_kwargs") or {}
        },
        **{f"setting s3 {name}": name not in _S3_SETTINGS and bool(value) for name, value in (config.s3 or {}).items()},
        **{f"setting {name}": bool(getattr(config, name, None)) for name in _CONFIG_SETTINGS},
        **{f"environment variable {name}": bool(os.environ.get(name)) for name in _CERTIFICATES if secure},
        "signature_version": not options.get("anon") and config.signature_version not in ("s3v4", "v4"),
        "endpoint": bool(endpoint.query or "@" in endpoint.netloc),
    }
    if unknown := [name for name, is_unknown in found.items() if is_unknown]:
        raise Unsuitable(f"what obstore would make of {', '.join(unknown)} is not known")


def _credentials(options: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """Return the function that obstore calls for credentials: those that botocore finds and
    renews.
    """
    from botocore.session import Session

    session, of_client = Session(profile=options.get("profile")), options.get("client_kwargs") or {}
    key, secret, token = (
        of_client.get(f"aws_{long}", options.get(short))
        for long, short in (("access_key_id", "key"), ("secret_access_key", "secret"), ("session_token", "token"))
    )
    if key and secret:
        session.set_credentials(key, secret, token)
    found = session.get_credentials()
    if found is None:
        raise Unsuitable("there are no credentials")

    def frozen() -> dict[str, Any]:
        now = found.get_frozen_credentials()
        expires_at = None if key and secret else datetime.now(UTC) + _CREDENTIALS_FOR
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": expires_at,
        }

    return frozen

"""The clients of an S3 store: one that retries, and one that never does.

Requests that can be repeated go through s3fs. A request that fails for a transient reason is
retried only here: the retries of s3fs and of botocore are off, since layers of retries multiply and
neither repeats everything it should (a body that broke off, a 409). Plain botocore sends the
conditional PUT, once. A response is trusted if it is as long as its header says, and is for the
requested range.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Lock
from typing import Any, Final

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.storage import retried, without_secrets

from . import errors as s3_errors
from .errors import BrokenAnswer, RangesIgnored
from .obstore import Reader

logger = logging.getLogger(__name__)

_TIMEOUTS: Final = {"connect_timeout": 4, "read_timeout": 15}
"""In seconds, for one try. An unreachable server is given up after 30 s of tries and pauses."""
TRIES_MAX: Final = 6
"""How often a request is sent, unless the ``retries`` of ``config_kwargs`` say otherwise."""
_SILENCE_SECONDS_MAX: Final = 30
"""How long all tries of a request wait for a server that accepts it and never responds."""
_PAUSE_SECONDS: Final = 0.1
_PAUSE_SECONDS_MAX: Final = 5.0
_OF_AIOBOTOCORE: Final = ("connector_args", "http_session_cls")
_ENDPOINT = re.compile(r"https?://[^/?#]")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")

_CLIENTS: dict[tuple[Any, ...], S3Client] = {}

_TEXTS: Final = ("key", "profile", "secret", "token")
_MAPPINGS: Final = ("client_kwargs", "config_kwargs", "s3_additional_kwargs")


def check_endpoint(options: Mapping[str, Any]) -> None:
    """Refuse an endpoint that is not a URL, or has a query. Raises ``InvalidInput``."""
    endpoint = s3_errors.endpoint_of(options)
    if not endpoint:
        return
    shown = re.split("[?#]", without_secrets(endpoint.rpartition("@")[2]))[0]
    if not _ENDPOINT.match(endpoint):
        raise InvalidInput(
            f"endpoint_url {shown!r} is no URL. Write http:// or https:// and the name of a host, in the option or in "
            "AWS_ENDPOINT_URL",
            kind=ErrorKind.INVALID_URL,
        )
    if "?" in endpoint or "#" in endpoint:
        raise InvalidInput(
            f"endpoint_url {shown!r} goes on with a query. An endpoint is http:// or https://, a host and a port. Pass "
            "credentials as key, secret and token",
            kind=ErrorKind.INVALID_URL,
        )


def check_types(options: Mapping[str, Any]) -> None:
    """Refuse options of a wrong type. Values are not repeated: they may be secrets."""
    for names, kind, called in ((_TEXTS, str, "text"), (_MAPPINGS, Mapping, "a mapping from names to values")):
        for name in names:
            value = options.get(name)
            if value is not None and not isinstance(value, kind):
                raise InvalidInput(
                    f"the option {name} of s3:// storage is of type {type(value).__name__}. It takes {called}"
                )


def check_names(options: Mapping[str, Any]) -> None:
    """Refuse names in ``client_kwargs`` and ``config_kwargs`` that botocore does not know."""
    from inspect import signature

    from botocore.config import Config
    from botocore.session import Session

    accepted = {
        "client_kwargs": set(signature(Session.create_client).parameters) - {"self", "service_name", "config"},
        "config_kwargs": {*Config.OPTION_DEFAULTS, *_OF_AIOBOTOCORE},
    }
    for option, names in accepted.items():
        unknown = sorted(map(str, set(options.get(option) or ()) - names))
        if unknown:
            raise InvalidInput(f"{option} has no {unknown[0]!r}. It takes {', '.join(sorted(names))}", options=unknown)


def client_of(options: Mapping[str, Any]) -> S3Client:
    """The client of this process for these options and this AWS environment, made on first use.

    Storages share it: making one takes some 0.2 s, and a worker gets a storage with every task. The
    process id is part of the key, since a client does not survive a fork. There is no lock, which a
    fork could copy in its locked state: two threads may each make a client, and one is kept.
    """
    environment = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
    key = (os.getpid(), repr(sorted(options.items())), environment)
    return _CLIENTS.get(key) or _CLIENTS.setdefault(key, S3Client(options))


def _unusable(error: Exception, options: Mapping[str, Any]) -> InvalidInput:
    return InvalidInput(
        "no S3 client can be made with these options "
        f"({s3_errors.redacted(str(error), s3_errors.secrets_of(options))}). Check client_kwargs and config_kwargs"
    )


def _tries_of(retries: Any) -> int:
    try:
        tries = int(retries.get("total_max_attempts") or retries.get("max_attempts", TRIES_MAX - 1) + 1)
    except (AttributeError, TypeError, ValueError):
        raise InvalidInput(
            f"config_kwargs['retries'] is {retries!r:.80}. It takes a mapping like {{'total_max_attempts': 6}}"
        ) from None
    if tries < 1:
        raise InvalidInput(f"config_kwargs['retries'] allows {tries} tries. At least 1 is needed")
    return tries


class S3Client:
    """What one process uses to talk to the server. Thread-safe. Never pickled."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import s3fs

        check_names(options)
        self._options = options
        self._reader = Reader(options, self.prepare)
        of_s3fs = {name: value for name, value in options.items() if name != "client"}
        config = {**_TIMEOUTS, **(options.get("config_kwargs") or {})}
        retries = config.pop("retries", None) or {}
        config["retries"] = {"total_max_attempts": 1, "mode": "standard"}
        self._tries = _tries_of(retries)
        # The instance cache would give the parent's instance to a forked child.
        self._fs: Any = s3fs.S3FileSystem(
            **{**of_s3fs, "config_kwargs": config}, use_listings_cache=False, skip_instance_cache=True
        )
        self._fs.retries = 1
        self._lock = Lock()
        self._single: Any = None

    def call(self, method: str, **arguments: Any) -> Any:
        """Call an operation of botocore's S3 client, by name, with retries. It must be safe to
        repeat.
        """
        return self._run(lambda: self._fs._call_s3(method, **arguments))

    def begin(self, method: str, **arguments: Any) -> Future[Any]:
        """The same in the background."""
        attempt = self._retry(lambda: self._fs._call_s3(method, **arguments))
        return asyncio.run_coroutine_threadsafe(attempt, self._fs.loop)

    def read(self, bucket: str, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range (offset, length > 0) of an object, all at once.

        Fewer if the object ends earlier. Obstore reads if it can (``s3.obstore``). Raises
        ``RangesIgnored``, and what botocore and aiohttp raise.
        """

        async def read_all() -> list[bytes]:
            each = [self._retry(partial(self._get, bucket, key, *span)) for span in ranges]
            return list(await asyncio.gather(*each))

        from fsspec.asyn import sync

        return self._reader.read(bucket, key, ranges, otherwise=lambda: sync(self._fs.loop, read_all))

    def put_if_absent(self, bucket: str, key: str, body: bytes) -> None:
        """Send exactly one PUT with ``If-None-Match: *``. Raises what botocore raises."""
        self.prepare().put_object(Bucket=bucket, Key=key, Body=body, IfNoneMatch="*", **self._put_options)

    def prepare(self) -> Any:
        """Return the client that never retries, made on first use. Raises what botocore raises."""
        with self._lock:
            if self._single is None:
                try:
                    self._single = self._make_single()
                except (AttributeError, TypeError) as error:
                    raise _unusable(error, self._options) from error
            return self._single

    def _run(self, attempt: Callable[[], Awaitable[Any]]) -> Any:
        from fsspec.asyn import sync

        return sync(self._fs.loop, self._retry, attempt)

    async def _retry(self, attempt: Callable[[], Awaitable[Any]]) -> Any:
        silence = 0.0
        for number in range(1, self._tries + 1):
            begun = time.monotonic()
            try:
                return await attempt()
            except (AttributeError, TypeError) as error:
                if self._fs._s3 is not None:
                    raise
                raise _unusable(error, self._options) from error
            except Exception as error:
                if s3_errors.is_silence(error):
                    silence += time.monotonic() - begun
                if number == self._tries or not s3_errors.is_passing(error) or silence >= _SILENCE_SECONDS_MAX:
                    raise
                pause = min(_PAUSE_SECONDS * 2 ** (number - 1), _PAUSE_SECONDS_MAX)
                why = type(error).__name__
                logger.warning("a request failed (%s): retry %d of %d in %.2f s", why, number, self._tries - 1, pause)
                retried(pause)
                await asyncio.sleep(pause)
        raise AssertionError("there is no last try")

    async def _get(self, bucket: str, key: str, offset: int, length: int) -> bytes:
        span = f"bytes={offset}-{offset + length - 1}"
        answer = await self._fs._call_s3("get_object", Bucket=bucket, Key=key, Range=span)
        try:
            data: bytes = await answer["Body"].read()
        finally:
            answer["Body"].close()
        found = _CONTENT_RANGE.fullmatch(answer.get("ContentRange", ""))
        if found is None:
            # The server sent the whole object, which will do if it is no longer than the requested
            # range.
            if offset or len(data) > length:
                raise RangesIgnored(len(data))
            due = int(answer.get("ContentLength", len(data)))
        else:
            first, last = int(found[1]), int(found[2])
            due = last + 1 - first
            end = offset + length if found[3] == "*" else min(offset + length, int(found[3]))
            if first != offset or last + 1 > end or (last + 1 < end and found[3] != "*"):
                raise RangesIgnored(due)
        if len(data) != due:
            raise BrokenAnswer(f"{len(data)} bytes came of {due}")
        return data

    def _make_single(self) -> Any:
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.session import Session

        options = self._options
        config = {
            **_TIMEOUTS,
            **(options.get("config_kwargs") or {}),
            "retries": {"total_max_attempts": 1, "mode": "standard"},
        }
        for name in _OF_AIOBOTOCORE:
            config.pop(name, None)
        arguments = {
            "endpoint_url": options.get("endpoint_url"),
            "use_ssl": options.get("use_ssl", True),
            "aws_access_key_id": options.get("key"),
            "aws_secret_access_key": options.get("secret"),
            "aws_session_token": options.get("token"),
            **(options.get("client_kwargs") or {}),
        }
        if options.get("anon"):
            config["signature_version"] = UNSIGNED
        single = Session(profile=options.get("profile")).create_client("s3", config=Config(**config), **arguments)
        accepted = single.meta.service_model.operation_model("PutObject").input_shape.members
        additional = options.get("s3_additional_kwargs") or {}
        self._put_options = {name: value for name, value in additional.items() if name in accepted}
        return single

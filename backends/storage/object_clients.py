"""Addresses and options of object stores, and obstore's clients for them.

Theory of operation. Every request that may be sent twice is retried here, on a client that does not
retry: so retries are counted, bounded by one rule, and include what obstore leaves out (a 409, a
body that broke off). Only the parts of a large object are sent, and retried, by obstore itself. The
conditional create is sent once.

obstore's threads do not survive in a forked child, and a request there would wait forever. So a
child that was forked after obstore had been imported is refused with a sentence.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

from stateformat.errors import CheckpointError, ErrorKind, InvalidInput, StorageError
from stateformat.storage import CONTAINER_SCHEMES, OBJECT_SCHEMES, retried, without_secrets

from . import object_answers as answers
from .checks import check_options

logger = logging.getLogger(__name__)

T = TypeVar("T")

TRIES_MAX: Final = 6
"""How often a request is sent, unless options say otherwise."""
_SILENCE_SECONDS_MAX: Final = 30
"""How long all tries of a request wait for a server that accepts it and never responds."""
_PAUSE_SECONDS: Final = 0.1
_PAUSE_SECONDS_MAX: Final = 5.0
_CONNECT_SECONDS: Final = 4.0
_READ_SECONDS: Final = 15.0
_REQUEST_TIMEOUT: Final = timedelta(hours=1)
# obstore asks for credentials again five minutes before they expire, botocore ten.
_CREDENTIALS_FOR: Final = timedelta(minutes=10)

_BUCKET: Final = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._$-]{1,254}")
_ACCOUNT: Final = re.compile(r"([a-z0-9]{3,24})\.(?:dfs|blob)\.(core\.[a-z0-9.-]+)")
_DOMAIN: Final = "core.windows.net"
_ENDPOINT: Final = re.compile(r"https?://[^/?#]")

_COMMON: Final = ("anon", "connect_timeout", "endpoint_url", "read_timeout", "tries")
_NO_CREDENTIALS: Final = ("account_name", "config_kwargs", "region", "s3_additional_kwargs", "use_ssl", "verify")
_OF_CLIENT: Final = {
    "aws_access_key_id": "key",
    "aws_secret_access_key": "secret",
    "aws_session_token": "token",
    "endpoint_url": "endpoint_url",
    "region_name": "region",
    "use_ssl": "use_ssl",
    "verify": "verify",
}
"""The ``client_kwargs`` of s3fs, and the options that they are."""
_OF_CONFIG: Final = ("connect_timeout", "max_pool_connections", "proxies", "read_timeout", "retries", "s3")
_OF_OBJECTS: Final = {
    "BucketKeyEnabled": "sse_bucket_key_enabled",
    "RequestPayer": "request_payer",
    "SSEKMSKeyId": "sse_kms_key_id",
    "ServerSideEncryption": "server_side_encryption",
}
"""The ``s3_additional_kwargs`` of s3fs, and the settings of obstore that they are."""


class Service(NamedTuple):
    """A kind of object store. ``options``: its own, with obstore's name where that is all."""

    name: str
    scheme: str
    extra: str
    options: Mapping[str, str]
    rights: Mapping[str, str]
    secrets: tuple[str, ...]


S3: Final = Service(
    "S3",
    "s3",
    "s3",
    {
        "key": "access_key_id",
        "secret": "secret_access_key",
        "token": "session_token",
        "region": "region",
        **dict.fromkeys(("client_kwargs", "config_kwargs", "profile", "s3_additional_kwargs", "use_ssl", "verify"), ""),
    },
    {
        **dict.fromkeys(("list", "look for"), "s3:ListBucket"),
        **dict.fromkeys(("read", "look at"), "s3:GetObject"),
        **dict.fromkeys(("write", "create", "copy"), "s3:PutObject"),
        "delete": "s3:DeleteObject",
        "list the uploads of": "s3:ListBucketMultipartUploads",
        "abort the upload of": "s3:AbortMultipartUpload",
    },
    ("key", "secret", "token"),
)
GCS: Final = Service(
    "Google Cloud Storage",
    "gs",
    "gcs",
    {name: name for name in ("application_credentials", "service_account", "service_account_key", "token")},
    {
        **dict.fromkeys(("list", "look for"), "storage.objects.list"),
        **dict.fromkeys(("read", "look at"), "storage.objects.get"),
        **dict.fromkeys(("write", "create", "copy"), "storage.objects.create"),
        "delete": "storage.objects.delete",
    },
    ("service_account_key", "token"),
)
_AZURE_OWN: Final = (
    *("account_name", "account_key", "authority_host", "client_id", "client_secret", "federated_token_file"),
    *("msi_endpoint", "object_id", "tenant_id", "use_azure_cli"),
)
_AZURE_LOSES: Final = ("client_secret", "federated_token_file", "use_azure_cli", "msi_endpoint", "object_id")
_AZURE_WINS: Final = ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_TOKEN")
"""Variables that obstore takes before these options."""
AZURE: Final = Service(
    "Azure",
    "az",
    "azure",
    {**{name: name for name in _AZURE_OWN}, "sas_token": "sas_key"},
    {
        **dict.fromkeys(("list", "look for", "read", "look at"), "Storage Blob Data Reader"),
        **dict.fromkeys(("write", "create", "copy", "delete"), "Storage Blob Data Contributor"),
    },
    ("account_key", "client_secret", "sas_token"),
)
_SERVICES: Final = {scheme: {"s3": S3, "gs": GCS, "az": AZURE}[own] for scheme, own in OBJECT_SCHEMES.items()}


def service_of(scheme: str) -> Service | None:
    """Return the service whose addresses begin so; None for other schemes."""
    return _SERVICES.get(scheme.lower())


class Place(NamedTuple):
    """A bucket or container; ``account`` of Azure, empty if options or the environment name it, in
    the cloud that has this ``domain``.
    """

    scheme: str
    bucket: str
    account: str = ""
    domain: str = _DOMAIN

    @property
    def service(self) -> Service:
        return _SERVICES[self.scheme]

    @property
    def url(self) -> str:
        if self.account:
            return f"abfss://{self.bucket}@{self.account}.dfs.{self.domain}"
        return f"{self.scheme}://{self.bucket}"


def configured(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for a URL, and what they leave out of those in fsspec's configuration
    (``~/.config/fsspec``, ``FSSPEC_S3_ENDPOINT_URL``), under any scheme of the service.

    Credentials come all from one of the two. What fsspec's own filesystem alone knows is left out.
    """
    # Most have none, and fsspec is not imported to find that out.
    if not (
        "fsspec" in sys.modules or Path("~/.config/fsspec").expanduser().is_dir() or "FSSPEC_" in " ".join(os.environ)
    ):
        return dict(options)
    from fsspec.config import conf

    service = _SERVICES[url.partition("://")[0].lower()]
    credentials = {*service.options, "anon"} - set(_NO_CREDENTIALS)
    known = {*_COMMON, *service.options} - (credentials if credentials & options.keys() else set())
    sections = [conf.get(scheme) or {} for scheme, of in _SERVICES.items() if of is service]
    found = {name: value for section in sections for name, value in section.items() if name in known}
    # Variables of the environment are texts.
    truths = {"true": True, "false": False}
    flags = found.keys() & {"anon", "use_azure_cli", "use_ssl", "verify"}
    return found | {name: truths.get(str(found[name]).lower(), found[name]) for name in flags} | dict(options)


def place_of(url: str, options: Mapping[str, Any]) -> tuple[Place, str]:
    """Return the place and the prefix that a URL names; checks the options. Raises
    ``InvalidInput``.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    service = _SERVICES[scheme]
    check_options(f"{scheme}://", options, (*_COMMON, *service.options))
    _check_types(service, options)
    _check_credentials(service, options)
    if re.search(r"[?#].*=", rest, re.DOTALL):
        # The address is not repeated: what follows may be a signature.
        raise InvalidInput(
            f"the {scheme}:// address goes on with a query, after a ? or #. Addresses are stored and shown: pass "
            f"credentials as options ({', '.join(service.secrets)}) or in the environment",
            kind=ErrorKind.INVALID_URL,
        )
    bucket, _, prefix = rest.partition("/")
    account, domain = "", _DOMAIN
    if service is AZURE and "@" in bucket:
        bucket, _, host = bucket.partition("@")
        if host.endswith(".fabric.microsoft.com"):
            raise InvalidInput(
                f"the {scheme}:// address in Microsoft Fabric (OneLake) is no store: it is no storage account. Give a "
                "container of Azure Storage, as CONTAINER@ACCOUNT.dfs.core.windows.net",
                kind=ErrorKind.INVALID_URL,
            )
        found = _ACCOUNT.fullmatch(host)
        account, domain = found.groups() if found else ("@", "")
    if "@" in bucket or ":" in bucket or account == "@":
        # The address is not repeated: there may be a secret before the @.
        raise InvalidInput(
            f"an address with {scheme}:// names a bucket and nothing else before the first slash"
            + (", or CONTAINER@ACCOUNT.dfs.core.windows.net" if service is AZURE else "")
            + ". Pass credentials and the endpoint as options (endpoint_url …) or in the environment",
            kind=ErrorKind.INVALID_URL,
        )
    parts = prefix.rstrip("/").split("/") if prefix.rstrip("/") else []
    if not _BUCKET.fullmatch(bucket) or any(part in ("", ".", "..") or not part.isprintable() for part in parts):
        form = "bucket/prefix, with a bucket of 2 to 255 characters"
        if scheme in CONTAINER_SCHEMES:
            form = "CONTAINER@ACCOUNT.dfs.core.windows.net/prefix, with a container of 3 to 63 characters"
        raise InvalidInput(
            f"{without_secrets(url)!r} is no address of a store. Write {scheme}://{form}",
            kind=ErrorKind.INVALID_URL,
        )
    if account and options.get("account_name") not in (None, account):
        raise InvalidInput(
            f"the address is in the account {account!r}, and the option account_name is "
            f"{options['account_name']!r:.80}. Leave the option out, or write {scheme}://{bucket}/prefix",
            kind=ErrorKind.INVALID_URL,
        )
    _check_endpoint(service, options)
    if find_spec("obstore") is None:
        raise InvalidInput(
            f"{without_secrets(url)} needs obstore, which is not installed: pip install 'stateformat[{service.extra}]'",
            kind=ErrorKind.MISSING_DEPENDENCY,
        )
    return Place(service.scheme, bucket, account, domain), "/".join(parts)


def endpoint_of(service: Service, options: Mapping[str, Any]) -> str:
    """Return the endpoint of options or environment; empty for the service's own."""
    if service is not S3:
        return str(options.get("endpoint_url") or "")
    heeded = not _ignores_endpoints(os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"))
    from_environment = heeded and (os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"))
    return str(s3_options(options).get("endpoint_url") or from_environment or "")


def server_name(service: Service, options: Mapping[str, Any]) -> str:
    """Return how messages name the server: the endpoint without user and password, or the
    service.
    """
    url = endpoint_of(service, options)
    if service is S3:
        # A message is about the options, not about a profile that is missing.
        with contextlib.suppress(Exception):
            url = s3_access(options)["endpoint_url"]
    if not url:
        return "AWS" if service is S3 else service.name
    parsed = urlsplit(url)
    return f"{parsed.scheme}://{parsed.netloc.rpartition('@')[2]}"


def secrets_of(service: Service, options: Mapping[str, Any]) -> list[str]:
    """Return what no message may show, though a server or client may put it into its own."""
    hidden = [options.get(name) for name in service.secrets]
    hidden += [value for name, value in (options.get("client_kwargs") or {}).items() if name.startswith("aws_")]
    return [str(text) for text in hidden if text]


def _check_types(service: Service, options: Mapping[str, Any]) -> None:
    """Refuse options of a wrong type. Values are not repeated: they may be secrets."""
    mappings = ("client_kwargs", "config_kwargs", "s3_additional_kwargs")
    for name, value in options.items():
        kind, called = (str, "text") if name in {*service.secrets, "account_name", "profile"} else (object, "")
        kind, called = (Mapping, "a mapping from names to values") if name in mappings else (kind, called)
        if value is not None and not isinstance(value, kind):
            raise InvalidInput(
                f"the option {name} of {service.scheme}:// storage is of type {type(value).__name__}. It takes {called}"
            )


def _check_credentials(service: Service, options: Mapping[str, Any]) -> None:
    """Refuse credentials that are not whole: clients would silently take others, of the
    environment.
    """
    given = s3_options(options) if service is S3 else options
    if empty := [name for name in service.secrets if given.get(name) == ""]:
        raise InvalidInput(
            f"the option {empty[0]} of {service.scheme}:// storage is empty. Give it, or leave it out to take the "
            "environment's",
            options=empty,
        )
    own = [name for name in _AZURE_LOSES if given.get(name)] if service is AZURE else []
    before = [name for name in _AZURE_WINS if os.environ.get(name)]
    if own and before and not (given.get("account_key") or given.get("sas_token")):
        raise InvalidInput(
            f"the option {own[0]} of az:// storage is given, and Azure's client would take {before[0]} of the "
            "environment before it. Unset that variable",
            options=own,
        )
    there = [name for name in S3.secrets if given.get(name)] if service is S3 else []
    if there and (lacking := [name for name in ("key", "secret") if name not in there]):
        raise InvalidInput(
            f"the options of s3:// storage have {' and '.join(there)} and no {' and no '.join(lacking)}. Give key and "
            "secret, or leave all out to take the environment's",
            options=there,
        )


def _check_endpoint(service: Service, options: Mapping[str, Any]) -> None:
    endpoint = endpoint_of(service, options)
    if not endpoint:
        return
    shown = re.split("[?#]", without_secrets(endpoint.rpartition("@")[2]))[0]
    variable = ", in the option or in AWS_ENDPOINT_URL" if service is S3 else ""
    if not _ENDPOINT.match(endpoint):
        raise InvalidInput(
            f"endpoint_url {shown!r} is no URL. Write http:// or https:// and the name of a host{variable}",
            kind=ErrorKind.INVALID_URL,
        )
    if "?" in endpoint or "#" in endpoint:
        raise InvalidInput(
            f"endpoint_url {shown!r} goes on with a query. An endpoint is http:// or https://, a host and a port. Pass "
            "credentials as options",
            kind=ErrorKind.INVALID_URL,
        )


# Clients

_CLIENTS: dict[tuple[Any, ...], Client] = {}
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = "obstore" in sys.modules


os.register_at_fork(after_in_child=_after_fork)


def client_of(place: Place, options: Mapping[str, Any]) -> Client:
    """The client of this process for a place, these options and this environment, made on first
    use.

    Storages share it. The process id is part of the key, and there is no lock, which a fork could
    copy in its locked state: two threads may each make a client, and one is kept.
    """
    environment = tuple(
        sorted(item for item in os.environ.items() if item[0].startswith(("AWS_", "AZURE_", "GOOGLE_")))
    )
    key = (os.getpid(), place, repr(sorted(options.items())), environment)
    return _CLIENTS.get(key) or _CLIENTS.setdefault(key, Client(place, options))


class Client:
    """obstore's stores of one bucket. Thread-safe. Never pickled."""

    def __init__(self, place: Place, options: Mapping[str, Any]) -> None:
        self.place = place
        self._options = options
        self._lock = Lock()
        self._made_once: dict[object, Any] = {}
        self.timeouts, self.tries = _patience(options)

    @property
    def once(self) -> Any:
        """The store that never retries."""
        return self.made(0, lambda: self._store(0))

    @property
    def patient(self) -> Any:
        """The store that retries by itself, for the parts of large objects."""
        return self.made(self.tries, lambda: self._store(self.tries - 1))

    def call(self, function: Callable[..., T], *arguments: Any, **more: Any) -> T:
        """Call a function with :attr:`once` and these arguments, with retries. It must be safe to
        repeat.
        """
        return self.retrying(lambda: function(self.once, *arguments, **more))

    def retrying(self, attempt: Callable[[], T]) -> T:
        """Return what an attempt returns, if need be a later one."""
        silence = 0.0
        for number in range(1, self.tries + 1):
            begun = time.monotonic()
            try:
                return attempt()
            except CheckpointError:
                raise
            except answers.client_errors() as error:
                if answers.is_silence(error):
                    silence += time.monotonic() - begun
                if number == self.tries or not answers.is_passing(error) or silence >= _SILENCE_SECONDS_MAX:
                    raise
                pause = min(_PAUSE_SECONDS * 2 ** (number - 1), _PAUSE_SECONDS_MAX)
                why = type(error).__name__
                logger.warning("a request failed (%s): retry %d of %d in %.2f s", why, number, self.tries - 1, pause)
                retried(pause)
                time.sleep(pause)
        raise AssertionError("there is no last try")

    def made(self, name: object, make: Callable[[], T]) -> T:
        """Return what was made under a name, the first time by this function."""
        with self._lock:
            if name not in self._made_once:
                self._made_once[name] = make()
            return self._made_once[name]  # type: ignore[no-any-return]

    def _store(self, retries: int) -> Any:
        if _forked:
            raise StorageError(
                f"{self.place.url} cannot be used in process {os.getpid()}: it was forked from one that used "
                "obstore, whose threads a fork does not copy. Start workers by 'spawn' or 'forkserver' "
                "(multiprocessing.get_context), or open the store in the workers only",
                kind=ErrorKind.STORAGE_UNSUITABLE,
            )
        from obstore import store as stores
        from obstore.exceptions import BaseError

        service = self.place.service
        make: Any = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[self.place.scheme]
        try:
            settings = {"s3": _s3_settings, "gs": _gcs_settings, "az": _azure_settings}[service.scheme](
                self.place, self._options
            )
            client = {**self.timeouts, "timeout": _REQUEST_TIMEOUT, **settings.pop("client_options", {})}
            backoff = {"init_backoff": timedelta(seconds=_PAUSE_SECONDS)}
            retrying = {"max_retries": retries, "retry_timeout": timedelta(seconds=60), "backoff": backoff}
            return make(self.place.bucket, client_options=client, retry_config=retrying, **settings)
        except CheckpointError:
            raise
        except (BaseError, TypeError, ValueError) as error:
            if "Account must be specified" in str(error):
                raise InvalidInput(
                    f"{self.place.url} names no account of Azure. Write abfss://{self.place.bucket}@ACCOUNT.dfs."
                    "core.windows.net/prefix, pass the option account_name, or set AZURE_STORAGE_ACCOUNT_NAME",
                    kind=ErrorKind.INVALID_URL,
                ) from error
            shown = answers.redacted(str(error).partition("\n")[0], secrets_of(service, self._options))
            raise InvalidInput(
                f"no {service.name} client can be made with these options ({shown}). Check them, and the environment"
            ) from error


def _patience(options: Mapping[str, Any]) -> tuple[dict[str, timedelta], int]:
    """Return the timeouts of one try, and the number of tries."""
    config = options.get("config_kwargs") or {}
    retries = config.get("retries")
    asked, takes = f"tries is {options.get('tries')!r:.80}", "a number"
    if retries:
        asked, takes = f"config_kwargs['retries'] is {retries!r:.80}", "a mapping like {'total_max_attempts': 6}"
    try:
        tries = int(options.get("tries", TRIES_MAX))
        if retries:
            tries = int(retries.get("total_max_attempts", retries.get("max_attempts", TRIES_MAX - 1) + 1))
    except (AttributeError, TypeError, ValueError):
        raise InvalidInput(f"{asked}. It takes {takes}") from None
    if tries < 1:
        raise InvalidInput(f"{asked}, which allows {tries} tries. At least 1 is needed")
    timeouts = {}
    for name, usual in (("connect_timeout", _CONNECT_SECONDS), ("read_timeout", _READ_SECONDS)):
        given = options.get(name, config.get(name, usual))
        try:
            timeouts[name] = timedelta(seconds=float(given))
        except (TypeError, ValueError, OverflowError):
            raise InvalidInput(f"{name} is {given!r:.80}. It takes seconds") from None
        if timeouts[name] <= timedelta(0):
            raise InvalidInput(f"{name} is {given!r:.80}. It takes seconds, more than 0")
    return timeouts, tries


def _gcs_settings(_: Place, options: Mapping[str, Any]) -> dict[str, Any]:
    config = {name: options[name] for name in GCS.options if options.get(name) and name != "token"}
    endpoint, settings = endpoint_of(GCS, options), {}
    if endpoint:
        config["base_url"] = endpoint
    if options.get("anon"):
        config["skip_signature"] = True
    token = options.get("token") or ("" if options.get("anon") else None)
    if token is not None:
        # obstore signs what writes even without credentials.
        settings["credential_provider"] = lambda: {"token": token, "expires_at": None}
    return {"config": config, "client_options": {"allow_http": endpoint.startswith("http://")}, **settings}


def _azure_settings(place: Place, options: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if token := options.get("sas_token"):
        # Otherwise a key of the environment would go before it.
        settings["credential_provider"] = lambda: {"sas_token": token.removeprefix("?"), "expires_at": None}
    config = {theirs: options[name] for name, theirs in AZURE.options.items() if options.get(name)}
    endpoint = endpoint_of(AZURE, options)
    if place.account:
        config["account_name"] = place.account
        # Otherwise obstore goes to the public cloud, or where the environment says.
        endpoint = endpoint or f"https://{place.account}.blob.{place.domain}"
    if endpoint:
        config["endpoint"] = endpoint
    if options.get("anon"):
        config["skip_signature"] = True
    return {"config": config, "client_options": {"allow_http": endpoint.startswith("http://")}, **settings}


def _s3_settings(place: Place, options: Mapping[str, Any]) -> dict[str, Any]:
    given = s3_access(options)
    session, endpoint, config = given["session"], given["endpoint_url"], given.get("config_kwargs") or {}
    settings = {"region": given["region"], "conditional_put": "etag", "skip_signature": bool(given.get("anon"))}
    settings |= headers_of_objects(options)
    settings |= _addressing(place.bucket, endpoint, (config.get("s3") or {}).get("addressing_style", "auto"))
    client: dict[str, Any] = {"allow_http": endpoint.startswith("http://")}
    if proxy := (config.get("proxies") or {}).get(urlsplit(endpoint).scheme or "https"):
        client["proxy_url"] = proxy
    verify = given.get("verify", os.environ.get("AWS_CA_BUNDLE") or os.environ.get("REQUESTS_CA_BUNDLE"))
    if verify is False:
        client["allow_invalid_certificates"] = True
    elif isinstance(verify, str):
        client["root_certificate"] = Path(verify).read_bytes()
    provider: Callable[[], dict[str, Any]] | None = None
    if given.get("key"):
        # Otherwise the environment's token would go with them.
        mine = {"access_key_id": given["key"], "secret_access_key": given["secret"], "token": given.get("token")}
        provider = lambda: {**mine, "expires_at": None}  # noqa: E731
    elif session is not None and not given.get("anon"):
        provider = _credentials(session)
    return {"config": settings, "client_options": client, "credential_provider": provider}


def _addressing(bucket: str, endpoint: str, style: str) -> dict[str, Any]:
    """Put the bucket into the host's name at Amazon, and into the path elsewhere, as botocore
    does.
    """
    host = urlsplit(endpoint).hostname or ""
    of_amazon = not endpoint or host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
    in_host = style == "virtual" or (style != "path" and of_amazon and "." not in bucket)
    found: dict[str, Any] = {"virtual_hosted_style_request": in_host}
    if endpoint:
        parsed = urlsplit(endpoint)
        url = f"{parsed.scheme}://{bucket}.{parsed.netloc}{parsed.path}".rstrip("/") if in_host else endpoint
        # Without the second, the environment's would go before the first.
        found |= {"endpoint": url, "aws_endpoint_url_s3": url}
    return found


def s3_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, with those of ``client_kwargs`` under their own names."""
    accepted = {"client_kwargs": _OF_CLIENT, "config_kwargs": _OF_CONFIG, "s3_additional_kwargs": _OF_OBJECTS}
    for option, names in accepted.items():
        if unknown := sorted(map(str, set(options.get(option) or ()) - set(names))):
            raise InvalidInput(f"{option} has no {unknown[0]!r}. It takes {', '.join(sorted(names))}", options=unknown)
    of_client = {_OF_CLIENT[name]: value for name, value in (options.get("client_kwargs") or {}).items()}
    return {name: value for given in (of_client, options) for name, value in given.items() if value is not None}


def headers_of_objects(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``s3_additional_kwargs`` as obstore's settings."""
    given = s3_options(options).get("s3_additional_kwargs") or {}
    return {_OF_OBJECTS[name]: value for name, value in given.items()}


def s3_access(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return :func:`s3_options` as every client of S3 takes them: with what the environment and
    the AWS configuration say of ``endpoint_url`` and ``region``, and botocore's ``session`` if one
    had to be asked for them or for credentials.
    """
    given = s3_options(options)
    endpoint, session = endpoint_of(S3, options), None
    region = given.get("region") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if find_spec("botocore") is None:
        if given.get("profile"):
            raise InvalidInput(
                "the option profile needs botocore, which is not installed: pip install botocore",
                kind=ErrorKind.MISSING_DEPENDENCY,
            )
    elif not (endpoint and region and (given.get("key") or given.get("anon"))):
        from botocore.session import Session

        session = Session(profile=given.get("profile"))
        endpoint = endpoint or _endpoint_of_profile(session)
        region = region or session.get_config_variable("region")
        if endpoint and not _ENDPOINT.match(endpoint):
            raise StorageError(
                f"cannot use s3://: Invalid endpoint: {endpoint.rpartition('@')[2]}. Check the options, the variables "
                "AWS_... and the AWS configuration"
            )
    if given.get("use_ssl") is False:
        if not endpoint:
            raise InvalidInput(
                "the option use_ssl is false without an endpoint: Amazon is asked by https:// only. Give endpoint_url"
            )
        endpoint = endpoint.replace("https://", "http://", 1)
    return {
        **given,
        "endpoint_url": endpoint,
        "region": region if region and region != "aws-global" else "us-east-1",
        "session": session,
    }


def _ignores_endpoints(given: Any) -> bool:
    return str(given).lower() == "true"


def _endpoint_of_profile(session: Any) -> str:
    """Return the endpoint in the AWS configuration of botocore's session; empty for none."""
    profile = session.get_scoped_config()
    if _ignores_endpoints(session.get_config_variable("ignore_configured_endpoint_urls")):
        return ""
    services = session.full_config.get("services", {}).get(profile.get("services")) or {}
    return str((services.get("s3") or {}).get("endpoint_url") or profile.get("endpoint_url") or "")


def _credentials(session: Any) -> Callable[[], dict[str, Any]]:
    """Return the function that obstore calls for credentials: those that botocore finds and
    renews.
    """
    found = session.get_credentials()
    if found is None:
        from botocore.exceptions import NoCredentialsError

        raise NoCredentialsError

    def frozen() -> dict[str, Any]:
        now = found.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_FOR,
        }

    return frozen


class ObjectPlace:
    """A prefix of a bucket: the base of stores and sinks. Thread-safe.

    Clients belong to the process that made them: they are made on first use, and never pickled. The
    options, which may contain credentials, are pickled, but are in no URL, ``repr`` or message.
    """

    def __init__(self, place: Place, prefix: str, options: dict[str, Any]) -> None:
        self._place = place
        self._prefix = prefix
        self._options = options

    @property
    def url(self) -> str:
        return f"{self._place.url}/{self._prefix}".rstrip("/")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self._place, self._prefix, self._options))

    @property
    def _client(self) -> Client:
        return client_of(self._place, self._options)

    @property
    def _where(self) -> str:
        return f"{self.url} at {server_name(self._place.service, self._options)}"

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}" if self._prefix else path

    @contextlib.contextmanager
    def _translated(self, operation: str, path: str) -> Iterator[None]:
        """Turn an error of a client into a ``StorageError`` with a sentence."""
        try:
            yield
        except CheckpointError:
            raise
        except answers.client_errors() as error:
            raise self._failure(operation, path, error) from error

    def _failure(self, operation: str, path: str, error: BaseException) -> StorageError:
        if isinstance(error, StorageError):
            return error
        service = self._place.service
        return answers.storage_error(
            error,
            operation,
            service.rights[operation],
            where=f"{path} in {self._where}" if path else self._where,
            bucket=self._place.bucket,
            server=service.name,
            secrets=secrets_of(service, self._options),
        )

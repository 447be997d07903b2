"""Interprets a response of an S3 server or client: as a sentence, or as the outcome of a PUT.

No message shows credentials, neither those that a server repeats nor those in an endpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from stateformat.errors import ErrorKind, StorageError
from stateformat.storage import CreateOutcome

# A 400 or 403 with one of these is about authentication, any other 403 about permissions.
_CREDENTIALS: Final = re.compile(
    "AccountProblem|ExpiredToken|InvalidAccessKeyId|InvalidSecurity|InvalidToken|NotSignedUp|SignatureDoesNotMatch"
    "|TokenRefreshRequired"
)
_CLOCK: Final = frozenset(("RequestTimeTooSkewed", "RequestExpired"))
_REGION: Final = frozenset(("AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect"))
_RIGHTS: Final = {
    "look for": "s3:ListBucket",
    "list": "s3:ListBucket",
    "read": "s3:GetObject",
    "look at": "s3:GetObject",
    "write": "s3:PutObject",
    "create": "s3:PutObject",
    "delete": "s3:DeleteObject",
    "list the uploads of": "s3:ListBucketMultipartUploads",
    "abort the upload of": "s3:AbortMultipartUpload",
}
"""The permission that an operation needs."""

# The codes with which a 404 reports a missing object. The response to a HEAD has no body, so the
# client makes up a code.
_NO_OBJECT: Final = frozenset(("NoSuchKey", "NotFound", "404", ""))
# A 400 with one of these was cut off in transit, and may have been applied.
_CUT_SHORT: Final = frozenset(("RequestTimeout", "IncompleteBody"))
# A 400 with one of these means that the body was changed in transit, and was not applied.
_CHANGED: Final = frozenset(("BadDigest", "XAmzContentSHA256Mismatch"))
_BROKEN: Final = frozenset(
    ("BrokenAnswer", "ClientPayloadError", "ContentLengthError", "IncompleteReadError", "ResponseParserError")
)


class BrokenAnswer(OSError):
    """A response that is not as long as it says it is."""


class RangesIgnored(Exception):
    """The response to a request for a range is another range. ``size_bytes``: of what came."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"another range came, of {size_bytes} bytes")
        self.size_bytes = size_bytes


class Answer(NamedTuple):
    """A response: HTTP status (0 if none), S3's error code, name of the client's exception."""

    status: int
    code: str
    exception: str


def client_errors() -> tuple[type[Exception], ...]:
    """What s3fs, botocore and their libraries raise when a request, or making a client, fails."""
    from http.client import HTTPException

    from aiohttp import ClientError as HttpError
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    parsing = (ResponseParserError, ValueError, RecursionError)
    return (OSError, BotoCoreError, ClientError, HttpError, HTTPException, *parsing)


def answer_of(error: BaseException) -> Answer:
    """Read an error of botocore, or of s3fs, whose cause is botocore's."""
    for link in (error, error.__cause__):
        response = getattr(link, "response", None)
        if isinstance(response, Mapping):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return Answer(int(status), str(response.get("Error", {}).get("Code", "")), type(link).__name__)
    return Answer(0, "", type(error).__name__)


def outcome_of(error: BaseException) -> CreateOutcome | None:
    """Return what a failed conditional PUT did; ``None`` if it did nothing, and was not a conflict
    either.

    412 is the condition, 409 a concurrent rival. After a 5xx, a time-out or a lost connection it is
    unknown. 501 comes from a server that does not have the condition, before it does anything.
    """
    answer = answer_of(error)
    if answer.status in (409, 412):
        return CreateOutcome.CONFLICT
    if answer.status in (408, 429) or answer.code in _CUT_SHORT or "Throttl" in answer.code:
        return CreateOutcome.UNKNOWN
    if answer.status >= 500 and answer.status != 501:
        return CreateOutcome.UNKNOWN
    if 300 <= answer.status < 500 or answer.status == 501:
        return None
    # No response, or one that cannot be parsed, unless the client itself refused to send.
    return None if _is_unsent(error) else CreateOutcome.UNKNOWN


def is_silence(error: BaseException) -> bool:
    """Return whether a request was sent and no response came in time."""
    timeouts = ("ReadTimeoutError", "TimeoutError", "ServerTimeoutError", "SocketTimeoutError")
    return answer_of(error).exception in timeouts


def is_passing(error: BaseException) -> bool:
    """Return whether the same request may succeed a moment later. It may have been applied
    already.
    """
    answer = answer_of(error)
    if answer.status:
        if answer.status < 500:
            return answer.status in (408, 409, 429) or answer.code in _CUT_SHORT | _CHANGED or "Throttl" in answer.code
        return answer.status != 501
    return answer.exception in _BROKEN | {"CredentialRetrievalError"} or _is_connection_lost(error)


def storage_error(
    error: BaseException, operation: str, *, where: str, bucket: str, secrets: Iterable[str]
) -> StorageError:
    """Return the error to raise: the operation, where, what is wrong, what to check."""
    answer = answer_of(error)
    name = answer.code or (str(answer.status) if answer.status else answer.exception)
    # Refused: it did nothing, and a retry would do nothing either.
    refused = outcome_of(error) is None and not is_passing(error)
    kind = ErrorKind.STORAGE_REFUSED if refused else ErrorKind.STORAGE_FAILED
    if answer.code == "NoSuchBucket":
        why = f"there is no bucket {bucket!r}. Create it, or check the URL and the endpoint"
    elif answer.code in _CLOCK:
        why = f"the clocks of this machine and of the server differ too much ({name}). Set the clock here, by NTP"
    elif _CREDENTIALS.fullmatch(answer.code) or answer.status == 401:
        why = f"the credentials were refused ({name}). Check key, secret, token or profile"
    elif answer.code in _REGION:
        why = (
            f"the bucket {bucket!r} is in another region ({name}). Set AWS_DEFAULT_REGION, or pass "
            "client_kwargs={'region_name': ...}"
        )
    elif 300 <= answer.status < 400 or isinstance(error, RecursionError):
        why = f"the request was redirected ({name}). Check endpoint_url, and whether it has to be https://"
    elif answer.status == 403:
        why = f"not permitted ({name}). Check that the key has the right {_RIGHTS[operation]} on {bucket!r}"
    elif "Credential" in answer.exception or answer.exception in ("ProfileNotFound", "TokenRetrievalError"):
        why = (
            f"there are no usable credentials ({name}). Pass key and secret, profile or anon=True, or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    elif answer.status == 501:
        kind = ErrorKind.STORAGE_UNSUITABLE
        why = f"the server does not know this request ({name}). Use a server with conditional writes (If-None-Match)"
    elif not answer.status and answer.exception in _BROKEN:
        why = f"the response was cut off ({name}). Try again, and check what lies between this machine and the server"
    elif not answer.status and _is_connection_lost(error):
        why = f"no connection ({name}). Check endpoint_url, and that the server runs and can be reached from here"
    elif answer.status == 404 and answer.code in _NO_OBJECT:
        why = f"the server there is not an S3 server ({name}). Check endpoint_url"
    else:
        why = f"{name}: {redacted(str(error), secrets)}"
        why += "" if answer.status else ". Check the options, the variables AWS_... and the AWS configuration"
    return StorageError(f"cannot {operation} {where}: {why}", kind=kind, status=answer.status, code=answer.code)


def secrets_of(options: Mapping[str, Any]) -> list[str]:
    """Return what no message may show, though a server or client may put it into its own."""
    hidden = [options.get(name) for name in ("key", "secret", "token")]
    hidden += [value for name, value in (options.get("client_kwargs") or {}).items() if name.startswith("aws_")]
    return [str(text) for text in hidden if text]


def is_missing_object(error: StorageError) -> bool:
    """Return whether an error of :func:`storage_error` is a 404 for an object, and not for the
    bucket.
    """
    return error.details.get("status") == 404 and error.details.get("code") in _NO_OBJECT


def endpoint_name(options: Mapping[str, Any]) -> str:
    """Return how messages name the server: the endpoint without user and password, or ``AWS``."""
    url = endpoint_of(options)
    if not url:
        return "AWS"
    parsed = urlsplit(url)
    return f"{parsed.scheme}://{parsed.netloc.rpartition('@')[2]}"


def endpoint_of(options: Mapping[str, Any]) -> str:
    """Return the endpoint of options or environment; empty for AWS, or one in a configuration
    file.
    """
    from_client = (options.get("client_kwargs") or {}).get("endpoint_url")
    from_environment = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return str(options.get("endpoint_url") or from_client or from_environment or "")


def _is_unsent(error: BaseException) -> bool:
    """Return whether an error without a response is the client's own, which did not send the
    request.
    """
    from botocore import exceptions

    unsent = (
        exceptions.ConfigNotFound,
        exceptions.ConfigParseError,
        exceptions.CredentialRetrievalError,
        exceptions.NoCredentialsError,
        exceptions.NoRegionError,
        exceptions.ParamValidationError,
        exceptions.PartialCredentialsError,
        exceptions.ProfileNotFound,
        exceptions.ValidationError,
    )
    # botocore recurses if a server redirects every request, even that for the bucket's region. It
    # has no class for an endpoint that is not a URL.
    no_endpoint = isinstance(error, ValueError) and str(error).startswith("Invalid endpoint")
    return no_endpoint or isinstance(error, (*unsent, RecursionError))


def _is_connection_lost(error: BaseException) -> bool:
    from botocore import exceptions

    return isinstance(error, (exceptions.ConnectionError, exceptions.HTTPClientError, TimeoutError, OSError))


def redacted(text: str, secrets: Iterable[str]) -> str:
    """Return a text without these secrets, and without users and queries in its URLs."""
    for secret in secrets:
        text = text.replace(secret, "***")
    text = re.sub(r"//[^/@\s]+@", "//***@", text)
    return re.sub(r"(://[^\s?#'\"`]*)[?#][^\s'\"`]*", r"\1?***", text)

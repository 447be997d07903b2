"""Interprets what obstore raises: as a sentence, or as the outcome of a conditional create.

obstore has few classes of errors, so the answer's status and the service's code are read from the
text. No message shows credentials, neither those that a server repeats nor those in an endpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from stateformat.errors import ErrorKind, StorageError
from stateformat.storage import CreateOutcome

# A 400, 401 or 403 with one of these is about authentication, any other 403 about permissions.
_CREDENTIALS: Final = re.compile(
    "AccountProblem|ExpiredToken|InvalidAccessKeyId|InvalidSecurity|InvalidToken|NotSignedUp|SignatureDoesNotMatch"
    "|TokenRefreshRequired|AuthenticationFailed|AuthenticationRequired|InvalidAuthenticationInfo"
)
_CLOCK: Final = frozenset(("RequestTimeTooSkewed", "RequestExpired"))
# What Azure and Google say of it, under codes that mean more.
_SKEW: Final = re.compile("Request date header too old|in a reasonable timeframe")
_REGION: Final = frozenset(("AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect"))
_NO_BUCKET: Final = frozenset(("NoSuchBucket", "ContainerNotFound"))
# The codes with which a 404 reports a missing object; the answer to a HEAD has none.
_NO_OBJECT: Final = frozenset(("NoSuchKey", "BlobNotFound", "NotFound", "404", ""))
# A 400 with one of these was cut off in transit, and may have been applied.
_CUT_SHORT: Final = frozenset(("RequestTimeout", "IncompleteBody"))
# A 400 with one of these means that the body was changed in transit, and was not applied.
_CHANGED: Final = frozenset(("BadDigest", "Md5Mismatch", "XAmzContentSHA256Mismatch"))
_CONDITION_REFUSED: Final = "BlobAlreadyExists"
"""Azure's code, with a 409, for what others refuse with a 412."""

_STATUS: Final = re.compile(r"status code: (\d{3})|\(code: (\d{3})\)")
_CODE: Final = re.compile(r"<Code>([^<]{1,100})</Code>")
_SIGNATURE: Final = re.compile(r"(?i)\b((?:sig|x-amz-[\w-]+|[\w-]*(?:signature|token))=|bearer\s+)[^\s&,;'\"`<>]+")
_KIND: Final = re.compile(r"HttpError \{\s*kind: (\w+)")


_FAILURES: Final = {
    **dict.fromkeys(("ConnectTimeoutError", "ReadTimeoutError"), "Timeout"),
    **dict.fromkeys(("EndpointConnectionError", "ProxyConnectionError", "SSLError"), "Connect"),
    **dict.fromkeys(("ConnectionClosedError", "ConnectionError", "HTTPClientError"), "Lost"),
    **dict.fromkeys(("IncompleteReadError", "ResponseParserError", "ResponseStreamingError"), "Interrupted"),
}
"""What is wrong without an answer, by botocore's exceptions."""


class BrokenAnswer(OSError):
    """An answer that is not as long as it says it is."""


class Answer(NamedTuple):
    """What came back: HTTP status (0 if none), the service's code, what failed without a status."""

    status: int
    code: str
    failure: str
    """Connect, Timeout, Interrupted …; ``Unsent`` for a request that was never sent."""


def client_errors() -> tuple[type[BaseException], ...]:
    """What obstore raises, and botocore, which finds credentials and ends uploads of S3."""
    from obstore.exceptions import BaseError

    try:
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError
    except ImportError:
        return (BaseError, OSError, ValueError)
    return (BaseError, OSError, ValueError, BotoCoreError, ClientError, ResponseParserError)


def answer_of(error: BaseException) -> Answer:
    """Read an error of obstore or botocore."""
    name = type(error).__name__
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return Answer(int(status), str(response.get("Error", {}).get("Code", "")), name)
    text = str(error)
    if isinstance(error, BrokenAnswer):
        return Answer(0, "", "Interrupted")
    if "token request" in text:
        return Answer(0, "", "NoCredentials")
    if "External" in text and name == "UnauthenticatedError":
        return Answer(0, "", "NoCredentials")
    if found := _STATUS.search(text):
        code = _CODE.search(text)
        # Azure's answer to a batch has sentences and no codes.
        said = "ContainerNotFound" if "specified container does not exist" in text else ""
        return Answer(int(found[1] or found[2]), code[1] if code else said, name)
    if "Received redirect" in text:
        return Answer(301, "", name)
    if "Wanted range starting at" in text:
        return Answer(416, "", name)
    if kind := _KIND.search(text):
        return Answer(0, "", "Lost" if kind[1] == "Request" else kind[1])
    if name in _FAILURES:
        return Answer(0, "", _FAILURES[name])
    if type(error).__module__.startswith("botocore") or isinstance(error, ValueError):
        unusable = "Credential" in name or name in ("ProfileNotFound", "TokenRetrievalError")
        return Answer(0, "", name if unusable else "Unsent")
    return Answer(0, "", name)


def proves_condition(error: BaseException) -> bool:
    """Return whether a create was refused because the object exists."""
    answer = answer_of(error)
    return answer.status == 412 or (answer.status == 409 and answer.code == _CONDITION_REFUSED)


def outcome_of(error: BaseException) -> CreateOutcome | None:
    """Return what a failed conditional create did; ``None`` if it did nothing, and was not a
    conflict either.

    412 is the condition, 409 that or a concurrent rival. After a 5xx, a time-out or a lost
    connection it is unknown. 501 comes from a server that does not have the condition, before it
    does anything.
    """
    answer = answer_of(error)
    if answer.status in (409, 412):
        return CreateOutcome.CONFLICT
    if answer.status in (408, 429) or answer.code in _CUT_SHORT or "Throttl" in answer.code:
        return CreateOutcome.UNKNOWN
    if answer.status:
        return CreateOutcome.UNKNOWN if answer.status >= 500 and answer.status != 501 else None
    return None if _is_unsent(answer) else CreateOutcome.UNKNOWN


def is_silence(error: BaseException) -> bool:
    """Return whether a request was sent and no answer came in time."""
    return answer_of(error).failure == "Timeout"


def is_passing(error: BaseException) -> bool:
    """Return whether the same request may succeed a moment later. It may have been applied
    already.
    """
    answer = answer_of(error)
    if not answer.status:
        return not _is_unsent(answer) and not is_other_range(error)
    if answer.status >= 500:
        return answer.status != 501
    return answer.status in (408, 409, 429) or answer.code in _CUT_SHORT | _CHANGED or "Throttl" in answer.code


def is_other_range(error: BaseException) -> bool:
    """Return whether a server answered a request for a range with something else."""
    text = str(error)
    return "Received non-partial response" in text or re.search(r"Requested \S+, got \S+", text) is not None


def is_missing_bucket(error: BaseException) -> bool:
    """Return whether a client's error, or one of :func:`storage_error`, is about the bucket."""
    code = error.details.get("code") if isinstance(error, StorageError) else answer_of(error).code
    return code in _NO_BUCKET


def is_missing_object(error: StorageError) -> bool:
    """Return whether an error of :func:`storage_error` is a 404 for an object, and not for the
    bucket.
    """
    return error.details.get("status") == 404 and error.details.get("code") in _NO_OBJECT


def is_unreadable_name(error: StorageError) -> bool:
    """Return whether an error of :func:`storage_error` is about an object whose name obstore does
    not read.
    """
    return type(error.__cause__).__name__ == "InvalidPathError"


def storage_error(
    error: BaseException, operation: str, right: str, *, where: str, bucket: str, server: str, secrets: Iterable[str]
) -> StorageError:
    """Return the error to raise: the operation, where, what is wrong, what to check."""
    answer = answer_of(error)
    name = answer.code or (str(answer.status) if answer.status else answer.failure)
    # Refused: it did nothing, and a retry would do nothing either.
    refused = outcome_of(error) is None and not is_passing(error)
    kind = ErrorKind.STORAGE_REFUSED if refused else ErrorKind.STORAGE_FAILED
    if answer.code in _NO_BUCKET:
        why = f"there is no bucket {bucket!r}. Create it, or check the URL and the endpoint"
    elif answer.code in _CLOCK or _SKEW.search(str(error)):
        why = f"the clocks of this machine and of the server differ too much ({name}). Set the clock here, by NTP"
    elif _CREDENTIALS.fullmatch(answer.code) or answer.status == 401:
        why = f"the credentials were refused ({name}). Check the options and the environment"
    elif answer.code in _REGION:
        why = (
            f"the bucket {bucket!r} is in another region ({name}). Pass its name as the option region, or set "
            "AWS_DEFAULT_REGION"
        )
    elif 300 <= answer.status < 400:
        why = f"the request was redirected ({name}). Check the region and endpoint_url, and whether it is https://"
    elif answer.status == 403:
        who = "key has" if server == "S3" else "credentials have"
        why = f"not permitted ({name}). Check that the {who} the right {right} on {bucket!r}"
    elif answer.failure == "ProfileNotFound":
        why = f"the AWS configuration has no such profile ({name}). Check the option profile, or AWS_PROFILE, and the "
        why += "names in ~/.aws/config"
    elif "Credential" in answer.failure or answer.failure == "TokenRetrievalError":
        why = f"there are no usable credentials ({name}). Pass them as options, anon=True, or set the variables of "
        why += {
            "S3": "AWS (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)",
            "Azure": "Azure (AZURE_STORAGE_ACCOUNT_KEY, or AZURE_CLIENT_ID and others)",
        }.get(server, f"{server} (GOOGLE_APPLICATION_CREDENTIALS)")
    elif answer.status == 501:
        kind = ErrorKind.STORAGE_UNSUITABLE
        why = f"the server does not know this request ({name}). Use a server with conditional writes (If-None-Match)"
    elif is_other_range(error):
        kind = ErrorKind.STORAGE_UNSUITABLE
        why = "the server ignores ranges: other bytes came than were asked for. Use one that answers range requests"
    elif answer.failure in ("Interrupted", "Decode"):
        why = f"the response was cut off ({name}). Try again, and check what lies between this machine and the server"
    elif answer.failure in ("Connect", "Timeout", "Lost"):
        why = f"no connection ({name}). Check endpoint_url, and that the server runs and can be reached from here"
    elif answer.status == 404:
        why = (
            f"the server there is not {'a' if server[0] == 'G' else 'an'} {server} server ({name}). Check endpoint_url"
        )
    elif answer.failure == "InvalidPathError":
        why = f"an object there has a name that obstore does not read ({_first_line(error)}). Rename or remove it"
    else:
        why = f"{name}: {redacted(_first_line(error), secrets)}"
        why += "" if answer.status else f". Check the options, and the configuration of {server}"
    return StorageError(f"cannot {operation} {where}: {why}", kind=kind, status=answer.status, code=answer.code)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def redacted(text: str, secrets: Iterable[str]) -> str:
    """Return a text without these secrets, without signatures and tokens, and without users and
    queries in its URLs.
    """
    for secret in secrets:
        text = text.replace(secret, "***")
    text = re.sub(r"//[^/@\s]+@", "//***@", text)
    text = _SIGNATURE.sub(r"\1***", text)
    return re.sub(r"(://[^\s?#'\"`]*)[?#][^\s'\"`]*", r"\1?***", text)


def _is_unsent(answer: Answer) -> bool:
    """Return whether the client itself refused to send."""
    return (
        answer.failure in ("Unsent", "ProfileNotFound", "InvalidPathError", "UnknownConfigurationKeyError")
        or "Credential" in answer.failure
    )

"""Addresses of stores and checkpoints: ``URL`` and ``URL@ID``, without credentials."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any, Final
from urllib.parse import unquote

from ..errors import ErrorKind, InvalidInput
from ..paths import SAVEPOINTS
from .instrumented import whole
from .protocol import TOP_LEVEL, Storage

_WITH_ID: Final = re.compile(r"(?s)(.*)@(\d+)")
_WITH_NAME: Final = re.compile(r"(?s)(.*[^@/]/?)@((?!\d+$)[A-Za-z0-9][A-Za-z0-9._-]{0,199})")
_URL: Final = re.compile(r"(?s)([^/?#]*?)://([^/?#]*)(.*)")
_HOST: Final = re.compile(r"[^:]*(:\d*)?|\[[^\]]*\](:\d*)?")
_CONTAINER: Final = re.compile(r"[a-z0-9$][a-z0-9-]{1,62}")
# What begins like a URL, or like a chain of fsspec: `zip::s3://bucket/a.zip`.
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(://|::)")
_FIRST: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://[^@:?#]*)?")
_OTHERS: Final = "fsspec"
"""The entry point for every scheme that has none."""
_SECRET: Final = re.compile(r"[@?#]")
_LOCAL: Final = re.compile(r"(?i)file:(//(localhost)?)?(?=/(?!/))")
_WINDOWS: Final = re.compile(r"(?i)(file:/*)?[a-z]:[\\/]|\\\\")
# A URL that pathlib has turned into a path.
_FLATTENED: Final = re.compile(r"[A-Za-z0-9+.-]{2,}:/[^/]")
_ONE_SLASH: Final = ("dbfs:/", "hdfs:/")
"""How Hadoop writes what has no host."""
_PATH_SCHEMES: Final = frozenset(("file", "memory"))
"""In these URLs everything is a path: ``@`` and ``?`` are ordinary characters."""
CONTAINER_SCHEMES: Final = frozenset(("abfs", "abfss", "wasb", "wasbs"))
"""In these URLs of Azure, a container may stand before the ``@``, and is no secret."""
OBJECT_SCHEMES: Final = {
    **dict.fromkeys(("s3", "s3a", "s3n", "s3p"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gs"),
    **dict.fromkeys(("az", *sorted(CONTAINER_SCHEMES)), "az"),
}
"""The schemes of object stores, as Spark, Flink and people write them, and the one that each is."""


def split_id(address: str) -> tuple[str, str | None]:
    """Return the URL and the digits of ``URL@ID``, or None. ``backups@42/`` ends in a name, not an
    id.
    """
    match = _WITH_ID.fullmatch(address)
    return (match[1], match[2]) if match else (address, None)


def split_name(url: str) -> tuple[str, str | None]:
    """Return the store and the name of ``STORE@NAME``, a savepoint of that store; or the URL and
    None.

    Only the last part of a path can end in a name: that of a savepoint (``paths``), which is not a
    number. ``s3://bucket/a@b/store``, ``s3://user@host`` and ``/data/me@host/`` contain none. The
    address may still be a place of its own; ``pins.open_address`` checks that.
    """
    match = _WITH_NAME.fullmatch(url)
    if match is None:
        return url, None
    scheme, separator, rest = match[1].partition("://")
    if separator and scheme.strip().lower() not in _PATH_SCHEMES and "/" not in rest:
        return url, None
    return match[1], match[2]


def is_id(digits: str) -> bool:
    """Return whether digits are the id of a checkpoint: 1 to 2^53 - 1."""
    from ..model import MAX_CHECKPOINT_ID

    return len(digits) <= len(str(MAX_CHECKPOINT_ID)) and 1 <= int(digits) <= MAX_CHECKPOINT_ID


def checkpoint_address(address: str) -> tuple[str, int | None]:
    """Return the URL and the id of ``URL`` or ``URL@ID``. Raises ``InvalidInput`` for an empty URL,
    or an id out of range.
    """
    url, digits = split_id(address)
    if not url.strip():
        raise InvalidInput(f"{address!r} names no store; give a path or a URL", kind=ErrorKind.INVALID_URL)
    if digits is not None and not is_id(digits):
        raise InvalidInput(
            f"checkpoint ids go from 1 to 2^53 - 1, and {without_secrets(url)!r} is given with {digits:.40}",
            kind=ErrorKind.INVALID_URL,
        )
    return url, None if digits is None else int(digits)


def without_secrets(url: str) -> str:
    """Return the URL without user, password, query and fragment. Paths are unchanged.

    Of a chain of fsspec (``zip://inside::https://…``), each part is a URL.
    """
    first, *others = url.split("::")
    if others and _FIRST.fullmatch(first) and all(_SCHEME.match(part) or not _SECRET.search(part) for part in others):
        return "::".join((first, *(without_secrets(part) for part in others)))
    match = _URL.match(url)
    if match is None or match[1].strip().lower() in _PATH_SCHEMES:
        return url
    scheme, authority, rest = match.groups()
    if not _HOST.fullmatch(authority.rpartition("@")[2]):
        # A password may contain a slash: then it continues after what looks like the host.
        before, _, rest = rest.rpartition("@")
        authority, slash, rest = f"@{rest}".partition("/") if before else ("@", "", "")
        rest = slash + rest
    user, at, host = authority.rpartition("@")
    if at and scheme.strip().lower() in CONTAINER_SCHEMES and _CONTAINER.fullmatch(user):
        at, host = "", authority
    path = re.split(r"[?#]", rest, maxsplit=1)[0]
    return f"{scheme}://{'***@' if at else ''}{host}{path}{'?***' if path != rest else ''}"


def check_no_secrets(url: str, what: str) -> None:
    """Raise ``InvalidInput`` if a URL has a user, password, query or fragment; the error does not
    repeat them.
    """
    if without_secrets(url) != url:
        raise InvalidInput(
            f"{what} is more than an address: something stands before an @, or after a ? or #. URLs are stored and "
            "shown: pass credentials as storage options or in the environment",
            kind=ErrorKind.INVALID_URL,
        )


def lies_in(url: str, folder_url: str) -> bool:
    """Return whether a place is a folder or lies in it; local links are followed."""
    (place, parts), (folder, above) = _place(url), _place(folder_url)
    return place == folder and parts[: len(above)] == above


def check_outside(url: str, store_url: str) -> None:
    """Raise ``InvalidInput`` for a place in one of the store's own folders, where gc would delete
    it.
    """
    (place, parts), (store, above) = _place(url), _place(store_url)
    inside = parts[len(above) :]
    if place == store and parts[: len(above)] == above and inside and inside[0] in TOP_LEVEL:
        raise InvalidInput(
            f"{without_secrets(url)} lies in {inside[0]}/ of the store {without_secrets(store_url)}, where garbage "
            "collection would delete it. Choose a place outside of the store's folders, as savepoints/NAME",
            kind=ErrorKind.INVALID_URL,
        )


def check_savepoint_place(url: str, store_url: str) -> None:
    """Raise ``InvalidInput`` for an address at which no job may make a savepoint of its store.

    It must mean the same everywhere, have no secrets, and lie in the store only below
    ``savepoints/``.
    """
    check_no_secrets(url, "the savepoint's URL")
    if absolute(url) != url:
        raise InvalidInput(
            f"the savepoint's address {url!r} is relative, and the job runs in another directory than you. Give an "
            "absolute path, or a URL",
            kind=ErrorKind.INVALID_URL,
        )
    check_lasting(url, store_url)
    check_outside(url, store_url)
    (place, parts), (store, above) = _place(url), _place(store_url)
    inside = parts[len(above) :]
    if place == store and parts[: len(above)] == above and (len(inside) < 2 or inside[0] != SAVEPOINTS.rstrip("/")):
        raise InvalidInput(
            f"{without_secrets(url)} lies in the store {without_secrets(store_url)} itself. Choose a place outside of "
            "it, or below it as savepoints/NAME",
            kind=ErrorKind.INVALID_URL,
        )


def absolute(url: str) -> str:
    """Return a URL as it is, and a path as seen from the current directory."""
    if _LOCAL.match(url) or not is_local(url) or "://" in url:
        return url
    return os.path.abspath(os.path.expanduser(url)) if url[:1] != "/" else url  # noqa: PTH100, PTH111


def check_lasting(url: str, beside: str) -> None:
    """Raise ``InvalidInput`` for a place in the memory of a process, which goes with it.

    It may be in the same memory as ``beside``, another store.
    """
    if _scheme(url) == "memory" and _scheme(beside) != "memory":
        raise InvalidInput(
            f"{url} lies in the memory of one process, and is gone when that ends. Give a directory, or the URL of a "
            "storage",
            kind=ErrorKind.INVALID_URL,
        )


def _scheme(url: str) -> str:
    scheme, separator, _ = url.partition("://")
    return scheme.lower() if separator else "file"


def stores_around(url: str) -> list[str]:
    """Return the local directories that would be stores if ``url`` lay in one of a store's own
    folders.
    """
    place, parts = _place(url)
    if place != "file://":
        return []
    return ["/" + "/".join(parts[:i]) for i, part in enumerate(parts) if i and part in TOP_LEVEL]


def _place(url: str) -> tuple[str, list[str]]:
    place, parts = _parts(url)
    if place == "file://":
        # What cannot be a path (a null character, half a surrogate pair) is reported where it is
        # used.
        with contextlib.suppress(ValueError):
            parts = [part for part in os.path.realpath("/" + "/".join(parts)).split("/") if part]
    return place, parts


def named_below(name: str, folder_url: str) -> str | None:
    """Return the path in a folder of a file that a checkpoint names in full; None if it is outside.

    Flink and Hadoop do not percent-encode the names that they write.
    """
    (place, parts), (folder, above) = _parts(name, encoded=False), _parts(folder_url)
    inside = parts[len(above) :]
    if place != folder or parts[: len(above)] != above or not inside or any(part in (".", "..") for part in parts):
        return None
    return "/".join(inside)


def named_address(name: str) -> str:
    """Return the address of what a checkpoint names in full (:func:`named_below`)."""
    place, parts = _parts(name, encoded=False)
    return ("/" if place == "file://" else f"{place}/") + "/".join(parts)


def local_path(url: str) -> str | None:
    """Return the path of an address on a disk of this machine; None for any other, and for a
    chain.
    """
    place, parts = _parts(url)
    return "/" + "/".join(parts) if place == "file://" and (is_local(url) or url[:5].lower() == "dbfs:") else None


def _parts(url: str, *, encoded: bool = True) -> tuple[str, list[str]]:
    """Return scheme and host, and the parts of the path: the same for every way to write a place.

    Links are not followed. ``encoded`` is False for names that programs have written.
    """
    with contextlib.suppress(InvalidInput):
        url = resolved(url)
    scheme, separator, rest = url.partition("://")
    if encoded and not is_local(url) and scheme.lower() not in OBJECT_SCHEMES:
        # Of a chain, as simplecache::file:///data, the last is where the bytes lie.
        url = re.sub(r"^local:", "file:", url.rpartition("::")[2], flags=re.IGNORECASE)
        scheme, separator, rest = url.partition("://")
    local = _LOCAL.match(url)
    if local or (is_local(url) and url[:6].lower() != "file:/"):
        path = url[local.end() :] if local else url
        if encoded:
            path = unquote(path, errors="surrogateescape") if local else absolute(path)
        return "file://", [part for part in path.split("/") if part]
    if not separator:
        scheme, _, rest = url.partition(":")
        rest = f"/{rest}"
    host, _, path = rest.partition("/")
    scheme = OBJECT_SCHEMES.get(scheme.lower(), scheme.lower())
    if scheme == "az" and "@" in host:
        scheme, host = "abfss", host.replace(".blob.", ".dfs.", 1)
    return f"{scheme}://{host}", [part for part in path.split("/") if part]


def as_url(url: str | os.PathLike[str]) -> str:
    """Return a URL or path as text. Raises ``InvalidInput`` for anything else."""
    try:
        found: object = os.fspath(url)
    except TypeError:
        found = None
    if not isinstance(found, str):
        raise InvalidInput(
            f"{url!r} is of type {type(url).__name__}; give a URL, or a path as text or pathlib.Path",
            kind=ErrorKind.INVALID_URL,
        )
    if not isinstance(url, str) and _FLATTENED.match(found):
        raise InvalidInput(
            f"{found!r} was a URL before it became a path, which has one slash fewer; give the URL as text",
            kind=ErrorKind.INVALID_URL,
        )
    return found


def is_local(url: str) -> bool:
    """Return whether an address is a directory's: a path, or a ``file:`` URL.

    ``a::b`` begins like a chain, and is a path where something has that name.
    """
    if named := _SCHEME.match(url):
        return url[:6].lower() == "file:/" or (named[2] == "::" and os.path.lexists(url))
    return url[:6].lower() not in _ONE_SLASH


def resolved(url: str) -> str:
    """Return an address as storages take it: a path of Databricks (``dbfs:/x``) as it is mounted,
    and ``hdfs:/x`` with three slashes.

    Raises ``InvalidInput`` for a path that cannot be one here, and says what to give instead.
    """
    if url[:6].lower() == "file:/":
        url = "file:" + url[5:]
    if _FLATTENED.match(url) and url.partition(":")[0].lower() in OBJECT_SCHEMES:
        raise InvalidInput(
            f"{url!r:.200} was a URL before it became a path, which has one slash fewer. Give the URL as text, with "
            "two slashes",
            kind=ErrorKind.INVALID_URL,
        )
    url = re.sub("(?i)^hdfs:/(?!/)", "hdfs:///", url)
    if _WINDOWS.match(url):
        raise InvalidInput(
            f"{url!r:.200} is a path of Windows, and this is another system. Give the path of the folder here, as "
            "/mnt/c/… in WSL",
            kind=ErrorKind.INVALID_URL,
        )
    of_databricks = url[:6].lower() == "dbfs:/"
    path = "/" + url[5:].lstrip("/") if of_databricks else url
    if path.startswith("/Volumes/"):
        mount = "/Volumes"
    elif of_databricks:
        mount, path = "/dbfs", f"/dbfs{path}"
    else:
        return url
    if os.path.isdir(mount):  # noqa: PTH112
        return path
    if of_databricks:
        return f"dbfs://{path.removeprefix('/dbfs')}"
    raise InvalidInput(
        f"{path} is a volume of Databricks, and there is no /Volumes here. Run this on a cluster, copy the folder "
        "(`databricks fs cp -r`), or give its address in the bucket",
        kind=ErrorKind.INVALID_URL,
    )


def open_storage(url: str | os.PathLike[str], **options: Any) -> Storage:
    """Return the storage of a URL, found by scheme through the entry-point group
    ``stateformat.storages``; one that it lacks may be known to fsspec. A plain path is ``file://``.
    ``options`` go to the storage (``endpoint_url``, ``key``, ``secret`` for ``s3://``). Raises
    ``InvalidInput`` for an unknown scheme or a missing extra.
    """
    from importlib.metadata import entry_points

    url = resolved(as_url(url))
    if not url.strip():
        raise InvalidInput("the store's address is empty; give a path or a URL", kind=ErrorKind.INVALID_URL)
    named = _SCHEME.match(url)
    scheme, chained = (named[1], named[2] == "::") if named and not is_local(url) else ("file", False)
    found = {entry.name: entry for entry in entry_points(group="stateformat.storages")}
    others = found.pop(_OTHERS, None)
    entry = others if chained else found.get(scheme, others)
    try:
        if entry is not None:
            return whole(entry.load()(url, options))
    except InvalidInput as error:
        if error.kind is not ErrorKind.UNKNOWN_SCHEME:
            raise
        scheme = error.details["scheme"]
    raise InvalidInput(
        f"no storage for {scheme}:// (in {without_secrets(url)}); known are {', '.join(sorted(found))}. Others can "
        "be added through the entry-point group stateformat.storages",
        kind=ErrorKind.UNKNOWN_SCHEME,
        url=without_secrets(url),
    )

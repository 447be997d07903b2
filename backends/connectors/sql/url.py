"""The URL of a database, which may hold a password that nobody else is told."""

from __future__ import annotations

import os
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.storage import as_url

_SECRET: Final = ("password", "sslpassword")
_SCHEMES: Final = ("sqlite", "postgresql", "postgres")


class SqlUrl:
    """``sqlite:///relative.db``, ``sqlite:////absolute.db``, ``postgresql://user:password@host:port/database?option=…``.

    ``str`` of it has no password, and what is pickled has none either: an object that comes back from a pickle connects as libpq
    finds (``PGPASSWORD``, ``~/.pgpass``). Raises ``InvalidInput``, without the URL where that might give the password away.
    """

    def __init__(self, url: str) -> None:
        url = as_url(url)
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in _SCHEMES:
            raise InvalidInput(
                f"the URL of a SQL sink begins with {scheme[:20] + separator if separator else 'no scheme'!r}; it is "
                "sqlite:///path.db or postgresql://user@host/database",
                kind=ErrorKind.UNKNOWN_SCHEME if separator else ErrorKind.INVALID_URL,
            )
        self.is_sqlite = scheme == "sqlite"
        self._secrets: tuple[str, ...] = ()
        if self.is_sqlite:
            self.path = os.path.abspath(rest[1:])  # noqa: PTH100 - text in, text out
            if not rest.startswith("/") or rest in ("/", "/:memory:"):
                raise InvalidInput(
                    f"{url} names no file; a SQLite URL is sqlite:///relative.db or sqlite:////absolute.db, and a database in "
                    "memory would be gone with its first transaction",
                    kind=ErrorKind.INVALID_URL,
                )
            self.full = self._shown = f"sqlite:///{self.path}"
        else:
            self.path = ""
            self.full = url
            self._shown = self._without_password(url)

    def _without_password(self, url: str) -> str:
        try:
            parts = urlsplit(url)
            user, at, place = parts.netloc.rpartition("@")
            query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
            # A password that is not encoded ends where it has a slash, or another mark of a URL, and the rest would be shown.
            strange = bool(parts.fragment) or "@" in user + parts.path + parts.query
        except ValueError:
            strange = True
        if strange:
            # Not even where in it: the place may be the password.
            raise InvalidInput(
                "the postgresql:// URL of a SQL sink cannot be read; write user and password in percent encoding "
                "(urllib.parse.quote(password, safe=''))",
                kind=ErrorKind.INVALID_URL,
            ) from None
        name, _, password = user.partition(":")
        secrets = [unquote(password), *(value for key, value in query if key in _SECRET)]
        self._secrets = tuple({text for secret in secrets if secret for text in (secret, quote(secret, safe=""))})
        kept = urlencode([(key, value) for key, value in query if key not in _SECRET], quote_via=quote, safe="/")
        return f"{parts.scheme}://{name}{at}{place}{parts.path}" + (f"?{kept}" if kept else "")

    def __str__(self) -> str:
        return self._shown

    def __repr__(self) -> str:
        return f"SqlUrl({self._shown!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (SqlUrl, (self._shown,))

    def __deepcopy__(self, memo: object) -> SqlUrl:
        # Within the process nothing is given away.
        return self

    def without_secret(self, text: str) -> str:
        """What somebody else has written, without the password."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


__all__ = ["SqlUrl"]

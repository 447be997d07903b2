"""The URL of a database, which may hold a password."""

from __future__ import annotations

import os
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.storage import as_url

_SECRET: Final = ("password", "sslpassword")
_SCHEMES: Final = ("sqlite", "postgresql", "postgres")


class SqlUrl:
    """``sqlite:///relative.db``, ``sqlite:////absolute.db``, ``postgresql://user:password@host/data?…``.

    Its ``str`` and its pickle have no password: after a pickle, libpq finds it elsewhere
    (``PGPASSWORD``, ``~/.pgpass``). Raises ``InvalidInput``, which shows no password either.
    """

    def __init__(self, url: str) -> None:
        url = as_url(url)
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in _SCHEMES:
            raise InvalidInput(
                f"the URL of a SQL sink begins with {scheme[:20] + separator if separator else 'no scheme'!r}. Give "
                "sqlite:///path.db or postgresql://user@host/database",
                kind=ErrorKind.UNKNOWN_SCHEME if separator else ErrorKind.INVALID_URL,
            )
        self.is_sqlite = scheme == "sqlite"
        self._secrets: tuple[str, ...] = ()
        if self.is_sqlite:
            self.path = os.path.abspath(rest[1:])  # noqa: PTH100 - text in, text out
            if not rest.startswith("/") or rest in ("/", "/:memory:"):
                raise InvalidInput(
                    f"{url} names no file. Give sqlite:///relative.db or sqlite:////absolute.db; a database in memory "
                    "would be gone with its first transaction",
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
            # An unencoded password ends at its first slash or other mark of a URL; the rest would
            # show.
            strange = bool(parts.fragment) or "@" in user + parts.path + parts.query
        except ValueError:
            strange = True
        if strange:
            # The message does not even say where: that may be in the password.
            raise InvalidInput(
                "the postgresql:// URL of a SQL sink cannot be read. Write user and password in percent encoding "
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
        # A copy in this process may keep the password.
        return self

    def without_secret(self, text: str) -> str:
        """A text of the database's client, without the password."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

"""A multipart upload as a committable holds it, in JSON."""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple, Self

PARTS_MAX: Final = 10_000
"""How many parts an upload may have, by S3's limit."""
_WORD: Final = re.compile(r"[\x21-\x7e]{1,1024}")
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")


class Upload(NamedTuple):
    """An upload that has all its parts and is not completed."""

    upload_id: str
    digest: str
    tags: list[str]

    def text(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def read(cls, text: str) -> Self | None:
        """The upload of a text that :meth:`text` made; None for any other text."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or set(found) != set(cls._fields) or not isinstance(found["tags"], list):
            return None
        upload = cls(**found)
        words = [upload.upload_id, *upload.tags]
        if len(words) > PARTS_MAX + 1 or not all(isinstance(word, str) and _WORD.fullmatch(word) for word in words):
            return None
        return upload if isinstance(upload.digest, str) and _DIGEST.fullmatch(upload.digest) else None

"""The names of what a file sink writes: they say for which checkpoint and attempt, by whom, and are used once."""

from __future__ import annotations

import re
from collections.abc import Callable
from hashlib import blake2s
from typing import Final, NamedTuple, Self

_PENDING: Final = ".pending"
_STEM: Final = r"(?P<checkpoint_id>[0-9]{20})-(?P<attempt_id>[0-9a-f]{1,64})"
_OWNER: Final = r"(?P<owner>[A-Za-z0-9.-]{1,80})"
_PLACE: Final = r"(?P<subtask>[0-9]{5,10})-(?P<number>[0-9]{5,10})-(?P<write_id>[0-9a-f]{16})"
_PATH: Final = re.compile(rf"part-{_STEM}-{_OWNER}-{_PLACE}\.parquet")
_STAGED: Final = re.compile(rf"{_OWNER}/{_STEM}-{_PLACE}\.prepared")


class PartName(NamedTuple):
    """Where a file comes from. ``write_id`` is random, so no two files have one name, whoever runs a task twice."""

    checkpoint_id: int
    attempt_id: str
    owner: str
    """The uid of the sink, as :func:`file_name_of` writes it."""
    subtask: int
    number: int
    write_id: str

    @classmethod
    def of_path(cls, path: str) -> Self | None:
        """Read the name of a committed file; None for a name that no sink gives."""
        return cls._of(_PATH.fullmatch(path), lambda name: name.path == path)

    @classmethod
    def of_staged(cls, name: str) -> Self | None:
        """Read the name of a prepared object in a staging place; None for a name that no sink gives."""
        return cls._of(_STAGED.fullmatch(name), lambda found: found.staged == name)

    @classmethod
    def _of(cls, found: re.Match[str] | None, is_written_so: Callable[[Self], bool]) -> Self | None:
        if found is None or not found["owner"].strip("."):
            return None
        checkpoint_id, subtask, number = (int(found[name]) for name in ("checkpoint_id", "subtask", "number"))
        name = cls(checkpoint_id, found["attempt_id"], found["owner"], subtask, number, found["write_id"])
        # A number has one spelling.
        return name if is_written_so(name) else None

    @property
    def path(self) -> str:
        """The name of the file once it is committed, relative to the directory."""
        return f"part-{self.stem}-{self.owner}-{self.place}.parquet"

    @property
    def pending(self) -> str:
        """The name of a prepared file, relative to a local directory."""
        return f"{_PENDING}/{self.staged}"

    @property
    def staged(self) -> str:
        """The name of a prepared object, relative to a staging place."""
        return f"{self.owner}/{self.stem}-{self.place}.prepared"

    @property
    def stem(self) -> str:
        """For which checkpoint, in which attempt."""
        return f"{self.checkpoint_id:020d}-{self.attempt_id}"

    @property
    def place(self) -> str:
        """By whom, and which of its files."""
        return f"{self.subtask:05d}-{self.number:05d}-{self.write_id}"


PATH_PREFIX = "part-"
"""With what all paths begin."""


def pending_folder(uid: str) -> str:
    """Where the files of a sink are until they are committed, relative to its directory, where that is a local one."""
    return f"{_PENDING}/{file_name_of(uid)}"


def file_name_of(uid: str) -> str:
    """A uid as part of a file name: what is not a letter, digit, dot or hyphen is replaced, and a digest tells such apart."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", uid)[:60]
    if name == uid and name.strip("."):
        return name
    return f"{name}-{blake2s(uid.encode(errors='surrogatepass'), digest_size=4).hexdigest()}"


__all__ = ["PATH_PREFIX", "PartName", "file_name_of", "pending_folder"]

"""The names of a file sink's files: for which checkpoint and attempt, by which sink; used once."""

from __future__ import annotations

import re
from collections.abc import Callable
from hashlib import blake2s
from typing import Final, NamedTuple, Self

from stateformat.errors import DamagedCheckpoint, ErrorKind

_PENDING: Final = ".pending"
_STEM: Final = r"(?P<checkpoint_id>[0-9]{20})-(?P<attempt_id>[0-9a-f]{1,64})"
_OWNER: Final = r"(?P<owner>[A-Za-z0-9.-]{1,80})"
_PLACE: Final = r"(?P<subtask>[0-9]{5,10})-(?P<number>[0-9]{5,10})-(?P<write_id>[0-9a-f]{16})"
_PATH: Final = re.compile(rf"part-{_STEM}-{_OWNER}-{_PLACE}\.parquet")
_STAGED: Final = re.compile(rf"{_OWNER}/{_STEM}-{_PLACE}\.prepared")

PATH_PREFIX: Final = "part-"
"""How all paths begin."""


class PartName(NamedTuple):
    """Where a file comes from. ``write_id`` is random: two runs of one task use different names."""

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
        """Read the name of a prepared object in a staging place; None for any other name."""
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
        """The name of the committed file, relative to the directory."""
        return f"{PATH_PREFIX}{self._stem}-{self.owner}-{self._place}.parquet"

    @property
    def pending(self) -> str:
        """The name of a prepared file, relative to a local directory."""
        return f"{_PENDING}/{self.staged}"

    @property
    def staged(self) -> str:
        """The name of a prepared object, relative to a staging place."""
        return f"{self.owner}/{self._stem}-{self._place}.prepared"

    @property
    def _stem(self) -> str:
        return f"{self.checkpoint_id:020d}-{self.attempt_id}"

    @property
    def _place(self) -> str:
        return f"{self.subtask:05d}-{self.number:05d}-{self.write_id}"


def pending_folder(uid: str) -> str:
    """Where a sink's files lie in a local directory before they are committed."""
    return f"{_PENDING}/{file_name_of(uid)}"


def file_name_of(uid: str) -> str:
    """A uid as part of a file name.

    Anything but a letter, digit, dot or hyphen is replaced, and a digest keeps such names apart.
    """
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", uid)[:60]
    if name == uid and name.strip("."):
        return name
    return f"{name}-{blake2s(uid.encode(errors='surrogatepass'), digest_size=4).hexdigest()}"


def foreign_name(sink: str, prepared: tuple[int, str], column: str, name: object) -> DamagedCheckpoint:
    """The error for a committable that names what its sink cannot have made.

    ``sink`` is a phrase like "sink 'out'"; ``prepared`` holds the row's checkpoint and attempt id.
    The name is shown escaped and cut.
    """
    checkpoint_id, attempt_id = prepared
    shown, attempt = (f"{text[:200]!r}" + "…" * (len(text) > 200) for text in (str(name), attempt_id))
    return DamagedCheckpoint(
        f"a committable of {sink}, prepared for checkpoint {checkpoint_id} by attempt {attempt}, has {shown} as "
        f"{column!r}, which that sink cannot have written for that attempt. Nothing was committed or removed. "
        "Something else has written this checkpoint. Find out who can write to the store, then go back to a checkpoint "
        "before it with ckpt rollback",
        kind=ErrorKind.DAMAGED_SEGMENT,
        column=column,
        name=name,
    )

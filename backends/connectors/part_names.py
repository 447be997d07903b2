"""The names of what a file sink writes: they say for which checkpoint and attempt, by whom, and are used once."""

from __future__ import annotations

import re
from hashlib import blake2s
from typing import NamedTuple

_PENDING = ".pending"


class PartName(NamedTuple):
    """Where a file comes from. ``write_id`` is random, so no two files have one name, whoever runs a task twice."""

    checkpoint_id: int
    attempt_id: str
    uid: str
    subtask: int
    number: int
    write_id: str

    @property
    def path(self) -> str:
        """The name of the file once it is committed, relative to the directory."""
        return f"part-{self.stem}-{file_name_of(self.uid)}-{self.place}.parquet"

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


def checkpoint_id_of(path: str, uid: str) -> int | None:
    """For which checkpoint the sink ``uid`` prepared the file of this path; None where it is none of its files."""
    found = re.fullmatch(
        rf"part-(\d{{20}})-[0-9a-f]+-{re.escape(file_name_of(uid))}-\d{{5,}}-\d{{5,}}-[0-9a-f]{{16}}\.parquet", path
    )
    return int(found[1]) if found else None


def pending_folder(uid: str) -> str:
    """Where the files of a sink are until they are committed, relative to its directory, where that is a local one."""
    return f"{_PENDING}/{file_name_of(uid)}"


def file_name_of(uid: str) -> str:
    """A uid as part of a file name: what is not a letter, digit, dot or hyphen is replaced, and a digest tells such apart."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", uid)[:60]
    if name == uid and name.strip("."):
        return name
    return f"{name}-{blake2s(uid.encode(errors='surrogatepass'), digest_size=4).hexdigest()}"


__all__ = ["PATH_PREFIX", "PartName", "checkpoint_id_of", "file_name_of", "pending_folder"]

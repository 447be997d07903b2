"""A savepoint or checkpoint of Flink as a :class:`ForeignSource`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput, NotFound, StorageError, UnsupportedFormat
from stateformat.formats import Outside
from stateformat.model import AttemptId, CheckpointId, CheckpointKind, JobId, ManifestRef, Record, Totals
from stateformat.schema import segment_schema
from stateformat.storage import Storage

from ..limits import METADATA_BYTES, read_whole
from ..source import Note, Opened, Part
from .contents import Bytes, Contents, KeyedPart, OperatorPart, contents_of, job_id_of
from .metadata import FILE_NAME, MAGIC, File, Metadata, Relative, Segment, decode_metadata, streams_of
from .streams import Places

_FOLDER: Final = re.compile(r"chk-(\d{1,18})/" + FILE_NAME)
_START: Final = MAGIC.to_bytes(4, "big")
_PARQUET: Final = b"PAR1"


def recognises(folder: Storage) -> bool:
    """Return whether a folder is a savepoint, a checkpoint, or has folders ``chk-N``."""
    return bool(checkpoint_ids(folder))


def checkpoint_ids(folder: Storage) -> list[int]:
    """Return the ids of the checkpoints in a folder, newest first; none if it has none.

    A ``_metadata`` that cannot be read counts: its checkpoint is damaged, not absent. Only that of
    a Parquet data set is another thing.
    """
    head = _head(folder, FILE_NAME)
    if head is not None:
        if head[:4] == _PARQUET:
            return []
        # The id comes after the magic and the version.
        return [int.from_bytes(head[8:16], "big", signed=True) if head[:4] == _START else 0]
    try:
        listed = [_FOLDER.fullmatch(item.path) for item in folder.list("chk-")]
    except FileNotFoundError:
        return []
    return sorted((int(match[1]) for match in listed if match), reverse=True)


def sources(folder: Storage, outside: Outside | None = None) -> Opened:
    """Return all checkpoints of a folder that can be opened, newest first."""
    found = Opened()
    for number in checkpoint_ids(folder):
        source = FlinkSource(folder, number, outside)
        try:
            if source.contents:
                found.sources.append(source)
        except (DamagedCheckpoint, UnsupportedFormat, InvalidInput) as error:
            found.failed(number, error)
    return found


def _head(folder: Storage, path: str) -> bytes | None:
    try:
        return bytes(memoryview(folder.read_range(path, 0, 16)))
    except FileNotFoundError:
        return None
    except StorageError:
        if folder.list(f"{path}/"):
            return None  # A folder of this name is Spark's.
        raise


class FlinkSource:
    """One checkpoint of Flink. Picklable; reads metadata and headers once, on first use."""

    goes_on_from_copies: ClassVar[bool] = False

    def __init__(self, folder: Storage, checkpoint_id: int | None = None, outside: Outside | None = None) -> None:
        self.folder: Storage = folder
        self.checkpoint_id, self.outside = checkpoint_id, outside
        self.home: str = ""
        known = checkpoint_ids(folder)
        if not known or checkpoint_id not in (None, *known):
            raise NotFound(
                f"there is no checkpoint {'' if checkpoint_id is None else f'{checkpoint_id} '}of Flink's in "
                f"{folder.url}, which has {', '.join(map(str, known)) or 'none'}; give a savepoint, a folder chk-N, or "
                "the folder that has these",
                kind=ErrorKind.CHECKPOINT_NOT_FOUND,
            )
        if _head(folder, FILE_NAME) is None:
            self.home = f"chk-{known[0] if checkpoint_id is None else checkpoint_id}/"

    def __reduce__(self) -> tuple[Any, ...]:
        return FlinkSource, (self.folder, self.checkpoint_id, self.outside)

    @cached_property
    def _bytes(self) -> bytes:
        return bytes(memoryview(read_whole(self.folder, self.home + FILE_NAME, METADATA_BYTES)))

    @cached_property
    def metadata(self) -> Metadata:
        """What ``_metadata`` says."""
        return decode_metadata(self._bytes, self.home + FILE_NAME)

    @cached_property
    def places(self) -> Places:
        """Where its streams are."""
        return Places(self.folder, self.home, self.outside)

    @cached_property
    def contents(self) -> Contents:
        """Everything that can be read. Raises ``DamagedCheckpoint`` and ``UnsupportedFormat``."""
        return contents_of(self.metadata, self.places)

    @cached_property
    def record(self) -> Record:
        contents, metadata = self.contents, self.metadata
        is_checkpoint = bool(self.home) or re.search(r"/chk-\d+/?$", self.folder.url) is not None
        return Record(
            checkpoint_id=CheckpointId(metadata.checkpoint_id),
            attempt_id=AttemptId(xxhash.xxh3_128_hexdigest(self._bytes)),
            kind=CheckpointKind.CHECKPOINT if is_checkpoint else CheckpointKind.SAVEPOINT,
            job_id=JobId(job_id_of(metadata)),
            graph=contents.graph,
            states=tuple(contents.states),
            manifest=ManifestRef("", 0, "", 0),
            totals=Totals(
                handles=len(contents.parts), bytes=sum(part.size_bytes for part, _ in contents.parts.values())
            ),
            created_at_us=0,
            writer=f"Flink (metadata of version {metadata.version})",
            properties=self._properties(metadata),
        )

    def _properties(self, metadata: Metadata) -> dict[str, str]:
        found = {
            "flink.checkpoint_id": str(metadata.checkpoint_id),
            "flink.metadata_version": str(metadata.version),
        }
        for operator in metadata.operators:
            if operator.uid:
                found[f"flink.operator_id.{operator.uid}"] = operator.id.hex()
        for state in metadata.master_states:
            found[f"flink.master_state.{state.name}"] = state.data.hex()
        return found

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for part, _ in self.contents.parts.values())

    @cached_property
    def notes(self) -> tuple[Note, ...]:
        return tuple(dict.fromkeys(self.contents.notes))

    def _content(self, part: Part) -> KeyedPart | OperatorPart | Bytes:
        return self.contents.parts[part.operator, part.state, part.subtask][1]

    def used_files(self) -> int:
        """See ``ForeignSource``; a file that several handles share counts once."""
        named = {
            stream.path if isinstance(stream, Relative) else stream.uri
            for _, _, stream in streams_of(self.metadata)
            if isinstance(stream, (File, Relative, Segment))
        }
        return 1 + len(named)

    def group_rows(self, part: Part) -> npt.NDArray[np.int64] | int:
        content = self._content(part)
        if isinstance(content, Bytes):
            return 1
        if isinstance(content, OperatorPart):
            return content.reader.rows(content.form) if content.reader is not None else 0
        if content.reader is None:
            return np.zeros(content.last - content.first + 1, np.int64)
        return content.reader.rows(content.form, content.first, content.last)

    def read(
        self, part: Part, first_group: int | None = None, last_group: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        content = self._content(part)
        if isinstance(content, Bytes):
            schema = segment_schema(self.record.state(part.operator, part.state))
            yield pa.RecordBatch.from_arrays([pa.array([content.data], pa.binary())], schema=schema)
        elif isinstance(content, OperatorPart):
            if content.reader is not None:
                yield from content.reader.batches(content.form)
        elif content.reader is not None:
            first = content.first if first_group is None else max(first_group, content.first)
            last = content.last if last_group is None else min(last_group, content.last)
            if first <= last:
                yield from content.reader.batches(content.form, first, last)

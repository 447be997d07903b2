"""What can be wrong with a checkpoint of Flink, each finding with its place.

``quick`` reads metadata and headers, and checks sizes; ``full`` decodes every row and compares key
groups with the hashes of keys, if Java's hash of their type is known.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import CheckpointError, ErrorKind, InvalidInput, StorageError
from stateformat.findings import Finding
from stateformat.keys import key_groups

from ..byte_strings import from_arrow
from ..source import Level, Part, Progress
from .binary_rows import Framed
from .contents import Contents, KeyedPart, RocksReader
from .headers import BINARY_ROW, HASHED
from .key_hash import binary_row_codes, java_hash_codes, murmur
from .keyed import HeapReader
from .layouts import form_of
from .metadata import (
    File,
    Metadata,
    Relative,
    Segment,
    Stream,
    streams_of,
)
from .source import FlinkSource
from .streams import Place

CLAUSE = "Flink metadata"
_STATE = "Flink state"
_OTHER = "put the file back, or take another checkpoint or savepoint"
_DAMAGE = "take another checkpoint or savepoint of the job"


def check_source(source: FlinkSource, level: Level, progress: Progress) -> Iterator[Finding]:
    """Find everything that is wrong with a checkpoint."""
    try:
        metadata = source.metadata
    except CheckpointError as error:
        yield _problem(error, CLAUSE, source.home + "_metadata")
        return
    files = _Files(source)
    broken = yield from files.check(metadata)
    try:
        contents = source.contents
    except (CheckpointError, FileNotFoundError) as error:
        if not (broken and isinstance(error, CheckpointError) and error.details.get("path") in broken):
            yield _problem(error, CLAUSE, source.home + "_metadata")
        return
    yield from _refused(contents)
    yield from _opaque_keys(contents)
    if level == "full":
        yield from _Rows(source, contents, broken, progress).check()


@dataclass
class _Files:
    """Files that are missing, have another size, or are left over."""

    source: FlinkSource
    used: set[str] = field(default_factory=set)

    def check(self, metadata: Metadata) -> Generator[Finding, None, set[str]]:
        """Yield problems, and return the paths of files that cannot be read."""
        broken: set[str] = set()
        outside: dict[str, tuple[int, CheckpointError]] = {}
        seen: set[Stream] = set()
        for uid, subtask, stream in streams_of(metadata):
            if stream in seen or not isinstance(stream, (File, Relative, Segment)):
                continue
            seen.add(stream)
            try:
                place = self.source.places.of(stream)
            except CheckpointError as error:
                path = stream.path if isinstance(stream, Relative) else stream.uri
                broken.add(path)
                namesake = self._named(path)
                if namesake is not None:
                    self.used.add(namesake)
                    end = stream.size + (stream.start if isinstance(stream, Segment) else 0)
                    message = _other_size(namesake, self.source.places.known[namesake], end)
                    yield Finding(ErrorKind.OBJECT_SIZE_DIFFERS, CLAUSE, message, _OTHER, namesake, uid, "", subtask)
                elif isinstance(error, InvalidInput):
                    above = path.rpartition("/")[0]
                    outside[above] = outside.get(above, (0, error))[0] + 1, error
                else:
                    yield _problem(error, CLAUSE, path, uid, subtask)
                continue
            self.used.add(place.name)
            problem = self._size(place, uid, subtask)
            if problem is not None:
                yield problem
                broken.add(place.path)
        for above, (count, first) in outside.items():
            what = "1 file" if count == 1 else f"{count} files"
            message = f"{what} of {above} outside of {self.source.folder.url}: {first}"
            advice = "give the folder above, or allow files outside of it (`--allow-outside`)"
            yield Finding(first.kind, CLAUSE, message, advice, above)
        yield from self._left_over()
        return broken

    def _size(self, place: Place, uid: str, subtask: int) -> Finding | None:
        try:
            size = place.stored_size()
        except FileNotFoundError:
            kind, message = ErrorKind.OBJECT_MISSING, f"{place.path} is missing; the metadata names it"
        except StorageError as error:
            kind, message = error.kind, str(error)
        else:
            end = place.start + place.size
            if size is None or size == end or (not place.whole and size > end):
                return None
            kind = ErrorKind.OBJECT_SIZE_DIFFERS
            message = _other_size(place.path, size, end)
        return Finding(kind, CLAUSE, message, _OTHER, place.path, uid, "", subtask)

    def _named(self, path: str) -> str | None:
        """Return the file here that has the name of one that was not found, in another size."""
        last = path.rpartition("/")[2]
        return next((name for name in self.source.places.known if name.rpartition("/")[2] == last), None)

    def _left_over(self) -> Iterator[Finding]:
        home = self.source.home
        used = {*self.used, f"{home}_metadata"}
        # Beside the folder chk-N there are files of other checkpoints.
        for name in sorted(self.source.places.known if not home else self._listed(home)):
            plain = name.rpartition("/")[2]
            if name in used or plain.startswith((".", "_")) or "/" in name.removeprefix(home):
                continue
            message = f"{name} belongs to no state of this checkpoint"
            yield Finding(
                ErrorKind.OBJECT_SIZE_DIFFERS,
                CLAUSE,
                message,
                "nothing in this checkpoint needs it",
                name,
                severity="warning",
            )

    def _listed(self, home: str) -> list[str]:
        return [item.path for item in self.source.folder.list(home)]


def _other_size(name: str, size: int, wanted: int) -> str:
    return f"{name} has {size} bytes, and {wanted} by the metadata: it was cut, or is another file"


def _refused(contents: Contents) -> Iterator[Finding]:
    """Report what no reader of this checkpoint gets, because of its form."""
    for note in contents.notes:
        if note.kind == "refused":
            operator = note.operator(contents.graph)
            state = note.subject[len(operator) + 1 :]
            message = f"{note.subject} cannot be read, nor checked: {note.message}"
            advice = f"`ckpt import SAVEPOINT --drop {shlex.quote(note.subject)} --to STORE` imports the rest"
            yield Finding(ErrorKind.UNSUPPORTED_FEATURE, _STATE, message, advice, "", operator, state)


def _opaque_keys(contents: Contents) -> Iterator[Finding]:
    for uid, java in contents.keys.items():
        if java not in (*HASHED, "Tuple", BINARY_ROW):
            yield Finding(
                ErrorKind.UNKNOWN_KEY_HASH,
                _STATE,
                f"whether keys of {uid} lie in their key groups could not be checked: the hash of their type is the "
                "user's own code",
                "nothing to do; key groups were compared with where entries lie",
                operator=uid,
                severity="warning",
            )


class _Rows:
    """Decodes every row."""

    def __init__(self, source: FlinkSource, contents: Contents, broken: set[str], progress: Progress) -> None:
        self.source, self.contents, self.broken, self.progress = source, contents, broken, progress
        self.done, self.total = 0, sum(part.size_bytes for part, _ in contents.parts.values())

    def check(self) -> Iterator[Finding]:
        for uid, subtask, reader, _ in self.contents.streams:
            if isinstance(reader, HeapReader):
                yield from self._caught(partial(_walk, reader), uid, "", subtask, reader.place.path)
            elif isinstance(reader, RocksReader):
                yield from self._caught(partial(_verify, reader), uid, "", subtask, reader.path)
        for part, content in self.contents.parts.values():
            if part.path not in self.broken:
                yield from self._part(part, content)
            self.done += part.size_bytes
            self.progress(self.done, self.total)

    def _caught(
        self, look: Callable[[], None], uid: str, state: str, subtask: int | None, path: str | None
    ) -> Iterator[Finding]:
        try:
            look()
        except FileNotFoundError as error:
            yield _problem(error, _STATE, path or "", uid, subtask, state)
        except CheckpointError as error:
            if error.details.get("path") not in self.broken:
                yield _problem(error, _STATE, path or "", uid, subtask, state)

    def _part(self, part: Part, content: object) -> Iterator[Finding]:
        wrong: list[str] = []

        def look() -> None:
            rows = 0
            for batch in self.source.read(part):
                rows += batch.num_rows
                if isinstance(content, KeyedPart) and not wrong:
                    wrong.extend(self._misplaced(part, content, batch))
            if part.rows is not None and rows != part.rows:
                wrong.append(f"has {rows} rows, and {part.rows} by the metadata")
            if isinstance(content, KeyedPart) and not wrong:
                wrong.extend(self._misplaced_rows(part, content))

        yield from self._caught(look, part.operator, part.state, part.subtask, part.path)
        for message in wrong:
            yield Finding(
                ErrorKind.DAMAGED_SEGMENT,
                _STATE,
                f"state {part.state!r} of {part.operator}, subtask {part.subtask}, {message}",
                _DAMAGE,
                part.path or "",
                part.operator,
                part.state,
                part.subtask,
            )

    def _misplaced(self, part: Part, content: KeyedPart, batch: pa.RecordBatch) -> Iterator[str]:
        """Compare the key groups of rows with Java's hash codes of their keys."""
        if self.contents.keys.get(part.operator) in (*HASHED, "Tuple") and not content.form.raw_key:
            yield from self._other_groups(part, batch, java_hash_codes(batch.column("key")))

    def _misplaced_rows(self, part: Part, content: KeyedPart) -> Iterator[str]:
        """Do the same for keys of SQL: the hash is of a row's bytes, so keys are read as bytes."""
        if self.contents.keys.get(part.operator) != BINARY_ROW or content.reader is None:
            return
        form, _ = form_of(part.operator, replace(content.form.parts, key=Framed()))
        for batch in content.reader.batches(form, content.first, content.last):
            yield from self._other_groups(part, batch, binary_row_codes(from_arrow(batch.column("key"))))

    def _other_groups(self, part: Part, batch: pa.RecordBatch, codes: npt.NDArray[np.int32]) -> Iterator[str]:
        limit = self.contents.graph.operator(part.operator).max_parallelism or 1
        expected, found = key_groups(murmur(codes), limit), batch.column("_key_group").to_numpy()
        wrong = np.flatnonzero(expected != found)
        if len(wrong):
            first = int(wrong[0])
            yield (
                f"has {len(wrong)} rows whose keys lie in other key groups than their hashes say, the first with key "
                f"{batch.column('key')[first].as_py()!r:.80} in {found[first]} instead of {expected[first]}"
            )


def _walk(reader: HeapReader) -> None:
    """Walk all key groups to their ends, which readers of one state do not do, if all is
    understood.
    """
    understood = reader.unnamed == 0 and len(reader.stored) == len(reader.numbers)
    if understood or (reader.compressed and reader.stored):
        for some in reader.extents.ranges():
            reader.entries(some, None)


def _verify(reader: RocksReader) -> None:
    reader.database().verify()


def _problem(
    error: CheckpointError | FileNotFoundError,
    clause: str,
    path: str,
    operator: str = "",
    subtask: int | None = None,
    state: str = "",
) -> Finding:
    if isinstance(error, FileNotFoundError):
        return Finding(ErrorKind.OBJECT_MISSING, clause, f"{path} is missing", _OTHER, path, operator, state, subtask)
    found = error.details.get("path") or path
    advice = _OTHER if isinstance(error, InvalidInput) else _DAMAGE
    return Finding(error.kind, clause, str(error), advice, str(found), operator, state, subtask)

"""Checkpoints that have lost segments: which, and putting them back (SPEC.md section 8.4).

``stateformat.publication`` deals with records and manifests that are damaged or lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from threading import Lock
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from . import paths as layout
from .errors import CheckpointError, DamagedCheckpoint, ErrorKind, NotFound, StorageError
from .findings import UNDECIDED
from .model import Mode, Record
from .pins import pins
from .publication import Diagnosis
from .reading import load_manifest
from .storage import Storage, read_input

# ---- what is lost --------------------------------------------------------------------------------
#
# Which segments of a checkpoint are lost.


_DISPENSABLE: Final = frozenset({Mode.COMMITTABLES, Mode.PROGRESS, Mode.IN_FLIGHT})
"""What a source can do without; without its other state it would lose or repeat input."""


class LostSegment(NamedTuple):
    """A segment that a checkpoint names and that is missing or damaged."""

    path: str
    size_bytes: int
    """The size in the manifest."""
    digest: bytes
    is_there: bool
    """Whether an object exists at its path; it is never overwritten."""


@dataclass(frozen=True)
class Losses:
    """The lost segments of one checkpoint with a readable record and manifest."""

    record: Record
    segments: tuple[LostSegment, ...]
    states: tuple[tuple[str, str], ...]
    """The operators and states that lost rows with them."""

    @property
    def positions(self) -> tuple[tuple[str, str], ...]:
        """Those that hold positions of a source, without which input is lost or read again."""
        return tuple(
            (uid, name)
            for uid, name in self.states
            if not self.record.graph.inputs(uid) and self.record.state(uid, name).mode not in _DISPENSABLE
        )


def losses_of(storage: Storage, diagnosis: Diagnosis, source: int | None = None) -> Losses | None:
    """Return the lost segments of ``source``, by default the newest checkpoint, after a diagnosis.

    None if it is intact, if anything but segments is damaged, if it may be a stray, or if it is
    unknown what is damaged. Raises ``NotFound`` for a ``source`` that was not diagnosed.
    """
    if source in (None, diagnosis.newest):
        record = diagnosis.found.chain[0] if diagnosis.fault is None and diagnosis.found.chain else None
        problems = diagnosis.problems
    else:
        way = diagnosis.chosen
        if way is None or way.record.checkpoint_id != source:
            raise NotFound(f"checkpoint {source} of {storage.url} was not diagnosed", checkpoint_id=source)
        record = way.record if way.certain and diagnosis.undecided is None else None
        problems = way.problems or ()
    errors = [problem for problem in problems if problem.severity == "error"]
    if record is None or not errors:
        return None
    if any(each.kind in UNDECIDED or not each.path.startswith(layout.SEGMENTS) for each in errors):
        return None
    manifest = load_manifest(storage, record)
    paths = sorted({each.path for each in errors})
    handles = manifest.handles.filter(pc.is_in(manifest.handles["path"], value_set=pa.array(paths, pa.string())))
    there = {item.path for item in storage.list(layout.SEGMENTS)}
    # Inline segments are in the manifest, so they exist, however damaged.
    there |= {path for path in paths if manifest.inline(path) is not None}
    rows = handles.select(["path", "size_bytes", "digest", "operator", "state"]).to_pylist()
    named = {row["path"]: (row["path"], row["size_bytes"], row["digest"], row["path"] in there) for row in rows}
    segments = tuple(LostSegment(*named[path]) for path in sorted(named))
    states = sorted({(row["operator"], row["state"]) for row in rows})
    return Losses(record, segments, tuple(states)) if segments else None


def why_not(storage: Storage, diagnosis: Diagnosis) -> CheckpointError:
    """Return the error for a damaged newest checkpoint whose lost segments are unknown."""
    newest = diagnosis.newest
    if diagnosis.undecided is not None:
        return diagnosis.fault or DamagedCheckpoint(
            f"checkpoint {newest} of {storage.url} may be whole, so nothing was changed: {diagnosis.undecided}"
        )
    if diagnosis.fault is not None:
        return DamagedCheckpoint(
            f"the record of checkpoint {newest} of {storage.url} cannot be read, so what it has lost is unknown; "
            "name an older checkpoint (STORE@ID), or go back (`ckpt repair`)",
            kind=diagnosis.fault.kind,
        )
    other = next(each for each in diagnosis.problems if not each.path.startswith(layout.SEGMENTS))
    return DamagedCheckpoint(
        f"checkpoint {newest} of {storage.url} has lost more than segments, so what is left of it is unknown: "
        f"{other.message}. Go back to a whole one (`ckpt repair`)",
        kind=other.kind,
        path=other.path,
    )


# ---- putting it back -----------------------------------------------------------------------------
#
# Lost segments that another store still has: savepoints and other copies keep paths and bytes.
#
# An object is trusted only by its size and digest. Nothing is overwritten: a missing object is
# written again under its path, and a damaged one has to be moved away first.


_CHUNK_BYTES = 4 * 2**20
logger = logging.getLogger(__name__)


def savepoints_of(storage: Storage) -> list[Storage]:
    """Return the savepoints below a store, the one with the newest checkpoint first."""
    found = [(one.record.checkpoint_id, one.name) for one in pins(storage) if one.record is not None]
    return [storage.savepoint(name) for _, name in sorted(found, key=lambda each: -each[0])]


def listed_in(segments: Sequence[LostSegment], places: Iterable[Storage]) -> dict[str, list[str]]:
    """Return the paths that each place, by its URL, has with the right size.

    Lists each place once. A place that cannot be listed has none.
    """
    wanted, found = {each.path: each.size_bytes for each in segments}, {}
    for place in places:
        try:
            there = place.list(layout.SEGMENTS)
        except StorageError:
            continue
        mine = [item.path for item in there if wanted.get(item.path) == item.size_bytes]
        if mine:
            found[place.url] = sorted(mine)
    return found


def put_back(
    storage: Storage,
    losses: Losses,
    places: Sequence[Storage],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Write the missing segments again, from the first of ``places`` that has each, byte for byte.

    Returns their paths: the checkpoint is whole again. ``progress`` is called with the bytes
    copied, and those to copy. Raises ``StorageError`` if a place does not respond, and
    ``DamagedCheckpoint`` if a segment is found nowhere, or stands damaged under its path; the
    others were put back then.
    """
    missing = [each for each in losses.segments if not each.is_there]
    lock, done, total = Lock(), [0], sum(each.size_bytes for each in missing)

    def one(segment: LostSegment) -> bool:
        found = any(_copied(place, storage, segment) for place in places)
        with lock:
            done[0] += segment.size_bytes
            if progress is not None:
                progress(done[0], total)
        return found

    with ThreadPoolExecutor(max((place.reads_at_once for place in places), default=1)) as pool:
        found = list(pool.map(one, missing))
    again = [each.path for each, is_found in zip(missing, found, strict=True) if is_found]
    storage.make_durable(again)
    number = losses.record.checkpoint_id
    logger.warning("put %d of %d segments of checkpoint %d back into %s", len(again), len(missing), number, storage.url)
    if len(again) < len(losses.segments):
        raise _still_lost(storage, losses, again, places)
    return again


def _copied(place: Storage, storage: Storage, segment: LostSegment) -> bool:
    """Copy a segment, unless the place has none with these bytes."""
    digest, size_bytes = xxhash.xxh3_128(), 0
    try:
        with closing(place.open_input(segment.path)) as source, storage.open_output(segment.path) as output:
            # An object that is longer is wrong already.
            while size_bytes <= segment.size_bytes and (chunk := read_input(place, source, _CHUNK_BYTES)):
                digest.update(chunk)
                size_bytes += len(chunk)
                output.write(chunk)
            if digest.digest() != segment.digest:
                raise _OtherBytes  # So the output is discarded.
    except (FileNotFoundError, _OtherBytes):
        return False
    return True


class _OtherBytes(Exception):
    """A place has other bytes under the path of a segment."""


def _still_lost(storage: Storage, losses: Losses, again: Sequence[str], places: Sequence[Storage]) -> DamagedCheckpoint:
    first = next(each for each in losses.segments if each.path not in set(again))
    number, put = losses.record.checkpoint_id, f"{len(again)} of {len(losses.segments)}"
    if first.is_there and listed_in([first], places):
        return DamagedCheckpoint(
            f"put {put} lost segments of checkpoint {number} of {storage.url} back: {first.path} is damaged, and "
            "nothing is overwritten. Move that object away and run this again, and it is put back as well",
            kind=ErrorKind.DAMAGED_SEGMENT,
            path=first.path,
        )
    return DamagedCheckpoint(
        f"put {put} lost segments of checkpoint {number} of {storage.url} back: {first.path} is found nowhere. `ckpt "
        "repair` lists the other ways out",
        kind=ErrorKind.OBJECT_MISSING,
        path=first.path,
    )

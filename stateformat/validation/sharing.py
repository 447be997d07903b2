"""Segments that several checkpoints share, each read once.

Checkpoints come from the newest down. Comparing the columns of two manifests, for all handles at
once, finds the segments that are named exactly as in the checkpoint checked before. A segment named
differently, after a rescale or a rollback, is remembered by its path: its handles are compared with
the rows that were counted in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .. import paths as layout
from ..findings import Finding, Level
from ..manifest import BATCH_ROWS, Ints, Manifest, Mask, integers, lists, one_chunk, spread, take_rows
from ..model import Record
from ..storage import Storage
from .segments import Segment, SegmentResult, check_other_handles, check_segment, segment_of, segments_of

THREADS: Final = 4
_WINDOW: Final = 256
REMEMBERED_BYTES_MAX: Final = 64 * 2**20
"""Bytes remembered of sound segments; those beyond it are read again if named differently."""
_RESULT_BYTES: Final = 1_024

_COMPARED: Final = (
    *("operator", "state", "mode", "subtask", "layer", "edge", "schema_id", "row_start", "rows", "segment_rows"),
    *("size_bytes", "uncompressed_bytes", "footer_bytes", "digest", "footer_digest", "first_group", "last_group"),
)
_OF_SEGMENT: Final = ("schema_id", "segment_rows", "size_bytes", "uncompressed_bytes", "footer_bytes")
_DIGESTS: Final = ("digest", "footer_digest", "operator", "state")


@dataclass
class Checked:
    """What a check of the segments of one checkpoint found and read."""

    problems: list[Finding] = field(default_factory=list)
    segments: int = 0
    """Distinct segments that the checkpoint names."""
    read: int = 0
    """Those of them that were not checked before."""
    bytes: int = 0
    rows: int = 0


@dataclass
class _Named:
    """The segments of the checkpoint checked before, in the order of its handles."""

    record: Record
    manifest: Manifest
    rows: Ints
    """Rows of the manifest, sorted by segment."""
    bounds: Ints
    paths: pa.Array
    newest_ids: Ints
    problems: dict[str, list[Finding]]


class SharedSegments:
    """Checks the segments of a store's checkpoints, newest first, each segment once."""

    def __init__(self, storage: Storage, level: Level) -> None:
        self.storage = storage
        """The storage of the store."""
        self._level: Level = level
        self._sizes: Mapping[str, int] | None = None
        self._before: _Named | None = None
        self._sound: dict[str, tuple[tuple[Any, ...], SegmentResult]] = {}
        self._remembered = 0

    def check(self, record: Record, manifest: Manifest, usable: Mask, done: Callable[[int], None]) -> Checked:
        """Return what is wrong with the segments that one checkpoint names.

        ``usable`` marks the handles that are valid by themselves. ``done`` is called with the
        number of bytes checked since the last call. Raises ``StorageError`` if the segments cannot
        be listed.
        """
        rows, bounds = segments_of(manifest, usable)
        first = rows[bounds[:-1]]
        count = len(bounds) - 1
        found = Checked(segments=count)
        if count and self._sizes is None:
            self._sizes = {item.path: item.size_bytes for item in self.storage.list(layout.SEGMENTS)}
        paths = one_chunk(manifest.handles["path"]).take(pa.array(first))
        paths = paths.combine_chunks() if isinstance(paths, pa.ChunkedArray) else paths
        same, newest_ids = self._same(record, manifest, rows, bounds, paths)
        problems: dict[int, list[Finding]] = {}
        if same.any():
            assert self._before is not None
            done(int(integers(manifest.handles["size_bytes"])[first][same].sum()))
            known = self._before.problems
            wrong = same & pc.is_in(paths, value_set=pa.array(list(known), pa.string())).to_numpy(zero_copy_only=False)
            numbers = np.flatnonzero(wrong)
            again = paths.take(pa.array(numbers)).to_pylist()
            problems = {number: known[path] for number, path in zip(numbers.tolist(), again, strict=True)}
        others = np.flatnonzero(~same).tolist()
        segments = (segment_of(record, manifest, rows, bounds, number) for number in others)
        for number, result in zip(others, self._check(record, segments, done), strict=True):
            newest_ids[number] = result.newest_id
            if result.problems:
                problems[number] = result.problems
            found.bytes, found.rows = found.bytes + result.bytes, found.rows + result.rows
            found.read += bool(result.bytes or result.problems)
        found.problems = [problem for number in sorted(problems) for problem in problems[number]]
        by_path = {some[0].path: some for some in problems.values()}
        self._before = _Named(record, manifest, rows, bounds, paths, newest_ids, by_path)
        return found

    def _check(
        self, record: Record, segments: Iterator[Segment], done: Callable[[int], None]
    ) -> Iterator[SegmentResult]:
        """Check segments in threads, and yield the results in order; queue a few at a time."""
        one = partial(self._check_one, record, done)
        with ThreadPoolExecutor(THREADS, thread_name_prefix="stateformat-validate") as pool:
            while window := list(islice(segments, _WINDOW)):
                for segment, result in zip(window, pool.map(one, window), strict=True):
                    self._remember(record, segment, result)
                    yield result

    def _check_one(self, record: Record, done: Callable[[int], None], segment: Segment) -> SegmentResult:
        facts, known = self._sound.get(segment.path, ((), None))
        if known is not None and known.newest_id <= record.checkpoint_id and facts == _facts(record, segment):
            done(int(segment.facts["size_bytes"]))
            return check_other_handles(self.storage, record, segment, known)
        return check_segment(self.storage, record, segment, sizes=self._sizes or {}, level=self._level, done=done)

    def _remember(self, record: Record, segment: Segment, result: SegmentResult) -> None:
        # Inline segments cost no request.
        if not result.is_sound or segment.inline is not None or segment.path in self._sound:
            return
        size_bytes = _RESULT_BYTES + 8 * len(result.row_groups)
        size_bytes += result.group_rows.counts.nbytes if result.group_rows is not None else 0
        if self._remembered + size_bytes <= REMEMBERED_BYTES_MAX:
            self._remembered += size_bytes
            self._sound[segment.path] = _facts(record, segment), result

    def _same(self, record: Record, manifest: Manifest, rows: Ints, bounds: Ints, paths: pa.Array) -> tuple[Mask, Ints]:
        """Return which segments are named exactly as in the checkpoint before, and their ids."""
        count, last = len(bounds) - 1, self._before
        if last is None or not count or not len(last.paths) or last.record.job_id != record.job_id:
            return np.zeros(count, bool), np.zeros(count, np.int64)
        at = integers(pc.index_in(paths, value_set=last.paths))
        there = np.maximum(at, 0)
        newest_ids = last.newest_ids[there]
        sizes, sizes_there = np.diff(bounds), np.diff(last.bounds)[there]
        same = (at >= 0) & (sizes == sizes_there) & (newest_ids <= record.checkpoint_id)
        for chosen in _batches(np.flatnonzero(same), sizes):
            owner, nth = spread(sizes[chosen])
            ours = take_rows(manifest.handles, pa.array(rows[bounds[:-1][chosen][owner] + nth]))
            rows_there = last.rows[last.bounds[:-1][there[chosen]][owner] + nth]
            theirs = take_rows(last.manifest.handles, pa.array(rows_there))
            differs = np.bincount(owner, ~_equal_rows(ours, theirs), len(chosen)) > 0
            same[chosen[differs]] = False
        return same & self._same_states(record, manifest, rows[bounds[:-1]]) & self._same_inline(
            manifest, paths, same
        ), newest_ids

    def _same_states(self, record: Record, manifest: Manifest, first: Ints) -> Mask:
        """Return which segments have a state declared as in the checkpoint before."""
        assert self._before is not None
        other, same = self._before.record, np.ones(len(first), bool)
        for state in record.states:
            was, operator = other.by_state.get((state.operator, state.name)), record.graph.by_uid[state.operator]
            before_, now = other.graph.by_uid.get(state.operator), (operator.max_parallelism, operator.key_hash)
            if was != state or before_ is None or (before_.max_parallelism, before_.key_hash) != now:
                named = take_rows(manifest.handles.select(["operator", "state"]), pa.array(first))
                mine = pc.and_(pc.equal(named["operator"], state.operator), pc.equal(named["state"], state.name))
                same &= ~mine.to_numpy()
        return same

    def _same_inline(self, manifest: Manifest, paths: pa.Array, same: Mask) -> Mask:
        """Return which segments are inline in both checkpoints with equal bytes, or in neither."""
        assert self._before is not None
        found = same.copy()
        if not manifest.inline_bytes() and not self._before.manifest.inline_bytes():
            return found
        chosen = np.flatnonzero(same)
        for number, path in zip(chosen.tolist(), paths.take(pa.array(chosen)).to_pylist(), strict=True):
            ours, theirs = manifest.inline(path), self._before.manifest.inline(path)
            found[number] = theirs is None if ours is None else theirs is not None and ours.equals(theirs)
        return found


def _batches(chosen: Ints, sizes: Ints) -> Iterator[Ints]:
    """Yield a few segments at a time, with about :data:`BATCH_ROWS` handles, or a single one."""
    if len(chosen):
        batch = (np.cumsum(sizes[chosen]) - 1) // BATCH_ROWS
        yield from np.split(chosen, np.flatnonzero(np.diff(batch)) + 1)


def _equal_rows(ours: pa.Table, theirs: pa.Table) -> Mask:
    """Return which rows of two tables of handles are equal."""
    same = np.ones(ours.num_rows, bool)
    for name in _COMPARED:
        one, other = ours[name], theirs[name]
        equal = pc.fill_null(pc.equal(one, other), False)
        same &= pc.or_(equal, pc.and_(pc.is_null(one), pc.is_null(other))).to_numpy()
    (start, end, counts), (start_there, end_there, counts_there) = (
        lists(table["rows_per_group"].combine_chunks()) for table in (ours, theirs)
    )
    same &= end - start == end_there - start_there
    rows = np.flatnonzero(same)
    owner, nth = spread((end - start)[rows])
    differs = counts[start[rows][owner] + nth] != counts_there[start_there[rows][owner] + nth]
    same[rows[np.bincount(owner, differs, len(rows)) > 0]] = False
    return same


def _facts(record: Record, segment: Segment) -> tuple[Any, ...]:
    """Return everything that the rows of a segment were checked against, except its handles."""
    facts, operator = segment.facts, segment.operator
    own = (*(facts[name] for name in (*_OF_SEGMENT, *_DIGESTS)), facts["layer"] > 0)
    return (*own, segment.state, operator.max_parallelism, operator.key_hash, record.job_id)

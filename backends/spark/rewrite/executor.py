"""The rewrite on Spark: what runs in Python workers, from Arrow batches to Arrow batches.

The stages are functions for ``mapInArrow``. Each carries a list of pickled tasks, and a worker
unpickles only its own. Results are rows (``Snapshot.to_bytes``). Spark takes the rows of exactly
one attempt per task, even if others were retried or ran twice; the segments of others are garbage.

Our errors travel as JSON in the message of an exception, because Spark keeps only the message: see
:func:`decode`.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa

import stateformat.errors
from stateformat.errors import CheckpointError, ErrorKind, StorageError
from stateformat.model import Handle
from stateformat.schema import KEY_GROUP
from stateformat.snapshot import Snapshot, WriteContext
from stateformat.tables import Spill, cut, split_by_bucket

from ...rewrite import Move, RehashSource, distribute, write_move, write_target
from ..worker_process import settle

Batches = Iterable[pa.RecordBatch]
Stage = Callable[[Batches], Iterator[pa.RecordBatch]]


FRAME_BYTES: Final = 4 * 2**20
"""A frame is an Arrow IPC record batch of about this size at most."""
FRAME_SCHEMA: Final = "target int, payload binary"
_COMPRESSED: Final = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
RESULT_SCHEMA: Final = "snapshot binary, rows_read long"
_READ: Final = b"rows_read"
"""In the metadata of a frame's schema: how many rows its source has read in total."""
_MARK: Final = "stateformat-error:"


def write_moves(tasks: Sequence[bytes], written: Any) -> Stage:
    """Turn rows (id long) into one row (snapshot binary, rows_read long) per place of a move.

    Task *id* is a pickled list of (context, move). The accumulator ``written`` counts rows for the
    progress shown to users.
    """

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        settle()
        for number in ids(batches):
            # Our own driver pickled it for this job. Nothing from a store is ever unpickled.
            work: list[tuple[WriteContext, Move]] = pickle.loads(tasks[number])  # noqa: S301
            for context, move in work:
                read: list[int] = []
                handles = write_move(context, move, seen=read.append)
                while (handle := reported(next, handles, None)) is not None:
                    yield _result(_snapshot(handle), sum(read))
                    read.clear()
                written.add(move.rows)

    return run


def distribute_sources(tasks: Sequence[bytes]) -> Stage:
    """Turn rows (id long) into frames (target int, payload binary).

    Task *id* is a pickled list of sources. The last frame of a source has no rows: it tells the
    first target of its state how many were read.
    """

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        settle()
        for number in ids(batches):
            work: list[RehashSource] = pickle.loads(tasks[number])  # noqa: S301
            for source in work:
                read: list[int] = []
                distributed = distribute(source, read.append)
                while (one := reported(next, distributed, None)) is not None:
                    target, batch = one
                    yield from frames_of(target, batch)
                said = pa.schema([], metadata={_READ: str(sum(read))})
                yield _framed(source.first_target, pa.RecordBatch.from_arrays([], schema=said))

    return run


def write_targets(tasks: Sequence[bytes], written: Any) -> Stage:
    """Turn frames into one row (snapshot binary, rows_read long) per target that has any.

    Task *target* is a pickled (context, place, whether row keys must be compared). The accumulator
    ``written`` counts rows.
    """

    def write(target: int, rows: Batches) -> bytes:
        context, place, check_unique = pickle.loads(tasks[target])  # noqa: S301
        handle = reported(partial(write_target, check_unique=check_unique), context, place, rows)
        written.add(handle.rows)
        return _snapshot(handle)

    return gather_targets(write)


def gather_targets(write: Callable[[int, Batches], bytes]) -> Stage:
    """Turn frames into one row (snapshot binary, rows_read long) per target that has any.

    ``write`` takes a target and the rows of all its frames, which wait in a temporary file, and
    returns the snapshot.
    """

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        settle()
        frames: Spill[int] = Spill()
        with frames:
            for batch in batches:
                rows = pa.Table.from_batches([batch])
                for target, payloads in split_by_bucket(
                    rows.select(["payload"]), rows["target"].to_numpy().astype(np.int64)
                ):
                    frames.add(target, payloads)
            for target in sorted(frames.sizes):
                read: list[int] = []
                data = write(target, _unframed(frames.read(target), read.append))
                yield _result(data, sum(read))

    return run


def _unframed(frames: Batches, seen: Callable[[int], None]) -> Iterator[pa.RecordBatch]:
    for batch in frames:
        for payload in batch["payload"]:
            stream = pa.ipc.open_stream(payload.as_buffer())
            read = (stream.schema.metadata or {}).get(_READ)
            if read is None:
                yield from stream
            else:
                seen(int(read))


def ids(batches: Batches) -> Iterator[int]:
    """Yield the numbers of a partition's tasks, from the column ``id``."""
    for batch in batches:
        yield from batch["id"].to_pylist()


def frames_of(target: int, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the frames that carry a batch to a target.

    They leave out the key group: hashing the keys again costs less than carrying it.
    """
    for part in cut(batch, batch.num_rows, FRAME_BYTES):
        kept = [name for name in part.schema.names if name != KEY_GROUP.name]
        yield _framed(target, part.select(kept))


def _framed(target: int, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a frame: one row with the target, and the batch as a compressed Arrow IPC stream.

    The JVM processes every byte of a frame several times, so compression pays off.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_COMPRESSED) as stream:
        stream.write_batch(batch)
    payload = sink.getvalue()
    # Built on the buffer itself, so that megabytes are not copied into a Python object.
    bounds = pa.py_buffer(struct.pack("ii", 0, payload.size))
    made = pa.Array.from_buffers(pa.binary(), 1, [None, bounds, payload])
    return pa.record_batch([pa.array([target], pa.int32()), made], ["target", "payload"])


def _snapshot(handle: Handle) -> bytes:
    return Snapshot(handle.operator, handle.subtask, (handle,)).to_bytes()


def _result(snapshot: bytes, rows_read: int) -> pa.RecordBatch:
    columns = [pa.array([snapshot], pa.binary()), pa.array([rows_read], pa.int64())]
    return pa.record_batch(columns, names=["snapshot", "rows_read"])


def reported(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function. Turn one of our errors into an error that :func:`decode` understands."""
    try:
        return function(*arguments)
    except CheckpointError as error:
        facts = {"class": type(error).__name__, "kind": error.kind, "message": str(error)}
        raise RuntimeError(f"{_MARK}{json.dumps(facts)}") from error


def decode(message: str) -> CheckpointError:
    """Return the error of a worker from Spark's message; if it is not ours, a ``StorageError``."""
    for line in message.split("\n"):
        _, mark, text = line.partition(_MARK)
        if mark:
            facts, _ = json.JSONDecoder().raw_decode(text)
            found = getattr(stateformat.errors, facts["class"], None)
            if isinstance(found, type) and issubclass(found, CheckpointError):
                return found(facts["message"], kind=ErrorKind(facts["kind"]))
    last = next((line for line in reversed(message.split("\n")) if line.strip()), "no reason given")
    return StorageError(f"a Spark task failed, nothing was published: {last.strip()}")

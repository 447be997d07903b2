"""Which committables may still be committed: those of every record that stands, and of attempts about to be published.

A sink cleans up when a run begins. What it removes must not be carried by any checkpoint that can still be started from:
after a rollback the newest checkpoint does not carry what a later one had prepared, but a second rollback goes back to that
one. So clean-up keeps what garbage collection keeps (``retention``): the records that stand, strays too, and the manifests
under newest + 1, one of which may belong to a rollback under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import pyarrow as pa

from ..errors import CheckpointExpired
from ..manifest import decode_manifest, unpublished_ref
from ..model import CheckpointId, Record, SchemaVersion
from ..reading import Checkpoint
from ..record import MANIFEST_BYTES_MAX
from ..storage import Storage
from .records import Ids, Moved, find_record, settled
from .retention import manifests_under


class Wanted(NamedTuple):
    """What is to be read of an operator's committables: down to which checkpoint id, and in which columns."""

    down_to: int
    schema: SchemaVersion


def carried_committables(storage: Storage, state: str, wanted: Mapping[str, Wanted]) -> dict[str, list[pa.Table]]:
    """The rows of the committables ``state`` of operators, by uid, one table for each checkpoint that carries some.

    What was prepared under an id is carried by no checkpoint below it, so nothing below ``down_to`` is read. Columns:
    ``_checkpoint_id``, ``_attempt_id``, then those of the schema that is wanted. Tables of different checkpoints may repeat rows. Only the handles of these states are read, once the manifest
    was. Raises ``DamagedCheckpoint``, ``UnsupportedFormat`` or ``StorageError`` where a record, a manifest or a segment of
    committables cannot be read, ``InvalidState`` where committables do not evolve to the schema: then it is unknown what is carried.
    """
    if not wanted:
        return {}
    return settled(storage, lambda ids: _carried(storage, ids, state, wanted))


def _carried(storage: Storage, ids: Ids, state: str, wanted: Mapping[str, Wanted]) -> dict[str, list[pa.Table]]:
    found: dict[str, list[pa.Table]] = {uid: [] for uid in wanted}
    least = min(each.down_to for each in wanted.values())
    newest: Record | None = None
    for checkpoint_id in ids:
        if checkpoint_id < least:
            continue
        record = find_record(storage, checkpoint_id)
        if record is None:
            # The newest is never removed, so then there is a newer one. Any other was expired meanwhile.
            if checkpoint_id == ids[-1]:
                raise Moved
            continue
        newest = record
        for uid, rows in _rows(Checkpoint(storage, record), state, wanted):
            found[uid].append(rows)
    for checkpoint in _unpublished(storage, newest):
        for uid, rows in _rows(checkpoint, state, wanted):
            found[uid].append(rows)
    return found


def _rows(checkpoint: Checkpoint, state: str, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, pa.Table]]:
    if "committables" not in checkpoint.record.required_features:
        return
    try:
        for uid, (down_to, schema) in wanted.items():
            if checkpoint.id >= down_to and (uid, state) in checkpoint.record.by_state:
                rows = checkpoint.read(uid, state).table(as_schema=schema)
                if rows.num_rows:
                    yield uid, rows
    except CheckpointExpired:
        raise Moved from None


def _unpublished(storage: Storage, newest: Record | None) -> Iterator[Checkpoint]:
    """The manifests under newest + 1, each read as if the newest record named it: what they carry is the same job's."""
    if newest is None:
        return
    for path in manifests_under(storage, CheckpointId(newest.checkpoint_id + 1)):
        try:
            data = storage.read_range(path, 0, MANIFEST_BYTES_MAX + 1)
        except FileNotFoundError:
            # Collected, as garbage of an id that is not above the newest any more.
            raise Moved from None
        ref = unpublished_ref(data, path)
        record = replace(
            newest,
            checkpoint_id=CheckpointId(newest.checkpoint_id + 1),
            manifest=ref,
            required_features=(*newest.required_features, "committables"),
        )
        yield Checkpoint(storage, record, manifest=decode_manifest(data, ref))


__all__ = ["Wanted", "carried_committables"]

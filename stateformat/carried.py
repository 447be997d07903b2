"""Which committables may still be committed: those of every record that stands, and of attempts about to be published.

A sink cleans up when a run begins. What it removes must not be carried by any checkpoint that can still be started from:
after a rollback the newest checkpoint does not carry what a later one had prepared, but a second rollback goes back to that
one. So clean-up keeps what garbage collection keeps (``retention``): the records that stand, strays too, and the manifests
under newest + 1, one of which may belong to a rollback under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pyarrow as pa

from stateformat.checkpoint import Checkpoint
from stateformat.codec_v1 import MANIFEST_BYTES_MAX
from stateformat.errors import CheckpointExpired
from stateformat.history import Ids, Moved, find_record, settled
from stateformat.manifest import decode_manifest, unpublished_ref
from stateformat.model import CheckpointId, Record
from stateformat.retention import manifests_under
from stateformat.storage import Storage


def carried_committables(storage: Storage, state: str, down_to: Mapping[str, int]) -> dict[str, list[pa.Table]]:
    """The rows of the committables ``state`` of operators, by uid, one table for each checkpoint that carries some.

    ``down_to`` gives the least id of interest for each uid: what was prepared under an id is carried by no checkpoint
    below it, so nothing below is read. Columns are those of each checkpoint: ``_checkpoint_id``, ``_attempt_id``, then the
    sink's. Tables of different checkpoints may repeat rows. Only the handles of these states are read, once the manifest
    was. Raises ``DamagedCheckpoint``, ``UnsupportedFormat`` or ``StorageError`` where a record, a manifest or a segment of
    committables cannot be read: then it is unknown what is carried.
    """
    if not down_to:
        return {}
    return settled(storage, lambda ids: _carried(storage, ids, state, down_to))


def _carried(storage: Storage, ids: Ids, state: str, down_to: Mapping[str, int]) -> dict[str, list[pa.Table]]:
    found: dict[str, list[pa.Table]] = {uid: [] for uid in down_to}
    newest: Record | None = None
    for checkpoint_id in ids:
        if checkpoint_id < min(down_to.values()):
            continue
        record = find_record(storage, checkpoint_id)
        if record is None:
            # The newest is never removed, so then there is a newer one. Any other was expired meanwhile.
            if checkpoint_id == ids[-1]:
                raise Moved
            continue
        newest = record
        for uid, rows in _rows(Checkpoint(storage, record), state, down_to):
            found[uid].append(rows)
    for checkpoint in _unpublished(storage, newest):
        for uid, rows in _rows(checkpoint, state, down_to):
            found[uid].append(rows)
    return found


def _rows(checkpoint: Checkpoint, state: str, down_to: Mapping[str, int]) -> Iterator[tuple[str, pa.Table]]:
    if "committables" not in checkpoint.record.required_features:
        return
    try:
        for uid, least in down_to.items():
            if checkpoint.id >= least and (uid, state) in checkpoint.record.by_state:
                rows = checkpoint.read(uid, state).table()
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


__all__ = ["carried_committables"]

"""The committables that may still be committed: of every record, and of attempts about to publish.

Sinks clean up when a run begins, and keep what garbage collection keeps (``retention``): a second
rollback may go back to a checkpoint whose committables the newest does not carry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import pyarrow as pa

from ..errors import CheckpointExpired
from ..manifest import decode_manifest, manifest_ref
from ..model import CheckpointId, Record, SchemaVersion
from ..reading import Checkpoint
from ..storage import Storage
from .records import HistoryChanged, Ids, find_record, read_until_stable
from .retention import check_expired, manifests_under, read_unpublished_bytes


class Wanted(NamedTuple):
    """Which committables of an operator to read."""

    down_to: int
    """The lowest checkpoint id."""
    schema: SchemaVersion


def carried_committables(storage: Storage, state: str, wanted: Mapping[str, Wanted]) -> dict[str, list[pa.Table]]:
    """Return the rows of the committables ``state`` by uid, one table for each checkpoint with any.

    Columns: ``_checkpoint_id``, ``_attempt_id``, then those of the wanted schema. Tables may repeat
    rows. No checkpoint below an id carries what was prepared under that id, so none is read.
    Raises what reading records, manifests and segments raises, and ``InvalidState`` if the
    committables cannot evolve to the schema.
    """
    if not wanted:
        return {}
    return read_until_stable(storage, lambda ids: _carried(storage, ids, state, wanted))


def _carried(storage: Storage, ids: Ids, state: str, wanted: Mapping[str, Wanted]) -> dict[str, list[pa.Table]]:
    found: dict[str, list[pa.Table]] = {uid: [] for uid in wanted}
    least = min(each.down_to for each in wanted.values())
    for checkpoint in _checkpoints(storage, ids, least):
        for uid, rows in _rows(checkpoint, state, wanted):
            found[uid].append(rows)
    return found


def _checkpoints(storage: Storage, ids: Ids, least: int) -> Iterator[Checkpoint]:
    """Yield the checkpoints from an id on, then the manifests under newest + 1."""
    newest: Record | None = None
    for checkpoint_id in ids:
        if checkpoint_id < least:
            continue
        record = find_record(storage, checkpoint_id)
        if record is None:
            check_expired(checkpoint_id, ids[-1])
            continue
        newest = record
        yield Checkpoint(storage, record)
    if newest is None:
        return
    features = (*newest.required_features, "committables")
    unpublished = replace(newest, checkpoint_id=CheckpointId(newest.checkpoint_id + 1), required_features=features)
    for path in manifests_under(storage, unpublished.checkpoint_id):
        data = read_unpublished_bytes(storage, path)
        ref = manifest_ref(path, data)
        yield Checkpoint(storage, replace(unpublished, manifest=ref), manifest=decode_manifest(data, ref))


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
        raise HistoryChanged from None

"""The record and the manifest of a checkpoint: two small reads."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from .. import paths as layout
from ..errors import CheckpointExpired, DamagedCheckpoint, ErrorKind, NotFound
from ..manifest import Manifest, decode_columns, decode_manifest, decode_outline
from ..model import CheckpointId, Record
from ..record import RECORD_BYTES_MAX, decode_record
from ..storage import Storage


def load_record(storage: Storage, checkpoint_id: CheckpointId) -> Record:
    """Return the verified record of an id (SPEC.md section 7.1), or raise ``NotFound``."""
    path = layout.record_path(checkpoint_id)
    try:
        data = storage.read_range(path, 0, RECORD_BYTES_MAX + 1)
    except FileNotFoundError as error:
        raise NotFound(
            f"no checkpoint {checkpoint_id} in {storage.url}; `ckpt history {storage.url}` lists what is there",
            checkpoint_id=checkpoint_id,
        ) from error
    return decode_record(data.to_pybytes(), path=path)


def missing_object(storage: Storage, record: Record, path: str, *, bound_to_run: bool = False) -> Exception:
    """Return the error for a missing object of a checkpoint: expired or damaged (SPEC 7.3).

    ``bound_to_run``: a run resumes from this checkpoint as the newest. If there is a newer one, the
    run has been overtaken, even if a late create has brought the record back.
    """
    try:
        now = load_record(storage, record.checkpoint_id)
        gone = now.attempt_id != record.attempt_id
    except NotFound:
        gone = True
    if not gone and bound_to_run:
        gone = storage.list(layout.RECORDS)[-1].path > layout.record_path(record.checkpoint_id)
    if gone:
        return CheckpointExpired(
            f"checkpoint {record.checkpoint_id} in {storage.url} has expired while it was read ({path} is gone); "
            "open the newest",
            checkpoint_id=record.checkpoint_id,
        )
    return DamagedCheckpoint(
        f"{path} is missing from {storage.url}, but checkpoint {record.checkpoint_id} still exists and names it; "
        f"`ckpt validate {storage.url}@{record.checkpoint_id}` lists everything that is wrong",
        kind=ErrorKind.OBJECT_MISSING,
        path=path,
    )


def load_manifest(storage: Storage, record: Record, *, bound_to_run: bool = False) -> Manifest:
    """Return the verified manifest of a record; ``bound_to_run`` as in :func:`missing_object`."""
    return decode_manifest(_manifest_bytes(storage, record, bound_to_run), record.manifest)


def load_columns(storage: Storage, record: Record, names: Sequence[str]) -> pa.Table:
    """Return some columns of the manifest; see ``manifest.decode_columns``."""
    return decode_columns(_manifest_bytes(storage, record, bound_to_run=False), record.manifest, names)


def load_outline(storage: Storage, record: Record, *, bound_to_run: bool = False) -> pa.Table:
    """Return the part of the manifest that plans need, verified as by :func:`load_manifest`."""
    return decode_outline(_manifest_bytes(storage, record, bound_to_run), record.manifest)


def _manifest_bytes(storage: Storage, record: Record, bound_to_run: bool) -> pa.Buffer:
    try:
        # One byte more than the record says shows an object that is too large.
        return storage.read_range(record.manifest.path, 0, record.manifest.size_bytes + 1)
    except FileNotFoundError as error:
        raise missing_object(storage, record, record.manifest.path, bound_to_run=bound_to_run) from error

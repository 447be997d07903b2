"""Facts about checkpoints as JSON documents: the record's own members, and sums over the manifest.

The names are those of SPEC.md wherever SPEC.md has one. Sums are made with numpy over a few columns of the manifest, so that
a checkpoint of a million handles is described in the time that reading its manifest takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.codec_v1 import members_of
from stateformat.model import PER_SUBTASK_MODES, ParentRef, Record, State, Status, Totals
from tools.ckpt.render import moment, skew

if TYPE_CHECKING:
    import numpy.typing as npt

Document = dict[str, Any]
Ints: TypeAlias = "npt.NDArray[np.int64]"


def reference(ref: ParentRef | None) -> Document | None:
    """A checkpoint by id and attempt; null where there is none."""
    return None if ref is None else {"checkpoint_id": ref.checkpoint_id, "attempt_id": ref.attempt_id}


def record_document(store: str, record: Record) -> Document:
    """Every member of the record (SPEC.md section 3.2) and where it lies. What a record leaves out is null here."""
    members = members_of(record)
    return {
        "store": store,
        **members,
        "parent": members.get("parent"),
        "stop": members.get("stop"),
        "rescaled_from": members.get("rescaled_from"),
        "created_at": moment(record.created_at_us),
    }


def totals_document(totals: Totals) -> Document:
    """The sums over the manifest that stand in the record."""
    return {"handles": totals.handles, "rows": totals.rows, "segments": totals.segments, "bytes": totals.bytes}


def published_document(store: str, record: Record) -> Document:
    """A checkpoint that a command has just published."""
    return {
        "store": store,
        "checkpoint_id": record.checkpoint_id,
        "attempt_id": record.attempt_id,
        "kind": record.kind.value,
        "parent": reference(record.parent),
        "totals": totals_document(record.totals),
        "operators": [operator_size(operator) for operator in record.graph.operators],
    }


def operator_size(operator: Any) -> Document:
    """An operator's parallelism and status, as short as can be."""
    return {
        "uid": operator.uid,
        "name": operator.name,
        "parallelism": operator.parallelism,
        "max_parallelism": operator.max_parallelism,
        "status": operator.status.value,
    }


def state_document(record: Record, state: State, declared: Document, handles: pa.Table) -> Document:
    """A state's declaration (SPEC.md section 3.6), and its rows and bytes by layer and by subtask.

    ``declared`` is the state as it stands in :func:`record_document`, ``handles`` the manifest. ``bytes`` are stored bytes in proportion to the rows; a segment that several handles share is counted once.
    ``subtasks`` lists the owners that report something, in order; ``skew`` is the greatest of their rows over the mean.
    """
    mine = handles.filter(
        pc.and_(pc.equal(handles["operator"], state.operator), pc.equal(handles["state"], state.name))
    )
    rows, layer = _ints(mine, "rows"), _ints(mine, "layer")
    stored = _stored_bytes(mine, rows)
    subtasks = _subtasks(mine, rows, stored, layer)
    segments = pc.count_distinct(mine["path"], mode="only_valid").as_py()
    shown = [entry["rows"] for entry in subtasks]
    if state.mode in PER_SUBTASK_MODES:
        operator = record.graph.operator(state.operator)
        shown += [0] * max(0, operator.parallelism - len(operator.done) - len(shown))
    return {
        **declared,
        "kind": declared.get("kind"),
        "edge": declared.get("edge"),
        "rows": int(rows.sum()),
        "bytes": int(stored.sum()),
        "handles": mine.num_rows,
        "segments": segments,
        "layers": [
            {
                "layer": int(number),
                "handles": int((layer == number).sum()),
                "rows": int(rows[layer == number].sum()),
                "bytes": int(stored[layer == number].sum()),
            }
            for number in np.flatnonzero(np.bincount(layer))
        ],
        "subtasks": subtasks,
        "skew": skew(shown),
    }


def _ints(table: pa.Table, name: str, *, null: int = -1) -> Ints:
    found: Ints = pc.fill_null(pc.cast(table[name], pa.int64()), null).to_numpy()
    return found


def _stored_bytes(handles: pa.Table, rows: Ints) -> Ints:
    """Each handle's part of its segment's size, by rows; no segment counts for more than its size."""
    if not len(rows):
        return rows
    sizes, whole = _ints(handles, "size_bytes"), _ints(handles, "segment_rows")
    encoded = pc.dictionary_encode(pc.fill_null(handles["path"], "")).combine_chunks()
    path = encoded.indices.to_numpy(zero_copy_only=False)
    covered = np.bincount(path, weights=rows)[path]
    # Handles that share rows (a broadcast copy after a rescale) share the bytes too.
    stored: Ints = np.rint(sizes * (rows / np.maximum(np.maximum(whole, covered), 1))).astype(np.int64)
    return stored


def _subtasks(handles: pa.Table, rows: Ints, stored: Ints, layer: Ints) -> list[Document]:
    """One entry per owner, in order; subtask null is the coordinator, or whoever owns committables."""
    owner = _ints(handles, "subtask")
    # A manifest is sorted by subtask: a new owner begins where the number changes. (np.unique would import numpy.ma.)
    begins = np.flatnonzero(np.diff(owner, prepend=-2))
    owners = owner[begins]
    place = np.repeat(np.arange(len(owners)), np.diff(begins, append=len(owner)))
    total_rows = np.bincount(place, weights=rows, minlength=len(owners)).astype(np.int64)
    total_bytes = np.bincount(place, weights=stored, minlength=len(owners)).astype(np.int64)
    layers = np.zeros(len(owners), np.int64)
    np.maximum.at(layers, place, layer + 1)
    first, last = _ints(handles, "first_group", null=2**31), _ints(handles, "last_group")
    lowest, highest = np.full(len(owners), 2**31), np.full(len(owners), -1)
    np.minimum.at(lowest, place, first)
    np.maximum.at(highest, place, last)
    return [
        {
            "subtask": None if number < 0 else int(number),
            "rows": int(total_rows[i]),
            "bytes": int(total_bytes[i]),
            "layers": int(layers[i]),
            "first_group": int(lowest[i]) if highest[i] >= 0 else None,
            "last_group": int(highest[i]) if highest[i] >= 0 else None,
        }
        for i, number in enumerate(owners)
    ]


def history_document(record: Record) -> Document:
    """One line of the history."""
    status = [operator.status for operator in record.graph.operators]
    return {
        "checkpoint_id": record.checkpoint_id,
        "attempt_id": record.attempt_id,
        "kind": record.kind.value,
        "parent": reference(record.parent),
        "job_id": record.job_id,
        "job_name": record.job_name,
        "created_at": moment(record.created_at_us),
        "created_at_us": record.created_at_us,
        "operators": len(status),
        "finished": status.count(Status.FULLY_FINISHED),
        "partially_finished": status.count(Status.PARTIALLY_FINISHED),
        "stop": None if record.stop is None else {"mode": record.stop.mode.value, "request": record.stop.request},
        "totals": totals_document(record.totals),
    }

"""What is known of a store for ``ckpt report``: a document of bounded size, by bounded requests.

A record is read once for history, validation and garbage. Manifests of older checkpoints are read
up to :data:`TREND_BYTES`. What would take longer is left out, and the document says so. Damage is
shown and does not stop the report.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from . import __version__, paths as layout, words
from .documents import (
    Document,
    Holdings,
    JsonRows,
    history_document,
    holds_document,
    record_document,
    reference,
    report_document,
)
from .errors import CheckpointError, NotFound
from .findings import Counts, Report, ordered
from .history import Survey
from .inspecting import savepoints_document, sizes_document
from .manifest import Ints, group_rows, state_runs
from .model import Capability, Mode, State
from .reading import Checkpoint
from .rules import check_content
from .storage import remembered
from .store import CheckpointStore
from .validation import validate

if TYPE_CHECKING:
    import pyarrow as pa

    from .model import CheckpointId, ParentRef, Record

ReportLevel = Literal["metadata", "quick", "full"]
LEVELS: Final[tuple[ReportLevel, ...]] = ("metadata", "quick", "full")
LIMIT: Final = 200
"""Checkpoints of the history, by default."""
TREND: Final = 24
"""Checkpoints whose states are compared: the newest, the oldest, and some in between."""
TREND_BYTES: Final = 48 << 20
"""Bytes of older manifests that are read for the trend."""
REMEMBERED_BYTES: Final = 96 << 20
"""Bytes of records and manifests kept in memory; each is read once while there is room."""
GARBAGE_CHECKPOINTS: Final = 200
GARBAGE_BYTES: Final = 64 << 20
"""With more checkpoints, or more bytes of manifests, garbage is left to ``ckpt gc``."""
_SIZES: Final = ("objects", "bytes", "shared_bytes", "folders", "garbage", "keep")
BARS: Final = 128
"""Subtasks or key groups in a chart; with more, neighbors share a bar."""
GREATEST: Final = 5
SEGMENTS_QUICK: Final = 1_000
"""With more segments outside the manifest, they are validated only on request."""

Progress = Callable[[int, int], None]


def collect_report(
    store: CheckpointStore,
    checkpoint_id: int | None = None,
    *,
    now_us: int | None = None,
    level: ReportLevel | None = None,
    limit: int = LIMIT,
    progress: Progress | None = None,
) -> Document:
    """Return what is known of a store and one of its checkpoints, by default the newest.

    ``level`` None: quick, or metadata if there are many segments. ``now_us``: the time that ages
    are counted from, in µs since the Unix epoch; None for now. If the newest is damaged,
    ``checkpoint`` is the highest that can be read. Raises ``NotFound``, and ``StorageError``.
    """
    now_us = time.time_ns() // 1000 if now_us is None else now_us
    # Neither changes under its name, and a report shows the store at one instant.
    storage = remembered(store.storage, (layout.RECORDS, layout.MANIFESTS), REMEMBERED_BYTES)
    once = CheckpointStore(storage, format=store.format, outside=store.outside)
    found = once.survey(limit)
    checkpoint, faults = _opened(once, found, checkpoint_id)
    shown = None if checkpoint is None else _described(checkpoint, faults, level)
    # The following steps read manifests too; one of a million handles takes half a GiB.
    del checkpoint
    return {
        "store": once.url,
        "made_at": words.moment(now_us),
        "made_at_us": now_us,
        "made_by": f"stateformat {__version__}",
        "system": shown and shown.document["system"],
        "wanted": checkpoint_id,
        "faults": faults,
        "checkpoint": shown and shown.document,
        "states": shown.states if shown else [],
        "history": _history(found),
        "trend": _trend(once, found, shown),
        "validation": (shown and shown.checked) or _validation(once, checkpoint_id, level, progress),
        "sizes": _sizes(once, found),
        "savepoints": _savepoints(once),
    }


class _Shown(NamedTuple):
    """The checkpoint of the report, without its manifest."""

    ref: ParentRef
    document: Document
    states: list[Document]
    totals: dict[tuple[str, str], tuple[int | None, int]]
    """Rows and bytes of each state; empty if its content contradicts itself."""
    checked: Document | None
    """The validation of its metadata, if its segments are not validated."""


def _fault(error: Exception, checkpoint_id: int | None) -> Document:
    kind = getattr(error, "kind", None)
    return {
        "checkpoint_id": checkpoint_id,
        "kind": "" if kind is None else str(kind.value),
        "message": str(error),
    }


def _opened(store: CheckpointStore, found: Survey, wanted: int | None) -> tuple[Checkpoint | None, list[Document]]:
    """Return the checkpoint to show, with its manifest read, and why higher ones are not shown."""
    faults = [_fault(found.unreadable[number], number) for number in found.damaged]
    if (fault := found.fault(store.storage)) is not None and not faults:
        faults.append(_fault(fault, None))
    if wanted is not None:
        known = [record for record in found.checkpoints if record.checkpoint_id == wanted]
        try:
            return _whole(store.checkpoint_of(known[0]) if known else store.open(wanted)), faults
        except NotFound:
            raise
        except CheckpointError as error:
            if not any(item["checkpoint_id"] == wanted for item in faults):
                faults.insert(0, _fault(error, wanted))
            return None, faults
    for record in found.checkpoints:
        try:
            return _whole(store.checkpoint_of(record)), faults
        except CheckpointError as error:
            faults.append(_fault(error, record.checkpoint_id))
    return None, faults


def _whole(checkpoint: Checkpoint) -> Checkpoint:
    _ = checkpoint.outline
    return checkpoint


def _described(checkpoint: Checkpoint, faults: list[Document], level: ReportLevel | None) -> _Shown:
    record = record_document(checkpoint.storage.url, checkpoint.record)
    record["inline_bytes"] = checkpoint.inline_bytes()
    record["system"] = checkpoint.system
    record["notes"] = [note._asdict() for note in checkpoint.notes]
    record["holds"] = None
    states, totals = [], {}
    try:
        handles = checkpoint.counted
        holdings = Holdings(checkpoint.record, handles)
        record["totals"]["rows"] = holdings.rows
        record["holds"] = holds_document(checkpoint.record, holdings)
        states = states_document(checkpoint, record, holdings, handles)
        totals = {(state.operator, state.name): holdings.totals(state) for state in checkpoint.states}
    except (CheckpointError, ValueError, IndexError) as error:
        # The bytes are as published, but the content is wrong: validation says what is wrong.
        faults.append(_fault(error, checkpoint.id))
    return _Shown(checkpoint.record.ref, record, states, totals, _metadata_checked(checkpoint, level))


def _metadata_checked(checkpoint: Checkpoint, level: ReportLevel | None) -> Document | None:
    """Return what is wrong with record and manifest; None if segments are validated too."""
    totals = checkpoint.record.totals
    outside = totals.segments if totals.bytes > checkpoint.inline_bytes() else 0
    told = level in ("quick", "full") or (level is None and outside <= SEGMENTS_QUICK)
    if told or Capability.VERIFY not in checkpoint.capabilities:
        return None
    record = checkpoint.record
    findings = check_content(record.graph, record.states, checkpoint.handles, record.rescaled_from)
    counts = Counts(records=1, handles=checkpoint.handles.num_rows)
    report = Report(checkpoint.storage.url, checkpoint.id, "quick", ordered(findings), counts)
    return {**report_document(report), "level": "metadata"}


def _history(found: Survey) -> Document:
    """Return the checkpoints, newest first, with the time from each one's parent."""
    records = found.checkpoints
    entries = []
    for i, record in enumerate(records):
        before = records[i + 1] if i + 1 < len(records) else None
        apart = None
        if before is not None and record.parent is not None and before.ref == record.parent:
            apart = record.created_at_us - before.created_at_us
        entries.append({**history_document(record), "since_parent_us": apart if apart is None or apart >= 0 else None})
    seen = {record.checkpoint_id for record in records}
    least = min(seen, default=0)
    return {
        "checkpoints": entries,
        "older": sum(1 for number in found.listed if number < least),
        "damaged": [_fault(found.unreadable[number], number) for number in found.damaged],
        "lost": [reference(ref) for ref in found.lost],
        "strays": [reference(ref) for ref in found.strays],
    }


def _trend(store: CheckpointStore, found: Survey, shown: _Shown | None) -> Document:
    """Return rows and bytes of each state in some checkpoints, oldest first."""
    ids: list[CheckpointId] = []
    columns: dict[tuple[str, str], Document] = {}
    for record in _chosen(found.checkpoints):
        totals = shown.totals if shown and shown.totals and record.ref == shown.ref else _totals(store, record)
        if totals is None:
            continue
        for (operator, name), (rows, size_bytes) in totals.items():
            empty: Document = {"operator": operator, "state": name, "rows": {}, "bytes": {}}
            column = columns.setdefault((operator, name), empty)
            column["rows"][record.checkpoint_id] = rows
            column["bytes"][record.checkpoint_id] = size_bytes
        ids.append(record.checkpoint_id)
    for column in columns.values():
        for name in ("rows", "bytes"):
            column[name] = [column[name].get(number) for number in ids]
    return {"checkpoint_ids": ids, "states": list(columns.values())}


def _totals(store: CheckpointStore, record: Record) -> dict[tuple[str, str], tuple[int | None, int]] | None:
    """Return rows and bytes of each state; None if the manifest is damaged."""
    try:
        holdings = Holdings(record, store.checkpoint_of(record).outline)
        return {(state.operator, state.name): holdings.totals(state) for state in record.states}
    except (CheckpointError, ValueError, IndexError):
        return None


def _chosen(records: tuple[Record, ...]) -> list[Record]:
    """Return up to :data:`TREND` checkpoints, oldest first, whose manifests are not too large."""
    last = len(records) - 1
    places = sorted({round(last * i / (TREND - 1)) for i in range(TREND)}) if last > 0 else [*range(len(records))]
    room = TREND_BYTES
    chosen = []
    # The newest first, then the oldest: both ends say most.
    for place in [*places[:1], *places[:0:-1]]:
        if place and records[place].manifest.size_bytes > room:
            continue
        room -= records[place].manifest.size_bytes if place else 0
        chosen.append(records[place])
    return sorted(chosen, key=lambda record: record.checkpoint_id)


def _validation(
    store: CheckpointStore, checkpoint_id: int | None, level: ReportLevel | None, progress: Progress | None
) -> Document:
    """Return the findings on the checkpoint that was asked for, segments included."""
    checked: Literal["quick", "full"] = "full" if level == "full" else "quick"
    return report_document(validate(store, checkpoint_id, level=checked, progress=progress))


def _sizes(store: CheckpointStore, found: Survey) -> Document:
    """Return the folders of the store as ``ckpt du`` shows them, and what deleting would free."""
    size = sum(record.manifest.size_bytes for record in found.checkpoints)
    if len(found.listed) > GARBAGE_CHECKPOINTS or size > GARBAGE_BYTES:
        left_out = (
            f"to find garbage, the manifests of all {words.plural(len(found.listed), 'checkpoint')} would have to be "
            f"read; `ckpt du {store.url}` does"
        )
        return {**dict.fromkeys(_SIZES), "left_out": left_out}
    try:
        whole = sizes_document(store, keep=1)
    except CheckpointError as error:
        return {**dict.fromkeys(_SIZES), "left_out": str(error)}
    return {**{name: whole[name] for name in _SIZES}, "left_out": None}


def _savepoints(store: CheckpointStore) -> list[Document]:
    """Return the savepoints below the store; none if they cannot be listed."""
    try:
        return savepoints_document(store.pins())
    except CheckpointError:
        return []


# ---- states: bounded lists, however many subtasks and key groups there are


def states_document(checkpoint: Checkpoint, record: Document, holdings: Holdings, handles: pa.Table) -> list[Document]:
    """Return each state as ``inspect`` shows it, with subtasks and key groups as bounded lists."""
    runs = {key: slice(start, stop) for key, start, stop in state_runs(handles)}
    found = []
    for state, declared in zip(checkpoint.states, record["states"], strict=True):
        document = holdings.document(state, declared)
        mine = runs.get((state.operator, state.name), slice(0, 0))
        document["subtasks"] = _subtasks(checkpoint, state, document)
        document["key_groups"] = _key_groups(checkpoint, state, handles.slice(mine.start, mine.stop - mine.start))
        found.append(document)
    return found


def _subtasks(checkpoint: Checkpoint, state: State, document: Document) -> Document | None:
    """Return what each subtask has; None if no subtask owns the state."""
    owned: JsonRows = document["subtasks"]
    operator = checkpoint.graph.by_uid.get(state.operator)
    if operator is None or state.mode in (Mode.COORDINATOR, Mode.COMMITTABLES):
        return None
    measure = "bytes" if document["rows"] is None else "rows"
    values = np.zeros(operator.parallelism, np.int64)
    for first, last in operator.done.ranges:
        values[first : last + 1] = -1
    index = owned.arrays["subtask"]
    known = (index >= 0) & (index < operator.parallelism)
    values[index[known]] = owned.arrays[measure][known]
    return {"measure": measure, **_bars(values), "greatest": owned.greatest(GREATEST, measure) if len(owned) else []}


def _bars(values: Ints) -> Document:
    """Return at most :data:`BARS` values, each the greatest of its neighbors; null means no
    value.
    """
    per_bar = max(1, -(-len(values) // BARS))
    starts = np.arange(0, len(values), per_bar)
    shown = np.maximum.reduceat(values, starts).tolist() if len(values) else []
    return {
        "count": len(values),
        "per_bar": per_bar,
        "values": [None if value < 0 else value for value in shown],
    }


def _key_groups(checkpoint: Checkpoint, state: State, handles: pa.Table) -> Document | None:
    """Return the rows of each key group; None if they are unknown, or there are no groups."""
    operator = checkpoint.graph.by_uid.get(state.operator)
    if operator is None or state.mode is not Mode.KEYED or not operator.max_parallelism or not handles.num_rows:
        return None
    _, group, rows = group_rows(handles)
    if not len(group):
        return None
    sound = (group >= 0) & (group < operator.max_parallelism)
    values = np.bincount(group[sound], rows[sound], operator.max_parallelism).astype(np.int64)
    greatest = np.argsort(-values, kind="stable")[:GREATEST].tolist()
    return {
        **_bars(values),
        "empty": int((values == 0).sum()),
        "skew": words.skew(values.tolist()),
        "greatest": [{"group": number, "rows": int(values[number])} for number in greatest if values[number]],
    }

"""What lies below a folder as JSON: stores and other systems' checkpoints, and which are whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from .. import words
from ..documents import fault_document, history_document
from ..errors import CheckpointError, ErrorKind
from ..findings import UNDECIDED
from ..formats import installed
from ..history import Below, Place, record_of
from ..model import Record
from ..storage import remembered
from ..validation import validate


def below_document(below: Below, limit: int) -> dict[str, Any]:
    """Return the first places, each with its newest checkpoint, and what was left out.

    Opens these and validates each at level ``quick``, several at once where that saves time.
    """
    chosen = below.places[:limit]
    at_once = max((place.storage.reads_at_once for place in chosen), default=1)
    with ThreadPoolExecutor(at_once) as pool:
        places = list(pool.map(_document, chosen))
    return {
        "folder": below.url,
        "places": places,
        "more": len(below.places) - len(chosen),
        "looked_into": below.looked_into,
        "left_out": below.left_out,
        "passed_over": [{"path": path, "why": why} for path, why in below.passed_over.items()],
    }


def _document(place: Place) -> dict[str, Any]:
    written_us, record, fault = None, None, None if place.fault is None else fault_document(place.fault)
    if fault is None:
        try:
            record, fault = _opened(place)
            written_us = record.created_at_us or None
        except CheckpointError as error:
            fault = fault_document(error)
        except FileNotFoundError as error:
            fault = {"kind": ErrorKind.OBJECT_MISSING.value, "message": f"{error} went while it was read"}
    if written_us is None and place.home is not None:
        with suppress(CheckpointError):
            written_us = place.home.look().files.get("_metadata")
    return {
        "path": place.path,
        "address": place.address,
        "system": place.format,
        "id": record.checkpoint_id if record is not None else place.checkpoint_id,
        "writer": None if record is None else record.writer,
        "written_at": None if written_us is None else words.moment(written_us),
        "written_at_us": written_us,
        "whole": None if fault is not None and fault["kind"] in UNDECIDED else fault is None,
        "fault": fault,
        "checkpoint": None if record is None else history_document(record),
    }


def _opened(place: Place) -> tuple[Record, dict[str, Any] | None]:
    """Return the record of the newest checkpoint, or of the one, and what is wrong with it."""
    storage = remembered(place.storage, ("",))
    if place.format is None:
        record, report = record_of(storage, None), validate(storage)
    else:
        found = installed()[place.format](storage, None)
        assert found is not None, "it was recognised before"
        record = found.open(place.checkpoint_id).record
        report = found.validate(place.checkpoint_id, "quick", None)
    wrong = report.problems
    return record, {"kind": wrong[0].kind.value, "message": wrong[0].message} if wrong else None

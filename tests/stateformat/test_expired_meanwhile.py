"""Retention removes checkpoints before any one of the reads of whatever looks at many of them.

What has expired is said to have expired. It is no damage, nothing advises to repair it, and what is
still there is found as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.exporting.source import batches_of, several_checkpoints
from stateformat.backends.querying import query
from stateformat.backends.storage import MemoryStorage
from stateformat.errors import CheckpointError, ErrorKind, NotFound
from stateformat.history import expire
from stateformat.inspecting import METADATA_TABLES, diff_checkpoints, key_history, metadata_table, sizes_document
from stateformat.reporting import collect_report
from stateformat.segments import WriteOptions
from stateformat.store import CheckpointStore
from stateformat.validation import newest_whole, validate, validate_all
from tests import stores
from tests.stateformat.test_validate_all import DELTA

CHECKPOINTS = 4


class Expiring(MemoryStorage):
    """Retention runs before the call number ``at``, and leaves the newest checkpoint."""

    at = -1
    calls = 0

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            expire(MemoryStorage(self._name), 1)

    def read(self, path: str) -> pa.Buffer:
        self._count()
        return super().read(path)

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        self._count()
        return super().read_range(path, offset, length)

    def list(self, prefix: str) -> Any:
        self._count()
        return super().list(prefix)


@cache
def _objects() -> dict[str, bytes]:
    """All objects of a store of four checkpoints."""
    store, job = CheckpointStore(MemoryStorage("expired-meanwhile-all")), stores.counts_job(keys=20)
    options = WriteOptions(inline_bytes_max=0)
    permit = job.publish(store, None, options=options)
    # The newest is whole again, so that every segment of the others goes with them.
    for deltas in (DELTA, DELTA, {}):
        permit = job.publish(store, permit, deltas=deltas, options=options)
    return {item.path: store.storage.read(item.path).to_pybytes() for item in store.storage.list("")}


def _filled(number: int) -> Expiring:
    storage = Expiring(f"expired-meanwhile-{number}")
    MemoryStorage.reset(storage._name)
    for path, data in _objects().items():
        storage.create(path, data)
    return storage


def _validated(level: Any, number: int | None, store: CheckpointStore) -> list[str]:
    report = validate(store, number, level=level)
    return [str(problem) for problem in report.problems if problem.kind is not ErrorKind.CHECKPOINT_EXPIRED]


def _all_validated(level: Any, store: CheckpointStore) -> list[str]:
    report = validate_all(store, level=level)
    assert {one.standing for one in report.checkpoints} <= {"whole", "expired"}, report
    assert report.checkpoints[0].standing == "whole"
    return [str(finding.problem) for finding in report.findings]


def _searched(store: CheckpointStore) -> list[str]:
    assert newest_whole(store).newest_whole == CHECKPOINTS
    return []


def _key_followed(store: CheckpointStore) -> list[str]:
    newest, *others = store.checkpoints()
    state = newest.record.state("counter", "counts")
    key = newest.state(state).table().select(["word"]).slice(0, 1)
    steps = key_history([newest, *others], state, key)
    return [str(step) for step in steps if not hasattr(step, "record") and "expired" not in str(step)]


def _compared(store: CheckpointStore) -> list[str]:
    found = diff_checkpoints(store.open(1), store.open(2))
    assert found.states
    return []


def _asked(store: CheckpointStore) -> list[str]:
    query(store, "select count(*) from counter.counts", all_checkpoints=True).table()
    return []


def _exported(store: CheckpointStore) -> list[str]:
    records = store.history()
    source = several_checkpoints(store, records, records[0], "counter", "counts")
    list(batches_of(source.stream(), lambda _: None))
    return []


def _reported(level: Any, store: CheckpointStore) -> list[str]:
    text = json.dumps(collect_report(store, level=level), default=str)
    return [text for word in ("missing from", "not in the store", "repair") if word in text]


def _tables(store: CheckpointStore) -> list[str]:
    for name in METADATA_TABLES:
        metadata_table(store, name)
    return []


def _garbage(keep: int | None, store: CheckpointStore) -> list[str]:
    found = store.collect_garbage(delete=False) if keep is None else store.expire(keep, delete=False)
    return [found.stopped] if found.stopped else []


def _sized(store: CheckpointStore) -> list[str]:
    document = sizes_document(store, keep=1)
    return [str(document["garbage"]["stopped"])] if document["garbage"]["stopped"] else []


LOOKS: dict[str, Callable[[CheckpointStore], list[str]]] = {
    "validate": partial(_validated, "quick", 2),
    "validate --level full": partial(_validated, "full", 1),
    "validate, the newest": partial(_validated, "full", None),
    "validate --all": partial(_all_validated, "quick"),
    "validate --all --level full": partial(_all_validated, "full"),
    "newest_whole": _searched,
    "get --all": _key_followed,
    "diff": _compared,
    "sql --all": _asked,
    "sql, metadata": _tables,
    "export --all": _exported,
    "report": partial(_reported, "quick"),
    "gc": partial(_garbage, None),
    "gc --keep": partial(_garbage, 1),
    "du": _sized,
}


@pytest.mark.parametrize("name", LOOKS)
def test_what_has_expired_meanwhile_is_not_called_damaged(name: str) -> None:
    number, look = [*LOOKS].index(name), LOOKS[name]
    undisturbed = _filled(number)
    assert look(CheckpointStore(undisturbed)) == []
    raised: list[NotFound] = []
    for at in range(1, undisturbed.calls + 1):
        storage = _filled(number)
        storage.at = at
        try:
            assert look(CheckpointStore(storage)) == [], at
        except NotFound as error:
            raised.append(error)
        except CheckpointError as error:
            raise AssertionError(f"retention before call {at} of {undisturbed.calls}: {error}") from error
    assert not [error for error in raised if "expired" not in str(error) and "no checkpoint" not in str(error)]

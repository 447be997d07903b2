"""Queries on S3: right answers, and as few requests as they can do with."""

from __future__ import annotations

import uuid

import pytest

from stateformat.backends.querying import query
from stateformat.segments import WriteOptions
from stateformat.storage import stats_of
from stateformat.store import open as open_store
from tests.servers.server import BUCKET, S3Server
from tests.worlds import stores
from tests.worlds.data import NEWEST, data_store, expected, same_rows

pytestmark = pytest.mark.s3


def test_answers_on_s3_are_those_of_a_folder(moto: S3Server) -> None:
    store = data_store(f"s3://{BUCKET}/{uuid.uuid4().hex}", **moto.options())
    assert same_rows(query(store, "from totals.spent").table(), expected("totals", "spent"))
    counted = query(
        store, "select _checkpoint_id as id, count(*) as n from totals.baskets group by 1", all_checkpoints=True
    )
    wanted = [{"id": one, "n": len(expected("totals", "baskets", one))} for one in range(1, NEWEST + 1)]
    assert same_rows(counted.table(), wanted)


REQUESTS = {
    "select sum(n) from counter.counts": {"list": 2, "read_range": 1 + 1 + 2},
    "select n from counter.counts where word = 'w7'": {"list": 2, "read_range": 1 + 1 + 1},
    "describe counter.counts": {"list": 2, "read_range": 1},
    "select 1": {"list": 2, "read_range": 1},
    "show tables": {"list": 2, "read_range": 1},
}
"""Two looks at the names, the record; the manifest; a segment of each subtask, or of the key's."""


@pytest.mark.parametrize("text", REQUESTS)
def test_a_query_of_one_state_reads_record_manifest_and_its_segments_once(moto: S3Server, text: str) -> None:
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    stores.counts_job(keys=200).publish(
        open_store(url, **moto.options()), None, options=WriteOptions(inline_bytes_max=0)
    )
    store = open_store(url, **moto.options())
    query(store, text).table()
    counts = {name: one.calls for name, one in stats_of(store.storage).operations.items() if one.calls}
    assert counts == REQUESTS[text]

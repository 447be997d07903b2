"""Where the data source reads: S3, folders of Flink and of Spark, beside a user's own packages."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stateformat
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import BUCKET, S3Server
from tests.spark.data_source_reads import read, sentence, table
from tests.worlds.data import data_store, expected, same_rows

pytestmark = pytest.mark.spark

LIST = "encoding-type&list-type&max-keys&prefix"
FIXTURES = Path(__file__).resolve().parents[1] / "foreign" / "fixtures"


@pytest.fixture(scope="module")
def proxy(moto: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(moto) as made:
        yield made


@pytest.mark.s3
def test_a_store_on_s3_costs_few_requests(session: Any, moto: S3Server, proxy: FaultProxy) -> None:
    url = f"s3://{BUCKET}/data-source"
    data_store(url, **moto.options())
    options = {"endpoint_url": proxy.endpoint, "option.key": moto.key, "option.secret": moto.secret}
    proxy.reset()
    frame = read(session, url.replace("s3:", "s3a:"), "totals", "spent", **options)
    proxy.settle()
    loaded = Counter(request.kind for request in proxy.requests)
    assert loaded == {f"GET ?{LIST}": 2, "GET checkpoints": 1, "GET manifests": 1}
    proxy.reset()
    found = table(frame)
    proxy.settle()
    assert same_rows(found, expected("totals", "spent"))
    slices = stateformat.open(url, **moto.options()).open().state("totals", "spent").task.slices
    asked = Counter(request.kind for request in proxy.requests)
    assert set(asked) == {"GET segments"}  # the DataFrame knows what to read
    assert asked.total() <= len(slices)
    told = sentence(lambda: read(session, f"s3://{BUCKET}/nowhere", "totals", "spent", **options))
    assert f"s3://{BUCKET}/nowhere" in told


FOREIGN = {
    "flink": "flink-2.3.0/core-hashmap-canonical/savepoint",
    "spark": "spark-4.3.0/totals-with-crc/checkpoint",
}


@pytest.mark.parametrize("named", [True, False], ids=["named", "plain"])
@pytest.mark.parametrize("system", FOREIGN)
def test_folders_of_other_systems_are_read_as_our_own(system: str, named: bool, session: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / FOREIGN[system], tmp_path / "folder")
    checkpoint = stateformat.open(folder).open()
    assert checkpoint.states
    for state in checkpoint.states[:3]:
        url = f"{system}:{folder}" if named else str(folder)
        found = table(read(session, url, state.operator, state.name, partitions=3))
        assert same_rows(found, checkpoint.state(state).table())
    states = read(session, str(folder), table="states", checkpoint=checkpoint.id).collect()
    assert [(row.operator, row.state) for row in states] == [(one.operator, one.name) for one in checkpoint.states]
    assert "checkpoint 999" in sentence(lambda: read(session, f"{folder}@999", "x", "y"))

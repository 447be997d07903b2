"""Exports to S3: tables, folders and files, with the options of the store's storage."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import fs, parquet as pq

from stateformat.backends.exporting import (
    Format,
    Place,
    TableExport,
    export_files,
    one_checkpoint,
    several_checkpoints,
)
from stateformat.backends.exporting.files import delta_options, iceberg_properties
from stateformat.errors import InvalidInput, StorageError
from stateformat.tools.ckpt.files import write_rows
from tests.ckpt.ckpt_runs import document, failure, run
from tests.exporting.export_readers import FORMATS
from tests.servers.server import BUCKET, S3Server
from tests.worlds.data import NAMES, data_store, expected, same_rows

pytestmark = pytest.mark.s3

ROOT = Path(__file__).resolve().parents[2]
SPENT = ("totals", "spent")
FEW = (SPENT, ("totals", "recent"), ("totals", "refunds"))
"""States with a schema that evolves, with nested columns, and without rows."""


SERVE = """
import sys
from tests.servers.moto_server import running_moto

with running_moto() as server:
    server.client.create_bucket(Bucket=sys.argv[1])
    print(*server, flush=True)
    sys.stdin.read()
"""
"""A server in a process of its own: deltalake lets no other thread run while it waits for it."""


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    command = [sys.executable, "-c", SERVE, BUCKET]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        yield S3Server(*server.stdout.readline().split())
        server.communicate("")


@pytest.fixture
def bucket(moto: S3Server) -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def properties(server: S3Server) -> dict[str, str]:
    """How pyiceberg reaches the server, by another client than that of the export."""
    return {
        "py-io-impl": "pyiceberg.io.pyarrow.PyArrowFileIO",
        "s3.endpoint": server.endpoint,
        "s3.access-key-id": server.key,
        "s3.secret-access-key": server.secret,
        "s3.region": server.region,
    }


def rows_at(file_format: Format, server: S3Server, url: str) -> pa.Table:
    if file_format is Format.ICEBERG:
        from pyiceberg.table import StaticTable

        return StaticTable.from_metadata(url, properties(server)).scan().to_arrow()
    from deltalake import DeltaTable

    options = {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": server.key,
        "AWS_SECRET_ACCESS_KEY": server.secret,
        "AWS_REGION": server.region,
        "AWS_ALLOW_HTTP": "true",
    }
    return DeltaTable(url, storage_options=options).to_pyarrow_table()


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_store_on_s3_becomes_tables_on_s3(moto: S3Server, bucket: str, file_format: Format) -> None:
    options = moto.options()
    store = data_store(f"{bucket}/store", **options)
    for at in (4, 6, 6):
        checkpoint = store.open(at)
        sources = [one_checkpoint(checkpoint, checkpoint.record.state(*name)) for name in FEW]
        with TableExport(sources, file_format, Place(f"{bucket}/lake", options), alone=False) as tables:
            done = tables.run()
        if at == 4:
            wanted = expected(*SPENT, 4)
            assert same_rows(rows_at(file_format, moto, f"{bucket}/lake/totals/spent"), wanted)
    assert [one.added for one in done] == [()] * len(FEW)
    for name in FEW:
        assert same_rows(rows_at(file_format, moto, f"{bucket}/lake/{'/'.join(name)}"), expected(*name)), name


@pytest.mark.parametrize("file_format", FORMATS)
def test_missing_checkpoints_are_added_on_s3(moto: S3Server, bucket: str, file_format: Format) -> None:
    options = moto.options()
    store = data_store(f"{bucket}/store", **options)
    records = {int(record.checkpoint_id): record for record in store.history()}
    for ids in ([5], [1, 5]):
        source = several_checkpoints(store, [records[number] for number in ids], records[6], *SPENT)
        with TableExport([source], file_format, Place(f"{bucket}/t", options), alone=True) as tables:
            assert tables.run()[0].added == (ids[0],)
    found = rows_at(file_format, moto, f"{bucket}/t")
    assert found["_checkpoint_id"].value_counts().to_pylist().__len__() == 2
    assert len(found) == len(expected(*SPENT, 1)) + len(expected(*SPENT, 5))


@pytest.mark.parametrize("file_format", FORMATS)
def test_of_two_exports_at_once_one_adds_nothing(
    moto: S3Server, bucket: str, tmp_path: Path, file_format: Format
) -> None:
    store = data_store(str(tmp_path / "store"), checkpoints=1)
    checkpoint = store.open()
    source = one_checkpoint(checkpoint, checkpoint.record.state("totals", "rates"))
    exports = [TableExport([source], file_format, Place(bucket, moto.options()), alone=True) for _ in range(2)]
    assert exports[0].run()[0].added == (1,)
    with pytest.raises(StorageError, match="nothing was added: export again"):
        exports[1].run()
    for export in exports:
        export.close()
    assert same_rows(rows_at(file_format, moto, bucket), expected("totals", "rates", 1))


def test_the_command_writes_to_s3_with_the_options_of_the_store(
    moto: S3Server, bucket: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto.secret)
    monkeypatch.setenv("AWS_DEFAULT_REGION", moto.region)
    data_store(str(tmp_path / "store"))
    where = ("--endpoint-url", moto.endpoint)
    for file_format in FORMATS:
        to = f"{bucket}/{file_format}"
        command = ("export", tmp_path / "store", *where, "--as", file_format, "--to", to, "--operator", "orders")
        found = document(*command)
        mine = [name for name in NAMES if name[0] == "orders"]
        assert (found["rows"], found["catalog"]) == (sum(len(expected(*name)) for name in mine), None)
        for name in mine:
            assert same_rows(rows_at(file_format, moto, f"{to}/{'/'.join(name)}"), expected(*name))
        again = document(*command)
        assert again["rows"] == 0
    spent = ("export", tmp_path / "store", *where, "--operator", "totals", "--state", "spent", "--to")
    s3 = fs.S3FileSystem(
        access_key=moto.key, secret_key=moto.secret, endpoint_override=moto.endpoint, region=moto.region
    )
    plain = bucket.removeprefix("s3://")
    document(*spent, f"{bucket}/rows.parquet")
    assert same_rows(pq.read_table(f"{plain}/rows.parquet", filesystem=s3), expected(*SPENT))
    assert "exists; give another name" in failure(*spent, f"{bucket}/rows.parquet", status=2)["message"]
    assert run(*spent, f"{bucket}/rows.parquet", "--force").status == 0
    found = document(*spent, f"{bucket}/folders", "--partition-by", "city")
    assert found["files"] == len({row["city"] for row in expected(*SPENT).to_pylist()})
    table = pq.read_table(f"{plain}/folders", filesystem=s3, partitioning="hive")
    assert len(table) == len(expected(*SPENT))
    assert "is new or empty" in failure(*spent, f"{bucket}/folders", "--partition-by", "city", status=2)["message"]


@pytest.mark.parametrize(("scheme", "server"), [("gs", "gcs"), ("az", "azurite")])
def test_elsewhere_tables_are_refused_before_anything_is_written_and_files_are(
    scheme: str, server: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store = data_store(str(tmp_path / "store"), checkpoints=1)
    checkpoint = store.open()
    source = one_checkpoint(checkpoint, checkpoint.record.state("totals", "rates"))
    to = Place(f"{scheme}://{BUCKET}/{uuid.uuid4().hex}", request.getfixturevalue(server).options())
    for file_format in FORMATS:
        with pytest.raises(InvalidInput, match=f"{scheme}://.* cannot hold {file_format.value} tables.*or to s3://"):
            TableExport([source], file_format, to, alone=True)
    assert to.files() == []
    export_files([source], to, ".parquet", lambda file, schema, rows: write_rows(file, "parquet", schema, rows))
    body = to.storage.read("totals/rates.parquet")
    assert same_rows(pq.read_table(pa.BufferReader(body)), expected("totals", "rates", 1))


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        (
            {"AWS_ENDPOINT_URL": "http://none", "AWS_ENDPOINT_URL_S3": "http://here:1", "AWS_REGION": "eu-south-2"},
            {"key": "k", "secret": "s"},
        ),
        (
            {"AWS_REGION": "none"},
            {"endpoint_url": "https://here:1", "use_ssl": False, "region": "eu-south-2", "key": "k", "secret": "s"},
        ),
        (
            {"AWS_DEFAULT_REGION": "eu-south-2", "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"},
            {
                "client_kwargs": {
                    "endpoint_url": "http://here:1",
                    "aws_access_key_id": "k",
                    "aws_secret_access_key": "s",
                }
            },
        ),
    ],
    ids=["environment", "options", "client_kwargs"],
)
def test_tables_are_written_where_and_as_whom_the_store_is(
    environment: dict[str, str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    place = Place("s3a://bucket/lake", options)
    assert place.location == "s3://bucket/lake"
    found = iceberg_properties(place)
    names = ("endpoint", "access-key-id", "secret-access-key", "region")
    assert [found[f"s3.{name}"] for name in names] == ["http://here:1", "k", "s", "eu-south-2"]
    found = delta_options(place)
    wanted = {"ENDPOINT_URL": "http://here:1", "ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "REGION": "eu-south-2"}
    assert {name: found[f"AWS_{name}"] for name in wanted} == wanted


def test_what_objects_are_written_with_goes_to_delta_and_is_refused_where_pyiceberg_would_leave_it_out() -> None:
    headers = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "mine", "BucketKeyEnabled": True}
    place = Place("s3://bucket/lake", {"key": "k", "secret": "s", "region": "r", "s3_additional_kwargs": headers})
    found = delta_options(place)
    assert [
        found[f"AWS_{name}"] for name in ("SERVER_SIDE_ENCRYPTION", "SSE_KMS_KEY_ID", "SSE_BUCKET_KEY_ENABLED")
    ] == [
        "aws:kms",
        "mine",
        "True",
    ]
    with pytest.raises(InvalidInput, match="pyiceberg would write their metadata without it"):
        iceberg_properties(place)


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_bucket_that_is_not_there_is_a_sentence(
    moto: S3Server, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, file_format: Format
) -> None:
    store = data_store(str(tmp_path / "store"), checkpoints=1)
    checkpoint = store.open()
    source = one_checkpoint(checkpoint, checkpoint.record.state("totals", "rates"))
    with (
        pytest.raises(StorageError, match="there is no bucket 'no-such-bucket'"),
        TableExport([source], file_format, Place("s3://no-such-bucket/x", moto.options()), alone=True) as tables,
    ):
        tables.run()

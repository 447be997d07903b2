"""``ckpt rescale`` of a Structured Streaming query: its pages (``pages/``, written anew with
``--update``), its JSON, how it fails, and the same as a Spark job."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest

from stateformat.storage import folder_of, open_storage
from stateformat.tools.jobs import rescale
from tests.ckpt.ckpt_runs import document, failure, page
from tests.foreign.test_spark_repartition import AGGREGATE, FIXTURES, bytes_of, content, deal, swap
from tests.rewrite import rewrite_jobs as jobs
from tests.servers.server import BUCKET, S3Server

PAGES = Path(__file__).parent / "pages"
JOIN = FIXTURES / "spark-4.3.0" / "join-outer" / "checkpoint"
TRANSFORM = FIXTURES / "spark-4.3.0" / "transform-rocksdb" / "checkpoint"
CALLS = {
    "rescale-spark": ["--parallelism", "12"],
    "rescale-spark-rocksdb": ["--parallelism", "2", "--provider", "rocksdb"],
    "rescale-spark-dry-run": ["--parallelism", "12", "--dry-run"],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_page_is_the_golden_one(name: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    # The paths are long and change, so the page is as wide as any can be.
    found = page("rescale", JOIN, "--to", tmp_path / "copy", *CALLS[name], COLUMNS="120")
    text = found.replace(str(tmp_path), "/tmp").replace(str(FIXTURES), "/fixtures")
    # Fixtures that are made anew have other ids.
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "QUERY", text)
    golden = PAGES / f"{name}.txt"
    if pytestconfig.getoption("update"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8"), "if this is right, run pytest with --update"
    assert (tmp_path / "copy").exists() == ("--dry-run" not in CALLS[name])


def test_its_json_says_what_the_page_does(tmp_path: Path) -> None:
    found = document("rescale", JOIN, "--to", tmp_path / "copy", "--parallelism", "12")
    assert found["partitions"] == {"before": 3, "after": 12}
    assert found["provider"] == {"before": "hdfs", "after": "hdfs"}
    assert (found["written"], found["location"]) == (True, f"file:{tmp_path}/copy")
    rows = content(tmp_path / "copy")
    for one in found["stores"]:
        keys = rows[one["operator"], one["store"]]
        assert (one["keys"], one["partitions"]) == (len(keys), 12)
        assert 12 * one["min_keys"] <= one["keys"] <= 12 * one["max_keys"]
    written = bytes_of(tmp_path / "copy")
    assert (found["files"], found["bytes"]) == (len(written), sum(map(len, written.values())))
    newest, oldest = found["batch"], min(int(path.name) for path in (JOIN / "commits").iterdir())
    assert (found["source"]["checkpoint_id"], found["left_out"]) == (newest + 1, [oldest, newest - 1])
    assert json.loads((tmp_path / "copy" / "metadata").read_text())["id"] == found["query_id"]


FAILURES: dict[str, tuple[list[str], str]] = {
    "no target": (["--parallelism", "4"], "give --parallelism N, and --to with an empty folder"),
    "no parallelism": (["--to", "{}/copy"], "give --parallelism N, and --to with an empty folder"),
    "one operator": (
        ["--operator-parallelism", "operator-0=2", "--to", "{}/copy"],
        "all operators of a query share one number of partitions",
    ),
    "into itself": (["--parallelism", "4", "--to", str(AGGREGATE)], "is never changed"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_cannot_be_is_misuse(name: str, tmp_path: Path) -> None:
    options, said = FAILURES[name]
    before = bytes_of(AGGREGATE)
    found = failure("rescale", AGGREGATE, *(text.format(tmp_path) for text in options), status=2)
    assert said in found["message"]
    assert bytes_of(AGGREGATE) == before
    assert list(tmp_path.iterdir()) == []


def test_only_the_newest_checkpoint_can_be_gone_on_with(tmp_path: Path) -> None:
    found = failure("rescale", f"{AGGREGATE}@3", "--parallelism", "4", "--to", tmp_path / "copy", status=2)
    assert "goes on from its newest checkpoint, 5; leave @3 out" in found["message"]


def test_a_flink_savepoint_is_refused_with_what_to_do(tmp_path: Path) -> None:
    savepoint = FIXTURES / "flink-2.3.0" / "core-hashmap-canonical" / "savepoint"
    found = failure("rescale", savepoint, "--parallelism", "4", "--to", tmp_path / "copy", status=2)
    assert "Flink restores it at another parallelism by itself" in found["message"]
    assert not (tmp_path / "copy").exists()


def test_options_for_queries_are_misuse_on_stores_of_ours(tmp_path: Path) -> None:
    jobs.publish(jobs.new_store(tmp_path / "store"))
    for option in (["--provider", "rocksdb"], ["--engine", "spark"]):
        found = failure("rescale", tmp_path / "store", "--parallelism", "4", *option, status=2)
        assert "are for the checkpoints of Structured Streaming queries" in found["message"]


def test_damage_is_an_answer_of_its_own(tmp_path: Path) -> None:
    source = Path(shutil.copytree(AGGREGATE, tmp_path / "source"))
    swap(source)
    found = failure("rescale", source, "--parallelism", "4", "--to", tmp_path / "copy", status=1)
    assert re.search(r"state/0/1: \d+ of \d+ keys of 'default' lie in partition 1", found["message"])
    assert not (tmp_path / "copy").exists()


@pytest.mark.spark
@pytest.mark.parametrize(("source", "provider"), [(JOIN, None), (JOIN, "rocksdb"), (TRANSFORM, None)])
def test_a_spark_job_writes_the_same_files(source: Path, provider: str | None, spark: Any, tmp_path: Path) -> None:
    del spark
    more = ["--provider", provider] if provider else []
    deal(source, tmp_path / "local", 7, provider)
    found = document("rescale", source, "--to", tmp_path / "job", "--parallelism", "7", "--engine", "spark", *more)
    assert sum(one["keys"] for one in found["stores"]) == sum(map(len, content(source).values()))
    local, job = bytes_of(tmp_path / "local"), bytes_of(tmp_path / "job")
    if (source, provider) == (JOIN, None):
        assert job == local
    else:
        # Names of tables follow from the folder.
        tables = [[data for path, data in sorted(files.items()) if path.endswith(".sst")] for files in (job, local)]
        assert sorted(tables[0]) == sorted(tables[1])
        assert len(tables[0]) > 4


@pytest.mark.spark
def test_a_spark_job_refuses_the_whole_before_anything_is_written(spark: Any, tmp_path: Path) -> None:
    del spark
    source = Path(shutil.copytree(AGGREGATE, tmp_path / "source"))
    swap(source)
    options = ["--parallelism", "4", "--to", tmp_path / "copy", "--engine", "spark"]
    found = failure("rescale", source, *options, status=1)
    assert "state/0/" in found["message"]
    assert not (tmp_path / "copy").exists()


@pytest.mark.spark
def test_the_program_for_spark_submit_is_the_same_command(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rescale, "session", lambda _: type("Kept", (), {"stop": lambda self: None})())
    assert rescale.run([str(AGGREGATE), "--parallelism", "5", "--to", str(tmp_path / "copy")]) == 0
    assert content(tmp_path / "copy") == content(AGGREGATE)


@pytest.mark.s3
def test_a_query_on_s3_is_written_to_s3(moto: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ACCESS_KEY_ID", moto.key), ("SECRET_ACCESS_KEY", moto.secret), ("REGION", moto.region)):
        monkeypatch.setenv(f"AWS_{name}", value)
    base = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    options: dict[str, Any] = {"endpoint_url": moto.endpoint}
    there = folder_of(open_storage(f"{base}/query", **options))
    assert there is not None
    for path, data in bytes_of(TRANSFORM).items():
        with there.open_output(path) as output:
            output.write(data)
    where = ("--to", f"{base}/copy", "--parallelism", "5", "--endpoint-url", moto.endpoint)
    found = document("rescale", f"{base}/query", *where)
    copy = folder_of(open_storage(f"{base}/copy", **options))
    assert copy is not None
    assert found["location"] == f"s3a://{base.removeprefix('s3://')}/copy"
    (path,) = (item.path for item in copy.list("state/0/_metadata/v2/"))
    schema = json.loads(bytes(copy.read(path)).splitlines()[1])["stateStoreInfo"][0]["stateSchemaFilePaths"][0]
    assert schema.startswith(f"{found['location']}/state/0/_stateSchema/default/")
    copy.size(schema.removeprefix(f"{found['location']}/"))
    assert {item.path for item in there.list("")} == set(bytes_of(TRANSFORM))
    for item in copy.list(""):
        target = tmp_path / "copy" / item.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(bytes(copy.read(item.path)))
    assert content(tmp_path / "copy") == content(TRANSFORM)
    refused = failure("rescale", f"{base}/query", *where, status=2)
    assert "holds a query's checkpoint" in refused["message"]

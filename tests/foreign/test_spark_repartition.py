"""Queries of Spark dealt anew to other numbers of partitions, by the library and the command."""

from __future__ import annotations

import json
import re
import shutil
import struct
import uuid
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

import stateformat
from stateformat.backends.foreign.framing import spark_decode, spark_encode
from stateformat.backends.foreign.spark.checks import check_source
from stateformat.backends.foreign.spark.repartition.plan import plan_repartition
from stateformat.backends.foreign.spark.repartition.run import Outcome, repartition
from stateformat.backends.foreign.spark.source import SparkSource
from stateformat.backends.foreign.spark.stores import Store
from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput, NotFound, StorageError, UnsupportedFormat
from stateformat.storage import Storage, open_storage
from stateformat.tools.jobs import rescale
from tests.ckpt.ckpt_runs import document, failure, page
from tests.rewrite import rewrite_jobs as jobs
from tests.servers.server import BUCKET, S3Server

FIXTURES = Path(__file__).parent / "fixtures"
AVRO = FIXTURES / "spark-4.3.0" / "transform-rocksdb-avro" / "checkpoint"
ALL = sorted(str(one.relative_to(FIXTURES).parent) for one in FIXTURES.glob("spark-*/*/checkpoint") if one != AVRO)
DEFAULT_STORE = [
    name
    for name in ALL
    if any("HDFSBacked" in log.read_text() for log in (FIXTURES / name / "checkpoint" / "offsets").iterdir())
]
AGGREGATE = FIXTURES / "spark-4.3.0" / "aggregate" / "checkpoint"


def each(names: list[str]) -> list[Any]:
    """Those of older versions are among the tests that take longer."""
    return [name if name.startswith("spark-4.3.0") else pytest.param(name, marks=pytest.mark.truth) for name in names]


def folder(path: Path | str) -> Storage:
    found = open_storage(str(path)).folder()
    assert found is not None
    return found


def deal(
    source: Path, target: Path, parallelism: int, provider: Literal["rocksdb"] | None = None, **more: Any
) -> Outcome:
    there = folder(target)
    plan = plan_repartition(folder(source), there.url, parallelism, provider)
    return repartition(folder(source), there, plan, **more)


def content(path: Path) -> dict[tuple[str, str], dict[bytes, bytes]]:
    """Entries as bytes by key, each once, of every store and of hidden column families too."""
    source = SparkSource(folder(path))
    found: dict[tuple[str, str], dict[bytes, bytes]] = {}
    hidden = [(name, store) for name, (store, _) in source.hidden.items() if is_there(path, source, store)]
    for name, store in [*source.stores.items(), *hidden]:
        rows = found[name] = {}
        for partition in range(store.partitions):
            files = source.reader.files(store, partition, source.listing)
            entries = source.reader.entries(folder(path), store, partition, files)
            pairs = (some.to_arrow().to_pylist() for some in (entries.keys, entries.values))
            for key, value in zip(*pairs, strict=True):
                assert key not in rows
                rows[key] = value
    return found


def is_there(path: Path, source: SparkSource, store: Store) -> bool:
    """Whether a family is in the database: of a list with a TTL Spark's schema names one that is
    not.
    """
    zips = [item for item in source.reader.files(store, 0, source.listing) if item.path.endswith(".zip")]
    with zipfile.ZipFile(path / zips[-1].path) as archive:
        found = json.loads(archive.read("metadata").decode().partition("\n")[2])
    return store.family in found["columnFamilyMapping"]


def rows(path: Path) -> dict[tuple[str, str], list[str]]:
    """Every state's rows as they decode, in one order."""
    source = SparkSource(folder(path))
    found: dict[tuple[str, str], list[str]] = {}
    for part in source.parts:
        for batch in source.read(part):
            texts = batch.drop_columns(["_key_group"]).to_pylist()
            found.setdefault((part.operator, part.state), []).extend(map(str, texts))
    return {name: sorted(texts) for name, texts in found.items()}


def problems(path: Path) -> list[str]:
    return [problem.message for problem in check_source(SparkSource(folder(path)), "full", lambda *_: None)]


def bytes_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.fixture
def aggregate(tmp_path: Path) -> Path:
    """A checkpoint of three partitions that a test may damage."""
    return Path(shutil.copytree(AGGREGATE, tmp_path / "source"))


def check_dealt(source: Path, folders: Path, numbers: Sequence[int]) -> None:
    before, files = content(source), bytes_of(source)
    at = source
    for number in numbers:
        deal(at, folders / str(len(list(folders.iterdir()))), number)
        at = folders / str(len(list(folders.iterdir())) - 1)
        assert content(at) == before
        assert problems(at) == problems(source)
    assert bytes_of(source) == files


@pytest.mark.parametrize("name", each(ALL))
def test_every_state_is_the_same_by_key_at_any_number_of_partitions(name: str, tmp_path: Path) -> None:
    check_dealt(FIXTURES / name / "checkpoint", tmp_path, (7, 2))


@pytest.mark.parametrize("name", ["aggregate", "session-rocksdb"])
def test_there_and_back_again(name: str, tmp_path: Path) -> None:
    check_dealt(FIXTURES / "spark-4.3.0" / name / "checkpoint", tmp_path, (4, 200, 8, 4))


@pytest.mark.parametrize("name", each([name for name in DEFAULT_STORE if "row-checksum" not in name]))
def test_every_state_moves_to_rocksdb(name: str, tmp_path: Path) -> None:
    source = FIXTURES / name / "checkpoint"
    deal(source, tmp_path / "to", 4, "rocksdb")
    assert rows(tmp_path / "to") == rows(source)
    assert problems(tmp_path / "to") == problems(source)
    deal(tmp_path / "to", tmp_path / "again", 3)
    assert content(tmp_path / "again") == content(tmp_path / "to")


def test_rows_with_checksums_do_not_move_to_rocksdb(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match="its rows carry checksums"):
        deal(FIXTURES / "spark-4.3.0" / "totals-row-checksum" / "checkpoint", tmp_path / "to", 4, "rocksdb")


def test_state_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match=r"operator-0.* cannot be read.* encoded as 'avro'"):
        deal(AVRO, tmp_path / "to", 4)
    assert not (tmp_path / "to").exists()


def rewritten_zip(path: Path, change: dict[str, Any]) -> None:
    """Change members of the metadata in a zip."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    head, _, body = files["metadata"].decode().partition("\n")
    files["metadata"] = f"{head}\n{json.dumps({**json.loads(body), **change})}".encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"numInternalKeys": 77}, "and the column families of the schema have"),
        ({"columnFamilyTypeMap": [1]}, "column families are none"),
        ({"numInternalKeys": "many"}, "its numbers of keys or"),
    ],
)
def test_a_database_whose_numbers_disagree_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    fixture = FIXTURES / "spark-4.3.0" / "transform-rocksdb" / "checkpoint"
    source = Path(shutil.copytree(fixture, tmp_path / "source"))
    rewritten_zip(source / "state" / "0" / "0" / f"{SparkSource(folder(source)).version}.zip", change)
    with pytest.raises(DamagedCheckpoint, match=message):
        deal(source, tmp_path / "to", 4)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("name", ["aggregate-rocksdb", "transform-rocksdb"])
def test_a_database_says_how_many_keys_it_has(name: str, tmp_path: Path) -> None:
    source = FIXTURES / "spark-4.3.0" / name / "checkpoint"

    def counted(path: Path, version: int) -> tuple[int, int]:
        zips = [zipfile.ZipFile(file) for file in path.glob(f"state/0/*/{version}.zip")]
        found = [json.loads(one.read("metadata").decode().partition("\n")[2]) for one in zips]
        return sum(one["numKeys"] for one in found), sum(one["numInternalKeys"] for one in found)

    deal(source, tmp_path / "to", 5)
    version = SparkSource(folder(source)).version
    assert counted(tmp_path / "to", version) == counted(source, version)
    assert counted(source, version)[0] > 0


def test_every_partition_has_one_snapshot_of_the_newest_version_even_an_empty_one(tmp_path: Path) -> None:
    outcome = deal(AGGREGATE, tmp_path / "to", 500)
    version = SparkSource(folder(AGGREGATE)).version
    for partition, keys in enumerate(outcome.keys[0].tolist()):
        place = tmp_path / "to" / "state" / "0" / str(partition)
        assert [file.name for file in place.iterdir() if file.is_file()] == [f"{version}.snapshot"]
        stored = bytes(spark_decode("lz4", (place / f"{version}.snapshot").read_bytes(), ""))
        assert stored.endswith(struct.pack(">i", -1))
        assert (len(stored) == 4) == (keys == 0)
    assert int(outcome.keys[0].sum()) == len(content(AGGREGATE)["operator-0", "default"])


def test_an_operator_without_keys_stays_in_partition_0(tmp_path: Path) -> None:
    source = FIXTURES / "spark-4.3.0" / "limit" / "checkpoint"
    deal(source, tmp_path / "to", 7)
    assert sorted(path.name for path in (tmp_path / "to" / "state" / "0").iterdir()) == ["0", "_metadata"]


def changes(before: Path, after: Path) -> dict[str, tuple[str, str]]:
    """Files outside of partitions that both have and that differ."""
    old, new = bytes_of(before), bytes_of(after)
    return {
        path: (old[path].decode(), new[path].decode()) for path in old.keys() & new.keys() if old[path] != new[path]
    }


def test_logs_change_in_the_number_of_partitions_and_in_nothing_else(tmp_path: Path) -> None:
    source = FIXTURES / "spark-4.3.0" / "totals-uncommitted" / "checkpoint"
    deal(source, tmp_path / "to", 12)
    newest = SparkSource(folder(source)).batch
    changed = changes(source, tmp_path / "to")
    assert sorted(changed) == sorted([f"offsets/{newest}", f"offsets/{newest + 1}", "state/0/_metadata/metadata"])
    for path, (old, new) in changed.items():
        name = "numPartitions" if path.startswith("state") else "spark.sql.shuffle.partitions"
        assert re.sub(rf'("{name}":"?)\d+', r"\g<1>12", old) == new


def test_moving_to_rocksdb_changes_the_provider_in_the_offsets_too(tmp_path: Path) -> None:
    deal(AGGREGATE, tmp_path / "to", 3, "rocksdb")
    ((path, (old, new)),) = (item for item in changes(AGGREGATE, tmp_path / "to").items() if "offsets" in item[0])
    assert old.replace("state.HDFSBackedStateStoreProvider", "state.RocksDBStateStoreProvider") == new
    assert path == f"offsets/{SparkSource(folder(AGGREGATE)).batch}"


def test_checksums_of_hadoop_stay_with_files_that_stay(tmp_path: Path) -> None:
    source = FIXTURES / "spark-4.3.0" / "totals-with-crc" / "checkpoint"
    deal(source, tmp_path / "to", 12)
    new = bytes_of(tmp_path / "to")
    changed = changes(source, tmp_path / "to")
    kept = [path for path in new if path.endswith(".crc")]
    assert kept
    for path in kept:
        of = re.sub(r"\.([^/]+)\.crc$", r"\1", path)
        assert of in new
        assert of not in changed


def test_nothing_of_older_batches_or_of_an_uncommitted_one_is_in_the_copy(tmp_path: Path) -> None:
    source = FIXTURES / "spark-4.3.0" / "totals-uncommitted" / "checkpoint"
    deal(source, tmp_path / "to", 2)
    version = SparkSource(folder(source)).version
    files = [path.name for path in (tmp_path / "to" / "state" / "0").rglob("*.*") if path.is_file()]
    assert set(files) == {f"{version}.snapshot"}


def swap(at: Path) -> None:
    one, other = at / "state" / "0" / "1", at / "state" / "0" / "2"
    one.rename(at / "aside")
    other.rename(one)
    (at / "aside").rename(other)


def number_in(path: str, name: str, value: str) -> Any:
    def change(at: Path) -> None:
        text = (at / path).read_text()
        (at / path).write_text(re.sub(rf'("{name}":)("?)\d+', rf"\g<1>\g<2>{value}", text))

    return change


def remove(path: str) -> Any:
    return lambda at: (at / path).unlink()


def flip(path: str) -> Any:
    def change(at: Path) -> None:
        data = bytearray((at / path).read_bytes())
        data[len(data) // 2] ^= 1
        (at / path).write_bytes(data)

    return change


def more_partitions(at: Path) -> None:
    shutil.copytree(at / "state" / "0" / "1", at / "state" / "0" / "3")


NEWEST = json.loads((AGGREGATE.parent / "made.json").read_text())["newest_commit"]
REFUSALS = {
    "partitions swapped": (swap, DamagedCheckpoint, "state/0/1.* do not belong there"),
    "a delta missing": (remove(f"state/0/1/{NEWEST + 1}.delta"), DamagedCheckpoint, f"state/0/1/{NEWEST + 1}.delta"),
    "the last partition missing": (
        lambda at: shutil.rmtree(at / "state" / "0" / "2"),
        DamagedCheckpoint,
        f"state/0/2/{NEWEST + 1}.delta",
    ),
    "a bit flipped": (flip(f"state/0/2/{NEWEST + 1}.delta"), DamagedCheckpoint, f"state/0/2/{NEWEST + 1}.delta"),
    "another number in the operator's metadata": (
        number_in("state/0/_metadata/metadata", "numPartitions", "2"),
        DamagedCheckpoint,
        "2 partitions here and 3 in offsets",
    ),
    "another number in the offsets": (
        number_in(f"offsets/{NEWEST}", "spark.sql.shuffle.partitions", "4"),
        DamagedCheckpoint,
        "3 partitions here and 4 in offsets",
    ),
    "a partition too many": (more_partitions, DamagedCheckpoint, "state/0/3.* has 3 partitions, 0 to 2"),
    "no schema": (remove("state/0/0/_metadata/schema"), DamagedCheckpoint, "state/0/0/_metadata/schema"),
    "no query id": (remove("metadata"), DamagedCheckpoint, "metadata"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_checkpoint_with_anything_wrong_is_refused_whole(name: str, aggregate: Path, tmp_path: Path) -> None:
    damage, kind, message = REFUSALS[name]
    damage(aggregate)
    before = bytes_of(aggregate)
    with pytest.raises(kind, match=message):
        deal(aggregate, tmp_path / "to", 5)
    assert not (tmp_path / "to").exists()
    assert bytes_of(aggregate) == before


def test_a_conf_without_the_number_of_partitions_is_refused_by_name(aggregate: Path, tmp_path: Path) -> None:
    later = aggregate / "offsets" / str(NEWEST + 1)
    later.write_text('v1\n{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{}}\n{}')
    with pytest.raises(UnsupportedFormat, match=rf"offsets/{NEWEST + 1}: its conf does not name spark.sql.shuffle"):
        deal(aggregate, tmp_path / "to", 5)


@pytest.mark.parametrize("number", [0, -1, 1 << 20])
def test_an_impossible_number_of_partitions_is_refused(number: int, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as error:
        deal(AGGREGATE, tmp_path / "to", number)
    assert error.value.kind == ErrorKind.INVALID_PARALLELISM


def test_a_target_that_holds_anything_is_refused(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "mine").write_text("mine")
    with pytest.raises(InvalidInput, match=r"holds .mine.\. Name a folder that is empty"):
        deal(AGGREGATE, tmp_path / "to", 4)
    deal(AGGREGATE, tmp_path / "other", 4)
    with pytest.raises(InvalidInput, match="holds a query's checkpoint"):
        deal(AGGREGATE, tmp_path / "other", 4)


def test_the_checkpoint_itself_and_a_folder_within_it_are_no_targets(aggregate: Path) -> None:
    before = bytes_of(aggregate)
    for target in (aggregate, aggregate / "copy", aggregate.parent):
        with pytest.raises(InvalidInput):
            deal(aggregate, target, 4)
    assert bytes_of(aggregate) == before


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("after", [1, 3])
def test_a_copy_that_was_interrupted_is_no_checkpoint_and_says_how_to_go_on(after: int, tmp_path: Path) -> None:
    def stop(step: str, done: int, _: int) -> None:
        if step == "writing" and done == after:
            raise Interrupted

    with pytest.raises(Interrupted):
        deal(AGGREGATE, tmp_path / "to", 4, progress=stop)
    assert [path.name for path in (tmp_path / "to" / "offsets").iterdir()] == [str(NEWEST + 2)]
    with pytest.raises(NotFound, match="begun and not ended: remove the folder"):
        stateformat.open(tmp_path / "to").open()
    with pytest.raises(InvalidInput, match=r"begun and not ended.*Remove the folder and run the command again"):
        deal(AGGREGATE, tmp_path / "to", 4)
    shutil.rmtree(tmp_path / "to")
    deal(AGGREGATE, tmp_path / "to", 4)
    assert content(tmp_path / "to") == content(AGGREGATE)


def test_a_query_that_goes_on_meanwhile_is_noticed_before_anything_is_written(aggregate: Path, tmp_path: Path) -> None:
    def commit(step: str, *_: int) -> None:
        if step == "reading":
            shutil.copy(aggregate / "commits" / str(NEWEST), aggregate / "commits" / str(NEWEST + 1))

    with pytest.raises(StorageError, match=f"newest batch was {NEWEST} and is {NEWEST + 1} now"):
        deal(aggregate, tmp_path / "to", 4, progress=commit)
    assert not (tmp_path / "to").exists()


def test_a_query_without_state_needs_no_copy(aggregate: Path, tmp_path: Path) -> None:
    shutil.rmtree(aggregate / "state")
    with pytest.raises(InvalidInput, match="no stateful operator"):
        deal(aggregate, tmp_path / "to", 4)


@pytest.mark.parametrize("codec", ["lz4", "snappy", "zstd"])
def test_streams_of_every_codec_are_joined_into_one(codec: str) -> None:
    from stateformat.backends.foreign.framing import spark_joined

    parts = [bytes([number]) * size for number, size in enumerate([100_000, 1, 0, 40_000])]
    whole = b"".join(spark_joined(codec, [spark_encode(codec, part) for part in parts]))
    assert bytes(spark_decode(codec, whole, "")) == b"".join(parts)


# ---- the command

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


def test_an_older_batch_is_dealt_anew_as_it_was(tmp_path: Path) -> None:
    found = document("rescale", f"{AGGREGATE}@3", "--parallelism", "4", "--to", tmp_path / "copy")
    assert (found["batch"], found["source"]["checkpoint_id"]) == (2, 3)
    document("copy", f"{AGGREGATE}@3", "--to", tmp_path / "older")
    assert SparkSource(folder(tmp_path / "copy")).batches[-1] == 2
    assert content(tmp_path / "copy") == content(tmp_path / "older") != content(AGGREGATE)


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
    assert not bytes_of(tmp_path / "copy")


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
    there = open_storage(f"{base}/query", **options).folder()
    assert there is not None
    for path, data in bytes_of(TRANSFORM).items():
        with there.open_output(path) as output:
            output.write(data)
    where = ("--to", f"{base}/copy", "--parallelism", "5", "--endpoint-url", moto.endpoint)
    found = document("rescale", f"{base}/query", *where)
    copy = open_storage(f"{base}/copy", **options).folder()
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

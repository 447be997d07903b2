"""Copies of a query whose sources go on elsewhere, and what Spark then reads."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stateformat.backends.foreign.spark.copying import copy_query, plan_copy
from stateformat.backends.foreign.spark.logs import UNFINISHED, read_offsets
from stateformat.backends.foreign.spark.offsets import SourceEdits
from stateformat.backends.foreign.spark.source import SparkSource
from stateformat.errors import StorageError
from tests.ckpt.ckpt_runs import document, failure, page
from tests.foreign.test_spark_copy import Failing
from tests.foreign.test_spark_repartition import FIXTURES, bytes_of, folder

AGGREGATE = FIXTURES / "spark-4.3.0" / "aggregate" / "checkpoint"
JOIN = FIXTURES / "spark-4.3.0" / "join-inner" / "checkpoint"
SHUFFLED = "spark.sql.shuffle.partitions"
CONF = "spark.sql.streaming."
POLICY = f"{CONF}multipleWatermarkPolicy"


def lines(checkpoint: Path, batch: int) -> list[str]:
    return (checkpoint / "offsets" / str(batch)).read_text().split("\n")[2:]


def logs(checkpoint: Path, number: int) -> list[str]:
    return sorted(path.name for path in (checkpoint / "sources" / str(number)).glob("[0-9]*"))


def test_a_file_source_goes_back_in_its_log(tmp_path: Path) -> None:
    before = bytes_of(AGGREGATE)
    copy = tmp_path / "copy"
    found = document("copy", AGGREGATE, "--to", copy, "--offsets", '0={"logOffset":2}', "--prove")
    assert found["proof"]["same"]
    assert [(one["before"], one["after"], one["old"], one["new"]) for one in found["sources"]] == [
        ("0", "0", '{"logOffset":4}', '{"logOffset":2}')
    ]
    # What lies between the two newest logs is read once more by old kinds of sources: nothing.
    assert lines(copy, 3) == lines(copy, 4) == ['{"logOffset":2}']
    assert lines(copy, 2) == lines(AGGREGATE, 2)
    assert logs(copy, 0) == ["0", "1", "2"]
    changed = {path for path, data in bytes_of(copy).items() if before[path] != data}
    assert changed == {"offsets/3", "offsets/4"}
    assert bytes_of(AGGREGATE) == before
    told = " ".join(page("copy", AGGREGATE, tmp_path / "other", "--offsets", '0={"logOffset":2}').split())
    assert re.search(r"2 files are read again, \S+ \S*batch-3.json first", told)


def test_the_next_batch_is_not_the_one_that_had_begun(tmp_path: Path) -> None:
    query = FIXTURES / "spark-4.3.0" / "totals-uncommitted" / "checkpoint"
    document("copy", query, "--to", tmp_path / "same")
    found = document("copy", query, "--to", tmp_path / "copy", "--offsets", '0={"logOffset":3}')
    assert not found["runs_again"]
    newest = SparkSource(folder(query)).batch
    assert (tmp_path / "same" / "offsets" / str(newest + 1)).exists()
    assert not (tmp_path / "copy" / "offsets" / str(newest + 1)).exists()


def test_a_compact_file_that_holds_what_is_gone_is_cut(tmp_path: Path) -> None:
    query = Path(shutil.copytree(AGGREGATE, tmp_path / "query"))
    log = query / "sources" / "0"
    entries = [(log / str(number)).read_text().split("\n")[1] for number in range(4)]
    (log / "3.compact").write_text("\n".join(["v1", *entries]))
    for number in range(4):
        (log / str(number)).unlink()
    document("copy", query, "--to", tmp_path / "copy", "--offsets", '0={"logOffset":1}')
    assert logs(tmp_path / "copy", 0) == ["1.compact"]
    cut = (tmp_path / "copy" / "sources" / "0" / "1.compact").read_text()
    assert cut.split("\n") == ["v1", *entries[:2]]
    (log / "3.compact").unlink()
    lost = failure("copy", query, "--to", tmp_path / "lost", "--offsets", '0={"logOffset":1}', status=1)
    assert "sources/0/0 is missing" in lost["message"]
    # A source that begins anew needs no log.
    document("copy", query, "--to", tmp_path / "anew", "--offsets", "0=-")
    assert lines(tmp_path / "anew", 4) == ["-"]
    assert not (tmp_path / "anew" / "sources" / "0").exists()


def test_sources_are_taken_out_and_put_in(tmp_path: Path) -> None:
    newest = SparkSource(folder(JOIN)).batch
    document("copy", JOIN, "--to", tmp_path / "less", "--source", "0=drop")
    assert lines(tmp_path / "less", newest) == lines(JOIN, newest)[1:]
    assert bytes_of(tmp_path / "less" / "sources" / "0") == bytes_of(JOIN / "sources" / "1")
    assert not (tmp_path / "less" / "sources" / "1").exists()
    more = ["--source", "0=add", "--offsets", '0={"events":{"0":7}}', "--offsets", '2={"logOffset":0}']
    document("copy", JOIN, "--to", tmp_path / "more", *more)
    assert lines(tmp_path / "more", newest) == ['{"events":{"0":7}}', lines(JOIN, newest)[0], '{"logOffset":0}']
    assert bytes_of(tmp_path / "more" / "sources" / "1") == bytes_of(JOIN / "sources" / "0")
    assert logs(tmp_path / "more", 2) == ["0"]


FORMS = {
    "kafka": ('{"events":{"0":7,"1":9}}', '{"events":{"0":0,"1":0}}'),
    "number": ("12", "3"),
    "rate": ('{"offset":40,"timestamp":4000}', '{"offset":10,"timestamp":1000}'),
    "kinesis": (
        '{"metadata":{"streamName":"s","batchId":"4"},"shardId-0":{"iteratorType":"AT_SEQUENCE_NUMBER","iteratorPosition":"4"}}',
        '{"metadata":{"streamName":"s","batchId":"4"},"shardId-0":{"iteratorType":"TRIM_HORIZON","iteratorPosition":""}}',
    ),
    "delta": (
        '{"sourceVersion":1,"reservoirId":"a","reservoirVersion":5,"index":-1,"isStartingVersion":false}',
        '{"sourceVersion":1,"reservoirId":"a","reservoirVersion":2,"index":-1,"isStartingVersion":false}',
    ),
    "object": ('{"position":"b/4"}', '{"position":"a/1","more":[1]}'),
    "array": ("[1,2]", "[0,0]"),
}


@pytest.fixture
def queries(tmp_path: Path) -> dict[str, Path]:
    made = {}
    for form, (old, _) in FORMS.items():
        made[form] = Path(shutil.copytree(AGGREGATE, tmp_path / form))
        for log in (made[form] / "offsets").iterdir():
            log.write_text("\n".join([*log.read_text().split("\n")[:2], old]))
        shutil.rmtree(made[form] / "sources")
    return made


def test_an_offset_keeps_the_form_of_its_source(queries: dict[str, Path], tmp_path: Path) -> None:
    others = {form: FORMS[other][1] for form, other in zip(FORMS, [*FORMS][1:] + [*FORMS][:1], strict=True)}
    for form, query in queries.items():
        target = tmp_path / "copies" / form
        document("copy", query, "--to", target, "--offsets", f"0={FORMS[form][1]}")
        assert lines(target, 4) == [FORMS[form][1]]
        told = failure("copy", query, "--to", tmp_path / "no", "--offsets", f"0={others[form]}", status=2)["message"]
        assert f"has the offset {FORMS[form][0]}" in told
        assert "the one given is" in told
        assert "or - to begin anew" in told
    assert not (tmp_path / "no").exists()


REFUSED: list[tuple[str, list[str], str, list[str]]] = [
    ("kafka", ["--offsets", '0={"events":{"0":-2}}'], "-1 and -2 .* startingOffsets", ["--offsets", "0=-"]),
    ("kafka", ["--offsets", '0={"events":{"0":1,"0":2}}'], "a name twice", ["--offsets", '0={"events":{"0":1}}']),
    ("kafka", ["--offsets", '0={"events":{"0":1}'], "it is no offset in JSON", ["--offsets", '0={"events":{"0":1}}']),
    ("kafka", ["--offsets", "0=99999999999999999999"], "does not fit 64 bits", ["--offsets", "0=-"]),
    ("kafka", ["--offsets", "0=-", "--offsets", "0=-"], "--offsets: 0 is given twice", ["--offsets", "0=-"]),
    ("kafka", ["--offsets", "1=-"], "no source '1'; the numbers of its sources are 0", ["--offsets", "0=-"]),
    ("kafka", ["--source", "0=drop"], "the only source", ["--source", "0=add", "--source", "1=drop"]),
    ("kafka", ["--source", "3=add"], "a number of 0 to 1", ["--source", "1=add"]),
    ("kafka", ["--source", "0=swap"], "0=drop, 0=add", ["--source", "0=add"]),
    ("delta", ["--offsets", "0=" + FORMS["delta"][1].replace('"a"', '"b"')], "the table b", ["--offsets", "0=-"]),
    ("files", ["--offsets", '0={"logOffset":9}'], "Give 0 to 4", ["--offsets", '0={"logOffset":4}']),
    ("files", ["--offsets", '0={"logOffset":-1}'], "begins at -", ["--offsets", "0=-"]),
    ("seconds", ["--offsets", "0=99999999999"], "still to come", ["--offsets", "0=99"]),
    ("named", ["--source", "left=add"], "Give one that is not there", ["--source", "more=add"]),
    ("number", ["--conf", f"{CONF}join.stateFormatVersion=4"], "What can be set is", ["--conf", f"{POLICY}=min"]),
    ("number", ["--conf", "spark.sql.session.timeZone=UTC"], "from the session: set it where the query starts", []),
    ("number", ["--conf", f"{POLICY}=mean"], "one of min, max", ["--conf", f"{POLICY}=max"]),
]


@pytest.mark.parametrize(("form", "options", "message", "advised"), REFUSED)
def test_what_does_not_fit_is_refused_by_name_and_what_is_advised_fits(
    queries: dict[str, Path], form: str, options: list[str], message: str, advised: list[str], tmp_path: Path
) -> None:
    queries |= {"files": AGGREGATE, "named": named(tmp_path), "seconds": queries["number"]}
    if form == "seconds":
        (queries[form] / "sources" / "0").mkdir(parents=True)
        (queries[form] / "sources" / "0" / "0").write_text("v1\n1700000000000")
    told = failure("copy", queries[form], "--to", tmp_path / "copy", *options, status=2)["message"]
    assert re.search(message, told), told
    assert not (tmp_path / "copy").exists()
    document("copy", queries[form], "--to", tmp_path / "copy", *advised)


@pytest.mark.parametrize(
    ("setting", "options"),
    [(SHUFFLED, []), (f"{CONF}stateStore.providerClass", ["--provider", "rocksdb"])],
)
def test_what_rescale_changes_is_left_to_it(setting: str, options: list[str], tmp_path: Path) -> None:
    told = failure("copy", AGGREGATE, "--to", tmp_path / "copy", "--conf", f"{setting}=4", status=2)["message"]
    assert " ".join(["ckpt rescale QUERY", *options]) in told
    document("rescale", AGGREGATE, *options, "--parallelism", "4", "--to", tmp_path / "copy")


def named(place: Path) -> Path:
    """A query of two sources that have names, as Spark 4.2 and later write it."""
    query = Path(shutil.copytree(AGGREGATE, place / "named"))
    for log in (query / "offsets").iterdir():
        _, head, old = log.read_text().split("\n")
        log.write_text("\n".join(["v2", head, f"right:{old}", f"left:{old}"]))
    (query / "sources" / "0").rename(query / "sources" / "left")
    shutil.copytree(query / "sources" / "left", query / "sources" / "right")
    return query


def test_sources_that_have_names_are_known_by_them(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    found = document(
        "copy", named(tmp_path), "--to", copy, "--offsets", 'left={"logOffset":1}', "--source", "right=drop"
    )
    assert lines(copy, 4) == ['left:{"logOffset":1}']
    assert [path.name for path in (copy / "sources").iterdir()] == ["left"]
    assert [(one["before"], one["after"]) for one in found["sources"]] == [("left", "left"), ("right", None)]
    (tmp_path / "named" / "sources" / "right" / "4").unlink()
    told = failure("copy", tmp_path / "named", "--to", tmp_path / "lost", status=1)["message"]
    assert "sources/right/4: it is missing, or a link" in told


def test_a_partition_of_kafka_without_an_offset_is_told(queries: dict[str, Path], tmp_path: Path) -> None:
    copied = document("copy", queries["kafka"], "--to", tmp_path / "copy", "--offsets", '0={"events":{"0":3}}')
    assert copied["sources"][0]["note"].startswith("events-1 had an offset before and has none now")


def test_a_copy_that_was_interrupted_at_any_file_holds_what_spark_refuses(tmp_path: Path) -> None:
    source = SparkSource(folder(AGGREGATE))
    changes = SourceEdits([("0", "add")], {"1": '{"logOffset":2}'}, {POLICY: "max"})
    whole, _ = copy_query(source.folder, folder(tmp_path / "whole"), plan_copy(source, "file:///c", changes))
    for left in range(1, whole + 1):
        target = tmp_path / str(left)
        with pytest.raises(StorageError, match="cannot write"):
            copy_query(source.folder, Failing(folder(target), left), plan_copy(source, "file:///c", changes))
        assert (target / "offsets" / "6").read_text() == UNFINISHED
        newest = max(int(path.name) for path in (target / "offsets").glob("[0-9]*"))
        assert newest == 6


def test_a_setting_is_changed_where_spark_reads_it(tmp_path: Path) -> None:
    document("copy", AGGREGATE, "--to", tmp_path / "copy", "--conf", f"{POLICY}=max", "--prove")
    found = json.loads((tmp_path / "copy" / "offsets" / "4").read_text().split("\n")[1])
    was = json.loads((AGGREGATE / "offsets" / "4").read_text().split("\n")[1])
    assert found == {**was, "conf": {**was["conf"], POLICY: "max"}}


# ---- Spark goes on

ROWS = 100
"""How many rows each partition of the Python source has."""


def counted(spark: Any) -> Any:
    """A streaming source with offsets as Kafka's: rows 0 to ``until`` of each of two partitions."""
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

    class Reader(DataSourceStreamReader):
        def __init__(self, until: int) -> None:
            self.until = until

        def initialOffset(self) -> dict[str, Any]:  # noqa: N802
            return {"events": {"0": 0, "1": 0}}

        def latestOffset(self) -> dict[str, Any]:  # noqa: N802
            return {"events": {"0": self.until, "1": self.until}}

        def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Any]:
            return [InputPartition((one, start["events"][one], end["events"][one])) for one in sorted(start["events"])]

        def read(self, partition: Any) -> Iterator[tuple[str, int]]:
            one, first, last = partition.value
            for number in range(first, last):
                yield f"events-{one}", number

    class Counted(DataSource):
        @classmethod
        def name(cls) -> str:
            return "counted"

        def schema(self) -> str:
            return "k string, n int"

        def streamReader(self, schema: Any) -> Any:  # noqa: N802
            return Reader(int(self.options["until"]))

    spark.dataSource.register(Counted)
    return spark.readStream.format("counted")


class Mixed:
    """A query of files, ``rate`` and a Python source, which counts each row of each."""

    def __init__(self, spark: Any, place: Path) -> None:
        self.spark, self.place = spark, place
        (place / "in").mkdir()

    def write(self, number: int) -> None:
        (self.place / "in" / f"{number}.json").write_text(json.dumps({"k": "files", "n": number}))

    def go_on(self, checkpoint: Path, until: int, *, without: tuple[str, ...] = ()) -> dict[str, dict[int, int]]:
        """Run until all is read; the counts of the rows that changed, by source."""
        spark, found = self.spark, dict[str, dict[int, int]]()
        files = spark.readStream.schema("k string, n int").option("maxFilesPerTrigger", 1)
        rate = spark.readStream.format("rate").load().selectExpr("'rate' k", "cast(value as int) n")
        inputs = {
            "files": files.json(str(self.place / "in")),
            "rate": rate,
            "python": counted(spark).option("until", until).load(),
        }
        frames = [frame for name, frame in inputs.items() if name not in without]
        frame = frames[0]
        for other in frames[1:]:
            frame = frame.union(other)

        def take(batch: Any, number: int) -> None:
            for row in batch.collect():
                found.setdefault(row.k, {})[row.n] = row["count"]

        query = frame.groupBy("k", "n").count().writeStream.outputMode("update").foreachBatch(take)
        query = query.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        assert query.awaitTermination(280)
        return found


def begun_earlier(checkpoint: Path, number: int, seconds: int) -> None:
    """Let a source ``rate`` have begun so long ago, so that nobody waits for its rows."""
    began = checkpoint / "sources" / str(number) / "0"
    (began.parent / f".{began.name}.crc").unlink(missing_ok=True)
    began.write_text(f"v1\n{int(began.read_text().split()[1]) - 1000 * seconds}")


@pytest.mark.spark
@pytest.mark.truth
@pytest.mark.timeout(600)
def test_spark_reads_again_what_lies_behind_the_new_offsets_and_no_more(spark: Any, tmp_path: Path) -> None:
    spark = spark.newSession()
    spark.conf.set(SHUFFLED, "2")
    query, mixed = tmp_path / "query", Mixed(spark, tmp_path)
    for number in range(2):
        mixed.write(number)
    mixed.go_on(query, 10)
    for number in range(2, 4):
        mixed.write(number)
    begun_earlier(query, 1, 100)
    first = mixed.go_on(query, 20)
    original = bytes_of(query)
    offsets = ['0={"logOffset":0}', "1=40", '2={"events":{"0":15,"1":20}}']
    copied = document(
        "copy", query, "--to", tmp_path / "copy", *(one for each in offsets for one in ("--offsets", each))
    )
    mixed.write(4)
    found = mixed.go_on(tmp_path / "copy", 25)
    assert found["files"] == {2: 2, 3: 2, 4: 1}
    assert found["events-0"] == {n: 2 if n < 20 else 1 for n in range(15, 25)}
    assert found["events-1"] == dict.fromkeys(range(20, 25), 1)
    seen = max(first["rate"])
    assert seen >= 99
    assert {n: count for n, count in found["rate"].items() if n <= seen} == dict.fromkeys(range(40, seen + 1), 2)
    assert bytes_of(query) == original
    assert {one["after"] for one in copied["sources"]} == {"0", "1", "2"}


@pytest.mark.spark
@pytest.mark.truth
@pytest.mark.timeout(600)
def test_spark_goes_on_with_a_source_less_and_one_that_begins_anew(spark: Any, tmp_path: Path) -> None:
    spark = spark.newSession()
    spark.conf.set(SHUFFLED, "2")
    query, mixed = tmp_path / "query", Mixed(spark, tmp_path)
    for number in range(3):
        mixed.write(number)
    mixed.go_on(query, 10)
    mixed.go_on(query, 12)
    document("copy", query, "--to", tmp_path / "less", "--source", "1=drop")
    with pytest.raises(Exception, match=r"There are \[3\] sources in the checkpoint offsets"):
        mixed.go_on(Path(shutil.copytree(query, tmp_path / "plain")), 14, without=("rate",))
    mixed.write(3)
    found = mixed.go_on(tmp_path / "less", 14, without=("rate",))
    assert found == {
        "files": {3: 1}, "events-0": {12: 1, 13: 1}, "events-1": {12: 1, 13: 1},
    }  # fmt: skip
    document("copy", tmp_path / "less", "--to", tmp_path / "more", "--source", "1=add", "--offsets", "0=-")
    found = mixed.go_on(tmp_path / "more", 14)
    assert found["files"] == {0: 2, 1: 2, 2: 2, 3: 2}
    assert "events-0" not in found
    begun_earlier(tmp_path / "more", 1, 200)
    rate = mixed.go_on(tmp_path / "more", 15)["rate"]
    assert {n: rate[n] for n in range(150, 200)} == dict.fromkeys(range(150, 200), 1)


@pytest.mark.spark
@pytest.mark.truth
@pytest.mark.timeout(600)
def test_spark_goes_on_with_sources_that_have_names(spark: Any, tmp_path: Path) -> None:
    spark = spark.newSession()
    if not hasattr(spark.readStream, "name"):
        pytest.skip("sources have names from Spark 4.2 on")
    spark.conf.set(SHUFFLED, "2")
    spark.conf.set(f"{CONF}queryEvolution.enableSourceEvolution", "true")
    query, found = tmp_path / "query", dict[str, int]()

    def write(number: int) -> None:
        for name in ("left", "right"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{number}.json").write_text(json.dumps({"k": f"{name}-{number}"}))

    def go_on(checkpoint: Path, *names: str) -> dict[str, int]:
        found.clear()
        one, *others = [spark.readStream.name(name).schema("k string").json(str(tmp_path / name)) for name in names]
        for other in others:
            one = one.union(other)

        def take(batch: Any, number: int) -> None:
            found.update({row.k: row["count"] for row in batch.collect()})

        query = one.groupBy("k").count().writeStream.outputMode("update").foreachBatch(take)
        query = query.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        assert query.awaitTermination(280)
        return dict(found)

    for number in range(2):
        write(number)
        go_on(query, "left", "right")
    document("copy", query, "--to", tmp_path / "moved", "--offsets", 'left={"logOffset":0}')
    document("copy", query, "--to", tmp_path / "less", "--source", "right=drop", "--offsets", "left=-")
    write(2)
    assert go_on(tmp_path / "moved", "left", "right") == {"left-1": 2, "left-2": 1, "right-2": 1}
    assert go_on(tmp_path / "less", "left") == {"left-0": 2, "left-1": 2, "left-2": 1}


def test_offsets_of_files_may_have_blanks_and_settings_short_names_are_explained(tmp_path: Path) -> None:
    document("copy", AGGREGATE, "--to", tmp_path / "copy", "--offsets", '0={"logOffset": 2}')
    assert read_offsets(folder(tmp_path / "copy"), 4).offsets == {"0": '{"logOffset":2}'}
    told = failure("copy", AGGREGATE, "--to", tmp_path / "other", "--conf", "multipleWatermarkPolicy=max", status=2)
    assert "did you mean spark.sql.streaming.multipleWatermarkPolicy?" in told["message"]
    document("copy", AGGREGATE, "--to", tmp_path / "other", "--conf", f"{CONF}multipleWatermarkPolicy=max")

"""Broken checkpoints of Spark: each damage ends in a finding or an error that names it, or changes
nothing that is read.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from spark_rows import array_of, checkpoint, encode_entries, encode_row, lz4_stream, schema_file, struct_of

from stateformat.backends.foreign.framing import spark_encode
from stateformat.backends.foreign.spark.checks import check_source
from stateformat.backends.foreign.spark.logs import read_lines, recognises
from stateformat.backends.foreign.spark.source import SparkSource, sources
from stateformat.errors import CheckpointError, DamagedCheckpoint, NotFound, UnsupportedFormat
from stateformat.findings import Finding
from stateformat.keys import hash_keys, key_groups
from stateformat.storage import ObjectInfo, open_storage

FIXTURES = Path(__file__).parent / "fixtures"
KEY = struct_of(("k", "string"), ("n", "integer"))
VALUE = struct_of(("sum", "long"), ("last", "string"), ("all", array_of("long")))


@dataclass
class Files:
    """A folder in memory: what readers of foreign folders call."""

    files: dict[str, bytes]
    url: str = "memory://query"
    reads: list[str] = field(default_factory=list)

    def list(self, prefix: str) -> list[ObjectInfo]:
        return [ObjectInfo(path, len(data)) for path, data in sorted(self.files.items()) if path.startswith(prefix)]

    def read(self, path: str) -> pa.Buffer:
        self.reads.append(path)
        if path not in self.files:
            raise FileNotFoundError(path)
        return pa.py_buffer(self.files[path])

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        return pa.py_buffer(bytes(self.read(path))[offset : offset + length])


def entry(number: int, batch: int) -> tuple[bytes, bytes]:
    key = encode_row([f"key-{number}" if number % 4 else None, number], ["string", "integer"])
    value = [batch * 100 + number, "x" * (number % 5), list(range(number % 4))]
    return key, encode_row(value, ["long", "string", array_of("long")])


def partition_of(number: int, partitions: int) -> int:
    columns = [pa.array([f"key-{number}" if number % 4 else None], pa.string()), pa.array([number], pa.int32())]
    return int(key_groups(hash_keys(columns), partitions)[0])


def small(partitions: int = 2, keys: int = 12) -> dict[str, bytes]:
    """Three batches: a delta, a delta with deletions and a snapshot of both, and a delta."""
    found = []
    for partition in range(partitions):
        own = [number for number in range(keys) if partition_of(number, partitions) == partition]
        first = [entry(number, 1) for number in own]
        gone = {key for key, _ in first[:1]}
        second = [(key, None) for key in gone] + [entry(number, 2) for number in own[1:3]]
        alive = dict(first) | dict(second)
        snapshot = [(key, value) for key, value in alive.items() if value is not None]
        third = [entry(number, 3) for number in own[2:4]]
        found.append(
            {
                "1.delta": lz4_stream(encode_entries(first)),
                "2.delta": lz4_stream(encode_entries(second)),
                "2.snapshot": lz4_stream(encode_entries(snapshot)),
                "3.delta": lz4_stream(encode_entries(third)),
            }
        )
    return checkpoint(KEY, VALUE, found, batch=2)


def quiet(done: int, total: int) -> None:
    pass


def rows(source: SparkSource) -> list[Any]:
    return [row for part in source.parts for batch in source.read(part) for row in batch.to_pylist()]


def opened(files: dict[str, bytes], checkpoint_id: int | None = None) -> SparkSource:
    return SparkSource(Files(files), checkpoint_id)  # type: ignore[arg-type]


def files_of(name: str) -> dict[str, bytes]:
    folder = open_storage(str(FIXTURES / name / "checkpoint")).folder()
    assert folder is not None
    return {item.path: bytes(folder.read(item.path)) for item in folder.list("")}


def findings(files: dict[str, bytes], level: str = "full") -> list[Finding]:
    return list(check_source(opened(files), level, quiet))  # type: ignore[arg-type]


WHOLE = small()


def test_the_small_checkpoint_is_whole() -> None:
    assert findings(WHOLE) == []
    assert [part.rows for part in opened(WHOLE).parts] == [None, None]
    # One key of each partition was deleted, and came back with batch 3 only if it was written.
    assert len(rows(opened(WHOLE))) == 10
    assert len(rows(opened(WHOLE, 1))) == 12
    batches = {row["sum"] // 100 for row in rows(opened(WHOLE))}
    assert batches == {1, 2, 3}


def outcome(act: Callable[[], tuple[list[Finding], list[Any]]], expected: list[Any]) -> str:
    """What comes of reading something broken; fails where it is read as something else."""
    try:
        problems, found = act()
    except (DamagedCheckpoint, UnsupportedFormat, NotFound):
        return "error"
    if any(problem.severity == "error" for problem in problems):
        return "finding"
    assert found == expected
    return "harmless"


def broken_versions(data: bytes) -> Iterator[tuple[str, bytes]]:
    for size in range(len(data)):
        yield f"cut to {size}", data[:size]
    for at in range(len(data)):
        # One bit of every byte: each of the eight in turn.
        for bit in {at % 8, (at + 3) % 8}:
            yield f"bit {bit} of byte {at}", data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


@pytest.mark.parametrize("name", ["2.snapshot", "3.delta"])
def test_every_truncation_and_flipped_bit_of_state_is_noticed_or_harmless(name: str) -> None:
    path = f"state/0/1/{name}"
    source, expected = opened(WHOLE), rows(opened(WHOLE))
    ends: dict[str, int] = {}

    def act() -> tuple[list[Finding], list[Any]]:
        source._kept = None
        problems = list(check_source(source, "full", quiet))
        return problems, [] if problems else rows(source)

    for what, data in broken_versions(WHOLE[path]):
        source.folder = Files({**WHOLE, path: data})  # type: ignore[assignment]
        end = outcome(act, expected)
        ends[end] = ends.get(end, 0) + 1
        assert end != "harmless" or "bit" in what
    # Harmless: the frame's size class in its head, and LZ4 that unpacks to the same bytes.
    assert ends["finding"] > 20 * ends.get("harmless", 0)


@pytest.mark.parametrize(
    "path",
    ["metadata", "offsets/2", "offsets/1", "commits/2", "state/0/_metadata/metadata", "state/0/0/_metadata/schema"],
)
def test_every_truncation_and_flipped_bit_of_logs_and_schemas_is_noticed_or_harmless(path: str) -> None:
    expected = [list(row.values()) for row in rows(opened(WHOLE))]

    for _, data in broken_versions(WHOLE[path]):
        files = {**WHOLE, path: data}

        def act(files: dict[str, bytes] = files) -> tuple[list[Finding], list[Any]]:
            source = opened(files)
            problems = list(check_source(source, "full", quiet))
            # Names may be others: nothing but they themselves says so.
            wrong = any(problem.severity == "error" for problem in problems)
            return problems, [] if wrong else [list(row.values()) for row in rows(source)]

        outcome(act, expected)


@pytest.mark.parametrize("codec", ["zstd", "snappy"])
def test_every_truncation_and_flipped_bit_under_another_codec_is_noticed_or_said_to_be_valid(codec: str) -> None:
    conf = {"spark.sql.streaming.stateStore.compression.codec": codec}
    data = spark_encode(codec, encode_entries([entry(number, 1) for number in range(6)]))
    files = checkpoint(KEY, VALUE, [{"1.delta": data}], conf=conf)
    source, expected = opened(files), rows(opened(files))
    assert len(expected) == 6
    for what, broken in broken_versions(data):
        source.folder, source._kept = Files({**files, "state/0/0/1.delta": broken}), None  # type: ignore[assignment]
        problems = list(check_source(source, "full", quiet))
        if what.startswith("cut"):
            assert problems
        elif not problems:
            # Neither has checksums: another value may stand there, but of the same shape.
            assert len(rows(source)) <= 6


def without(*paths: str) -> dict[str, bytes]:
    return {path: data for path, data in WHOLE.items() if path not in paths}


@pytest.mark.parametrize(
    ("files", "level", "message"),
    [
        (without("state/0/1/3.delta"), "quick", "state/0/1/3.delta: it is missing"),
        (without("state/0/0/2.snapshot", "state/0/0/2.delta"), "quick", "state/0/0/2.delta: it is missing"),
        ({**WHOLE, "state/0/1/3.delta": b""}, "quick", "state/0/1/3.delta is empty"),
        ({k: v for k, v in WHOLE.items() if not k.startswith("state/0/1/")}, "quick", "1 have no folder"),
        ({**WHOLE, "state/0/7/3.delta": b"x"}, "quick", "folders of 1 more (the first is 7)"),
        ({**WHOLE, "offsets/3": WHOLE["offsets/2"]}, "quick", "batch 3 has begun and has no commit"),
        ({**WHOLE, "offsets/4": WHOLE["offsets/2"]}, "quick", "commits/3 and later ones are missing"),
        (without("offsets/1"), "quick", "offsets/1 is missing"),
        ({**WHOLE, "state/0/1/.3.delta.crc": b"crc\x00"}, "quick", "it has 4 bytes, and 12 would belong"),
        (
            {**WHOLE, "state/0/1/.3.delta.crc": b"crc\x00\x00\x00\x02\x00\x00\x00\x00\x01"},
            "full",
            "the checksum of byte 0 and on differs",
        ),
        ({**WHOLE, "state/0/1/3.delta": WHOLE["state/0/0/3.delta"]}, "full", "are not where their hash says"),
    ],
)
def test_what_is_wrong_is_found_and_named(files: dict[str, bytes], level: str, message: str) -> None:
    found = findings(files, level)
    assert [problem for problem in found if message in problem.message], [str(problem) for problem in found]
    assert all(problem.advice and problem.clause == "Spark state store" for problem in found)


def test_a_damaged_snapshot_is_needless_where_its_deltas_are_there() -> None:
    path = "state/0/1/2.snapshot"
    broken = {**WHOLE, path: WHOLE[path][:-1]}
    (found,) = findings(broken)
    assert found.path == path
    assert "writes a copy without it" in found.advice
    by_deltas = rows(opened({name: data for name, data in broken.items() if name != path}))
    assert sorted(map(repr, by_deltas)) == sorted(map(repr, rows(opened(WHOLE))))
    (alone,) = findings({name: data for name, data in broken.items() if name != "state/0/1/1.delta"})
    assert "put the file back" in alone.advice


def test_a_right_crc_is_no_finding() -> None:
    data = WHOLE["state/0/1/3.delta"]
    sums = b"crc\x00\x00\x00\x02\x00" + zlib.crc32(data).to_bytes(4, "big")
    assert findings({**WHOLE, "state/0/1/.3.delta.crc": sums}) == []


def swapped() -> dict[str, bytes]:
    zero, one = ({k: v for k, v in WHOLE.items() if k.startswith(f"state/0/{n}/") and "_meta" not in k} for n in (0, 1))
    moved = {path.replace("/0/0/", "/0/1/"): data for path, data in zero.items()}
    return {**WHOLE, **moved, **{path.replace("/0/1/", "/0/0/"): data for path, data in one.items()}}


def test_swapped_partitions_are_an_error_that_says_whose_files_these_are() -> None:
    found = findings(swapped())
    assert [problem.subtask for problem in found] == [0, 1]
    assert "all belong into partition 1, whose files these seem to be" in found[0].message
    assert "Spark reports no error, and its results are wrong" in found[0].advice
    assert findings(swapped(), "quick") == []


def changed(path: str, old: str, new: str) -> dict[str, bytes]:
    assert old in WHOLE[path].decode()
    return {**WHOLE, path: WHOLE[path].decode().replace(old, new).encode()}


OFFSETS = "offsets/2"
OPERATOR = "state/0/_metadata/metadata"


def test_partitions_that_disagree_between_metadata_and_offsets() -> None:
    (found,) = findings(changed(OPERATOR, '"numPartitions": 2', '"numPartitions": 5'), "quick")
    assert "has 5 partitions by state/0/_metadata/metadata, and 2 by offsets/2" in found.message
    more = findings(changed(OFFSETS, 'partitions": "2"', 'partitions": "3"'))
    assert {problem.severity for problem in more} == {"error"}
    assert any("has 3 partitions, and 1 have no folder" in problem.message for problem in more)


def test_an_old_query_is_warned_of() -> None:
    old = changed(OFFSETS, '"true"', '"false"')
    (found,) = findings(old, "quick")
    assert found.severity == "warning"
    assert "before Spark 3.3" in found.message
    assert "--level full" in found.advice
    # In full every key is compared.
    assert findings(old) == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (changed(OPERATOR, "stateStoreSave", "someNewThing"), "'someNewThing'"),
        (
            {**WHOLE, OFFSETS: WHOLE[OFFSETS].replace(b'"conf": {', b'"conf": {"spark.sql.streaming.stateStore.compression.codec": "lzf", ')},
            "'lzf'",
        ),
    ],
)  # fmt: skip
def test_unknown_operators_and_codecs_are_findings_with_their_names(files: dict[str, bytes], message: str) -> None:
    assert any(message in problem.message and problem.severity == "error" for problem in findings(files))


def test_an_unknown_provider_is_refused_by_its_name() -> None:
    conf = b'"conf": {"spark.sql.streaming.stateStore.providerClass": "com.example.Own", '
    with pytest.raises(UnsupportedFormat, match=r"com\.example\.Own"):
        findings({**WHOLE, OFFSETS: WHOLE[OFFSETS].replace(b'"conf": {', conf)})


def test_a_missing_schema_is_named() -> None:
    for files in (without("state/0/0/_metadata/schema"), without("state/0/0/_metadata/schema", OPERATOR)):
        with pytest.raises(DamagedCheckpoint, match="state/0/0/_metadata/schema is missing"):
            opened(files)


@pytest.mark.parametrize(
    ("path", "content", "error"),
    [
        (OFFSETS, b"v9\n{}", UnsupportedFormat),
        (OFFSETS, b"v1", DamagedCheckpoint),
        (OFFSETS, b"v1\n[]", DamagedCheckpoint),
        (OFFSETS, b'v1\n{"conf": {"spark.sql.shuffle.partitions": "4000000000"}}', DamagedCheckpoint),
        (OFFSETS, b"v1\n" + b"[" * 100_000, DamagedCheckpoint),
        (OPERATOR, b"v1\n{}", DamagedCheckpoint),
        (OPERATOR, b'v1\n{"operatorInfo": {"operatorId": 3, "operatorName": "x"}, "stateStoreInfo": []}', DamagedCheckpoint),
        (OPERATOR, WHOLE[OPERATOR].replace(b'"default"', b'"../../.."'), DamagedCheckpoint),
        (OPERATOR, WHOLE[OPERATOR].replace(b'"numPartitions": 2', b'"numPartitions": 1e999'), DamagedCheckpoint),
        (OFFSETS, WHOLE[OFFSETS].replace(b"1700000000002", b"9" * 40), DamagedCheckpoint),
        ("metadata", b'{"id": 5}', DamagedCheckpoint),
        ("metadata", b'{"id": "caf\xe9"}', DamagedCheckpoint),
        ("commits/2", b"v1\n{", DamagedCheckpoint),
        ("state/0/0/_metadata/schema", b"\x00\x02v7", UnsupportedFormat),
        ("state/0/0/_metadata/schema", b"\x00\x02v2\x7f\xff\xff\xff", DamagedCheckpoint),
        ("state/0/0/_metadata/schema", schema_file(KEY, VALUE) + b"x", DamagedCheckpoint),
    ],
)  # fmt: skip
def test_broken_logs_are_refused_by_their_path(path: str, content: bytes, error: type[CheckpointError]) -> None:
    with pytest.raises(error, match=path.replace("/", "/")) as caught:
        opened({**WHOLE, path: content}).record  # noqa: B018
    assert caught.value.details["path"] == path


def test_the_number_of_prefix_columns_stays_within_the_key() -> None:
    files = changed(OPERATOR, "stateStoreSave", "sessionWindowStateStoreSaveExec")
    for number in ("-1", "9"):
        with pytest.raises(DamagedCheckpoint, match="prefix"):
            opened(
                {
                    **files,
                    OPERATOR: files[OPERATOR].replace(
                        b'"numColsPrefixKey": 0', b'"numColsPrefixKey": ' + number.encode()
                    ),
                }
            )


def keeping(*folders: str) -> dict[str, bytes]:
    """What is left of a query where only these are: ``metadata`` as Spark writes it, and some."""
    found = {path: data for path, data in WHOLE.items() if path.partition("/")[0] in folders}
    return {**found, "metadata": b'{"id":"77e84bb8-c6f4-4e55-a40d-6d1f6c4b2b4c"}'}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (keeping(), "has begun no batch yet"),
        (keeping("state"), "has state/, and no offsets/ and commits/.*Put both folders back"),
        (keeping("offsets"), "has offsets/ of batches 0 to 2, and no commits/ and state/.*runs batch 2 again"),
        (keeping("offsets", "state"), r"has offsets/ of batches 0 to 2, state/, and no commits/: Spark before 2\.2"),
    ],
)
def test_what_is_left_of_a_query_and_what_is_missing_is_said(files: dict[str, bytes], said: str) -> None:
    assert recognises(Files(files))  # type: ignore[arg-type]
    for read in (lambda: opened(files), lambda: sources(Files(files))):  # type: ignore[arg-type]
        with pytest.raises(NotFound, match=said):
            read()


def test_a_file_that_many_partitions_lack_is_one_finding() -> None:
    many = small(40, keys=4)
    lost = [path for path in many if path.endswith(("/2.snapshot", "/2.delta"))]
    (found,) = findings({path: data for path, data in many.items() if path not in lost or "/0/39/" in path})
    assert "the same in 39 partitions, 0-38" in found.message
    assert found.path == "state/0/0/2.delta"
    assert "torn" not in found.message


def test_state_that_is_gone_is_said() -> None:
    (warning,) = findings({path: data for path, data in WHOLE.items() if not path.startswith("state/")})
    assert (warning.severity, warning.path) == ("warning", "state/")
    assert "no stateful operator, or its state was removed" in warning.message
    second = {path.replace("state/0/", "state/1/"): data for path, data in WHOLE.items()}
    second["state/1/_metadata/metadata"] = WHOLE[OPERATOR].replace(b'"operatorId": 0', b'"operatorId": 1')
    (error,) = findings(second)
    assert (error.severity, error.path) == ("error", "state/0")
    ids = {"nextBatchWatermarkMs": 0, "stateUniqueIds": {"0": [["a"]]}}
    commit = f"v1\n{json.dumps(ids)}".encode()
    (certain,) = findings({**keeping("offsets", "commits", "sources"), "commits/2": commit})
    assert (certain.severity, certain.path) == ("error", "state/0")


def test_only_a_query_is_recognised() -> None:
    assert recognises(Files(WHOLE))  # type: ignore[arg-type]
    assert not recognises(Files({"metadata": b'{"id": "mine"}', "state/x": b""}))  # type: ignore[arg-type]
    assert not recognises(Files({"metadata/v1.json": b"{}"}))  # type: ignore[arg-type]
    assert not recognises(Files({"_metadata": b"", "state/x": b""}))  # type: ignore[arg-type]
    assert not recognises(Files({"offsets/x": b"", "commits/0": b""}))  # type: ignore[arg-type]


def test_history_reads_every_log_once_and_several_at_a_time_where_that_helps() -> None:
    folder = Files(WHOLE)
    folder.reads_at_once = 4  # type: ignore[attr-defined]
    assert [source.record.checkpoint_id for source in sources(folder).sources] == [3, 2, 1]  # type: ignore[arg-type]
    assert len(folder.reads) == len(set(folder.reads)) == 9


def test_opening_reads_no_data_file() -> None:
    folder = Files(WHOLE)
    source = SparkSource(folder)  # type: ignore[arg-type]
    assert source.record.totals.bytes > 0
    assert source.parts
    list(check_source(source, "quick", quiet))
    assert not [path for path in folder.reads if path.endswith((".delta", ".snapshot"))]


@pytest.mark.parametrize("name", ["spark-4.3.0/totals-row-checksum", "spark-4.3.0/totals-with-crc"])
def test_a_wrong_byte_under_a_checksum_of_spark_is_found(name: str) -> None:
    files = files_of(name)
    assert findings(files) == []
    path = next(part.path for part in opened(files).parts if part.size_bytes > 60)
    assert path is not None
    found = findings({**files, path: files[path][:-30] + bytes([files[path][-30] ^ 4]) + files[path][-29:]})
    assert [problem.path for problem in found if problem.severity == "error"] == [path]


def test_a_row_checksum_is_compared_for_puts_and_for_deletions() -> None:
    from stateformat.backends.foreign.framing import crc32c

    def sum_of(data: bytes) -> bytes:
        found = crc32c(np.frombuffer(data, np.uint8), np.array([len(data)], np.int64))
        return int(found[0]).to_bytes(4, "little")

    one, two = entry(1, 1), entry(2, 1)
    puts = [(key, sum_of(key + value) + value) for key, value in (one, two)]
    conf = {"spark.sql.streaming.stateStore.rowChecksum.enabled": "true"}

    def made(deleted: bytes) -> dict[str, bytes]:
        state = {
            "1.delta": lz4_stream(encode_entries(puts)),
            "2.delta": lz4_stream(encode_entries([(deleted + one[0], None)])),
        }
        return checkpoint(KEY, VALUE, [state], batch=1, conf=conf)

    assert findings(made(sum_of(one[0]))) == []
    assert [row["n"] for row in rows(opened(made(sum_of(one[0]))))] == [2]
    (wrong,) = findings(made(b"four"))
    assert "checksum of another row" in wrong.message
    assert wrong.path == "state/0/0/2.delta"


def test_a_join_that_counts_other_rows_than_it_has_is_found() -> None:
    files = files_of("spark-4.3.0/join-outer")
    source = opened(files)
    part = next(part for part in source.parts if part.state == "left-keyToNumValues" and len(source.entries(part).keys))
    for item in source.files(part):
        files[item.path] = lz4_stream(encode_entries([]))
    (found,) = findings(files)
    assert "the left side of operator-0 counts 0 rows" in found.message
    assert (found.subtask, found.severity) == (part.subtask, "warning")


def test_a_join_of_spark_3_without_one_of_its_schemas_is_no_other_operator() -> None:
    files = files_of("spark-3.5.9/join-outer")
    path = "state/0/0/right-keyToNumValues/_metadata/schema"
    with pytest.raises(DamagedCheckpoint, match=path):
        opened({name: data for name, data in files.items() if name != path})


def test_offsets_of_sources_by_name_and_sources_without_an_offset() -> None:
    log = WHOLE[OFFSETS].decode().splitlines()
    text = "\n".join(["v2", log[1], 'orders:{"logOffset":5}', "users:-"])
    properties = opened({**WHOLE, OFFSETS: text.encode()}).record.properties
    assert json.loads(properties["spark.offsets.orders"]) == {"logOffset": 5}
    assert "spark.offsets.users" not in properties


def test_only_a_line_feed_ends_a_line_of_a_log(tmp_path: Path) -> None:
    """Spark writes U+2028 and U+0085 into its JSON as they are."""
    told = ['{"a": "one\u2028two\x85three\x1cfour"}', "0:-"]
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "7").write_bytes("\n".join(["v1", *told, ""]).encode())
    folder = open_storage(str(tmp_path)).folder()
    assert folder is not None
    assert read_lines(folder, "offsets/7", (1,)) == (1, told)

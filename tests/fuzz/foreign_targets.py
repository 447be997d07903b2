"""Foreign checkpoints under the fuzzer: real folders of Spark and Flink with one file changed, and
each parser alone.

Where a file is compressed or has checksums, what is inside is changed and packed anew, so that
these are not what refuses.
"""

from __future__ import annotations

import codecs
import copy
import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stateformat.backends.foreign import formats, framing
from stateformat.backends.foreign.byte_strings import from_arrow
from stateformat.backends.foreign.flink import kryo, metadata
from stateformat.backends.foreign.flink.kryo_columns import Kryo
from stateformat.backends.foreign.flink.lanes import Lanes
from stateformat.backends.foreign.spark import schemas
from stateformat.backends.foreign.sst import merge, table
from stateformat.errors import DamagedCheckpoint, UnsupportedFormat
from stateformat.reading import Checkpoint
from stateformat.storage import ObjectInfo
from tests.foreign.kryo_written import leaf, listed, mapped, named
from tests.fuzz.mutations import VALUES, Choices, changed_bytes, nodes

if TYPE_CHECKING:
    from tests.fuzz.targets import Preparation, Reading

# Python imports a codec when it is first used; that is no file that a checkpoint has opened.
for _codec in ("utf-16-le", "utf-16-be", "utf-16", "latin-1", "ascii", "cp437"):
    codecs.lookup(_codec)

FIXTURES = Path(__file__).resolve().parents[1] / "foreign" / "fixtures"
ROWS_MAX = 100_000
"""A changed file may say many rows of no bytes; so many are read."""


class DictFolder:
    """A folder in memory: it opens no file, which the watch forbids."""

    url = "memory:fuzzed"

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def exists(self) -> bool:
        return True

    def read(self, path: str) -> pa.Buffer:
        if path not in self.files:
            raise FileNotFoundError(path)
        return pa.py_buffer(self.files[path])

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        return pa.py_buffer(self.read(path).to_pybytes()[offset : offset + length])

    def open_input(self, path: str) -> io.BytesIO:
        return io.BytesIO(self.read(path).to_pybytes())

    def size(self, path: str) -> int:
        return self.read(path).size

    def list(self, prefix: str) -> list[ObjectInfo]:
        found = sorted(path for path in self.files if path.startswith(prefix))
        return [ObjectInfo(path, len(self.files[path])) for path in found]


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def changed_json(data: bytes, choices: Choices) -> bytes | None:
    """Lines of which one that is JSON has another member; None where no line is JSON."""
    lines = data.decode(errors="surrogateescape").split("\n")
    parsed = {}
    for number, line in enumerate(lines):
        if line[:1] in ("{", "["):
            try:
                parsed[number] = json.loads(line)
            except ValueError:
                continue
    if not parsed:
        return None
    number = choices.of(sorted(parsed))
    value = parsed[number]
    found = list(nodes(value))
    for _ in range(1 + choices.below(3)):
        if not found:
            break
        holder, key = choices.of(found)
        how = choices.below(4)
        try:
            if how == 0:
                holder[key] = copy.deepcopy(choices.of(VALUES))
            elif how == 1:
                del holder[key]
            elif how == 2 and isinstance(holder[key], int) and not isinstance(holder[key], bool):
                holder[key] += choices.of((1, -1, 2**31, 2**53))
            elif isinstance(holder, list):
                holder += copy.deepcopy(holder[key : key + 1]) * (1 + choices.below(50))
        except (KeyError, IndexError):
            continue  # An earlier change has taken it away.
    lines[number] = json.dumps(value)
    return "\n".join(lines).encode(errors="surrogatepass")


def changed_file(path: str, data: bytes, codec: str, choices: Choices) -> bytes:
    """A file with other bytes: of JSON another member, of compressed bytes others within."""
    if choices.below(3):
        if path.endswith((".delta", ".snapshot", ".changelog")):
            return framing.spark_encode(codec, changed_bytes(bytes(framing.spark_decode(codec, data, path)), choices))
        found = changed_json(data, choices)
        if found is not None:
            return found
    return changed_bytes(data, choices)


def folders(place: str, form: Any, inner: str, codec_of: Callable[[str], str]) -> Preparation:
    """One file of a folder changed, removed or exchanged: validated in full, every state read."""
    # A message that shows a time would read the time zone's file, once in a process.
    pa.scalar(0, pa.timestamp("us", "UTC")).as_py()
    found = {"/".join(path.parts[-3:-1]): files_of(path) for path in sorted(FIXTURES.glob(f"{place}/{inner}"))}

    def prepare(choices: Choices) -> Reading:
        name = choices.of(sorted(found))
        files = dict(found[name])
        path = choices.of(sorted(files))
        how = choices.below(10)
        if how == 0:
            del files[path]
        elif how == 1:
            other = choices.of(sorted(files))
            files[path], files[other] = files[other], files[path]
        elif how == 2:
            files[path] = files[path][: choices.below(max(1, len(files[path])))]
        else:
            files[path] = changed_file(path, files[path], codec_of(name), choices)
        folder: Any = DictFolder(files)

        def read() -> None:
            opened = form(folder, None)
            if opened is not None:
                opened.validate(None, "full", None)
                read_all(opened.open())

        return read

    return prepare


def read_all(checkpoint: Checkpoint) -> None:
    """Read every state, up to a number of rows."""
    for state in checkpoint.states:
        drain(checkpoint.read(state.operator, state.name).batches())


def drain(batches: Iterable[pa.RecordBatch]) -> None:
    """Read batches, up to a number of rows."""
    rows = 0
    for batch in batches:
        rows += batch.num_rows
        if rows > ROWS_MAX:
            break


def spark_target() -> Preparation:
    """The folder of a Structured Streaming query."""
    return folders("spark-*", formats.spark, "*/checkpoint", lambda name: "zstd" if "zstd" in name else "lz4")


def flink_target() -> Preparation:
    """The folder of a Flink savepoint: headers, canonical and native key groups, operator state."""
    return folders("flink-*", formats.flink, "*/savepoint", lambda name: name)


def metadata_target() -> Preparation:
    """Flink's ``_metadata`` alone."""
    seeds = [path.read_bytes() for path in sorted(FIXTURES.glob("flink-*/*/savepoint/_metadata"))]

    def prepare(choices: Choices) -> Reading:
        changed = changed_bytes(choices.of(seeds), choices)
        return lambda: _unused(metadata.decode_metadata(changed))

    return prepare


def kryo_target() -> Preparation:
    """One value of Kryo's that was changed, among many that were not: read or refused as by
    itself.
    """
    values = [
        listed(["tag", "\u20ac", None, "x" * 70]),
        listed([1, -(2**31), None]),
        mapped([("a", 1.5), ("bb", None)]),
        named("java.util.TreeMap") + b"\1\0\1" + leaf(True) + leaf(2**40, longs=True),
        listed([], "java.util.HashSet"),
        named("java.util.ArrayList") + b"\1\2" + named("[[I", 1) + b"\1\2\1\2\2" + b"\1\1\3",
        named("java.time.LocalDateTime") + b"\1\1\0\3\0\2\xc8\x1f\1\4\5\0\6",
        leaf("text"),
    ]
    known = kryo.Known(kryo.registered(["java.util.List"]), {})
    shapes = [kryo.shape_of(kryo.Reader(known, memoryview(raw), 0, len(raw), "").value()) for raw in values]

    def prepare(choices: Choices) -> Reading:
        number = choices.below(len(values))
        serializer = Kryo("java.util.List", known, shapes[number])
        changed = changed_bytes(values[number], choices)
        many = [values[number]] * 40
        many[choices.below(40)] = changed

        def read() -> None:
            outcomes = []
            for some in ([changed], many):
                lanes = Lanes.of(from_arrow(pa.array(some, pa.binary())), "value")
                try:
                    serializer.read(lanes).validate(full=True)
                    outcomes.append(int(lanes.left.sum()))
                except (DamagedCheckpoint, UnsupportedFormat) as error:
                    outcomes.append(-1)
                    refused = error
            assert outcomes[0] == outcomes[1], "a value is read otherwise among others"
            if outcomes[0] < 0:
                raise refused

        return read

    return prepare


def table_target() -> Preparation:
    """RocksDB's table files, some of which have no checksums, so that changes reach the parser."""
    names = ("checksum-none-6", "checksum-crc32c", "index-two-levels-3", "ranges-1", "compression-zstd")
    sets = [files_of(FIXTURES / "rocksdb-9.8.4" / name) for name in names]
    plain = sets[0]

    def prepare(choices: Choices) -> Reading:
        files = dict(plain if choices.below(2) else choices.of(sets))
        files.pop("expected.txt")
        path = choices.of(sorted(files))
        files[path] = changed_bytes(files[path], choices)

        def read() -> None:
            tables = [table.open_table(_ranges(data), len(data), name) for name, data in sorted(files.items())]
            merge.merged(tables, None, None)

        return read

    return prepare


def _ranges(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, length: data[offset : offset + length]


def frames_target() -> Preparation:
    """Compressed streams of Spark and Flink."""
    text = b"the same words again and again, " * 3000
    codecs = ("lz4", "snappy", "zstd")
    streams = {codec: framing.spark_encode(codec, text) for codec in codecs}
    flink = framing.snappy_frames_encode(text)

    def prepare(choices: Choices) -> Reading:
        codec = choices.of((*codecs, ""))
        changed = changed_bytes(streams.get(codec, flink), choices)

        def read() -> None:
            if codec:
                _unused(framing.spark_decode(codec, changed, "x.delta"))
            else:
                _unused(framing.snappy_frames_decode(changed, "x"))

        return read

    return prepare


def schema_target() -> Preparation:
    """Spark's files of schemas."""
    seeds = [path.read_bytes() for path in sorted(FIXTURES.glob("spark-*/*/checkpoint/state/*/0/**/_metadata/schema"))]

    def prepare(choices: Choices) -> Reading:
        changed = changed_bytes(choices.of(seeds), choices)

        def read() -> None:
            for schema in schemas.parse_schema_file(changed, "schema"):
                schemas.arrow_fields(schema.key)
                schemas.arrow_fields(schema.value)

        return read

    return prepare


def _unused(value: object) -> None:
    """What was read is of no interest: that it could be is."""


def all_targets() -> Iterator[tuple[str, Callable[[], Preparation]]]:
    """The targets by their names."""
    yield "spark folder", spark_target
    yield "flink folder", flink_target
    yield "flink metadata", metadata_target
    yield "flink kryo", kryo_target
    yield "rocksdb tables", table_target
    yield "foreign frames", frames_target
    yield "spark schemas", schema_target

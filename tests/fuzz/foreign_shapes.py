"""Foreign files that are made to be hard, not flipped: shared types, names that repeat, huge
numbers, nesting deep and wide, and lengths that are forged under checksums that are right.
"""

from __future__ import annotations

import io
import json
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from stateformat.backends.foreign import formats, framing
from stateformat.backends.foreign.sst import merge
from stateformat.schema import segment_schema
from stateformat.storage import ObjectInfo
from tests.foreign import hostile_flink as flink, rocks_tables
from tests.foreign.flink_written import BASE, composite, pack, utf
from tests.fuzz.foreign_targets import FIXTURES, DictFolder, files_of, read_all
from tests.fuzz.mutations import Choices, changed_bytes, nodes

if TYPE_CHECKING:
    from tests.fuzz.targets import Preparation, Reading

HUGE = (0, 1, -1, 127, 65_535, 1 << 20, (1 << 31) - 1, -(1 << 31), 1 << 40, (1 << 62) - 1, (1 << 63) - 1, -(1 << 63))
TEXTS = ("", "s", "s0", "a" * 5_000, "\n", "x\x1b[2J", "../x", "a.b", "a/b", "\u202e", "🙂", "default")
HALF = b"\xed\xa0\x80"


def some(choices: Choices, most: int) -> int:
    """A number, mostly small, now and then of the order of ``most``."""
    return choices.below(4) if choices.below(4) else choices.below(most + 1)


def both(opened: Any) -> None:
    """Check a folder in full and show all of it: what has no errors can be opened and shown."""
    if opened is None:
        return
    report = opened.validate(None, "full", None)
    for problem in report.problems:
        assert f"{problem.message} {problem.advice} {problem.path}".encode()
    sound = not any(problem.severity == "error" for problem in report.problems)
    try:
        checkpoint = opened.open()
        for operator in checkpoint.graph.operators:
            assert f"{operator.uid} {operator.name}".encode()
        for state in checkpoint.states:
            assert f"{state.name} {segment_schema(state)}".encode()
        read_all(checkpoint)
    except Exception as error:
        if sound:
            raise AssertionError(f"validate finds nothing wrong, and reading: {error}") from error
        raise


# ---- Flink ---------------------------------------------------------------------------------------


def snapshot(choices: Choices, depth: int = 0) -> bytes:
    """A serializer: nested, wide, or of a type that names another many times."""
    how = choices.below(8)
    if how < 3 or depth > 40:
        return flink.LONG
    if how == 3:
        return flink.SHAPES[choices.of(sorted(flink.SHAPES))](1 + some(choices, 60))
    if how == 4:
        inner = snapshot(choices, depth + 1)
        for _ in range(some(choices, 60)):
            inner = composite(f"{BASE}ListSerializerSnapshot", [inner])
        return inner
    if how == 5:
        names = b"".join(utf(choices.of(TEXTS)) for _ in range(some(choices, 300)))
        count = pack("i", max(0, len(names) // 4))
        return utf(f"{BASE}EnumSerializer$EnumSerializerSnapshot") + pack("i", 3) + utf("a.E") + count + names
    child = snapshot(choices, depth + 1)
    inner = [child] * min(1 + some(choices, 200), 1 + (1 << 14) // len(child))
    if how == 6:
        return composite(
            "org.apache.flink.api.java.typeutils.runtime.RowSerializer$RowSerializerSnapshot", inner, b"\1"
        )
    tuples = "org.apache.flink.api.java.typeutils.runtime.TupleSerializerSnapshot"
    return composite(tuples, inner, utf(f"org.apache.flink.api.java.tuple.Tuple{len(inner)}"), 2)


def number_into(data: bytes, choices: Choices) -> bytes:
    """Bytes of which four or eight, at some place, are a number that is huge."""
    form = choices.of((">i", ">q", ">H"))
    size = struct.calcsize(form)
    at = choices.below(max(1, len(data) - size))
    value = choices.of(HUGE) & ((1 << 8 * size) - 1)
    return data[:at] + value.to_bytes(size, "big") + data[at + size :]


def savepoint(choices: Choices) -> dict[str, bytes]:
    """A folder of Flink."""
    count = some(choices, 400)
    names = [choices.of((*TEXTS, HALF)) if choices.below(3) == 0 else f"s{number}" for number in range(count)]
    one = snapshot(choices)
    header = flink.header([(name, one if choices.below(4) else snapshot(choices)) for name in names])
    if choices.below(3) == 0:
        header = number_into(header, choices)
    groups = 1 + some(choices, 2_000)
    body, offsets = b"", []
    for group in range(groups):
        offsets.append(len(header) + len(body))
        rows = some(choices, 50)
        entries = b"".join(
            pack("hi", number, rows) + (b"\0" + pack("qq", group, 7)) * rows for number in range(min(count, 3))
        )
        body += pack("i", group) + entries + b"".join(pack("hi", number, 0) for number in range(3, min(count, 20)))
    how = choices.below(6)
    if how == 0:
        offsets = [choices.of(HUGE) for _ in offsets]
    elif how == 1:
        offsets = offsets[:1] * groups
    elif how == 2:
        body = number_into(body, choices)
    elif how == 3:
        offsets = [0] * groups
    size = choices.of(HUGE) if choices.below(5) == 0 else None
    files = flink.files(header + body, offsets, size)
    if choices.below(3) == 0:
        files["_metadata"] = many_operators(choices)
    if choices.below(3) == 0:
        files["_metadata"] = number_into(files["_metadata"], choices)
    return files


def many_operators(choices: Choices) -> bytes:
    """Metadata whose handles nest or repeat."""
    keyed = pack("b", 3) + pack("ii", 0, 0) + pack("b", 6) + utf("stream") + pack("q", 4)
    for _ in range(some(choices, 60)):
        if choices.below(2):
            keyed = pack("b", 8) + pack("iiq", 0, 1, 1) + pack("i", 1) + keyed + pack("i", 0) + pack("q", 0) + utf("h")
        else:
            keyed = pack("b", 3) + pack("ii", 0, 0) + keyed
    parallelism = choices.of((1, 2, 128, 32_768))
    same = choices.below(2)
    operators = [
        flink.one_operator(keyed, parallelism, parallelism, 0 if same else number, uid=b"u%d" % (0 if same else number))
        for number in range(1 + some(choices, 150))
    ]
    return flink.metadata(operators)


def flink_target() -> Preparation:
    """Whole folders of Flink."""

    def prepare(choices: Choices) -> Reading:
        folder: Any = Sizes(savepoint(choices), {})
        return lambda: both(formats.flink(folder, None))

    return prepare


# ---- Spark ---------------------------------------------------------------------------------------


class Sizes(DictFolder):
    """A folder in memory that says other sizes of some files than they have."""

    def __init__(self, files: dict[str, bytes], said: dict[str, int]) -> None:
        super().__init__(files)
        self.said = said

    def size(self, path: str) -> int:
        return self.said.get(path, super().size(path))

    def list(self, prefix: str) -> list[ObjectInfo]:
        return [ObjectInfo(item.path, self.said.get(item.path, item.size_bytes)) for item in super().list(prefix)]


def spark_type(choices: Choices, depth: int = 0) -> Any:
    """A type in Spark's JSON, deep or wide."""
    how = choices.below(6)
    if how < 3:
        return choices.of(("long", "string", "decimal(38,38)", "decimal(99,1)", "void", "x" * 3_000))
    if how == 3:
        found: Any = spark_type(choices, depth + 1) if depth < 4 else "long"
        for _ in range(some(choices, 200)):
            found = {"type": "array", "elementType": found, "containsNull": True}
        return found
    if how == 4:
        inner = spark_type(choices, depth + 1) if depth < 4 else "long"
        return {"type": "map", "keyType": inner, "valueType": inner, "valueContainsNull": True}
    inner = spark_type(choices, depth + 1) if depth < 4 else "long"
    names = [choices.of(TEXTS) if choices.below(2) else "same" for _ in range(1 + some(choices, 20))]
    repeated = names * (1 + some(choices, 400))
    # Wide structs of wide structs would be gigabytes, of the generator and not of what it tests.
    room = min(3_000, 1 + 4_000_000 // len(json.dumps(inner)))
    fields = [{"name": name, "type": inner, "nullable": True, "metadata": {}} for name in repeated[:room]]
    return {"type": "struct", "fields": fields}


def spark_schema(choices: Choices) -> bytes:
    """A schema file of such types."""

    def chunks(text: str) -> bytes:
        raw = text.encode("utf-8", "surrogatepass").replace(b"\0", b"\xc0\x80")
        pieces = [raw[at : at + 60_000] for at in range(0, len(raw), 60_000)]
        return pack("i", len(pieces)) + b"".join(pack("H", len(piece)) + piece for piece in pieces)

    def row() -> str:
        found = spark_type(choices)
        whole = found if isinstance(found, dict) and found["type"] == "struct" else None
        fields = [{"name": "c", "type": found, "nullable": True, "metadata": {}}]
        return json.dumps(whole or {"type": "struct", "fields": fields})

    found = utf("v2") + chunks(row()) + chunks(row())
    return number_into(found, choices) if choices.below(4) == 0 else found


def harder_json(data: bytes, choices: Choices) -> bytes:
    """A log of which a line has a member that is huge, deep, repeated, or no text."""
    lines = data.decode(errors="surrogateescape").split("\n")
    chosen = [number for number, line in enumerate(lines) if line[:1] in ("{", "[")]
    if not chosen:
        return data
    number = choices.of(chosen)
    value = json.loads(lines[number])
    found = list(nodes(value))
    raw = choices.of(
        ("Infinity", "NaN", "1e999", "9" * 30, "9" * 5_000, '"\\ud800"', "[" * 3_000 + "]" * 3_000, "2147483648")
    )
    if found:
        holder, key = choices.of(found)
        if choices.below(3) == 0 and isinstance(holder, list):
            holder += holder[key : key + 1] * some(choices, 20_000)
        elif choices.below(2):
            holder[key] = "@@"
        elif isinstance(holder, dict):
            holder["@@"] = holder.pop(key)
    text = json.dumps(value)
    lines[number] = text.replace('"@@":', '"\\ud800":').replace('"@@"', raw)
    return "\n".join(lines).encode(errors="surrogatepass")


def harder_zip(data: bytes, choices: Choices) -> bytes:
    """A zip with other metadata, other compression, or more entries."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = [(info.filename, archive.read(info)) for info in archive.infolist()]
    how = choices.below(4)
    if how == 0:
        parts += [(f"e{number}", b"") for number in range(some(choices, 12_000))]
    elif how == 1:
        parts += parts * (1 + some(choices, 20))
    elif how == 2:
        parts = [(name, harder_json(part, choices) if name == "metadata" else part) for name, part in parts]
    out = io.BytesIO()
    method = zipfile.ZIP_STORED if choices.below(2) else zipfile.ZIP_DEFLATED
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", method) as archive:
        warnings.simplefilter("ignore")
        for name, part in parts:
            archive.writestr(name, part)
    made = out.getvalue()
    return number_into(made, choices) if choices.below(4) == 0 else made


def harder_chain(data: bytes, codec: str, choices: Choices) -> bytes:
    """A delta or changelog whose sizes are forged, or that unpacks to much."""
    plain = bytes(framing.spark_decode(codec, data, ""))
    how = choices.below(4)
    if how == 0:
        plain = bytes(1 << (10 + choices.below(15)))
    elif how == 1:
        plain = plain[:-4] * (1 + some(choices, 300)) + plain[-4:]
    elif how == 2:
        plain = (pack("i", 0) + pack("i", choices.of((0, -1)))) * (1 + some(choices, 60_000)) + pack("i", -1)
    else:
        plain = number_into(plain, choices)
    packed = framing.spark_encode(codec, plain)
    return number_into(packed, choices) if choices.below(6) == 0 else packed


def spark_target() -> Preparation:
    """Whole folders of Spark, of each store, with one or two files made harder."""
    names = ("aggregate", "aggregate-rocksdb", "aggregate-rocksdb-ids", "aggregate-rocksdb-changelog", "totals-zstd")
    found = {name: files_of(FIXTURES / "spark-4.3.0" / name / "checkpoint") for name in names}

    def prepare(choices: Choices) -> Reading:
        name = choices.of(names)
        files, said = dict(found[name]), dict[str, int]()
        for _ in range(1 + choices.below(2)):
            path = choices.of(sorted(files))
            files[path] = harder(path, files[path], "zstd" if "zstd" in name else "lz4", choices)
            if choices.below(8) == 0:
                said[path] = abs(choices.of(HUGE))
            if choices.below(8) == 0 and path.split("/")[0] in ("offsets", "commits"):
                log = path.split("/")[0]
                files[f"{log}/{choices.of((10**17, 2**63, 7, 0))}"] = files.pop(path)
        folder: Any = Sizes(files, said)
        return lambda: both(formats.spark(folder, None))

    return prepare


def harder(path: str, data: bytes, codec: str, choices: Choices) -> bytes:
    """What a file becomes, by its kind."""
    if path.endswith((".delta", ".snapshot", ".changelog")):
        return harder_chain(data, codec, choices)
    if path.endswith(".zip"):
        return harder_zip(data, choices)
    if path.endswith("/schema"):
        return spark_schema(choices)
    if path.endswith(".sst"):
        return table(choices)
    return harder_json(data, choices)


# ---- RocksDB -------------------------------------------------------------------------------------


def table(choices: Choices) -> bytes:
    """A table whose blocks are changed before they get their checksums."""
    forged = choices.below(3)

    class Writer(rocks_tables.Writer):
        def add(self, raw: bytes, compression: int | None = None) -> bytes:
            if forged == 1 and choices.below(3) == 0:
                raw = changed_bytes(raw, choices)
            elif forged == 2 and choices.below(3) == 0:
                at = choices.below(max(1, len(raw)))
                wide = rocks_tables.varint(abs(choices.of(HUGE)))
                raw = raw[:at] + wide + raw[at + len(wide) :]
            handle = super().add(raw, compression)
            if choices.below(8) == 0:
                return rocks_tables.varint(abs(choices.of(HUGE))) + rocks_tables.varint(abs(choices.of(HUGE)))
            return handle

    value = bytes(1 << (4 + choices.below(15)))
    key = b"k" * some(choices, 3_000)
    count = 1 + some(choices, 150)
    kinds = (rocks_tables.PUT, rocks_tables.DELETE, rocks_tables.MERGE, choices.below(256))
    records = [(key + b"%04d" % at, abs(choices.of(HUGE)) >> 8, choices.of(kinds), value) for at in range(count)]
    stones = [(b"a", b"z", at) for at in range(some(choices, 100))]
    names = ("num.entries", "deleted.keys", "merge.operands", "num.range-deletions", "index.key.is.user.key")
    says = {name: abs(choices.of(HUGE)) for name in names if choices.below(6) == 0}
    return rocks_tables.table(
        records,
        per_block=1 + choices.below(60),
        interval=1 + choices.below(60),
        compression=choices.of((0, 1, 4, 7)),
        ranges=stones,
        says=says,
        writer=Writer,
    )


def table_target() -> Preparation:
    """Some tables, read together."""

    def prepare(choices: Choices) -> Reading:
        tables = [table(choices) for _ in range(1 + choices.below(3))]

        def read() -> None:
            opened = [rocks_tables.opened(data, f"{number}.sst") for number, data in enumerate(tables)]
            merge.merged(opened, None, None)

        return read

    return prepare


def all_targets() -> Iterator[tuple[str, Callable[[], Preparation]]]:
    """The targets by their names."""
    yield "flink shapes", flink_target
    yield "spark shapes", spark_target
    yield "rocksdb shapes", table_target

"""Stores that a hostile writer would make: small objects, right digests everywhere, and contents that grow.

Each bomb is a function that is given the directory of a store of one good checkpoint (``tests.stores.counts_job``, nothing
inline) and turns it into a bomb. :func:`attack` does with a store all that readers do, in a process of its own with a limit on
its memory, and says how each ended, how long it took and how far the process grew.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

import stateformat
from stateformat.errors import CheckpointError
from stateformat.tools.ckpt.main import main as ckpt
from tests.forgery import Forger, seal
from tests.fuzz import thrift_tree as thrift
from tests.stores import counts_job

MIB = 1 << 20
ADDRESS_SPACE_BYTES = 3 << 30
"""What a process may map beyond what it maps at its start: far more than it may use, and not all of this machine."""
SECONDS_MAX = 10.0
RECORD = "checkpoints/00000000000000000001.json"


class Outcome(NamedTuple):
    """How an attack ended: what each action came to, and what it took at most."""

    actions: Mapping[str, str]
    grown_bytes: int
    slowest_seconds: float

    @property
    def noticed(self) -> bool:
        """Whether anything was refused or called a problem."""
        return any(said not in ("right", "0") for said in self.actions.values())

    @property
    def faults(self) -> list[str]:
        """Actions that ended as no action may."""
        return [f"{name}: {said}" for name, said in self.actions.items() if said.startswith("FAULT")]


def good_store(root: Path, parallelism: int = 2) -> None:
    """One checkpoint whose segments are objects."""
    store = stateformat.open(str(root))
    counts_job(parallelism, keys=200).publish(store, None, options=stateformat.WriteOptions(inline_bytes_max=0))


# ---- records ---------------------------------------------------------------------------------------------------------


def members(root: Path) -> dict[str, Any]:
    """The record without its digest."""
    found: dict[str, Any] = json.loads((root / RECORD).read_text())
    found.pop("digest")
    return found


def put_record(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Another record, sealed."""
    found = members(root)
    change(found)
    (root / RECORD).write_bytes(seal(found))


def put_body(root: Path, extra: str) -> None:
    """The record with one more member, written as it is."""
    body = json.dumps(members(root), ensure_ascii=False, separators=(",", ":"))[:-1] + f',"x":{extra}'
    (root / RECORD).write_bytes(f'{body},"digest":"{xxhash.xxh3_128_hexdigest(body.encode())}"}}\n'.encode())


def record_of_six_gigabytes(root: Path) -> None:
    with (root / RECORD).open("r+b") as file:
        file.truncate(6 << 30)


def record_of_50_mb(root: Path) -> None:
    put_body(root, json.dumps(["x" * 50] * MIB, separators=(",", ":")))


def record_nested_100_000_deep(root: Path) -> None:
    put_body(root, "[" * 100_000 + "]" * 100_000)


def record_of_empty_arrays(root: Path) -> None:
    put_body(root, "[" + "[]," * 1_000_000 + "[]]")


def record_of_400_000_members(root: Path) -> None:
    put_body(root, "{" + ",".join(f'"{i:x}":1' for i in range(400_000)) + "}")


def record_that_repeats_its_last_member(root: Path) -> None:
    put_body(root, "{" + ",".join(f'"{i:x}":1' for i in range(300_000)) + ',"aaaa":1,"aaaa":2,"aaaa":3}')


def record_with_integers_of_a_million_digits(root: Path) -> None:
    put_body(root, "[" + ",".join(["9" * 1_000_000] * 7) + "]")


def record_of_a_million_operators(root: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        found["operators"] += [{**found["operators"][0], "uid": f"o{i}"} for i in range(1_000_000)]

    put_record(root, change)


def _many_operators(found: dict[str, Any], count: int, **changes: Any) -> None:
    found["operators"] += [{**found["operators"][0], "uid": f"o{i}", "name": "", **changes} for i in range(count)]


def record_of_operators_that_all_finished(root: Path) -> None:
    put_record(
        root,
        lambda found: _many_operators(
            found,
            40_000,
            parallelism=32_768,
            max_parallelism=32_768,
            status="fully_finished",
            finished=[[0, 32_767]],
        ),
    )


def record_with_subtasks_up_to_2_53(root: Path) -> None:
    put_record(root, lambda found: found["operators"][0].update(finished=[[0, 2**53 - 1]], parallelism=2**31))


def record_of_parallelism_2_31(root: Path) -> None:
    put_record(root, lambda found: found["operators"][0].update(parallelism=2**31, max_parallelism=2**31))


def record_of_a_long_chain_of_operators(root: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        _many_operators(found, 8_000)
        edge = found["edges"][0]
        found["edges"] += [
            {**edge, "id": f"e{i}", "from": f"o{i}", "to": f"o{i + 1}", "partitioner": "rebalance", "key_columns": []}
            for i in range(7_999)
        ]

    put_record(root, change)


def record_of_one_operator_with_40_000_inputs(root: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        edge = {**found["edges"][0], "partitioner": "rebalance", "key_columns": []}
        found["edges"] += [{**edge, "id": f"e{i}", "input": i} for i in range(40_000)]

    put_record(root, change)


def record_of_a_state_with_5_000_schemas(root: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        state = found["states"][0]
        schema = state["schemas"][0]
        state["schemas"] = [{**schema, "id": i} for i in range(1, 5_000)]

    put_record(root, change)


def record_of_a_state_with_20_000_fields(root: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        fields = found["states"][0]["schemas"][0]["fields"]
        fields += [{"id": 100 + i, "name": f"f{i}", "type": "int64", "nullable": True} for i in range(20_000)]
        found["states"][0]["last_field_id"] = 60_000

    put_record(root, change)


def record_with_a_name_of_7_mb(root: Path) -> None:
    put_record(root, lambda found: found.update(job_name="x" * 7 * MIB, writer="\N{GRINNING FACE}"))


# ---- manifests -------------------------------------------------------------------------------------------------------


def forger(root: Path) -> Forger:
    """The checkpoint in parts."""
    return Forger(stateformat.open(str(root)).storage, 1)


def put_manifest(root: Path, data: bytes) -> None:
    """Other bytes as the manifest, vouched for by the record as far as their footer can be read."""
    path = members(root)["manifest"]["path"]
    (root / path).write_bytes(data)
    try:
        groups = thrift.get(thrift.split_footer(data)[1], 4)[1]
        uncompressed = sum(thrift.unzigzag(thrift.get(group, 2)) for group in groups)
    except (StopIteration, IndexError, ValueError, TypeError):
        uncompressed = 0
    ref = {
        "path": path,
        "size_bytes": len(data),
        "digest": xxhash.xxh3_128_hexdigest(data),
        "uncompressed_bytes": max(0, uncompressed),
    }
    put_record(root, lambda found: found.update(manifest=ref))


def manifest_table(root: Path) -> pa.Table:
    return pq.read_table(root / members(root)["manifest"]["path"])


def written(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    options = {"compression": "zstd", "write_page_checksum": True, "store_schema": False, **options}
    pq.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


def manifest_of_millions_of_equal_handles(root: Path) -> None:
    table = manifest_table(root).slice(0, 1)
    put_manifest(root, written(table.take(pa.array(np.zeros(3_000_000, np.int64))), row_group_size=131_072))


def manifest_with_long_names_in_a_dictionary(root: Path) -> None:
    table = manifest_table(root)
    names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(100_000, np.int32)), pa.array(["x" * 4 * MIB]))
    table = table.take(pa.array(np.zeros(100_000, np.int64))).set_column(0, "operator", names)
    put_manifest(root, written(table, dictionary_pagesize_limit=1 << 30, row_group_size=131_072))


def manifest_with_a_list_of_60_million_groups(root: Path) -> None:
    table = manifest_table(root).slice(0, 1)
    counts = pa.ListArray.from_arrays([0, 60_000_000], pa.array(np.zeros(60_000_000, np.int64)))
    at = table.column_names.index("rows_per_group")
    put_manifest(root, written(table.set_column(at, "rows_per_group", counts)))


def manifest_with_inline_bytes_shared_by_many(root: Path) -> None:
    table = manifest_table(root)
    shared = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(120_000, np.int32)), pa.array([b"x" * 4 * MIB], pa.binary())
    )
    at = table.column_names.index("inline")
    table = table.take(pa.array(np.zeros(120_000, np.int64))).set_column(at, "inline", shared)
    put_manifest(root, written(table, dictionary_pagesize_limit=1 << 30, row_group_size=131_072))


def footer_changed(data: bytes, change: Callable[[thrift.Struct], None]) -> bytes:
    body, footer = thrift.split_footer(data)
    change(footer)
    return thrift.join_footer(body, footer)


def _manifest_footer(root: Path, change: Callable[[thrift.Struct], None]) -> None:
    path = root / members(root)["manifest"]["path"]
    put_manifest(root, footer_changed(path.read_bytes(), change))


def manifest_of_2_40_rows_without_pages(root: Path) -> None:
    def change(footer: thrift.Struct) -> None:
        thrift.put(footer, thrift.zigzag(2**40), 3)
        thrift.put(footer, thrift.zigzag(2**40), 4, 0, 3)

    _manifest_footer(root, change)


def manifest_of_2_000_row_groups(root: Path) -> None:
    def change(footer: thrift.Struct) -> None:
        inner, groups = thrift.get(footer, 4)
        thrift.put(footer, (inner, groups * 2_000), 4)

    _manifest_footer(root, change)


def deep_schema(footer: thrift.Struct, levels: int) -> None:
    """A schema of structs in structs, around one column."""
    inner, elements = thrift.get(footer, 2)
    group = [[4, thrift.BINARY, b"s"], [5, thrift.I32, thrift.zigzag(1)]]
    thrift.put(footer, (inner, [elements[0], *[group] * levels, *elements[1:]]), 2)


def manifest_of_structs_in_structs(root: Path) -> None:
    _manifest_footer(root, lambda footer: deep_schema(footer, 200_000))


def manifest_of_60_000_columns(root: Path) -> None:
    def change(footer: thrift.Struct) -> None:
        inner, elements = thrift.get(footer, 2)
        thrift.put(elements[0], thrift.zigzag(60_000), 5)
        thrift.put(footer, (inner, [elements[0], *[elements[1]] * 60_000]), 2)

    _manifest_footer(root, change)


def manifest_whose_footer_is_larger_than_the_file(root: Path) -> None:
    path = root / members(root)["manifest"]["path"]
    put_manifest(root, path.read_bytes()[:-8] + (2**31 - 1).to_bytes(4, "little") + b"PAR1")


def manifest_whose_lists_claim_2_31_elements(root: Path) -> None:
    path = root / members(root)["manifest"]["path"]
    body, _ = thrift.split_footer(path.read_bytes())
    huge = b"\x15\x04\x19\xfc" + thrift.varint(2**31 - 1) + b"\x48" + thrift.varint(2**31 - 1)
    put_manifest(root, thrift.join_footer(body, huge))


def manifest_larger_than_the_record_says(root: Path) -> None:
    with (root / members(root)["manifest"]["path"]).open("r+b") as file:
        file.truncate(6 << 30)


def manifest_of_six_gigabytes(root: Path) -> None:
    manifest_larger_than_the_record_says(root)
    put_record(root, lambda found: found["manifest"].update(size_bytes=6 << 30))


# ---- segments --------------------------------------------------------------------------------------------------------


def put_segment(root: Path, data: bytes, **facts: Any) -> None:
    """Other bytes as the first segment, vouched for by its handle, the manifest and the record."""
    parts = forger(root)
    at = parts.find("counter", "counts")
    parts.set_bytes(at, data)
    groups = thrift.get(thrift.split_footer(data)[1], 4)[1]
    rows = sum(thrift.unzigzag(thrift.get(group, 3)) for group in groups)
    uncompressed = sum(thrift.unzigzag(thrift.get(group, 2)) for group in groups)
    most = min(rows, 2**46)
    handle = parts.handles[at]
    facts = {
        "rows": most,
        "segment_rows": most,
        "uncompressed_bytes": uncompressed,
        "last_group": handle.first_group,
        "rows_per_group": [most],
        **facts,
    }
    parts.change(at, **facts)
    parts.seal()


def segment_bytes(root: Path) -> bytes:
    parts = forger(root)
    return parts.bytes_of(parts.find("counter", "counts"))


def segment_written(root: Path, columns: Mapping[str, Any], **options: Any) -> bytes:
    """A Parquet file with the entries of the good segment's footer and other columns."""
    old = pq.read_metadata(pa.BufferReader(segment_bytes(root))).metadata
    schema = pa.schema(
        [
            pa.field("_key_group", pa.int32(), nullable=False),
            pa.field("word", getattr(columns["word"], "type", pa.string())),
            pa.field("n", pa.int64()),
        ]
    )
    rows = len(columns["word"])
    table = pa.table({"_key_group": pa.array(np.zeros(rows, np.int32)), **columns}, schema)
    sink = pa.BufferOutputStream()
    size = options.pop("row_group_size", rows)
    options = {
        "compression": "zstd",
        "write_page_checksum": True,
        "store_schema": False,
        "write_statistics": False,
        **options,
    }
    with pq.ParquetWriter(sink, schema, **options) as writer:
        writer.write_table(table, row_group_size=size)
        writer.add_key_value_metadata({key.decode(): value.decode() for key, value in old.items()})
    return sink.getvalue().to_pybytes()


def nulls(rows: int) -> pa.Array:
    return pa.nulls(rows, pa.int64())


def segment_of_one_long_string_repeated(root: Path) -> None:
    words = pa.DictionaryArray.from_arrays(pa.array(np.zeros(200_000, np.int32)), pa.array(["x" * 16 * MIB]))
    put_segment(root, segment_written(root, {"word": words, "n": nulls(200_000)}, dictionary_pagesize_limit=1 << 30))


def segment_of_pages_of_a_gigabyte(root: Path) -> None:
    words = pa.array(["x" * (256 * MIB)] * 3)
    put_segment(root, segment_written(root, {"word": words, "n": nulls(3)}, use_dictionary=False))


def segment_of_a_hundred_million_nulls(root: Path) -> None:
    rows = 100_000_000
    words = pa.nulls(rows, pa.string())
    put_segment(root, segment_written(root, {"word": words, "n": nulls(rows)}, compression="none"))


def segment_of_many_row_groups_of_nulls(root: Path) -> None:
    data = segment_written(root, {"word": pa.nulls(4 * MIB, pa.string()), "n": nulls(4 * MIB)})

    def change(footer: thrift.Struct) -> None:
        inner, groups = thrift.get(footer, 4)
        thrift.put(footer, (inner, groups * 1000), 4)
        thrift.put(footer, thrift.zigzag(4 * MIB * 1000), 3)

    put_segment(root, footer_changed(data, change))


def _footers_lie(root: Path, field: int, value: int) -> None:
    """A compressed page of 256 MiB, and a footer that says less."""
    words = pa.array(["x" * (256 * MIB)])
    data = segment_written(root, {"word": words, "n": nulls(1)}, use_dictionary=False)

    def change(footer: thrift.Struct) -> None:
        thrift.put(footer, thrift.zigzag(value), 4, 0, field)
        thrift.put(footer, thrift.zigzag(value), 4, 0, 1, 1, 3, 6)

    put_segment(root, footer_changed(data, change))


def segment_whose_footer_hides_the_size(root: Path) -> None:
    _footers_lie(root, 2, 1000)


def segment_whose_page_claims_2_gib(root: Path) -> None:
    data = segment_written(
        root, {"word": pa.array(["x"] * 50), "n": nulls(50)}, compression="lz4", use_dictionary=False
    )
    footer = thrift.split_footer(data)[1]
    start = thrift.unzigzag(thrift.get(footer, 4, 0, 1, 1, 3, 9))
    header, length = thrift.parse(data[start:])
    thrift.put(header, thrift.zigzag(2**31 - 1), 2)
    forged = thrift.unparse(header)
    shift = len(forged) - length

    def change(tree: thrift.Struct) -> None:
        column = thrift.get(tree, 4, 0, 1, 1, 3)
        thrift.put(column, thrift.get(column, 7) + 2 * shift, 7)
        column = thrift.get(tree, 4, 0, 1, 2, 3)
        thrift.put(column, thrift.get(column, 9) + 2 * shift, 9)

    put_segment(root, footer_changed(data[:start] + forged + data[start + length :], change))


def segment_of_2_40_rows(root: Path) -> None:
    def change(footer: thrift.Struct) -> None:
        thrift.put(footer, thrift.zigzag(2**40), 3)
        thrift.put(footer, thrift.zigzag(2**40), 4, 0, 3)

    put_segment(root, footer_changed(segment_bytes(root), change))


def segment_of_structs_in_structs(root: Path) -> None:
    put_segment(root, footer_changed(segment_bytes(root), lambda footer: deep_schema(footer, 200_000)))


def segment_with_200_000_entries_of_metadata(root: Path) -> None:
    def change(footer: thrift.Struct) -> None:
        inner, entries = thrift.get(footer, 5)
        thrift.put(footer, (inner, entries + [[[1, thrift.BINARY, b"k"]]] * 200_000), 5)

    put_segment(root, footer_changed(segment_bytes(root), change))


def segment_with_an_arrow_schema_of_a_megabyte(root: Path) -> None:
    def change(footer: thrift.Struct) -> None:
        inner, entries = thrift.get(footer, 5)
        bomb = [[1, thrift.BINARY, b"ARROW:schema"], [2, thrift.BINARY, b"/////" + b"A" * MIB]]
        thrift.put(footer, (inner, [*entries, bomb]), 5)

    put_segment(root, footer_changed(segment_bytes(root), change))


def segment_larger_than_its_handle_says(root: Path) -> None:
    parts = forger(root)
    with (root / str(parts.handles[parts.find("counter", "counts")].path)).open("r+b") as file:
        file.truncate(6 << 30)


def segment_whose_columns_lie_far_apart(root: Path) -> None:
    data = segment_bytes(root)
    body, footer = thrift.split_footer(data)
    thrift.put(footer, thrift.zigzag(2**40), 4, 0, 1, 1, 3, 7)
    put_segment(root, thrift.join_footer(body, footer))


def segment_of_lists_of_nothing(root: Path) -> None:
    """One row that is a list of two hundred million nulls, in a state that has such a column."""
    count = 200_000_000
    field = {"id": 50, "name": "l", "nullable": True}
    field["type"] = {"list": {"id": 51, "name": "element", "type": "int64", "nullable": True}}  # type: ignore[assignment]

    def declare(found: dict[str, Any]) -> None:
        found["states"][0]["schemas"][0]["fields"].append(field)
        found["states"][0]["last_field_id"] = 51

    put_record(root, declare)
    old = pq.read_metadata(pa.BufferReader(segment_bytes(root))).metadata
    element = pa.list_(pa.field("element", pa.int64()))
    schema = pa.schema(
        [
            pa.field("_key_group", pa.int32(), nullable=False),
            pa.field("word", pa.string()),
            pa.field("n", pa.int64()),
            pa.field("l", element),
        ]
    )
    lists = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), nulls(count), type=element)
    table = pa.table({"_key_group": pa.array([0], pa.int32()), "word": ["w"], "n": nulls(1), "l": lists}, schema)
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, compression="zstd", write_page_checksum=True, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({key.decode(): value.decode() for key, value in old.items()})
    put_segment(root, sink.getvalue().to_pybytes())


def requests_of_gigabytes(root: Path) -> None:
    (root / "requests").mkdir(exist_ok=True)
    with (root / "requests" / "stop-0000.json").open("wb") as file:
        file.truncate(6 << 30)


RECORDS = [found for name, found in list(globals().items()) if name.startswith("record_")]
MANIFESTS = [
    found for name, found in list(globals().items()) if name.startswith("manifest_") and name != "manifest_table"
]
SEGMENTS = [
    found
    for name, found in list(globals().items())
    if name.startswith("segment_") and name not in ("segment_bytes", "segment_written")
]
HARMLESS = [
    requests_of_gigabytes,
    record_of_a_long_chain_of_operators,
    record_of_one_operator_with_40_000_inputs,
    record_with_a_name_of_7_mb,
    record_of_empty_arrays,
    record_of_400_000_members,
    record_of_a_state_with_5_000_schemas,
]
"""Large or odd, and yet nothing is wrong: these are read right."""


# ---- what readers do with a store ------------------------------------------------------------------------------------


def _actions(root: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    url = str(root)

    def opened() -> Any:
        return stateformat.open(url).open()

    def read(parallelism: int | None) -> None:
        checkpoint = opened()
        plan = checkpoint.plan_restore(checkpoint.graph.at(parallelism))
        for subtask in range(min(4, checkpoint.graph.operator("counter").parallelism)):
            for _ in checkpoint.restore(plan, "counter", subtask)["counts"].batches():
                pass

    yield "open", opened
    yield "plan", lambda: opened().plan_restore(opened().graph.at(3)).describe()
    yield "read whole", lambda: read(None)
    yield "read in slices", lambda: read(3)
    yield "validate quick", lambda: ckpt(["validate", url])
    yield "validate full", lambda: ckpt(["validate", url, "--level", "full"])
    yield "inspect", lambda: ckpt(["inspect", url])
    yield "history", lambda: ckpt(["history", url])
    yield "gc", lambda: ckpt(["gc", url])
    yield (
        "export",
        lambda: ckpt(
            [
                "export",
                url,
                "--operator",
                "counter",
                "--state",
                "counts",
                "--force",
                "--to",
                str(root.parent / "out.parquet"),
            ]
        ),
    )


def _vm(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


def _attack(root: Path, bomb: Callable[[Path], None], answer: Any) -> None:
    """In the child: everything that readers do, each action for itself."""
    resource.setrlimit(resource.RLIMIT_AS, (_vm("VmSize") + ADDRESS_SPACE_BYTES,) * 2)
    before = _vm("VmRSS")
    said: dict[str, str] = {}
    slowest = 0.0
    for name, action in _actions(root):
        answer.send(("begun", name))
        start = time.process_time()
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                status = action()
            said[name] = str(status) if isinstance(status, int) else "right"
            if "Traceback" in out.getvalue() or "this is a bug" in out.getvalue():
                said[name] = f"FAULT {out.getvalue()[-300:]}"
        except CheckpointError as error:
            said[name] = f"{type(error).__name__} {error.kind}: {str(error)[:160]}"
        except BaseException:
            said[name] = f"FAULT {traceback.format_exc()[-600:]}"
        slowest = max(slowest, time.process_time() - start)
    answer.send(("ended", said, max(0, _vm("VmHWM") - before), slowest))


def _run(target: Callable[..., None], seconds: float, *arguments: Any) -> list[Any]:
    """What a forked child said, until it ended or was ended."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=target, args=(*arguments, theirs))
    child.start()
    theirs.close()
    said = []
    deadline = time.monotonic() + seconds
    with contextlib.suppress(EOFError):
        while ours.poll(max(0.0, deadline - time.monotonic())):
            said.append(ours.recv())
    if time.monotonic() >= deadline:
        said.append(("hung",))
    child.kill() if child.is_alive() else None
    child.join()
    return [*said, ("exit", child.exitcode)]


def _build(root: Path, bomb: Callable[[Path], None], answer: Any) -> None:
    good_store(root)
    bomb(root)
    answer.send(("built",))


def attack(root: Path, bomb: Callable[[Path], None], *, seconds: float = 120.0) -> Outcome:
    """Make the bomb in ``root`` and do with it all that readers do, both in forked processes.

    A bomb that ends the process, or keeps it busy for ``seconds``, is a fault of the action under way.
    """
    built = _run(_build, seconds, root, bomb)
    assert built[0] == ("built",), (bomb.__name__, built)
    said = _run(_attack, seconds, root, bomb)
    ended = [message for message in said if message[0] == "ended"]
    if ended:
        return Outcome(*ended[0][1:])
    begun = [message[1] for message in said if message[0] == "begun"]
    how = "hung" if ("hung",) in said else f"ended with {said[-1][1]}"
    return Outcome({begun[-1] if begun else "start": f"FAULT {how}"}, 0, 0.0)


BOMBS = {bomb.__name__: bomb for bomb in [*RECORDS, *MANIFESTS, *SEGMENTS, requests_of_gigabytes]}


def main(names: Sequence[str]) -> None:
    """Attack with the bombs of these names, or all; a line of JSON for each. In a process of its own, for it forks."""
    for name in names or BOMBS:
        with tempfile.TemporaryDirectory() as place:
            found = attack(Path(place) / "store", BOMBS[name])
        print(json.dumps([name, found.noticed, found.faults, found.grown_bytes, found.slowest_seconds]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Stores that a hostile writer would make: small objects, right digests everywhere, and contents
that grow.

A bomb is a function that changes the directory of a store of one good checkpoint. :func:`attack`
does with it all that readers do, in a process with a limit on its memory.
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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

import stateformat
from stateformat.errors import CheckpointError
from stateformat.segments import WriteOptions
from stateformat.tools.ckpt.main import main as ckpt
from tests.forgery import Forger, seal
from tests.fuzz import thrift_tree as thrift
from tests.worlds.stores import counts_job

MIB = 1 << 20
ADDRESS_SPACE_BYTES = 3 << 30
"""What a process may map beyond what it maps at its start: far more than it may use, and not all of
this machine.
"""
SECONDS_MAX = 10.0
RECORD = "checkpoints/00000000000000000001.json"
Bomb = Callable[[Path], None]
Change = Callable[[dict[str, Any]], None]
FooterChange = Callable[[thrift.Struct], None]


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
        return [f"{name}: {said}" for name, said in self.actions.items() if said.startswith("FAULT")]


def good_store(root: Path, parallelism: int = 2) -> None:
    """One checkpoint whose segments are objects."""
    store = stateformat.open(str(root))
    counts_job(parallelism, keys=200).publish(store, None, options=WriteOptions(inline_bytes_max=0))


# ---- records -------------------------------------------------------------------------------------


def members(root: Path) -> dict[str, Any]:
    """The record without its digest."""
    found: dict[str, Any] = json.loads((root / RECORD).read_text())
    found.pop("digest")
    return found


def put_record(root: Path, change: Change) -> None:
    """Another record, sealed."""
    found = members(root)
    change(found)
    (root / RECORD).write_bytes(seal(found))


def put_body(root: Path, extra: str) -> None:
    """The record with one more member, written as it is."""
    body = json.dumps(members(root), ensure_ascii=False, separators=(",", ":"))[:-1] + f',"x":{extra}'
    (root / RECORD).write_bytes(f'{body},"digest":"{xxhash.xxh3_128_hexdigest(body.encode())}"}}\n'.encode())


def truncate(path: Path) -> None:
    """Grow a file to six gigabytes of zeros."""
    with path.open("r+b") as file:
        file.truncate(6 << 30)


def add_operators(count: int, **changes: Any) -> Change:
    def change(found: dict[str, Any]) -> None:
        found["operators"] += [{**found["operators"][0], "uid": f"o{i}", "name": "", **changes} for i in range(count)]

    return change


def chain_operators(found: dict[str, Any]) -> None:
    add_operators(8_000)(found)
    edge = {**found["edges"][0], "partitioner": "rebalance", "key_columns": []}
    found["edges"] += [{**edge, "id": f"e{i}", "from": f"o{i}", "to": f"o{i + 1}"} for i in range(7_999)]


def add_inputs(found: dict[str, Any]) -> None:
    edge = {**found["edges"][0], "partitioner": "rebalance", "key_columns": []}
    found["edges"] += [{**edge, "id": f"e{i}", "input": i} for i in range(40_000)]


def add_schemas(found: dict[str, Any]) -> None:
    state = found["states"][0]
    state["schemas"] = [{**state["schemas"][0], "id": i} for i in range(1, 5_000)]


def add_fields(found: dict[str, Any]) -> None:
    fields = found["states"][0]["schemas"][0]["fields"]
    fields += [{"id": 100 + i, "name": f"f{i}", "type": "int64", "nullable": True} for i in range(20_000)]
    found["states"][0]["last_field_id"] = 60_000


def numbered_members(count: int) -> str:
    return ",".join(f'"{i:x}":1' for i in range(count))


FINISHED = {"parallelism": 2**15, "max_parallelism": 2**15, "status": "fully_finished", "finished": [[0, 2**15 - 1]]}
BODIES: dict[str, Callable[[], str]] = {
    "50_mb": lambda: json.dumps(["x" * 50] * MIB, separators=(",", ":")),
    "nested_100_000_deep": lambda: "[" * 100_000 + "]" * 100_000,
    "empty_arrays": lambda: "[" + "[]," * 1_000_000 + "[]]",
    "400_000_members": lambda: "{" + numbered_members(400_000) + "}",
    "that_repeats_its_last_member": lambda: "{" + numbered_members(300_000) + ',"aaaa":1,"aaaa":2,"aaaa":3}',
    "integers_of_a_million_digits": lambda: "[" + ",".join(["9" * 1_000_000] * 7) + "]",
}
CHANGES: dict[str, Change] = {
    "a_million_operators": add_operators(1_000_000),
    "operators_that_all_finished": add_operators(40_000, **FINISHED),
    "subtasks_up_to_2_53": lambda r: r["operators"][0].update(finished=[[0, 2**53 - 1]], parallelism=2**31),
    "parallelism_2_31": lambda r: r["operators"][0].update(parallelism=2**31, max_parallelism=2**31),
    "a_long_chain_of_operators": chain_operators,
    "one_operator_with_40_000_inputs": add_inputs,
    "a_state_with_5_000_schemas": add_schemas,
    "a_state_with_20_000_fields": add_fields,
    "a_name_of_7_mb": lambda r: r.update(job_name="x" * 7 * MIB, writer="\N{GRINNING FACE}"),
}
RECORDS: dict[str, Bomb] = {
    "record_six_gigabytes": lambda root: truncate(root / RECORD),
    **{
        f"record_{name}": partial(lambda root, make: put_body(root, make()), make=make) for name, make in BODIES.items()
    },
    **{f"record_{name}": partial(put_record, change=change) for name, change in CHANGES.items()},
}


# ---- manifests -----------------------------------------------------------------------------------


def forger(root: Path) -> Forger:
    """The checkpoint in parts."""
    return Forger(stateformat.open(str(root)).storage, 1)


def manifest_path(root: Path) -> Path:
    return root / members(root)["manifest"]["path"]


def put_manifest(root: Path, data: bytes) -> None:
    """Other bytes as the manifest; the record vouches for them as far as their footer can be
    read.
    """
    path = manifest_path(root)
    path.write_bytes(data)
    try:
        groups = thrift.get(thrift.split_footer(data)[1], 4)[1]
        uncompressed = sum(thrift.unzigzag(thrift.get(group, 2)) for group in groups)
    except (StopIteration, IndexError, ValueError, TypeError):
        uncompressed = 0
    digest = xxhash.xxh3_128_hexdigest(data)
    ref = {"size_bytes": len(data), "digest": digest, "uncompressed_bytes": max(0, uncompressed)}
    put_record(root, lambda found: found["manifest"].update(ref))


def zeros(count: int) -> pa.Array:
    return pa.array(np.zeros(count, np.int32))


def shared(value: str | bytes, count: int) -> pa.Array:
    """One value in a dictionary, named by so many rows."""
    return pa.DictionaryArray.from_arrays(zeros(count), pa.array([value]))


def put_rows(root: Path, count: int = 1, **columns: str | bytes | int) -> None:
    """A manifest of the first handle, so many times; one value in a column of all, or so long a
    list.
    """
    table = pq.read_table(manifest_path(root)).take(zeros(count))
    for name, value in columns.items():
        is_list = isinstance(value, int)
        column = pa.ListArray.from_arrays([0, value], np.zeros(value, np.int64)) if is_list else shared(value, count)
        table = table.set_column(table.column_names.index(name), name, column)
    sink = pa.BufferOutputStream()
    options = {"compression": "zstd", "write_page_checksum": True, "store_schema": False}
    pq.write_table(table, sink, dictionary_pagesize_limit=1 << 30, row_group_size=131_072, **options)
    put_manifest(root, sink.getvalue().to_pybytes())


def footer_changed(data: bytes, change: FooterChange) -> bytes:
    body, footer = thrift.split_footer(data)
    change(footer)
    return thrift.join_footer(body, footer)


def put_footer(root: Path, change: FooterChange) -> None:
    put_manifest(root, footer_changed(manifest_path(root).read_bytes(), change))


def claim_2_40_rows(footer: thrift.Struct) -> None:
    thrift.put(footer, thrift.zigzag(2**40), 3)
    thrift.put(footer, thrift.zigzag(2**40), 4, 0, 3)


def repeat_row_groups(footer: thrift.Struct, times: int) -> None:
    inner, groups = thrift.get(footer, 4)
    thrift.put(footer, (inner, groups * times), 4)


def deepen_schema(footer: thrift.Struct) -> None:
    """200,000 structs in structs, around one column."""
    inner, elements = thrift.get(footer, 2)
    group = [[4, thrift.BINARY, b"s"], [5, thrift.I32, thrift.zigzag(1)]]
    thrift.put(footer, (inner, [elements[0], *[group] * 200_000, *elements[1:]]), 2)


def claim_60_000_columns(footer: thrift.Struct) -> None:
    inner, elements = thrift.get(footer, 2)
    thrift.put(elements[0], thrift.zigzag(60_000), 5)
    thrift.put(footer, (inner, [elements[0], *[elements[1]] * 60_000]), 2)


def manifest_whose_footer_is_larger_than_the_file(root: Path) -> None:
    put_manifest(root, manifest_path(root).read_bytes()[:-8] + (2**31 - 1).to_bytes(4, "little") + b"PAR1")


def manifest_whose_lists_claim_2_31_elements(root: Path) -> None:
    body, _ = thrift.split_footer(manifest_path(root).read_bytes())
    huge = b"\x15\x04\x19\xfc" + thrift.varint(2**31 - 1) + b"\x48" + thrift.varint(2**31 - 1)
    put_manifest(root, thrift.join_footer(body, huge))


def manifest_of_six_gigabytes(root: Path) -> None:
    truncate(manifest_path(root))
    put_record(root, lambda found: found["manifest"].update(size_bytes=6 << 30))


MANIFESTS: dict[str, Bomb] = {
    "manifest_of_millions_of_equal_handles": lambda root: put_rows(root, 3_000_000),
    "manifest_with_long_names_in_a_dictionary": lambda root: put_rows(root, 100_000, operator="x" * 4 * MIB),
    "manifest_with_inline_bytes_shared_by_many": lambda root: put_rows(root, 120_000, inline=b"x" * 4 * MIB),
    "manifest_with_a_list_of_60_million_groups": lambda root: put_rows(root, rows_per_group=60_000_000),
    "manifest_of_2_40_rows_without_pages": partial(put_footer, change=claim_2_40_rows),
    "manifest_of_2_000_row_groups": partial(put_footer, change=partial(repeat_row_groups, times=2_000)),
    "manifest_of_structs_in_structs": partial(put_footer, change=deepen_schema),
    "manifest_of_60_000_columns": partial(put_footer, change=claim_60_000_columns),
    "manifest_whose_footer_is_larger_than_the_file": manifest_whose_footer_is_larger_than_the_file,
    "manifest_whose_lists_claim_2_31_elements": manifest_whose_lists_claim_2_31_elements,
    "manifest_larger_than_the_record_says": lambda root: truncate(manifest_path(root)),
    "manifest_of_six_gigabytes": manifest_of_six_gigabytes,
}


# ---- segments ------------------------------------------------------------------------------------


def put_segment(root: Path, data: bytes) -> None:
    """Other bytes as the first segment, vouched for by its handle, the manifest and the record."""
    parts = forger(root)
    at = parts.find("counter", "counts")
    parts.set_bytes(at, data)
    groups = thrift.get(thrift.split_footer(data)[1], 4)[1]
    rows = min(sum(thrift.unzigzag(thrift.get(group, 3)) for group in groups), 2**46)
    uncompressed = sum(thrift.unzigzag(thrift.get(group, 2)) for group in groups)
    group = parts.handles[at].first_group
    facts = {"rows": rows, "segment_rows": rows, "last_group": group, "rows_per_group": [rows]}
    parts.change(at, uncompressed_bytes=uncompressed, **facts)
    parts.seal()


def segment_bytes(root: Path) -> bytes:
    parts = forger(root)
    return parts.bytes_of(parts.find("counter", "counts"))


def put_columns(root: Path, words: pa.Array, change: FooterChange | None = None, **options: Any) -> None:
    """A segment of other columns, with the entries of the good one's footer; ``l`` is one more."""
    old = pq.read_metadata(pa.BufferReader(segment_bytes(root))).metadata
    rows = len(words)
    columns = {"_key_group": zeros(rows), "word": words, "n": pa.nulls(rows, pa.int64())}
    columns |= {name: options.pop(name) for name in ("l",) if name in options}
    fields = [pa.field(name, column.type, nullable=name != "_key_group") for name, column in columns.items()]
    table = pa.table(columns, pa.schema(fields))
    sink = pa.BufferOutputStream()
    options = {"compression": "zstd", "write_page_checksum": True, "store_schema": False} | options
    with pq.ParquetWriter(sink, table.schema, write_statistics=False, **options) as writer:
        writer.write_table(table, row_group_size=rows)
        writer.add_key_value_metadata({key.decode(): value.decode() for key, value in old.items()})
    data = sink.getvalue().to_pybytes()
    put_segment(root, data if change is None else footer_changed(data, change))


def put_segment_footer(root: Path, change: FooterChange) -> None:
    put_segment(root, footer_changed(segment_bytes(root), change))


def put_many_nulls(root: Path) -> None:
    rows = 4 * MIB

    def change(footer: thrift.Struct) -> None:
        repeat_row_groups(footer, 1000)
        thrift.put(footer, thrift.zigzag(rows * 1000), 3)

    put_columns(root, pa.nulls(rows, pa.string()), change)


def hide_the_size(footer: thrift.Struct) -> None:
    thrift.put(footer, thrift.zigzag(1000), 4, 0, 2)
    thrift.put(footer, thrift.zigzag(1000), 4, 0, 1, 1, 3, 6)


def segment_whose_page_claims_2_gib(root: Path) -> None:
    put_columns(root, pa.array(["x"] * 50), compression="lz4", use_dictionary=False)
    data = segment_bytes(root)
    start = thrift.unzigzag(thrift.get(thrift.split_footer(data)[1], 4, 0, 1, 1, 3, 9))
    header, length = thrift.parse(data[start:])
    thrift.put(header, thrift.zigzag(2**31 - 1), 2)
    forged = thrift.unparse(header)
    shift = len(forged) - length

    def change(tree: thrift.Struct) -> None:
        for column, field in ((1, 7), (2, 9)):
            place = thrift.get(tree, 4, 0, 1, column, 3)
            thrift.put(place, thrift.get(place, field) + 2 * shift, field)

    put_segment(root, footer_changed(data[:start] + forged + data[start + length :], change))


def add_entries(footer: thrift.Struct, entries: list[Any]) -> None:
    inner, found = thrift.get(footer, 5)
    thrift.put(footer, (inner, found + entries), 5)


def segment_larger_than_its_handle_says(root: Path) -> None:
    parts = forger(root)
    truncate(root / str(parts.handles[parts.find("counter", "counts")].path))


def segment_of_lists_of_nothing(root: Path) -> None:
    """One row that is a list of two hundred million nulls, in a state that has such a column."""
    element = {"id": 51, "name": "element", "type": "int64", "nullable": True}
    field = {"id": 50, "name": "l", "nullable": True, "type": {"list": element}}

    def declare(found: dict[str, Any]) -> None:
        found["states"][0]["schemas"][0]["fields"].append(field)
        found["states"][0]["last_field_id"] = 51

    put_record(root, declare)
    kind = pa.list_(pa.field("element", pa.int64()))
    ends = pa.array([0, 200_000_000], pa.int32())
    lists = pa.ListArray.from_arrays(ends, pa.nulls(200_000_000, pa.int64()), type=kind)
    put_columns(root, pa.array(["w"]), l=lists)


ENTRIES: list[Any] = [[[1, thrift.BINARY, b"k"]]] * 200_000
ARROW_SCHEMA = [[1, thrift.BINARY, b"ARROW:schema"], [2, thrift.BINARY, b"/////" + b"A" * MIB]]


def put_long_words(root: Path, count: int, change: FooterChange | None = None) -> None:
    """Words of 256 MiB in pages of their own."""
    put_columns(root, pa.array(["x" * (256 * MIB)] * count), change, use_dictionary=False)


def put_shared_word(root: Path) -> None:
    put_columns(root, shared("x" * 16 * MIB, 200_000), dictionary_pagesize_limit=1 << 30)


def spread_columns(footer: thrift.Struct) -> None:
    thrift.put(footer, thrift.zigzag(2**40), 4, 0, 1, 1, 3, 7)


FOOTERS: dict[str, FooterChange] = {
    "segment_of_2_40_rows": claim_2_40_rows,
    "segment_of_structs_in_structs": deepen_schema,
    "segment_with_200_000_entries_of_metadata": partial(add_entries, entries=ENTRIES),
    "segment_with_an_arrow_schema_of_a_megabyte": partial(add_entries, entries=[ARROW_SCHEMA]),
    "segment_whose_columns_lie_far_apart": spread_columns,
}
SEGMENTS: dict[str, Bomb] = {
    "segment_of_one_long_string_repeated": put_shared_word,
    "segment_of_pages_of_a_gigabyte": lambda root: put_long_words(root, 3),
    "segment_of_a_hundred_million_nulls": lambda root: put_columns(
        root, pa.nulls(10**8, pa.string()), compression="none"
    ),
    "segment_of_many_row_groups_of_nulls": put_many_nulls,
    "segment_whose_footer_hides_the_size": lambda root: put_long_words(root, 1, hide_the_size),
    "segment_whose_page_claims_2_gib": segment_whose_page_claims_2_gib,
    "segment_larger_than_its_handle_says": segment_larger_than_its_handle_says,
    "segment_of_lists_of_nothing": segment_of_lists_of_nothing,
    **{name: partial(put_segment_footer, change=change) for name, change in FOOTERS.items()},
}


def requests_of_gigabytes(root: Path) -> None:
    (root / "requests").mkdir(exist_ok=True)
    (root / "requests" / "stop-0000.json").touch()
    truncate(root / "requests" / "stop-0000.json")


BOMBS = RECORDS | MANIFESTS | SEGMENTS | {"requests_of_gigabytes": requests_of_gigabytes}
HARMLESS = (
    "requests_of_gigabytes",
    "record_a_long_chain_of_operators",
    "record_one_operator_with_40_000_inputs",
    "record_a_name_of_7_mb",
    "record_empty_arrays",
    "record_400_000_members",
    "record_a_state_with_5_000_schemas",
)
"""Large or odd, and yet nothing is wrong: these are read right."""


# ---- what readers do with a store ----------------------------------------------------------------


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
    out = str(root.parent / "out.parquet")
    yield (
        "export",
        lambda: ckpt(["export", url, *["--operator", "counter", "--state", "counts", "--force", "--to"], out]),
    )


def _vm(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


def _attack(root: Path, bomb: Bomb, answer: Any) -> None:
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


def _build(root: Path, bomb: Bomb, answer: Any) -> None:
    good_store(root)
    bomb(root)
    answer.send(("built",))


def attack(root: Path, bomb: Bomb, *, seconds: float = 600.0) -> Outcome:
    """Make the bomb in ``root`` and do with it all that readers do, both in forked processes.

    A bomb that ends the process, or keeps it busy for ``seconds``, is a fault of the action under
    way.
    """
    built = _run(_build, seconds, root, bomb)
    assert built[0] == ("built",), built
    said = _run(_attack, seconds, root, bomb)
    ended = [message for message in said if message[0] == "ended"]
    if ended:
        return Outcome(*ended[0][1:])
    begun = [message[1] for message in said if message[0] == "begun"]
    how = "hung" if ("hung",) in said else f"ended with {said[-1][1]}"
    return Outcome({begun[-1] if begun else "start": f"FAULT {how}"}, 0, 0.0)


def main(names: Sequence[str]) -> None:
    """Attack with the bombs of these names, or all; a line of JSON for each. In a process of its
    own, for it forks.
    """
    for name in names or BOMBS:
        with tempfile.TemporaryDirectory() as place:
            found = attack(Path(place) / "store", BOMBS[name])
        print(json.dumps([name, found.noticed, found.faults, found.grown_bytes, found.slowest_seconds]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""A storage of another package, written against ``stateformat.storage`` of 0.1, works unchanged."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

STORAGE = """
from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.storage import (
    REFUSALS, TOP_LEVEL, CreateOutcome, Leftover, ListsNames, MakesDurable, ObjectInfo, OutputObject, ReadsAtOnce,
    Storage, TellsLeftovers, as_url, check_path, is_object_name, is_object_path, make_durable, names, names_after,
    open_storage, reads_at_once,
)
import errno
import pyarrow as pa

STORES = {}


def from_url(url, options):
    if set(options) - {"shout"}:
        raise InvalidInput("unknown options", kind=ErrorKind.INVALID_ARGUMENT)
    return Attic(url, **options)


class Attic:
    reads_at_once = 3

    def __init__(self, url, shout=False):
        self.url, self.objects, self.durable = url, STORES.setdefault(url, {}), []

    def exists(self):
        return bool(self.objects)

    def read(self, path):
        if check_path(path) not in self.objects:
            raise FileNotFoundError(errno.ENOENT, "nothing in the attic", path)
        return pa.py_buffer(self.objects[path])

    def read_range(self, path, offset, length):
        return self.read(path)[offset : offset + length]

    def open_input(self, path):
        return pa.BufferReader(self.read(path))

    def size(self, path):
        return self.read(path).size

    def open_output(self, path):
        return Output(self, check_path(path))

    def create(self, path, data):
        if check_path(path) in self.objects:
            return CreateOutcome.CONFLICT
        self.objects[path] = bytes(data)
        return CreateOutcome.CREATED

    def list(self, prefix):
        return sorted(ObjectInfo(path, len(data)) for path, data in self.objects.items() if path.startswith(prefix))

    def delete(self, paths):
        for path in paths:
            self.objects.pop(check_path(path), None)

    def names(self, folder):
        return [item.path for item in self.list(folder)]

    def names_after(self, path):
        return [name for name in self.names(path[: path.rindex("/") + 1]) if name > path]

    def leftovers(self):
        return [Leftover("segments/1/x", 5, "box")]

    def discard(self, leftovers):
        self.discarded = [item.name for item in leftovers]

    def make_durable(self, paths):
        self.durable += paths


class Output:
    closed = False

    def __init__(self, storage, path):
        self.storage, self.path, self.parts = storage, path, []

    def write(self, data):
        self.parts.append(bytes(data))
        return len(self.parts[-1])

    def flush(self):
        pass

    def close(self):
        if not self.closed:
            self.closed = True
            if self.storage.create(self.path, b"".join(self.parts)) is CreateOutcome.CONFLICT:
                raise StorageError(f"{self.path} is taken")

    def abort(self):
        self.closed = True

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.abort() if exc[0] else self.close()
"""
PROGRAM = """
import attic
import stateformat as sf
from stateformat.backends.connectors import CollectSink, RateSource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import LocalRuntime
from stateformat.storage import names, names_after, make_durable, open_storage, reads_at_once

storage = open_storage("attic://one", shout=True)
for protocol in (attic.Storage, attic.ListsNames, attic.MakesDurable, attic.TellsLeftovers, attic.ReadsAtOnce):
    assert isinstance(storage, protocol), protocol
assert isinstance(storage.open_output("segments/1/x"), object) and reads_at_once(storage) == 3
assert attic.TOP_LEVEL and attic.REFUSALS and attic.is_object_name("a") and attic.is_object_path("segments/1/a")
assert attic.as_url("attic://one") == "attic://one"
make_durable(storage, ["segments/1/a"])
assert storage.durable == ["segments/1/a"]

out = CollectSink()
flow = Dataflow("job", parallelism=2)
numbers = flow.source(RateSource(rows_per_read=10, total=40, shards=2), uid="in", event_time="at")
numbers.key_by("shard").aggregate({"n": ("n", "sum")}, emit="end", uid="sums").apply(out, uid="out")
store = sf.open("attic://one")
LocalRuntime(store, checkpoint_interval_us=None, checkpoint_rows=10).run(flow)
assert sorted(out.table()["n"].to_pylist()) == [190, 190]
assert store.history(), "a store of checkpoints"
records = names(storage, "checkpoints/")
assert len(records) > 1 and names_after(storage, records[0]) == records[1:]
print("done")
"""


def test_a_storage_of_another_package_is_found_and_runs_a_job_unchanged(tmp_path: Path) -> None:
    (tmp_path / "attic.py").write_text(STORAGE)
    package = tmp_path / "attic-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: attic\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[stateformat.storages]\nattic = attic:from_url\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{textwrap.dedent(PROGRAM)}"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr

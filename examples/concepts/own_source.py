"""A source of one's own: lines of text files. A split is a file, a position the byte where the next
line begins.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

import stateformat
from stateformat.backends.connectors import CollectSink, ListEnumerator
from stateformat.backends.dataflow import Chunk, Dataflow, ReaderContext, Source, Split
from stateformat.backends.local import LocalRuntime


class Lines(Source):
    """The lines of the files of a folder."""

    schema = pa.schema({"line": pa.string()})

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def enumerator(self) -> ListEnumerator:
        return ListEnumerator(lambda: (Split(path.name, b"") for path in sorted(self._folder.iterdir())))

    def read(self, split: Split, context: ReaderContext) -> Iterator[Chunk]:
        with (self._folder / split.id).open("rb") as file:
            file.seek(split.position)  # after a restart: exactly where the checkpoint was
            while lines := file.readlines(65_536):
                yield Chunk(pa.record_batch({"line": [line.decode().rstrip("\n") for line in lines]}), file.tell())


folder = Path("texts")
folder.mkdir(exist_ok=True)
(folder / "one.txt").write_text("to be\nor not\n")
(folder / "two.txt").write_text("to be\n")

flow = Dataflow("lines", parallelism=2)
lines = flow.source(Lines(folder), uid="lines")
counted = lines.key_by("line").aggregate({"n": ("*", "count")}, emit="end", uid="counted")
counted.apply(out := CollectSink(), uid="out")
LocalRuntime(stateformat.open("memory://lines")).run(flow)
print(out.table().sort_by("line").to_pylist())

# It prints:
# [{'line': 'or not', 'n': 1}, {'line': 'to be', 'n': 2}]

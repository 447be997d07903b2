"""States on local disk: those that do not fit in memory for now.

Arrays are written in their memory layout, one after another in one file. A second file describes
them; if it is missing, nothing was saved. The bytes are for this machine and this version of the
code; nothing verifies them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import pyarrow as pa

from stateformat.errors import InvalidInput

from .columns import ColumnBuffer
from .rows import KeyedRows, Rows

_ARRAYS: Final = "states.bin"
_FACTS: Final = "states.json"
_FREE_SHARE: Final = 8
"""Loading leaves room for one eighth more rows than were saved."""


class Saver:
    """Writes arrays, one after another."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def array(self, array: Any) -> str:
        """Write an array; returns its description."""
        if isinstance(array, np.ndarray):
            self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            return f"{array.dtype.str}:{len(array)}"
        self.table(pa.Table.from_arrays([pa.chunked_array([array])], ["values"]))
        return "arrow"

    def table(self, table: pa.Table) -> None:
        with pa.ipc.new_stream(self._file, table.schema) as writer:
            writer.write_table(table)

    def rows(self, rows: Rows) -> dict[str, Any]:
        """Write a store; returns its description."""
        buffers = [buffer.export_arrays(rows.used) for column in rows.buffers for buffer in column]
        facts: dict[str, Any] = {"used": rows.used, "count": rows.count}
        facts["buffers"] = [[self.array(array) for array in arrays] for arrays in buffers]
        facts["arrays"] = {
            name: [self.array(array) for array in buffer.export_arrays(rows.used)]
            for name, buffer in rows.arrays.items()
            if name != "stamp"
        }
        if isinstance(rows, KeyedRows):
            facts["index"] = [self.array(rows.index.export_array()), rows.index.taken]
        return facts


class Loader:
    """Reads what a :class:`Saver` wrote, in the same order."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def array(self, what: str, capacity: int = 0) -> Any:
        """Read an array of at least ``capacity``, padded with zeros."""
        if what == "arrow":
            return self.table()["values"].combine_chunks()
        kind, count = what.split(":")
        array = np.zeros(max(capacity, int(count)), kind)
        read = array[: int(count)]
        if len(read) and self._file.readinto(read.view(np.uint8).data) != read.nbytes:  # type: ignore[attr-defined]
            raise _incomplete(f"it ends before an array of {read.nbytes} bytes does")
        return array

    def _buffer(self, buffer: ColumnBuffer, arrays: Sequence[str], capacity: int) -> None:
        if arrays:
            buffer.import_arrays([self.array(what, 0 if number else capacity) for number, what in enumerate(arrays)])
        else:
            buffer.reserve(capacity, 0)

    def table(self) -> pa.Table:
        return pa.ipc.open_stream(self._file).read_all()

    def rows(self, rows: Rows, facts: Mapping[str, Any]) -> None:
        used = facts["used"]
        capacity = used + used // _FREE_SHARE + 1024
        buffers = [buffer for column in rows.buffers for buffer in column]
        for buffer, arrays in zip(buffers, facts["buffers"], strict=True):
            self._buffer(buffer, arrays, capacity)
        for name, arrays in facts["arrays"].items():
            if name not in rows.arrays:
                rows.add_array(name, np.dtype(arrays[0].split(":")[0]))
            self._buffer(rows.arrays[name], arrays, capacity)
        for name, array in rows.arrays.items():
            if name not in facts["arrays"]:
                array.reserve(capacity, 0)
        rows.used, rows.count, rows.capacity = used, facts["count"], capacity
        if isinstance(rows, KeyedRows):
            what, taken = facts["index"]
            rows.index.import_array(self.array(what), taken)


@contextmanager
def saving(directory: Path) -> Iterator[tuple[Saver, dict[str, Any]]]:
    """Yield a saver, and a dictionary of descriptions to fill, which is written as JSON at the
    end.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _FACTS).unlink(missing_ok=True)
    facts: dict[str, Any] = {}
    with (directory / _ARRAYS).open("wb") as file:
        yield Saver(file), facts
    (directory / f"{_FACTS}.part").write_text(json.dumps(facts))
    (directory / f"{_FACTS}.part").replace(directory / _FACTS)


@contextmanager
def loading(directory: Path, names: Sequence[str]) -> Iterator[tuple[Loader, Mapping[str, Any]]]:
    """Yield a loader and the descriptions; ``InvalidInput`` without a complete save of these
    names.
    """
    try:
        facts = json.loads((directory / _FACTS).read_text())
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{directory} holds no states: {error}; restore from the checkpoint") from error
    if [*facts] != [*names]:
        raise InvalidInput(f"{directory} holds the states {[*facts]}, and not {[*names]}; restore from the checkpoint")
    try:
        with (directory / _ARRAYS).open("rb") as file:
            yield Loader(file), facts
    except (OSError, pa.ArrowException) as error:
        raise _incomplete(error) from error


def _incomplete(why: object) -> InvalidInput:
    return InvalidInput(f"{_ARRAYS} is not what was saved: {why}; restore from the checkpoint")

"""Choose the texts of a segment that are stored by a dictionary (SPEC.md sections 5.5 and 7.4).

Each row group has its own dictionary. It pays if many rows share few texts. Before a reader decodes
one, it assumes that every row has the longest text; if that would be too much, the texts are stored
one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

_FIRST_ROWS: Final = 1024
_ROWS: Final = 32_768
_ROWS_MIN: Final = 64
# The first rows show whether all texts differ: many of these rows would be equal if a row group had
# only a quarter as many different texts as rows.
_DIFFERENT_MAX, _PAYS_MAX = 0.95, 0.25
# Every reader accepts 128 MiB for a row group (SPEC.md section 7.4): for the longest texts, and for
# everything as it is in memory.
_LONGEST_BYTES_MAX: Final = 24 << 20
_TAKEN_BYTES_MAX: Final = 64 << 20


def paths_that_pay(rows: pa.Table) -> frozenset[str]:
    """Return the Parquet paths of texts in ``rows``, a row group, that repeat often enough."""
    leaves = [leaf for column in _columns(rows) for leaf in _leaves(*column)]
    # Arrow takes encodings by path, and two leaves may have one path.
    count = Counter(path for path, _ in leaves)
    return frozenset(path for path, values in leaves if count[path] == 1 and _is_text(values.type) and _pays(values))


def are_readable(rows: pa.Table, paths: Collection[str], taken: int) -> bool:
    """Return whether readers accept a row group of ``taken`` bytes with these dictionaries."""
    if taken > _TAKEN_BYTES_MAX:
        return False
    longest_bytes = 0
    for name, column in _columns(rows):
        if any(path == name or path.startswith(f"{name}.") for path in paths):
            for path, values in _leaves(name, column):
                if path in paths:
                    longest_bytes += (pc.max(pc.binary_length(values)).as_py() or 0) * len(values)
    return longest_bytes <= _LONGEST_BYTES_MAX


def _columns(rows: pa.Table) -> Iterator[tuple[str, pa.Array]]:
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        if _is_text(column.type) or pa.types.is_nested(column.type):
            yield name, column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _leaves(path: str, values: pa.Array) -> Iterator[tuple[str, pa.Array]]:
    """Yield the Parquet path and the values of each leaf of a column."""
    kind = values.type
    if pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            yield from _leaves(f"{path}.{kind.field(number).name}", values.field(number))
    elif pa.types.is_map(kind):
        offsets = values.offsets
        start, stop = (offsets[0].as_py(), offsets[-1].as_py()) if len(values) else (0, 0)
        for name, of_map in (("key", values.keys), ("value", values.items)):
            yield from _leaves(f"{path}.key_value.{name}", of_map.slice(start, stop - start))
    elif pa.types.is_list(kind):
        yield from _leaves(f"{path}.list.element", values.flatten())
    else:
        yield path, values


def _pays(values: pa.Array) -> bool:
    first = values.slice(0, _FIRST_ROWS)
    present = len(first) - first.null_count
    if present < _ROWS_MIN or pc.count_distinct(first).as_py() > _DIFFERENT_MAX * present:
        return False
    some = values.slice(0, _ROWS)
    return bool(pc.count_distinct(some).as_py() <= _PAYS_MAX * (len(some) - some.null_count))

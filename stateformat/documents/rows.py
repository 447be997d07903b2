"""Rows of state as text, batch by batch: JSON lines and the cells of CSV files. No loop over rows.

Every value has one text form, in every command:

==================  ==============================================================================
type                JSON
==================  ==============================================================================
bool, integers      ``true``, ``42``
float, double       ``1.5``; text for what is no JSON number: ``"NaN"``, ``"Infinity"``
decimal             text, to keep every digit: ``"12.30"``
utf8                text
binary              text, hexadecimal
date32, timestamps  text, ISO 8601, with a final ``Z`` if the type says UTC
struct              an object
list                an array
map                 an array of objects ``{"key": ..., "value": ...}``
null                ``null``
==================  ==============================================================================

Arrow kernels build the text column by column, nested types from the inside out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_HEX: Final = np.array([list(f"{value:02x}".encode()) for value in range(256)], np.uint8)
_CONTROLS: Final = [chr(code) for code in range(32)] + ["\x7f"]


def json_texts(batch: pa.RecordBatch) -> pa.Array:
    """Return a batch as JSON objects: one utf8 value per row, never null, members in column
    order.
    """
    _check(batch)
    return _object(list(zip(batch.schema.names, batch.columns, strict=True)), batch.num_rows)


def json_lines(batch: pa.RecordBatch) -> pa.Buffer:
    """Return the bytes of JSON lines: each object and a newline."""
    return lines_of(json_texts(batch))


def lines_of(texts: pa.Array) -> pa.Buffer:
    """Return the bytes of utf8 values without nulls, each followed by a newline."""
    lines = pc.binary_join_element_wise(texts, pa.scalar(""), "\n")
    _, offsets, data = lines.buffers()
    if data is None or not len(lines):
        return pa.py_buffer(b"")
    bounds = np.frombuffer(offsets, np.int32)[lines.offset : lines.offset + len(lines) + 1]
    return data.slice(int(bounds[0]), int(bounds[-1] - bounds[0]))


def flat(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch as CSV can hold it: binary as hexadecimal text, nested types as JSON
    text.
    """
    _check(batch)
    columns = []
    for column in batch.columns:
        if pa.types.is_binary(column.type):
            column = hexadecimal(column)
        elif pa.types.is_nested(column.type):
            column = pc.if_else(pc.is_valid(column), _json(column), pa.scalar(None, pa.string()))
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def objects(batches: Iterable[pa.RecordBatch], limit: int) -> list[dict[str, Any]]:
    """Return the first ``limit`` rows as Python objects, in the forms above."""
    found: list[dict[str, Any]] = []
    for batch in batches:
        found += [json.loads(text) for text in json_texts(batch.slice(0, limit - len(found))).to_pylist()]
        if len(found) >= limit:
            break
    return found


def _check(batch: pa.RecordBatch) -> None:
    """Refuse strings that are not UTF-8: Parquet can hold any bytes, JSON and CSV cannot."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        from ..errors import DamagedCheckpoint, ErrorKind

        raise DamagedCheckpoint(
            f"some values are not valid for their type and cannot be written as text: {error}. `ckpt validate --level "
            "full` says where; an export to Parquet keeps their bytes",
            kind=ErrorKind.DAMAGED_SEGMENT,
        ) from error


def hexadecimal(column: pa.Array) -> pa.Array:
    """Return binary as utf8, two digits per byte; nulls stay."""
    if column.null_count == len(column):
        return pa.nulls(len(column), pa.string())
    # A copy without offset: nulls have no bytes, and the data begins at byte 0.
    packed = pc.take(column, pa.array(np.arange(len(column))))
    validity, offsets, data = packed.buffers()
    bounds = np.frombuffer(offsets, np.int32)[: len(packed) + 1].astype(np.int64) * 2
    if bounds[-1] >= 2**31 and len(column) == 1:
        from ..errors import InvalidInput

        raise InvalidInput(
            f"a value of {bounds[-1] // 2:,} bytes has more than 2 GiB of hexadecimal text; export to Parquet"
        )
    if bounds[-1] >= 2**31:
        half = len(column) // 2
        return pa.concat_arrays([hexadecimal(column[:half]), hexadecimal(column[half:])])
    octets = np.frombuffer(data, np.uint8)[: bounds[-1] // 2] if data is not None else np.empty(0, np.uint8)
    text = pa.py_buffer(_HEX[octets].tobytes())
    buffers = [validity, pa.py_buffer(bounds.astype(np.int32).tobytes()), text]
    return pa.Array.from_buffers(pa.string(), len(packed), buffers)


def _object(members: list[tuple[str, pa.Array]], length: int) -> pa.Array:
    """Return JSON objects with the same members, one per row."""
    if not members:
        return pa.array(["{}"] * length, pa.string())
    parts: list[Any] = []
    for i, (name, column) in enumerate(members):
        head = ("{" if i == 0 else ",") + json.dumps(name, ensure_ascii=False) + ":"
        parts += [pa.scalar(head), _json(column)]
    return pc.binary_join_element_wise(*parts, pa.scalar("}"), "")


def _json(column: pa.Array) -> pa.Array:
    """Return a column of any type as JSON texts, ``null`` for null; never null itself."""
    dtype = column.type
    if pa.types.is_struct(dtype):
        members = [(dtype.field(i).name, child) for i, child in enumerate(column.flatten())]
        texts = _object(members, len(column))
    elif pa.types.is_list(dtype):
        texts = _array(column, _json(column.flatten()))
    elif pa.types.is_map(dtype):
        # Entries may lie under a null map; without nulls the entries of all rows are adjacent.
        filled = column.drop_null() if column.null_count else column
        bounds = np.asarray(filled.offsets) if len(filled) else np.zeros(1, np.int32)
        entries = [("key", filled.keys[bounds[0] : bounds[-1]]), ("value", filled.items[bounds[0] : bounds[-1]])]
        texts = _array(column, _object(entries, int(bounds[-1] - bounds[0])))
    else:
        texts = _scalar_texts(column)
    return pc.if_else(pc.is_valid(column), texts, pa.scalar("null"))


def _array(column: pa.Array, elements: pa.Array) -> pa.Array:
    """Return JSON arrays from the texts of all elements of the valid lists, in order."""
    lengths = np.where(np.asarray(pc.is_valid(column)), np.diff(np.asarray(column.offsets)), 0)
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(bounds), elements)
    return pc.binary_join_element_wise(pa.scalar("["), pc.binary_join(lists, ","), pa.scalar("]"), "")


def _scalar_texts(column: pa.Array) -> pa.Array:
    dtype = column.type
    if pa.types.is_boolean(dtype) or pa.types.is_integer(dtype):
        return pc.cast(column, pa.string())
    if pa.types.is_floating(dtype):
        return _float_texts(column)
    if pa.types.is_string(dtype):
        return _quoted(_escaped(column))
    if pa.types.is_binary(dtype):
        return _quoted(hexadecimal(column))
    if pa.types.is_timestamp(dtype):
        return _quoted(pc.replace_substring(pc.cast(column, pa.string()), " ", "T", max_replacements=1))
    return _quoted(pc.cast(column, pa.string()))


def _float_texts(column: pa.Array) -> pa.Array:
    texts = pc.cast(column, pa.string())
    for value, name in (("nan", "NaN"), ("-nan", "NaN"), ("inf", "Infinity"), ("-inf", "-Infinity")):
        texts = pc.if_else(pc.equal(texts, value), pa.scalar(f'"{name}"'), texts)
    return texts


def _quoted(texts: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(pa.scalar('"'), texts, pa.scalar('"'), "")


def _escaped(texts: pa.Array) -> pa.Array:
    """Return text with everything escaped that JSON does not allow inside quotes."""
    for char in ("\\", '"'):
        texts = pc.replace_substring(texts, char, "\\" + char)
    # Control characters are rare: most columns need none of the 33 replacements.
    if pc.any(pc.match_substring_regex(texts, r"[\x00-\x1f\x7f]")).as_py():
        for char in _CONTROLS:
            escape = json.dumps(char)[1:-1] if char != "\x7f" else "\\u007f"
            texts = pc.replace_substring(texts, char, escape)
    return texts

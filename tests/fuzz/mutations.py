"""Changes of records and Parquet files that follow from a string of bytes, and know the structure
of what they change.

A fuzzer hands over bytes; :class:`Choices` reads decisions out of them. So atheris, hypothesis and
a list of seeds drive the same changes, and coverage guides them. What is changed is sealed again by
the targets: digests are never what refuses.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from tests.forgery import seal
from tests.fuzz import thrift_tree as thrift
from tests.fuzz.parquet_parts import Parts

NUMBERS = (0, 1, -1, 2, 127, 128, 32_767, 32_768, 2**31 - 1, -(2**31), 2**32, 2**53 - 1, 2**53, 2**63 - 1, -(2**63))
TEXTS = ("", "x", "\ud800", "\0", "../x", "segments/1/a.parquet", "keyed", "int64", "decimal(38,38)", "x" * 1000)
LISTS: tuple[Any, ...] = ([], {}, [[0, 0]], [[0, 2**53]], [None], {"struct": []}, {"list": {}})
VALUES: tuple[Any, ...] = (None, True, False, 1.5, *TEXTS, *LISTS, *NUMBERS)


class Choices:
    """Decisions out of bytes; zeros when they have run out."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def left(self) -> bool:
        return self._at < len(self._data)

    def below(self, limit: int) -> int:
        size = 1 if limit <= 256 else 2 if limit <= 65_536 else 4
        taken = self._data[self._at : self._at + size]
        self._at += size
        return int.from_bytes(taken, "little") % max(1, limit)

    def of(self, items: Any) -> Any:
        return items[self.below(len(items))]


# ---- JSON ----------------------------------------------------------------------------------------


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every member or item of a JSON value, at any depth: what holds it, and its name."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from nodes(inner)


def changed_record(members: dict[str, Any], choices: Choices) -> bytes:
    """A record with other members, or other bytes, and a right digest."""
    members = copy.deepcopy(members)
    for _ in range(1 + choices.below(4)):
        found = list(nodes(members))
        holder, key = choices.of(found)
        how = choices.below(6)
        if how == 0:
            holder[key] = copy.deepcopy(choices.of(VALUES))
        elif how == 1:
            del holder[key]
        elif how == 2:
            other, there = choices.of(found)
            if isinstance(other, dict) and there not in other:
                continue
            holder[key] = copy.deepcopy(other[there]) if not isinstance(other, list) or there < len(other) else 0
        elif how == 3 and isinstance(holder, list):
            holder += copy.deepcopy(holder[key : key + 1]) * (1 + choices.below(50))
        elif how == 4 and isinstance(holder[key], int) and not isinstance(holder[key], bool):
            holder[key] += choices.of((1, -1, 2**31, 2**53))
        elif isinstance(holder, dict):
            holder[str(choices.of(("x", key.upper(), "digest", "_key_group")))] = holder.pop(key)
    try:
        data = seal(members)
    except UnicodeEncodeError:
        data = seal(json.loads(json.dumps(members).replace("\\ud800", "?")))
    return sealed_bytes(changed_bytes(data[:-46], choices)) if choices.below(4) == 0 else data


def sealed_bytes(body: bytes) -> bytes:
    """Any bytes as the body of a record, with the digest of them behind."""
    import xxhash

    return body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


def changed_bytes(data: bytes, choices: Choices) -> bytes:
    out = bytearray(data)
    for _ in range(1 + choices.below(4)):
        at = choices.below(max(1, len(out)))
        how = choices.below(5)
        if how == 0 and out:
            out[at] ^= 1 << choices.below(8)
        elif how == 1 and out:
            out[at] = choices.below(256)
        elif how == 2:
            out[at:at] = bytes([choices.below(256)]) * (1 + choices.below(8))
        elif how == 3:
            del out[at : at + 1 + choices.below(16)]
        else:
            piece = out[at : at + 1 + choices.below(64)]
            out[choices.below(max(1, len(out))) :][:0] = piece
            out += piece if choices.below(2) else b""
    return bytes(out)


# ---- Parquet -------------------------------------------------------------------------------------


def _fields(tree: thrift.Struct) -> Iterator[tuple[Any, list[Any]]]:
    for item in tree:
        yield tree, item
        if item[1] == thrift.STRUCT:
            yield from _fields(item[2])
        elif item[1] == thrift.LIST and item[2][0] == thrift.STRUCT:
            for inner in item[2][1]:
                yield from _fields(inner)


def _change_structure(tree: thrift.Struct, choices: Choices) -> None:
    fields = list(_fields(tree))
    if not fields:
        return
    holder, item = choices.of(fields)
    how = choices.below(6)
    if how == 0 and item[1] in (thrift.I16, thrift.I32, thrift.I64):
        item[2] = thrift.zigzag(choices.of(NUMBERS))
    elif how == 1 and item[1] in (thrift.I16, thrift.I32, thrift.I64):
        item[2] = thrift.zigzag(thrift.unzigzag(item[2]) + choices.of((1, -1, 8, 1 << 20)))
    elif how == 2:
        holder.remove(item)
    elif how == 3:
        holder.insert(choices.below(len(holder) + 1), copy.deepcopy(item))
    elif how == 4 and item[1] == thrift.LIST and item[2][1]:
        kind, values = item[2]
        at = choices.below(len(values))
        more = [copy.deepcopy(values[at]) for _ in range(choices.of((0, 2, 20)))]
        item[2] = (kind, [*values[:at], *more, *values[at + 1 :]])
    elif item[1] == thrift.BINARY:
        item[2] = changed_bytes(item[2], choices)
    else:
        item[0] = 1 + choices.below(16)


def _together(parts: Parts, otherwise: bytes) -> bytes:
    try:
        whole = parts.data()
        thrift.split_footer(whole)
    except Exception:  # What was changed may be of any type where the tree needs a number.
        return otherwise
    return whole


def changed_parquet(data: bytes, choices: Choices) -> bytes:
    """A Parquet file with other pages, other page headers or another footer; what they say of
    places stays right.
    """
    parts = Parts(data)
    pages = [page for chunk in parts.pages for page in chunk]
    footer_first = choices.below(2)
    for _ in range(1 + choices.below(3)):
        how = choices.below(4)
        if how == 0 or not pages:
            footer_first = 2
        elif how == 1:
            _change_structure(choices.of(pages)[0], choices)
        elif how == 2:
            page = choices.of(pages)
            page[1] = changed_bytes(page[1], choices)
            if choices.below(2):
                for item in page[0]:
                    if item[0] == 3:
                        item[2] = thrift.zigzag(len(page[1]))
        else:
            chunk = choices.of([chunk for chunk in parts.pages if chunk])
            chunk.insert(choices.below(len(chunk) + 1), copy.deepcopy(choices.of(chunk)))
    body, footer = thrift.split_footer(_together(parts, data))
    if footer_first:
        for _ in range(1 + choices.below(3)):
            _change_structure(footer, choices)
    stored = thrift.unparse(footer)
    if choices.below(8) == 0:
        stored = changed_bytes(stored, choices)
    return thrift.join_footer(body, stored)

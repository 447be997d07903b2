"""Timers that jobs on RocksDB keep on the heap, in raw keyed state written by hand.

What Flink itself wrote, and says of it, is in the fixtures whose names end in ``heap``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from flink_streams import VOID, WINDOW
from flink_written import LONG, TEXT, Kind, opaque, pack, utf, versioned
from test_flink_key_hash import code_of, murmur_of

import stateformat
from stateformat.backends.foreign.flink.metadata import (
    KeyGroups,
    Metadata,
    Operator,
    Relative,
    Subtask,
    encode_metadata,
)
from stateformat.backends.importing import ImportSpec, import_checkpoint, prove_import
from stateformat.errors import DamagedCheckpoint
from tests.ckpt.ckpt_runs import document

GROUPS = 128
WINDOWS = Kind("window", versioned(WINDOW, 3), LONG.values, lambda two: pack("qq", *two))
NONE = Kind("no namespace", VOID, LONG.values, lambda _: b"\0")


class Service(NamedTuple):
    name: str
    key: Kind
    namespace: Kind
    timers: dict[str, list[tuple[int, Any, Any, int]]]
    """By domain: key group, key, namespace, moment in ms."""


def head(service: Service) -> bytes:
    return utf(service.name) + service.key.snapshot + service.namespace.snapshot


def stream(services: Sequence[Service], groups: Sequence[int]) -> tuple[bytes, list[int]]:
    """Raw keyed state with some key groups, as Flink lays it out; the others have no offset."""
    out, offsets = bytearray(), [-1] * GROUPS
    for group in groups:
        offsets[group] = len(out)
        out += b"\xf1\xcd\x85\x9f" + pack("ii", 2, len(services))
        for service in services:
            out += head(service)
            for domain in ("event", "processing"):
                mine = [one for one in service.timers.get(domain, []) if one[0] == group]
                out += pack("i", len(mine))
                for _, key, namespace, moment in mine:
                    out += service.key.write(key) + service.namespace.write(namespace) + pack("q", moment)
    return bytes(out), offsets


def checkpoint(folder: Path, data: bytes, offsets: Sequence[int]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stream").write_bytes(data)
    handle = KeyGroups(12, 0, np.array(offsets, np.int64), Relative("stream", len(data)), "id")
    operator = Operator(b"\7" * 16, "operator", "op", 1, GROUPS, None, False, (Subtask(0, raw_keyed=handle),))
    (folder / "_metadata").write_bytes(encode_metadata(Metadata(6, 1, (), (operator,), b"")))
    return folder


def timers(namespace: Any, *keys: str) -> list[tuple[int, Any, Any, int]]:
    """Timers in the key groups that Flink gives the keys, at moments of every size and sign."""
    return [
        (murmur_of(code_of(key)) % GROUPS, key, namespace and (n, n + 10), (-1) ** n * 7**n)
        for n, key in enumerate(keys)
    ]


MANY = [
    Service("window-timers", TEXT, WINDOWS, {"event": timers(True, *"abcdefghé"), "processing": timers(True, "late")}),
    Service("user-timers", TEXT, NONE, {"processing": timers(None, "", "😀")}),
]


def test_all_timers_of_all_services_are_read_and_go_back(tmp_path: Path) -> None:
    source = stateformat.open(str(checkpoint(tmp_path / "s", *stream(MANY, range(GROUPS))))).open()
    expected = {
        f"_timer_state/{domain}_{service.name}": sorted(
            (group, key, moment * 1000, f"{domain}/{service.name}" + (f"/{two[0]}-{two[1]}" if two else ""))
            for group, key, two, moment in service.timers.get(domain, [])
        )
        for service in MANY
        for domain in ("event", "processing")
    }
    store = stateformat.open(str(tmp_path / "store"))
    import_checkpoint(source, store, ImportSpec(key_hash="keep"))
    document("export", tmp_path / "store", "--as", "flink-savepoint", "--to", tmp_path / "back")
    for found in (source, store.open(), stateformat.open(str(tmp_path / "back")).open()):
        for name, rows in expected.items():
            table = found.read("op", name).table()
            said = zip(*(table[column].to_pylist() for column in ("_key_group", "key")), strict=True)
            moments = table["_timestamp"].cast("int64").to_pylist()
            assert (
                sorted((*one, at, tag) for one, at, tag in zip(said, moments, table["_tag"].to_pylist(), strict=True))
                == rows
            )


def test_timers_whose_ends_are_not_known_are_refused_by_name_with_their_class(tmp_path: Path) -> None:
    custom = Kind("custom", opaque("a.Custom"), LONG.values, LONG.write)
    unknown = Kind("unknown", versioned("a.b.OwnSnapshot", 1), LONG.values, LONG.write)
    for number, (key, name) in enumerate([(custom, "a.Custom"), (unknown, "a.b.OwnSnapshot")]):
        service = Service("own-timers", key, NONE, {"event": [(3, 1, None, 5)]})
        place = checkpoint(tmp_path / f"s{number}", *stream([service, *MANY], range(4)))
        problems = document("validate", place, "--level", "full", status=1)["problems"]
        assert {problem["kind"] for problem in problems} <= {"unsupported_feature", "unknown_key_hash"}
        assert name in str(problems)
        dropped = sorted(
            {
                problem["advice"].split("--drop ")[1].split(" ")[0]
                for problem in problems
                if "--drop" in problem["advice"]
            }
        )
        source = stateformat.open(str(place)).open()
        spec = ImportSpec(key_hash="keep", drop=dropped)
        done = import_checkpoint(source, stateformat.open(str(tmp_path / f"t{number}")), spec)
        assert prove_import(source, done.rewritten.permit.checkpoint(), spec).same


@pytest.mark.parametrize("where", ["name", "count", "end"])
def test_bytes_that_are_none_of_these_timers_are_damage(where: str, tmp_path: Path) -> None:
    data, offsets = stream(MANY, range(GROUPS))
    first = data.index(b"user-timers", offsets[30])
    count = offsets[30] + 12 + len(head(MANY[0]))
    spoiled = {
        "name": data[:first] + b"X" + data[first + 1 :],
        "count": data[:count] + b"\x7f" + data[count + 1 :],
        "end": data[:-3],
    }[where]
    place = str(checkpoint(tmp_path / "s", spoiled, offsets))
    with pytest.raises(DamagedCheckpoint):
        stateformat.open(place).open().read("op", "_timer_state/processing_user-timers").table()

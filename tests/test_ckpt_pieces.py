"""The pieces that pages are made of, without a store: graphs, bars, tables, addresses, rows as text, errors as statuses."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from typing import Any

import click
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest

from stateformat import errors
from stateformat.tools.ckpt import exit_status as failures
from stateformat.tools.ckpt.options import Address, AddressType, options_for
from stateformat.tools.ckpt.options.values import OperatorParallelism, StorageOptionType
from stateformat.tools.ckpt.rows import flat, json_lines, json_texts, objects
from stateformat.tools.ckpt.text import Column, Look, graph, render

# ---- the graph -------------------------------------------------------------------------------------------------------


def operator(uid: str, status: str = "running", **more: Any) -> dict[str, Any]:
    plain = {
        "name": "",
        "parallelism": 4,
        "max_parallelism": 128,
        "finished": [],
        "finishing": [],
        "coordinator": False,
    }
    return {"uid": uid, "status": status, **plain, **more}


def edge(
    source: str, target: str, partitioner: str = "rebalance", *keys: str, feedback: bool = False
) -> dict[str, Any]:
    return {"from": source, "to": target, "partitioner": partitioner, "key_columns": list(keys), "feedback": feedback}


def drawing(operators: list[dict[str, Any]], edges: list[dict[str, Any]], look: Look | None = None) -> list[str]:
    return [line.rstrip() for line in graph.draw(operators, edges, look or Look())]


def test_a_chain_is_a_straight_line_with_its_edges_in_words() -> None:
    operators = [operator("a", "fully_finished", finished=[[0, 3]]), operator("b")]
    assert drawing(operators, [edge("a", "b", "hash", "x", "y")]) == [
        "    operator  subtasks  max  status",
        "  ● a                4  128  finished",
        "  ○ b                4  128  running",
        "      ← a hash by x, y",
    ]


def test_lanes_meet_above_a_fan_in_and_part_below_a_fan_out() -> None:
    operators = [operator("a"), operator("b"), operator("c"), operator("d"), operator("e")]
    edges = [edge("a", "c"), edge("b", "c"), edge("c", "d"), edge("c", "e")]
    assert drawing(operators, edges) == [
        "      operator  subtasks  max  status",
        "  ○   a                4  128  running",
        "  │ ○ b                4  128  running",
        "  ├─╯",
        "  ○   c                4  128  running",
        "  ├─╮   ← a rebalance, b rebalance",
        "  ○ │ d                4  128  running",
        "    │   ← c rebalance",
        "    ○ e                4  128  running",
        "        ← c rebalance",
    ]


def test_a_graph_has_an_ascii_twin() -> None:
    operators = [
        operator("a", "partially_finished", finished=[[0, 1]], finishing=[[3, 3]]),
        operator("b"),
        operator("c"),
    ]
    lines = drawing(operators, [edge("a", "c"), edge("b", "c"), edge("c", "c", feedback=True)], Look(unicode=False))
    assert lines == [
        "      operator  subtasks  max  status",
        "  +   a                4  128  2 of 4 finished: 0-1",
        "  |     finishing: 3",
        "  | o b                4  128  running",
        "  +-'",
        "  o   c                4  128  running",
        "        <- a rebalance, b rebalance, loop c rebalance (feedback)",
    ]
    assert all(line.isascii() for line in lines)


def test_operators_stand_after_their_sources_even_where_they_were_defined_before() -> None:
    ordered = graph.in_order([operator("sink"), operator("b"), operator("a")], [edge("a", "b"), edge("b", "sink")])
    assert [entry["uid"] for entry in ordered] == ["a", "b", "sink"]


def test_a_graph_with_a_cycle_is_shown_all_the_same() -> None:
    lines = drawing([operator("a"), operator("b")], [edge("a", "b"), edge("b", "a")])
    assert sum(line.split()[1] in ("a", "b") for line in lines[1:] if "○" in line) == 2


def test_a_graph_of_very_many_lanes_keeps_only_its_marks() -> None:
    sources = [operator(f"s{i}") for i in range(30)]
    lines = drawing([*sources, operator("t")], [edge(f"s{i}", "t") for i in range(30)])
    assert lines[1].startswith("  ○ s0 ")
    assert not any("│" in line for line in lines)
    assert all(len(line) <= 80 for line in lines)


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_bars_are_in_proportion_and_tell_none_from_nothing() -> None:
    assert render.spark([0, 1, 4, 8, None], Look(), width=10) == "·▁▄█-"
    assert render.spark([0, 1, 4, 8, None], Look(unicode=False), width=10) == ".148-"
    assert render.spark([0, 0], Look(), width=10) == "··"
    assert render.spark([], Look(), width=10) == ""


def test_bars_that_share_a_column_show_the_greatest() -> None:
    assert render.spark([1] * 50 + [8] + [1] * 49, Look(), width=4) == "▁▁█▁"


def test_every_colour_can_be_left_out() -> None:
    assert render.spark([1], Look(color=True), width=1) != render.spark([1], Look(), width=1)
    assert click.unstyle(render.spark([1], Look(color=True), width=1)) == render.spark([1], Look(), width=1)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1024**2 - 1, "1.0 MiB"), (5 * 1024**3, "5.0 GiB")],
)
def test_sizes_are_for_people(number: int, text: str) -> None:
    assert render.size(number) == text


def test_ages_show_their_greatest_unit_and_a_clock_that_is_ahead_shows_none() -> None:
    day = 86_400 * 10**6
    assert [render.age(0, t) for t in (5 * 10**6, 61 * 10**6, day // 2, 3 * day)] == ["5 s", "1 min", "12 h", "3 d"]
    assert render.age(10, -(10**6)) == ""


def test_a_time_beyond_the_calendar_is_no_error() -> None:
    assert render.moment(2**53 - 1).startswith("2255-")
    assert render.moment(2**60) == "9999-12-31T00:00:00Z"


def test_a_table_leaves_out_optional_columns_and_cuts_flexible_ones_where_it_is_too_wide() -> None:
    columns = [Column("name", flexible=True), Column("n", right=True), Column("extra", optional=1)]
    rows = [["x" * 30, "1", "y" * 60]]
    assert render.table(columns, rows, Look(width=80)) == ["  name" + " " * 28 + "n", "  " + "x" * 30 + "  1"]
    assert render.table(columns[:2], rows, Look(width=20))[1] == "  " + "x" * 14 + "…  1"


def test_a_strangers_text_cannot_break_a_line_or_steer_a_terminal() -> None:
    assert render.label("a\nb\x1b[31mc\u202e") == "a\\nb\\x1b[31mc\\u202e"
    assert render.label("größe 日本") == "größe 日本"


def test_wide_characters_count_twice_and_colours_not_at_all() -> None:
    assert render.text_width("日本") == 4
    assert render.text_width(click.style("ab", fg="red")) == 2
    assert render.pad("日", 4) == "日  "


# ---- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "url", "checkpoint"),
    [
        ("/data/store", "/data/store", None),
        ("/data/store@7", "/data/store", 7),
        ("/data/store@7/", "/data/store@7/", None),
        ("s3://bucket/a@b/store", "s3://bucket/a@b/store", None),
        ("s3://bucket/a@1/store@23", "s3://bucket/a@1/store", 23),
        ("store@latest", "store@latest", None),
        ("a@1@2", "a@1", 2),
    ],
)
def test_only_trailing_digits_are_an_id(text: str, url: str, checkpoint: int | None) -> None:
    assert AddressType().convert(text, None, None) == Address(url, checkpoint)


@pytest.mark.parametrize(
    ("checkpoint", "text"),
    [
        ("optional", ""),
        ("optional", "@3"),
        ("optional", "s@0"),
        ("optional", f"s@{2**53}"),
        ("always", "store"),
        ("never", "s@3"),
    ],
)
def test_other_addresses_are_misuse(checkpoint: str, text: str) -> None:
    with pytest.raises(click.UsageError):
        AddressType(checkpoint).convert(text, None, None)


def test_storage_options_go_to_the_remote_store_of_two() -> None:
    given = dict(
        [StorageOptionType().convert("anon=true", None, None), StorageOptionType().convert("key=a=b", None, None)]
    )
    assert given == {"anon": True, "key": "a=b"}
    assert options_for("/data", given, ("s3://b/c",)) == {}
    assert options_for("s3://b/c", given, ("/data",)) == given
    assert options_for("/data", given) == given


@pytest.mark.parametrize("text", ["a", "a=", "=3", "a=0", "a=x", "a=-1", "a=1.5"])
def test_a_parallelism_of_an_operator_has_a_name_and_a_number(text: str) -> None:
    with pytest.raises(click.UsageError):
        OperatorParallelism("UID=N").convert(text, None, None)


def test_a_uid_may_hold_an_equals_sign() -> None:
    assert OperatorParallelism("UID=N").convert("a=b=3", None, None) == ("a=b", 3)


# ---- failures --------------------------------------------------------------------------------------------------------


def every_error() -> list[type[errors.CheckpointError]]:
    found, left = [], [errors.CheckpointError]
    while left:
        found += left[0].__subclasses__()
        left = left[1:] + left[0].__subclasses__()
    return [error for error in found if error.__module__ == "stateformat.errors"]


def test_every_class_of_error_has_its_exit_status() -> None:
    statuses = {error.__name__: failures.failure_of(error("why")).status for error in every_error()}
    assert statuses == {
        "InvalidInput": 2,
        "InvalidState": 1,
        "RestoreRefused": 1,
        "PublishConflict": 1,
        "OutcomeUnknown": 3,
        "NotFound": 3,
        "CheckpointExpired": 3,
        "JobMismatch": 1,
        "UnsupportedFormat": 1,
        "DamagedCheckpoint": 1,
        "StorageError": 3,
    }


def test_an_error_that_nobody_foresaw_is_called_a_bug_and_has_no_trace() -> None:
    found = failures.failure_of(ZeroDivisionError("division by zero"))
    assert (found.status, found.kind) == (1, "internal_error")
    assert "bug in ckpt" in found.message
    assert "ZeroDivisionError" in found.message


def test_details_become_plain_json() -> None:
    error = errors.DamagedCheckpoint("why", path="a", subtasks=(1, 2), state=errors.ErrorKind.STORE_EMPTY, nothing=None)
    details = failures.failure_of(error).to_json()["error"]["details"]
    assert json.loads(json.dumps(details)) == {"path": "a", "subtasks": [1, 2], "state": "store_empty", "nothing": None}


def test_an_interruption_has_the_status_that_shells_give_it() -> None:
    assert failures.failure_of(KeyboardInterrupt()).status == 130


# ---- rows as text ----------------------------------------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    {
        "flag": True,
        "n": 2**62,
        "x": 1.5,
        "text": 'q"\\\n\x00\x1fé☃',
        "raw": b"\x00\xff",
        "day": datetime.date(2020, 1, 2),
        "at": datetime.datetime(2020, 1, 2, 3, 4, 5, 6),  # noqa: DTZ001 - the type has no zone
        "utc": datetime.datetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC),
        "price": decimal.Decimal("-1.20"),
        "list": [1, None],
        "struct": {"a": 1, "b": ["x", None]},
        "map": [("k", 1), ("l", None)],
    },
    dict.fromkeys(("flag", "n", "x", "text", "raw", "day", "at", "utc", "price", "list", "struct", "map")),
    {
        "flag": False,
        "n": -1,
        "x": math.nan,
        "text": "",
        "raw": b"",
        "day": datetime.date(1969, 12, 31),
        "at": datetime.datetime(1969, 12, 31, 23, 59, 59, 999999),  # noqa: DTZ001
        "utc": datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC),
        "price": decimal.Decimal("0.00"),
        "list": [],
        "struct": {"a": None, "b": None},
        "map": [],
    },
]
SCHEMA = pa.schema(
    [
        pa.field("flag", pa.bool_()),
        pa.field("n", pa.int64()),
        pa.field("x", pa.float64()),
        pa.field("text", pa.string()),
        pa.field("raw", pa.binary()),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us")),
        pa.field("utc", pa.timestamp("us", "UTC")),
        pa.field("price", pa.decimal128(38, 2)),
        pa.field("list", pa.list_(pa.int64())),
        pa.field("struct", pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))])),
        pa.field("map", pa.map_(pa.string(), pa.int64())),
    ]
)


def expected(value: Any, name: str = "") -> Any:
    """The oracle: each value on its own, in plain Python."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime.datetime):
        stamp = value.strftime("%Y-%m-%dT%H:%M:%S.%f")
        return stamp + ("Z" if value.tzinfo else "")
    if isinstance(value, dict):
        return {key: expected(inner) for key, inner in value.items()}
    if isinstance(value, list):
        pairs = name == "map"
        return [{"key": one[0], "value": one[1]} if pairs else expected(one) for one in value]
    return str(value)


BATCH = pa.RecordBatch.from_pylist(ROWS * 2, schema=SCHEMA)
TEXTS = [{name: expected(value, name) for name, value in row.items()} for row in ROWS * 2]


@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("length", range(1, 7))
def test_json_of_any_part_of_a_batch_is_that_of_its_rows(start: int, length: int) -> None:
    part = BATCH.slice(start, length)
    assert [json.loads(text) for text in json_texts(part).to_pylist()] == TEXTS[start : start + length]
    lines = bytes(json_lines(part)).decode()
    assert lines.endswith("\n")
    assert [json.loads(line) for line in lines[:-1].split("\n")] == TEXTS[start : start + length]


def test_an_empty_batch_has_no_lines() -> None:
    assert bytes(json_lines(BATCH.slice(0, 0))) == b""


def test_a_sample_takes_no_more_than_it_needs() -> None:
    def batches() -> Any:
        yield BATCH.slice(0, 2)
        yield BATCH.slice(2, 2)
        pytest.fail("a third batch was read")

    assert objects(batches(), 3) == TEXTS[:3]


def test_csv_reads_back_and_tells_null_from_empty(tmp_path: Any) -> None:
    path = tmp_path / "rows.csv"
    pa_csv.write_csv(pa.Table.from_batches([flat(BATCH.slice(0, 3))]), path)
    options = pa_csv.ConvertOptions(
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        column_types={"raw": pa.string(), "list": pa.string()},
    )
    read = pa_csv.read_csv(
        path, convert_options=options, parse_options=pa_csv.ParseOptions(newlines_in_values=True)
    ).to_pylist()
    assert [row["raw"] for row in read] == ["00ff", None, ""]
    assert [row["list"] for row in read] == ["[1,null]", None, "[]"]
    assert [row["text"] for row in read][1:] == [None, ""]
    assert [json.loads(row["struct"]) if row["struct"] else None for row in read] == [
        {"a": 1, "b": ["x", None]},
        None,
        {"a": None, "b": None},
    ]

"""Every page of ``ckpt``, word for word: ``pages/``, written anew with ``--update``; and pages of
any width and character set.

The pieces of ``ckpt``, without a store: graphs, bars, tables, values of options, rows as text, exit
statuses.
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest

import stateformat as sf
from stateformat import errors, words
from stateformat.backends.storage import MemoryStorage
from stateformat.documents import checkpoint_document, flat, json_lines, json_texts, objects
from stateformat.pages.blocks import Block, Column, Graph, Table, Values, in_order
from stateformat.pages.checkpoint import checkpoint_page, history_page
from stateformat.states import broadcast_state, even_split_state
from stateformat.tools.ckpt import exit_status as failures, pages as pages_of, text as render
from stateformat.tools.ckpt.options import Address, AddressType, options_for
from stateformat.tools.ckpt.options.values import OperatorParallelism, StorageOptionType
from stateformat.tools.ckpt.text import Look, lines as lines_of
from tests.ckpt.ckpt_runs import page, run
from tests.html.hostile import hostile
from tests.worlds import stores

PAGES = Path(__file__).parent / "pages"
GOLDEN = Path(__file__).parents[1] / "golden/v1"
STORES = {"flights": "flights", "stopped": "stopped", "rescaled": "rescaled", "damaged": "flights", "gapped": "stopped"}
WIDE = "日本語のオペレーター"
LONG = "a name that says everything about what the operator does, and then some more, until no page is wide enough"

CHANGED = "--flow tests.ckpt.flight_jobs:changed"
CALLS = {
    "copy": "copy memory://flights memory://copied",
    "diff": "diff memory://flights@1 @2",
    "diff-ascii": "diff memory://flights@2 @1 --operator delays --rows 1",
    "diff-narrow": "diff memory://flights@1 memory://stopped",
    "diff-rescaled": "diff memory://flights memory://rescaled@3",
    "diff-same": "diff memory://rescaled@2 @3",
    "diff-rows": "diff memory://flights@1 @2 --state sums --rows 2",
    "explain-restore": "explain-restore memory://flights --parallelism 6",
    "explain-restore-column": "explain-restore memory://flights --drop delays/sums.n",
    "explain-restore-dropped": "explain-restore memory://flights --drop rates",
    "explain-restore-flow": f"explain-restore memory://flights {CHANGED} --drop planes",
    "explain-restore-flow-anew": f"explain-restore memory://nothing {CHANGED}",
    "explain-restore-flow-narrow": f"explain-restore memory://flights {CHANGED} --drop planes",
    "explain-restore-refused": "explain-restore memory://flights --parallelism 129",
    "gc": "gc memory://flights --keep 1",
    "gc-deleted": "gc memory://flights --keep 1 --delete",
    "gc-stopped": "gc memory://damaged --keep 1 --delete",
    "get": 'get memory://flights --operator delays --state last --key "N004"',
    "get-all": 'get memory://flights --operator delays --state sums --key "N004" --all',
    "get-all-narrow": 'get memory://flights --operator delays --state sums --key "N010" --all',
    "history": "history memory://flights",
    "history-damaged": "history memory://damaged",
    "history-narrow": "history memory://stopped",
    "inspect": "inspect memory://flights",
    "inspect-ascii": "inspect memory://flights",
    "inspect-narrow": "inspect memory://flights",
    "inspect-older": "inspect memory://flights@1",
    "inspect-operator": "inspect memory://flights --operator delays",
    "inspect-rescaled": "inspect memory://rescaled",
    "inspect-rows": "inspect memory://flights --operator delays --state last --rows 2",
    "inspect-sink": "inspect memory://flights --operator sink",
    "inspect-stopped": "inspect memory://stopped",
    "repair": "repair memory://flights",
    "repair-damaged": "repair memory://damaged",
    "repair-done": "repair memory://damaged@1 --yes",
    "repair-segments": "repair memory://gapped",
    "repair-segments-narrow": "repair memory://gapped",
    "copy-proved": "copy memory://rescaled memory://copied --prove",
    "rewrite-proved": "rewrite memory://stopped --rename delays=late --max-parallelism 32 --prove",
    "rescale": "rescale memory://flights --parallelism 3",
    "rescale-dry-run": "rescale memory://flights --operator-parallelism delays=2 --dry-run",
    "rollback": "rollback memory://flights@1",
    "stop-stopped": "stop memory://stopped",
    "top": "top memory://flights --operator delays --limit 2",
    "top-bytes-narrow": "top memory://flights --operator delays --limit 2 --by bytes",
    "validate": "validate memory://flights --level full",
    "validate-all": "validate memory://damaged --all --level full",
    "watch-stopped": "watch memory://stopped --until-end",
    "watch-stopped-narrow": "watch memory://stopped --until-end",
    "validate-damaged": "validate memory://damaged",
    "validate-gapped": "validate memory://gapped",
    "validate-narrow": "validate memory://damaged --all",
    "validate-newest-whole": "validate memory://flights --newest-whole",
}
REFUSED = {
    "explain-restore-flow",
    "explain-restore-flow-narrow",
    "diff",
    "diff-ascii",
    "diff-narrow",
    "diff-rescaled",
    "diff-rows",
    "explain-restore-refused",
    "gc-stopped",
    "history-damaged",
    "repair-damaged",
    "repair-segments",
    "repair-segments-narrow",
    "validate-all",
    "validate-damaged",
    "validate-gapped",
    "validate-narrow",
}


@pytest.fixture
def _in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The golden stores, whole and damaged, at addresses and at a time that are always the same."""
    for name, source in STORES.items():
        folder = GOLDEN / source
        objects = {
            str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("*/**/*")) if path.is_file()
        }
        if name == "damaged":
            objects[max(path for path in objects if path.startswith("checkpoints/"))] = b"{"
        if name == "gapped":
            del objects[min(path for path in objects if "delays-sums" in path)]
        for path, data in objects.items():
            MemoryStorage(name).create(path, data)
    newest_us = max(sf.open(f"memory://{name}").open().record.created_at_us for name in ("flights", "stopped"))
    monkeypatch.setattr(time, "time_ns", lambda: (newest_us + 3 * 86_400 * 10**6) * 1000)
    yield
    for name in (*STORES, "copied"):
        MemoryStorage.reset(name)


@pytest.mark.usefixtures("_in_memory")
@pytest.mark.parametrize("name", CALLS)
def test_a_page_is_the_golden_one(name: str, pytestconfig: pytest.Config) -> None:
    found = run(
        *CALLS[name].split(),
        encoding="ascii" if name.endswith("ascii") else "utf-8",
        COLUMNS="60" if name.endswith("narrow") else "80",
    )
    assert (found.status, found.err) == (int(name in REFUSED), "")
    # How long it waited is the one figure that the machine decides.
    page = re.sub(r"(?<=waited     )[0-9.]+ s", "0 s", found.out)
    text = f"$ ckpt {CALLS[name]}\n{page}"
    golden = PAGES / f"{name}.txt"
    if pytestconfig.getoption("update"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8"), "if this is right, run pytest with --update"


def test_every_golden_page_is_one_that_is_drawn() -> None:
    assert {path.stem for path in PAGES.iterdir()} == {*CALLS, "graphs", "graphs-ascii"}


COMMANDS = (
    *("inspect", "inspect --operator delays", "history", "validate", "gc --keep 1"),
    *("top", "top --by bytes --limit 1", "top --no-keys"),
    *("explain-restore --parallelism 3", "explain-restore --parallelism 128"),
)


@pytest.mark.parametrize("columns", [60, 72])
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("store", ["flights", "stopped"])
def test_pages_fill_the_columns_that_there_are(store: str, command: str, columns: int) -> None:
    name, *options = command.split()
    lines = page(name, GOLDEN / store, *options, COLUMNS=str(columns)).splitlines()
    widths = list(map(render.text_width, lines))
    assert max(widths) <= columns
    assert max(widths) > columns - 20


def test_a_wide_terminal_is_used() -> None:
    assert 80 < max(map(len, page("inspect", GOLDEN / "flights", COLUMNS="110").splitlines())) <= 110


def test_a_page_that_is_no_terminal_has_no_colors(flights: Path) -> None:
    assert "\x1b" not in page("inspect", flights, FORCE_COLOR="1")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in which names are long, or take two columns per character."""
    folder = tmp_path_factory.mktemp("odd") / "store"
    operators = (sf.Operator("source", 1, name=LONG), sf.Operator(WIDE, 1, max_parallelism=16))
    graph = sf.JobGraph(operators, (sf.Edge("e", "source", WIDE, sf.Partitioner.REBALANCE),))
    rules = broadcast_state(WIDE, "規則", columns={LONG: pa.string()})
    state = even_split_state("source", LONG, columns={"n": pa.int64()})
    pending = sf.open(str(folder)).begin(job_id="odd", graph=graph, states=[rules, state], parent=None)
    for owner, name, rows in (
        (WIDE, "規則", pa.table({LONG: ["語" * 70]})),
        ("source", LONG, pa.table({"n": [1]})),
    ):
        with pending.context.subtask(owner, 0) as writer:
            writer.write(name, rows)
        pending.add(writer)
    pending.publish()
    return folder


@pytest.mark.parametrize(
    ("status", "command"),
    [
        *((0, command) for command in ("inspect", "inspect --rows 1", "explain-restore")),
        *((1, f"explain-restore --parallelism {number}") for number in (17, 99999)),
    ],
)
def test_long_and_wide_names_keep_to_the_columns_of_the_page(odd: Path, status: int, command: str) -> None:
    name, *options = command.split()
    for columns in (80, 120):
        text = page(name, odd, *options, status=status, COLUMNS=str(columns))
        assert max(map(render.text_width, text.splitlines())) <= columns
        assert WIDE in text


def test_values_too_wide_for_the_page_are_cut_and_it_says_so(tmp_path: Path) -> None:
    job, words = stores.counts_job(), pa.table({"word": ["x" * 200, "y" * 200], "n": [1, 2]})
    rows = {("counter", "counts"): lambda i: stores.owned(words, ["word"], job.graph.operators[1], i)}
    stores.Job(job.job_id, job.graph, job.states, rows).publish(sf.open(str(tmp_path)), None)
    text = page("inspect", tmp_path, "--rows", 1)
    assert "x" * 30 in text
    assert "… marks values that are cut" in text
    assert max(map(len, text.splitlines())) <= 80


# ---- the graph


def operator(uid: str, status: str = "running", **more: Any) -> dict[str, Any]:
    plain = {"name": "", "parallelism": 4, "max_parallelism": 128, "coordinator": False}
    return {"uid": uid, "status": status, **plain, "finished": [], "finishing": [], **more}


def edge(ends: str, partitioner: str = "rebalance", *keys: str, feedback: bool = False) -> dict[str, Any]:
    source, target = ends.split(">")
    return {"from": source, "to": target, "partitioner": partitioner, "key_columns": list(keys), "feedback": feedback}


def drawn(*page: Block, look: Look) -> list[str]:
    return list(lines_of(page, look))


def drawing(operators: list[dict[str, Any]], edges: list[dict[str, Any]], look: Look | None = None) -> list[str]:
    return drawn(Graph(in_order(operators, edges), edges, {}), look=look or Look())


PARTLY = {"finished": [[0, 1]], "finishing": [[3, 3]]}
LOOP = [edge("a>c"), edge("b>c"), edge("c>c", feedback=True)]
GRAPHS = {
    "a chain is a straight line": (
        [operator("a", "fully_finished", finished=[[0, 3]]), operator("b")],
        [edge("a>b", "hash", "x", "y")],
    ),
    "lanes meet above a fan-in and part below a fan-out": (
        list(map(operator, "abcde")),
        [edge("a>c"), edge("b>c"), edge("c>d"), edge("c>e")],
    ),
    "a loop is in words": ([operator("a", "partially_finished", **PARTLY), operator("b"), operator("c")], LOOP),
}


@pytest.mark.parametrize("look", [Look(), Look(unicode=False)])
def test_graphs_are_drawn_as_they_were(look: Look) -> None:
    golden = Path(__file__).parent / "pages" / ("graphs.txt" if look.unicode else "graphs-ascii.txt")
    lines = [line for name, graph in GRAPHS.items() for line in (f"# {name}", *drawing(*graph, look), "")]
    assert look.unicode or all(line.isascii() for line in lines)
    assert "\n".join(lines) == golden.read_text()


def test_operators_stand_after_their_sources_even_where_they_were_defined_before() -> None:
    ordered = in_order([operator("sink"), operator("b"), operator("a")], [edge("a>b"), edge("b>sink")])
    assert [entry["uid"] for entry in ordered] == ["a", "b", "sink"]


def test_a_graph_with_a_cycle_is_shown_all_the_same() -> None:
    lines = drawing([operator("a"), operator("b")], [edge("a>b"), edge("b>a")])
    assert sum(line.split()[1] in ("a", "b") for line in lines[1:] if "○" in line) == 2


def test_a_graph_of_very_many_lanes_keeps_only_its_marks() -> None:
    sources = [operator(f"s{i}") for i in range(30)]
    lines = drawing([*sources, operator("t")], [edge(f"s{i}>t") for i in range(30)])
    assert lines[1].startswith("  ○ s0 ")
    assert not any("│" in line for line in lines)
    assert all(len(line) <= 80 for line in lines)


# ---- figures


@pytest.mark.parametrize(
    ("values", "look", "text"),
    [
        ([0, 1, 4, 8, None], Look(), "·▁▄█-"),
        ([0, 1, 4, 8, None], Look(unicode=False), ".148-"),
        ([0, 0], Look(), "··"),
        ([], Look(), ""),
        ([1] * 125 + [8] + [1] * 124, Look(), "▁▁▁▁▁█▁▁▁▁"),
    ],
)
def test_bars_are_in_proportion_and_a_shared_one_shows_the_greatest(
    values: list[int | None], look: Look, text: str
) -> None:
    assert render.spark(values, look, width=10) == text


def test_every_color_can_be_left_out() -> None:
    assert render.spark([1], Look(color=True), width=1) != render.spark([1], Look(), width=1)
    assert click.unstyle(render.spark([1], Look(color=True), width=1)) == render.spark([1], Look(), width=1)


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("names", [False, True], ids=["plain", "hostile"])
def test_colors_change_no_line_and_none_runs_on_into_the_next(flights: Path, names: bool, width: int) -> None:
    document = checkpoint_document(sf.open(str(flights)).open())
    shown = hostile(document) if names else document

    def drawn(*, color: bool) -> list[str]:
        return [*lines_of(checkpoint_page(shown, 0), Look(width, color=color))]

    painted = drawn(color=True)
    assert [click.unstyle(line) for line in painted] == drawn(color=False)
    assert any("\x1b" in line for line in painted)
    for line in painted:
        styles = re.findall(r"\x1b\[(\d+)m", line)
        assert not styles or styles[-1] == "0"
        assert "\x1b" not in re.sub(r"\x1b\[\d+m", "", line)


def test_a_painted_text_that_is_cut_or_wrapped_keeps_its_colors() -> None:
    text = f"one {click.style('two three four', fg='red')} five"
    assert render.wrap(f"{text} {'x' * 12}", 20) == [
        f"one {click.style('two three four', fg='red')}",
        f"five {'x' * 12}",
    ]
    assert render.shorten(text, 9) == f"one {click.style('two ', fg='red')}…"


DAY_US = 86_400 * 10**6


@pytest.mark.parametrize(
    ("found", "text"),
    [
        *((words.size(number), text) for number, text in ((0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"))),
        *((words.size(number), text) for number, text in ((1024**2 - 1, "1.0 MiB"), (5 * 1024**3, "5.0 GiB"))),
        *((words.age(0, at_us), text) for at_us, text in ((5 * 10**6, "5 s"), (61 * 10**6, "1 min"))),
        *((words.age(0, at_us), text) for at_us, text in ((DAY_US // 2, "12 h"), (3 * DAY_US, "3 d"))),
        (words.age(10, -(10**6)), ""),
        (words.published(0, 3 * DAY_US), "1970-01-01 00:00:00 UTC, 3 d ago"),
        (words.published(DAY_US, 0), "1970-01-02 00:00:00 UTC"),
        (words.moment(2**53 - 1)[:5], "2255-"),
        (words.moment(2**60), "9999-12-31T00:00:00Z"),
        (words.label("a\nb\x1b[31mc\u202e"), "a\\nb\\x1b[31mc\\u202e"),
        (words.label("größe 日本"), "größe 日本"),
        (render.text_width("日本"), 4),
        (render.text_width(click.style("ab", fg="red")), 2),
        (render.pad("日", 4), "日  "),
        (render.wrap("日本 語", 20), ["日本 語"]),
        (render.wrap("日" * 10 + " " + "本" * 10, 20), ["日" * 10, "本" * 10]),
        (render.wrap("a " + "日" * 12, 21), ["a " + "日" * 9, "日" * 3]),
    ],
)
def test_figures_and_texts_are_for_people(found: object, text: object) -> None:
    assert found == text


def test_lines_are_wrapped_by_the_columns_that_their_characters_take() -> None:
    text = "operator '日本語' is asked for parallelism 99999, which is not within 1 to 32768 日本語" + "語" * 50
    lines = render.wrap(text, 40)
    assert max(map(render.text_width, lines)) == 40
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_a_word_longer_than_a_line_is_broken_behind_a_sign() -> None:
    assert render.wrap("in file:///data/2026/orders-by-day/part.parquet now", 24) == [
        "in file:///data/2026/",
        "orders-by-day/part.",
        "parquet now",
    ]
    assert render.wrap("see " + "x" * 30, 20) == ["see", "x" * 20, "x" * 10]
    assert render.hanging("  a long line with words", 20) == ["  a long line with", "  words"]


def test_a_column_in_which_nothing_stands_is_left_out_unless_more_rows_come() -> None:
    rows = [["a", "", None, "1"]]
    found = drawn(
        Table([Column("x"), Column("y"), Column("z", least=3), Column("n", right=True)], rows), look=Look(width=60)
    )
    assert found == ["  x  z    n", "  a       1"]
    values = Values([{"name": "k", "type": "string"}, {"name": "note", "type": "string"}], [{"k": "a", "note": ""}])
    assert drawn(values, look=Look(width=60))[0] == "  k  note"


def test_a_text_of_millions_of_characters_takes_fifty_lines_and_says_what_is_left_out() -> None:
    lines = render.wrap("x" * 7_000_000, 80)
    assert len(lines) < 55
    assert " ".join(lines).endswith("(and 6,996,000 more characters)")


def test_a_table_that_is_too_wide_leaves_out_optional_columns_and_cuts_flexible_ones() -> None:
    columns = [Column("name", flexible=True), Column("n", right=True), Column("extra", optional=1)]
    rows = [["x" * 30, "1", "y" * 60]]
    wide = ["  name" + " " * 28 + "n", "  " + "x" * 30 + "  1"]
    assert drawn(Table(columns, rows), look=Look(width=80)) == wide
    narrow = Table(columns[:2], [row[:2] for row in rows])
    assert drawn(narrow, look=Look(width=20))[1] == "  " + "x" * 14 + "…  1"


# ---- addresses


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
    [*(("optional", text) for text in ("", "@3", "s@0", f"s@{2**53}")), ("always", "store"), ("never", "s@3")],
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


# ---- failures


def every_error() -> list[type[errors.CheckpointError]]:
    found, left = [], [errors.CheckpointError]
    while left:
        found += left[0].__subclasses__()
        left = left[1:] + left[0].__subclasses__()
    return [error for error in found if error.__module__ == "stateformat.errors"]


def test_every_class_of_error_has_its_exit_status() -> None:
    statuses = {error.__name__: failures.failure_of(error("why")).status for error in every_error()}
    misuse, refused, unavailable = "InvalidInput", "InvalidState RestoreRefused PublishConflict JobMismatch", "NotFound"
    refused += " UnsupportedFormat DamagedCheckpoint"
    unavailable += " CheckpointExpired OutcomeUnknown StorageError"
    expected = ((misuse, 2), (refused, 1), (unavailable, 3))
    assert statuses == {name: status for names, status in expected for name in names.split()}


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


# ---- rows as text

# Each column with three values: a usual one, null in the second row, and an extreme one.
COLUMNS: dict[str, tuple[pa.DataType, Any, Any]] = {
    "flag": (pa.bool_(), True, False),
    "n": (pa.int64(), 2**62, -1),
    "x": (pa.float64(), 1.5, math.nan),
    "text": (pa.string(), 'q"\\\n\x00\x1fé☃', ""),
    "raw": (pa.binary(), b"\x00\xff", b""),
    "day": (pa.date32(), datetime.date(2020, 1, 2), datetime.date(1969, 12, 31)),
    "at": (
        pa.timestamp("us"),
        datetime.datetime(2020, 1, 2, 3, 4, 5, 6),  # noqa: DTZ001 - the type has no zone
        datetime.datetime(1969, 12, 31, 23, 59, 59, 999999),  # noqa: DTZ001
    ),
    "utc": (
        pa.timestamp("us", "UTC"),
        datetime.datetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC),
        datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC),
    ),
    "price": (pa.decimal128(38, 2), decimal.Decimal("-1.20"), decimal.Decimal("0.00")),
    "list": (pa.list_(pa.int64()), [1, None], []),
    "struct": (
        pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))]),
        {"a": 1, "b": ["x", None]},
        {"a": None, "b": None},
    ),
    "map": (pa.map_(pa.string(), pa.int64()), [("k", 1), ("l", None)], []),
}
SCHEMA = pa.schema([(name, kind) for name, (kind, *_) in COLUMNS.items()])
ROWS: list[dict[str, Any]] = [
    {name: first for name, (_, first, _) in COLUMNS.items()},
    dict.fromkeys(COLUMNS),
    {name: last for name, (_, _, last) in COLUMNS.items()},
]


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


def test_a_history_of_large_numbers_fits_a_narrow_page() -> None:
    entry = {
        "checkpoint_id": 1234, "kind": "checkpoint", "created_at_us": 1795376807688150, "operators": 3, "finished": 1,
        "partially_finished": 1, "totals": {"rows": 100_671, "bytes": 500_000}, "parent": None, "stop": None,
    }  # fmt: skip
    document = {
        "store": "file:///store", "job_id": "job", "job_name": "", "checkpoints": [entry], "cut_off": [], "damaged": [],
        "lost": [], "savepoints": [], "ended_by": None, "strays": None,
    }  # fmt: skip
    for width in (60, 80):
        lines = drawn(*history_page(document, 0), look=Look(width=width))
        assert max(map(len, lines)) <= width
        assert "100,671  488.3 KiB" in lines[-1]


def test_a_question_ends_as_it_is() -> None:
    assert words.sentence("nothing comes; does the job run?") == "Nothing comes; does the job run?"
    assert words.sentence("nothing comes") == "Nothing comes."


def test_a_checkpoint_without_a_time_is_listed_without_one() -> None:
    result = {
        "checkpoint_id": 1,
        "kind": "savepoint",
        "created_at_us": 0,
        "standing": "whole",
        "certain": True,
        "problem_count": 0,
    }
    assert pages_of._result(result)[1] == ""


def test_a_number_in_a_narrow_table_is_whole_and_texts_are_cut() -> None:
    columns = [{"name": "n", "type": "int64"}, {"name": "text", "type": "string"}]
    rows = [{"n": -(2**63) + i, "text": "x" * 200} for i in range(2)]
    found = "\n".join(drawn(Values(columns, rows), look=Look(width=42)))
    assert all(str(row["n"]) in found for row in rows)
    assert "x" * 8 in found
    assert "x" * 40 not in found

"""The short table of the README: what users ask first, from the rows of docs/benchmarks.md."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

BEGIN, END = "<!-- asked:begin -->\n", "<!-- asked:end -->"
_ALTERNATIVES = re.compile(r"\{(.*?)\}")
_MARK = re.compile(r" ?(\*\*missed[^*]*\*\*)")


class Asked(NamedTuple):
    """A line: what it says, and whose figures stand in it, one behind the other.

    In names of rows ``{a|b}`` stands for either. ``against``: of rows with one name, those that are
    measured against this.
    """

    what: str
    rows: tuple[str, ...]
    against: str = ""

    @property
    def names(self) -> list[str]:
        """The names of its rows, in order."""
        found = []
        for pattern in self.rows:
            text = _ALTERNATIVES.sub("{}", pattern)
            choices = [each.split("|") for each in _ALTERNATIVES.findall(pattern)]
            found += [text.format(*chosen) for chosen in itertools.product(*choices)]
        return found


_PER_KEY = "Spark runtime, plain function of a key, {} keys, {} rows an epoch"
_MORE_PER_KEY = _PER_KEY.format("5,000,000", "20,000")
_AGGREGATE = "Spark runtime, `aggregate`, {} rows an epoch"
_FIVE_MILLION = "Spark runtime, `aggregate`, 5,000,000 keys in the state"
_ON_SPARK = "Spark runtime, {}, 100,000 keys, {{2,000|200,000}} rows an epoch"
_IN_PROCESS = "in process, {}, {{100,000 keys, batches of 65,536|5,000,000 keys, batches of 1,000,000}} rows"
_CHANGED = "in process, 1,000 of 1,000,000 keys changed, {}"

ASKED = (
    Asked(
        "on Spark, plain function of a key: 100k keys, 2k, 20k, 200k rows an epoch; 5M keys, 20k rows",
        (_PER_KEY.format("100,000", "{2,000|20,000|200,000}"), _MORE_PER_KEY),
        "transformWithState with rows",
    ),
    Asked(
        "the same: 100k keys, 2k, 20k rows an epoch; 5M keys, 20k rows",
        (_PER_KEY.format("100,000", "{2,000|20,000}"), _MORE_PER_KEY),
        "applyInPandasWithState",
    ),
    Asked(
        "on Spark, `aggregate`, 2k rows an epoch: 100, 100k, 5M keys",
        (_AGGREGATE.format("{100|100,000|5,000,000} keys, 2,000"),),
    ),
    Asked(
        "on Spark, `aggregate`, 200k rows an epoch: 100, 100k, 5M keys",
        (_AGGREGATE.format("{100|100,000} keys, 200,000"), f"{_FIVE_MILLION}, 200,000 rows an epoch"),
    ),
    Asked(
        "on Spark, `aggregate`, 2M rows an epoch: 100, 100k, 5M keys",
        (_AGGREGATE.format("{100|100,000|5,000,000} keys, 2,000,000"),),
    ),
    Asked("on Spark, tumbling window: 2k, 200k rows an epoch", (_ON_SPARK.format("tumbling window"),)),
    Asked("on Spark, `deduplicate`: 2k, 200k rows an epoch", (_ON_SPARK.format("`deduplicate`"),)),
    Asked(
        "on Spark, join with a bounded table: 2k, 200k rows an epoch",
        (_ON_SPARK.format("join with a table of 100,000 rows"),),
    ),
    Asked("on Spark, an epoch of one row", (_AGGREGATE.format("100 keys, 1").replace("rows", "row"),)),
    Asked(
        "on Spark, whole reads of state: 16, 64, 128 workers",
        ("Spark runtime, whole reads of state, {16|64|128} workers",),
    ),
    Asked(
        "on Spark, an epoch of each of ten jobs in one session",
        ("Spark runtime, an epoch of each of 10 jobs in one session, 100,000 keys, 20,000 rows",),
    ),
    Asked(
        "on Spark, resume with 5M keys, to the end of the first epoch",
        (f"{_FIVE_MILLION}: resume, to the end of the first epoch",),
    ),
    Asked("on Spark, 4 → 6 subtasks of 5M keys", (f"{_FIVE_MILLION}: 4 → 6, published",)),
    Asked(
        "restore of 5M keys into live state, then a `get` of 50,000",
        ("restore of 5,000,000 keys into live state, then one `get` of 50,000 keys",),
    ),
    Asked("in process, 1,000 rows, parallelism 256", ("in process, 1,000 rows, parallelism 256",)),
    Asked("in process, `aggregate` with updates: 100k, 5M keys", (_IN_PROCESS.format("aggregate with updates"),)),
    Asked("in process, tumbling window: 100k, 5M keys", (_IN_PROCESS.format("tumbling windows"),)),
    Asked("in process, `deduplicate`: 100k, 5M keys", (_IN_PROCESS.format("deduplicate"),)),
    Asked("in process, 1,000 of 1M keys changed, a checkpoint a second", (_CHANGED.format("a checkpoint a second"),)),
    Asked("the same: bytes of a checkpoint a key", (_CHANGED.format("bytes of a checkpoint a key"),)),
    Asked("500 columns: write, restore, stream", ("500 columns of 40,000 rows: {write|restore|stream}",)),
    Asked("500 columns: full validation", ("500 columns of 40,000 rows: full validation",)),
    Asked("200 states: write, restore, stream", ("200 states of 25,000 rows: {write|restore|stream}",)),
    Asked("200 states: full validation", ("200 states of 25,000 rows: full validation",)),
    Asked("lists: write, restore, stream", ("500,000 rows of two lists: {write|restore|stream}",)),
    Asked("lists: full validation", ("500,000 rows of two lists: full validation",)),
    Asked("low-cardinality text: bytes", ("2,000,000 rows of three texts that repeat: bytes",)),
    Asked(
        "publish with 10,000 records kept, on a local folder", ("publish with 10,000 records kept, on a local folder",)
    ),
    Asked("publish with 10,000 records kept, on S3", ("publish with 10,000 records kept, on S3",)),
    Asked(
        "open and plan a rescale of a million handles: all keyed, mixed",
        ("open and plan a rescale of one million handles, {all keyed|mixed}",),
    ),
    Asked("write 5M clustered rows", ("write 5M clustered rows",)),
    Asked("write 5M unordered rows", ("write 5M unordered rows",)),
    Asked("restore 5M rows", ("restore 5M rows",)),
    Asked("metadata-only rescale 4 → 6 of 5M rows", ("metadata-only rescale 4 → 6 of 5M rows",)),
    Asked(
        "`rewrite` of 5M rows on Spark, max parallelism 128 → 256",
        ("`rewrite` on Spark, 5,000,000 rows, 4 → 6 subtasks, max parallelism 128 → 256",),
    ),
    Asked("`bootstrap` of 5M rows on Spark", ("`bootstrap` of 5,000,000 rows on Spark, parallelism 4",)),
    Asked(
        '`spark.read.format("stateformat")`, sum over 5M rows',
        ('`spark.read.format("stateformat")`, sum over 5,000,000 rows, 2 partitions',),
    ),
    Asked("`ckpt inspect`, cold process", ("`ckpt inspect` of a local checkpoint, cold process",)),
    Asked(
        "`ckpt get` of one of 5M keys, cold process",
        ("`ckpt get` of one key of 5,000,000 rows in three layers, cold process",),
    ),
    Asked(
        "`ckpt diff` of 5M rows, 1 % changed: a delta, written anew",
        ("`ckpt diff` of 5,000,000 rows, 1 % changed, {a delta|written anew}",),
    ),
    Asked(
        "Spark's HDFS-backed store read: long → long, string → string",
        ("Spark's HDFS-backed store read, 1,000,000 keys, {long → long|string → string}",),
    ),
    Asked(
        "Spark's RocksDB store read: long → long, string → string",
        ("Spark's RocksDB store read, 1,000,000 keys, {long → long|string → string}",),
    ),
    Asked("Flink's savepoint read: long → long", ("Flink's canonical savepoint read, 4,000,000 entries, long → long",)),
    Asked(
        "Flink's savepoint read: string → string",
        ("Flink's canonical savepoint read, 1,000,000 entries, string → string",),
    ),
)


class _Cells(NamedTuple):
    what: str
    ours: str
    against: str
    ratio: str
    cpu: str
    budget: str

    @property
    def figure(self) -> str:
        """Its ratio, or its own figure if it has none; and its mark."""
        mark = _MARK.search(self.budget)
        return f"{self.ours if self.ratio == '–' else self.ratio}{f' {mark[1]}' if mark else ''}"


def rows_of(page: str) -> list[_Cells]:
    """The rows of all tables of a page."""
    rows = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in page.splitlines() if line[:2] == "| ")
    return [_Cells(*cells) for cells in rows if len(cells) == len(_Cells._fields)]


def line(asked: Asked, page: list[_Cells]) -> str:
    """Its line, from the rows of the page. Those that were never measured are left out."""
    rows = [row for name in asked.names for row in page if row.what == name and row.against.startswith(asked.against)]
    against = ", ".join(dict.fromkeys(row.against.partition(": ")[0] for row in rows))
    budgets = ", ".join(dict.fromkeys(_MARK.sub("", row.budget) for row in rows))
    return f"| {asked.what} | {against} | {' · '.join(row.figure for row in rows)} | {budgets} |"


def with_table(readme: str, page: str) -> str:
    """The README with its short table, from the page."""
    rows = rows_of(page)
    lines = ["| what | against | ratio | goal |", "|---|---|---|---|", *(line(asked, rows) for asked in ASKED)]
    head, begin, rest = readme.partition(BEGIN)
    return head + begin + "\n".join(lines) + "\n" + rest[rest.index(END) :]

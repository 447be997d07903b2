"""The table with which docs/foreign.md begins: what can be done with the checkpoints of Spark and
of Flink, from the table that the advice of ``ckpt`` is made of.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from stateformat.backends.foreign.advice import FLINK, SPARK, TASKS, Way

FOREIGN_PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "foreign.md"
_BLOCK: Final = re.compile(r"(<!-- tasks:begin -->\n).*?(<!-- tasks:end -->)", re.DOTALL)


def with_tasks(page: str) -> str:
    """The page with its table of tasks up to date."""
    rows = ["| task | Spark query | Flink savepoint or checkpoint |", "|---|---|---|"]
    for task, ways in TASKS.items():
        spark, flink = ways[SPARK], ways[FLINK]
        rows.append(f"| {task} | {_cell(spark, 'QUERY')} | {_cell(flink, 'PATH') if flink != spark else 'the same'} |")
    return _BLOCK.sub(lambda block: f"{block[1]}{chr(10).join(rows)}\n{block[2]}", page)


def _cell(way: Way, url: str) -> str:
    return f"**{'yes' if way.can else 'no'}**: {way.told.format(url=url)}"

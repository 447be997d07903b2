"""`make bench`: every budget as a ratio measured side by side in this run, and the table for the README.

Each module ``bench_*`` of this folder has a function ``measure()`` that gives a list of rows, or yields them; one that draws has ``save() -> str`` too, which
a whole run calls at its end. Ratios, not times: machines are noisy,
and both sides of a ratio run in turn on the same one. ``python -m benchmarks NAME …`` runs some of the modules; with ``--full``
those that know it (their ``measure`` takes ``full``) leave nothing out, however long it takes.
"""

from __future__ import annotations

import importlib
import inspect
import os
import platform
import re
import sys
from pathlib import Path

from benchmarks.measuring import Row

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
FULL = "--full"
TABLE = re.compile(r"(<!-- bench:begin -->\n).*?(<!-- bench:end -->)", re.DOTALL)


def machine() -> str:
    """What the figures were measured on, in a line."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores, {memory_gib:.0f} GiB, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| what | ours | against | ratio | budget |", "|---|---|---|---|---|"]
    lines += [f"| {row.what} | {row.ours} | {row.against} | {row.ratio} | {row.budget} |" for row in rows]
    return "\n".join(lines) + f"\n\nMeasured on: {machine()}.\n"


def main() -> None:
    """Run the modules named, or all, and put the table of a whole run into the README."""
    named = [name for name in sys.argv[1:] if name != FULL]
    names = named or sorted(path.stem for path in HERE.glob("bench_*.py"))
    rows: list[Row] = []
    modules = [importlib.import_module(f"benchmarks.{name}") for name in names]
    for module in modules:
        knows_full = "full" in inspect.signature(module.measure).parameters
        for row in module.measure(**({"full": FULL in sys.argv} if knows_full else {})):
            print(f"{row.what}: {row.ours} against {row.against}: {row.ratio} (budget {row.budget})", flush=True)
            rows.append(row)
    if not named:
        README.write_text(TABLE.sub(lambda match: match[1] + table(rows) + match[2], README.read_text()))
        print("The table in README.md is from this run.")
        for module in modules:
            if hasattr(module, "save"):
                print(module.save())


if __name__ == "__main__":
    main()

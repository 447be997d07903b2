"""`make bench`: every budget as a ratio measured side by side in this run, and the tables for the README.

Each module ``bench_*`` of this folder has a function ``measure()`` that gives a list of rows, or yields them; one that draws has ``save() -> str`` too, which
a whole run calls at its end. Ratios, not times: machines are noisy, and both sides of a ratio run in turn on the same one.

A whole run replaces the table of each module in README.md as soon as the module is done. ``python -m benchmarks NAME …`` (or ``make bench
ONLY="NAME …"``) runs some of the modules, ``segments`` or ``bench_segments``, and prints; with ``--update-readme`` it replaces their tables, too. With
``--full`` those that know it (their ``measure`` takes ``full``) leave nothing out, however long it takes.
"""

from __future__ import annotations

import importlib
import inspect
import os
import platform
import sys
from pathlib import Path

from benchmarks.measuring import Row

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
FULL, UPDATE = "--full", "--update-readme"
END = "<!-- bench:end -->"


def machine() -> str:
    """What the figures were measured on, in a line."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores, {memory_gib:.0f} GiB, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| what | ours | against | ratio | processor time | budget |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = row.what, row.ours, row.against, row.ratio, row.cpu_text, f"{row.budget} {row.mark}".rstrip()
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def replace_section(page: str, name: str, title: str, rows: list[Row], measured_on: str) -> str:
    """The page with the table of one module replaced, or put behind the others."""
    begin = f"<!-- {name} -->\n"
    head, found, rest = page.partition(begin)
    if found:
        tail = rest[rest.index("<!-- bench") :]
    else:
        head, end, rest = page.partition(END)
        tail = end + rest
    return f"{head}{begin}{title}\n\n{table(rows)}\nMeasured on: {measured_on}.\n\n{tail}"


def main() -> None:
    """Run the modules named, or all, and put the tables of a whole run into the README."""
    named = [f"bench_{name.removeprefix('bench_')}" for name in sys.argv[1:] if not name.startswith("--")]
    names = named or sorted(path.stem for path in HERE.glob("bench_*.py"))
    modules = [importlib.import_module(f"benchmarks.{name}") for name in names]
    for name, module in zip(names, modules, strict=True):
        rows: list[Row] = []
        knows_full = "full" in inspect.signature(module.measure).parameters
        for row in module.measure(**({"full": FULL in sys.argv} if knows_full else {})):
            rows.append(row)
            print(table([row]).splitlines()[-1], flush=True)
        if rows and (UPDATE in sys.argv or not named):
            title = (module.__doc__ or name).partition("\n")[0]
            README.write_text(replace_section(README.read_text(), name, title, rows, machine()))
            print(f"The table of {name} in README.md is from this run.", flush=True)
    if not named:
        for module in modules:
            if hasattr(module, "save"):
                print(module.save())


if __name__ == "__main__":
    main()

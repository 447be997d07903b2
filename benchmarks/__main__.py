"""`make bench`: every budget as a ratio measured side by side, and the tables for the README.

Each module ``bench_*`` has a function ``measure()`` that gives rows, as a list or one by one; one
that draws has ``save() -> str`` too, which a whole run calls at its end. A whole run replaces the
table of each module in README.md as soon as the module is done. ``python -m benchmarks NAME …`` (or
``make bench ONLY="NAME …"``) runs some of them, ``segments`` or ``bench_segments``, and prints;
with ``--update`` it replaces their tables, too. A name that is the beginning of several, ``spark``,
stands for all of them. With ``--full`` those whose ``measure`` takes ``full`` leave nothing out;
``--line=TEXT`` prints only the lines in whose names the text stands, and a ``measure`` that takes
``line`` does only the work for these.
"""

from __future__ import annotations

import importlib
import inspect
import os
import platform
import sys
import time
from pathlib import Path

from benchmarks import asked
from benchmarks.measuring import Row

HERE = Path(__file__).parent
README, PAGE = HERE.parent / "README.md", HERE.parent / "docs" / "benchmarks.md"
FULL, UPDATE, LINE = "--full", "--update", "--line="
END = "<!-- bench:end -->"
MINUTES = 60
"""What a whole run may take on two cores."""


def machine() -> str:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    where = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores, {memory_gib:.0f} GiB, {where}"


def table(rows: list[Row]) -> str:
    lines = ["| what | ours | against | ratio | processor time | budget |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = row.what, row.ours, row.against, row.ratio, row.cpu_text, f"{row.budget} {row.mark}".rstrip()
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def replace_section(page: str, name: str, title: str, rows: list[Row], measured_on: str) -> str:
    begin = f"<!-- {name} -->\n"
    head, found, rest = page.partition(begin)
    if found:
        tail = rest[rest.index("<!-- bench") :]
    else:
        head, end, rest = page.partition(END)
        tail = end + rest
    return f"{head}{begin}{title}\n\n{table(rows)}\nMeasured on: {measured_on}.\n\n{tail}"


def modules_of(name: str) -> list[str]:
    """The module of a name, or those whose names go on behind it."""
    stem = f"bench_{name.removeprefix('bench_')}"
    return (
        [stem] if (HERE / f"{stem}.py").exists() else sorted(path.stem for path in HERE.glob(f"{stem}_*.py")) or [stem]
    )


def main() -> None:
    """Run the modules named, or all, and put the tables of a whole run into the pages."""
    named = [stem for name in sys.argv[1:] if not name.startswith("--") for stem in modules_of(name)]
    line = next((option.removeprefix(LINE) for option in sys.argv[1:] if option.startswith(LINE)), "")
    names = named or sorted(path.stem for path in HERE.glob("bench_*.py"))
    modules = [importlib.import_module(f"benchmarks.{name}") for name in names]
    begun = time.perf_counter()
    for name, module in zip(names, modules, strict=True):
        rows: list[Row] = []
        before = time.perf_counter()
        known = {"full": FULL in sys.argv, "line": line}
        takes = inspect.signature(module.measure).parameters
        for row in module.measure(**{option: value for option, value in known.items() if option in takes}):
            if line not in row.what:
                continue
            rows.append(row)
            print(table([row]).splitlines()[-1], flush=True)
        if rows and not line and (UPDATE in sys.argv or not named):
            title = (module.__doc__ or name).partition("\n")[0]
            PAGE.write_text(replace_section(PAGE.read_text(), name, title, rows, machine()))
            README.write_text(asked.with_table(README.read_text(), PAGE.read_text()))
            print(f"The table of {name} in docs/benchmarks.md is from this run.", flush=True)
        print(f"{name} took {time.perf_counter() - before:.0f} s.", flush=True)
    if not (named or line):
        for module in modules:
            if hasattr(module, "save"):
                print(module.save())
        taken = (time.perf_counter() - begun) / 60
        print(f"All took {taken:.0f} minutes{'' if taken <= MINUTES else f', more than {MINUTES}'}.")


if __name__ == "__main__":
    main()

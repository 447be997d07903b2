"""The house: which way imports go, what stands behind a door, how long functions are, what stays
unimported until it is used.
"""

from __future__ import annotations

import ast
import importlib
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
WINGS = ("redistribution", "backends", "tools")
LAYERS = ("stateformat", *WINGS)
ORDER = """
_lazy words errors ttl graph keys model findings paths schema parquet storage tables segments record manifest rescaling states rules documents
pages.blocks pages.style pages.elements pages.drawings pages.html pages.checkpoint pages.restore pages.difference pages.report pages
redistribution snapshot reading formats history validation publication
pins repairing requests inspecting store reporting
backends.foreign.advice backends.foreign.limits backends.foreign.source backends.foreign.byte_strings backends.foreign.framing backends.foreign.cursor backends.foreign.sst
backends.foreign.spark backends.foreign.spark.repartition
backends.foreign.flink
backends.foreign.checkpoint backends.foreign.flink.writing backends.foreign.formats backends.foreign
backends.storage.checks backends.storage.local_tree backends.storage.local backends.storage.memory
backends.storage.object_answers backends.storage.object_clients backends.storage.objects backends.storage.s3 backends.storage.filesystems
backends.storage backends.storage.testing backends.state
backends.dataflow.api backends.dataflow.casting backends.dataflow.operators backends.dataflow.operators.per_key backends.dataflow.steps backends.dataflow.graph backends.dataflow.compile
backends.dataflow.flow backends.dataflow backends.dataflow.events backends.dataflow.chained_operator backends.dataflow.source_reader backends.dataflow.chain backends.dataflow.task_tracker backends.dataflow.coordinator
backends.dataflow.task_inputs backends.dataflow.task_states backends.dataflow.task
backends.connectors.sources backends.connectors.sinks backends.connectors.sql
backends.connectors backends.tasks backends.rewrite backends.bootstrap backends.importing
backends.querying backends.exporting backends.origin
backends.runtime backends.dataflow.testing backends.local
backends.spark.worker_process backends.spark.sessions backends.spark.data_source backends.spark.arrow backends.spark.offsets backends.spark.files backends.spark.source backends.spark.frames backends.spark.messages backends.spark.task_cache backends.spark.task_run backends.spark.epoch backends.spark.run
backends.spark.runtime backends.spark.rewrite backends.spark.bootstrapping backends.spark
tools.ckpt.synonyms tools.ckpt.exit_status tools.ckpt.interrupts tools.ckpt.json_text tools.ckpt.text tools.ckpt.output tools.ckpt.pages
tools.ckpt.watch tools.ckpt.functions tools.ckpt.options tools.ckpt.files tools.ckpt.kept tools.ckpt.topology
tools.ckpt.transforms tools.ckpt.published tools.ckpt.repartitioned tools.ckpt.programs tools.ckpt.start_plan tools.ckpt.job_reports
tools.ckpt.completion tools.ckpt.commands.looking tools.ckpt.commands.running tools.ckpt.commands.changing
tools.ckpt.main tools.ckpt.__main__ tools.ckpt.docs tools.jobs __main__
"""
"""Every room, lowest first: a room imports rooms before it. A file that stands in no room is one of
its own.
"""
ROOMS = ORDER.split()
HALLS = {
    f"stateformat{name}"
    for name in (
        "",
        ".backends",
        ".backends.dataflow",
        ".backends.foreign",
        ".backends.spark",
        ".backends.storage",
        ".pages",
        ".tools",
        ".tools.ckpt",
        ".tools.ckpt.commands",
    )
}
"""Folders of rooms: a file in one is a room of its own."""
UPWARD = {
    ("stateformat.reading.checkpoint", "stateformat.redistribution"),
    ("stateformat.__main__", "stateformat.tools.ckpt.__main__"),
}
"""The imports upward: ``Checkpoint.plan_restore`` asks the planner, and ``python -m stateformat``
is a program. The door of the whole package may name everything.
"""
FUNCTION_LINES_MAX = 70
SLACK = 60
"""Lines by which a budget may exceed the code: less code, lower budget."""


class Use(NamedTuple):
    """An import of one of our names, at any depth: in a function and for type checkers too."""

    by: str
    line: int
    module: str
    name: str

    def __str__(self) -> str:
        return f"{MODULES[self.by].relative_to(ROOT)}:{self.line} imports {self.name or 'all'} of {self.module}"


def _modules() -> dict[str, Path]:
    """Every module of the package by its name, in a checkout and in an unpacked sdist."""
    package = ROOT / "stateformat"
    # The wings are links in a checkout, which `rglob` follows only as a start.
    paths = {path for start in (package, *(package / wing for wing in WINGS)) for path in start.rglob("*.py")}
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(paths)}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


MODULES = _modules()
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py"}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@cache
def listed(package: str) -> frozenset[str]:
    """What a door lists: its ``__all__``, or the names that it imports for type checkers."""
    names = {
        item.value
        for node in tree(package).body
        if isinstance(node, ast.Assign) and any(isinstance(at, ast.Name) and at.id == "__all__" for at in node.targets)
        for item in ast.walk(node.value)
        if isinstance(item, ast.Constant)
    }
    inside = (node for node in ast.walk(tree(package)) if isinstance(node, ast.ImportFrom))
    return frozenset(names | {alias.asname or alias.name for node in inside for alias in node.names})


@cache
def all_imports(module: str) -> tuple[Use, ...]:
    """Every import of a file, by absolute names; ``module`` is the submodule where one is imported
    by its name.
    """
    here = module.split(".") if module in PACKAGES else module.split(".")[:-1]
    found = []
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found += [Use(module, node.lineno, alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = here[: len(here) + 1 - node.level] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                named = f"{source}.{alias.name}"
                door = source in PACKAGES and alias.name in listed(source) and source != module
                found.append(Use(module, node.lineno, named if named in MODULES and not door else source, alias.name))
    return tuple(found)


def uses() -> Iterator[Use]:
    """Every import of ours by ours."""
    return (use for module in MODULES for use in all_imports(module) if use.module in MODULES)


def room_of(module: str) -> str:
    """The package that a module stands in; a file of a hall, and a door itself, is its own room."""
    parent = module.rpartition(".")[0]
    return module if module in PACKAGES or parent in HALLS else parent


def place_of(module: str) -> int | None:
    """Where a module's room stands in the order; None for the doors of halls that hold nothing but
    rooms.
    """
    room = room_of(module).removeprefix("stateformat.")
    room = "redistribution" if room.startswith("redistribution") else room  # its files and its rules use each other
    return ROOMS.index(room) if room in ROOMS else None


def layer_of(module: str) -> int:
    parts = module.split(".")
    return LAYERS.index(parts[1]) if len(parts) > 1 and parts[1] in WINGS else 0


def allowed_upward(use: Use) -> bool:
    return use.by == "stateformat" or (use.by, use.module) in UPWARD


def lines(found: Iterator[Use]) -> str:
    return "\n".join(sorted(map(str, found)))


def test_imports_go_strictly_downward() -> None:
    assert not lines(use for use in uses() if layer_of(use.module) > layer_of(use.by) and not allowed_upward(use))


def test_nobody_imports_tests_benchmarks_or_examples() -> None:
    others = (use for module in MODULES for use in all_imports(module))
    assert not lines(use for use in others if use.module.split(".")[0] in ("tests", "benchmarks", "examples"))


def test_the_imports_upward_are_still_there() -> None:
    assert {(use.by, use.module) for use in uses()} >= UPWARD


def test_a_room_imports_only_rooms_before_it() -> None:
    def upward(use: Use) -> bool:
        by, place = place_of(use.by), place_of(use.module)
        return by is not None and place is not None and place > by and not allowed_upward(use)

    assert not lines(use for use in uses() if upward(use))


def test_what_is_done_with_a_checkpoint_is_decided_by_its_capabilities() -> None:
    """``system`` is a word to show."""

    def asked(node: ast.AST) -> list[ast.AST]:
        match node:
            case ast.If() | ast.IfExp() | ast.While():
                return [node.test]
            case ast.BoolOp():
                return [*node.values]
            case ast.Compare():
                return [node.left, *node.comparators]
            case ast.UnaryOp(op=ast.Not()):
                return [node.operand]
        return []

    found = [
        f"{MODULES[module].relative_to(ROOT)}:{one.lineno}"
        for module in MODULES
        for node in ast.walk(tree(module))
        for one in asked(node)
        if isinstance(one, ast.Attribute) and one.attr == "system"
    ]
    assert not found, f"these ask for the system, not for what it can do: {found}"


def test_every_room_has_its_place_in_the_order() -> None:
    open_doors = {"stateformat", "stateformat.backends", "stateformat.tools", "stateformat.tools.ckpt"}
    open_doors |= {"stateformat.tools.ckpt.commands"}
    assert {module for module in MODULES if place_of(module) is None} == open_doors
    assert len(set(ROOMS)) == len(ROOMS)


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_by_its_old_name_cannot_be_imported_and_the_error_says_the_new_one(wing: str) -> None:
    """In a clone its folder lies on the path, and a second copy would have classes of its own."""
    found = subprocess.run(
        [sys.executable, "-c", f"import {wing}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert f"import stateformat.{wing}" in found.stderr


DOORS_MAX = 49
"""Packages that offer names of their modules. The number only falls."""


def test_doors_are_few() -> None:
    assert sum(bool(listed(package)) for package in PACKAGES) <= DOORS_MAX


def test_nobody_reaches_past_a_door() -> None:
    def past(use: Use) -> bool:
        room = room_of(use.module)
        # An inner room has no door: whoever needs it imports its modules.
        return room != use.module and bool(listed(room)) and not f"{use.by}.".startswith(f"{room}.")

    assert not lines(use for use in uses() if past(use) and use.by != "stateformat")


def test_no_name_of_a_door_is_that_of_a_module_behind_it() -> None:
    """Of a lazy door such a name is the module, once anybody has imported that."""
    doubles = {
        f"{package}.{alias.name}"
        for package in PACKAGES
        if "= lazy(" in MODULES[package].read_text()
        for node in ast.walk(tree(package))
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
    assert doubles
    assert not doubles & set(MODULES)


def test_no_circle_of_imports_hides_in_a_function_or_behind_type_checking() -> None:
    graph: dict[str, set[str]] = {module: set() for module in MODULES if module not in PACKAGES}
    for use in uses():
        if use.by in graph and use.module in graph and use.by != use.module:
            graph[use.by].add(use.module)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


def test_inside_a_wing_imports_are_relative_and_out_of_it_absolute() -> None:
    wrong = []
    for module in MODULES:
        if module.startswith("stateformat.tools.jobs.") or module.endswith(".pyspark_stateformat"):
            continue  # started by their path, or at the top of a wheel: no package around them
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ImportFrom) and (node.module or node.level):
                target = next(use.module for use in all_imports(module) if use.line == node.lineno)
                if (
                    module != "stateformat"
                    and target in MODULES
                    and (layer_of(target) == layer_of(module)) != bool(node.level)
                ):
                    wrong.append(f"{MODULES[module].relative_to(ROOT)}:{node.lineno}")
    assert not wrong


def test_the_checks_of_imports_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every import begins with `stateformat`, so a check by the first part of the name would pass
    # whatever is imported.
    text = "from stateformat.tools.ckpt.main import main\ndef f():\n    from .modes import cut_keyed\n"
    monkeypatch.setitem(globals(), "tree", lambda module: ast.parse(text))
    monkeypatch.setitem(globals(), "listed", lambda package: frozenset())
    found = list(all_imports.__wrapped__("stateformat.redistribution.modes"))
    assert [use.module for use in found] == ["stateformat.tools.ckpt.main", "stateformat.redistribution.modes"]
    assert layer_of(found[0].module) > layer_of(found[0].by)
    assert not allowed_upward(found[0])


@pytest.mark.parametrize(
    ("part", "forbidden"),
    [
        (
            "redistribution",
            "stateformat.storage stateformat.store stateformat.reading stateformat.segments os io pathlib",
        ),
        (
            "backends.dataflow",
            (
                "stateformat.store stateformat.backends.storage stateformat.backends.local stateformat.backends.runtime "
                "stateformat.backends.spark stateformat.backends.connectors pyspark fsspec time random threading os pathlib"
            ),
        ),
    ],
)
def test_pure_parts_reach_no_file_no_executor_and_no_clock(part: str, forbidden: str) -> None:
    names = tuple(f"{name}." for name in forbidden.split())
    # The harness is for authors of operators; it drives the core as executors do, on a store in
    # memory.
    pure = [m for m in MODULES if f"{m}.".startswith(f"stateformat.{part}.") and ".dataflow.testing" not in m]
    assert not lines(use for module in pure for use in all_imports(module) if f"{use.module}.".startswith(names))


def test_the_format_needs_nothing_but_arrow_numpy_and_xxhash() -> None:
    allowed = {"pyarrow", "numpy", "xxhash", "stateformat", *sys.stdlib_module_names}
    core = [module for module in MODULES if layer_of(module) == 0]
    assert not lines(use for module in core for use in all_imports(module) if use.module.split(".")[0] not in allowed)


def test_nothing_imports_the_harness_of_operators() -> None:
    harness = "stateformat.backends.dataflow.testing"
    assert not lines(use for use in uses() if use.module.startswith(harness) and not use.by.startswith(harness))


def test_nothing_unpickles_what_comes_from_a_store() -> None:
    # The suite for authors of storages sends a storage to itself, as Spark would.
    allowed = tuple(f"stateformat.backends.{name}" for name in ("spark", "rewrite", "storage.testing"))
    pickles = {"pickle", "cloudpickle", "marshal", "shelve", "dill"}
    found = (use for module in MODULES if not module.startswith(allowed) for use in all_imports(module))
    assert not lines(use for use in found if use.module.split(".")[0] in pickles)


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_cannot_be_imported_under_its_old_name(wing: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {wing}"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert f"ImportError: import stateformat.{wing}" in done.stderr


def code_lines(path: Path) -> int:
    """The lines of a file that hold code: no blank lines, comments or docstrings."""
    text = path.read_text()
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    found = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in silent
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(found - docstrings)


def row_of(path: Path) -> str:
    """The row of the budget that a file counts for."""
    parts = path.relative_to(ROOT).parent.parts
    parts = parts[1:] if parts[:1] == ("stateformat",) and parts[1:2] and parts[1] in WINGS else parts
    return "/".join(parts[:3] if parts[:2] in (("backends", "foreign"), ("tools", "ckpt")) else parts[:2])


def budgets() -> dict[str, int]:
    """The lines of code that each room may hold, by docs/design/house.md."""
    page = (ROOT / "docs/design/house.md").read_text().partition("## The budget")[2]
    rows = re.findall(r"^\| `(\S+)` \| ([\d,]+) \|", page, re.M)
    return {room: int(lines.replace(",", "")) for room, lines in rows}


def test_no_room_holds_more_code_than_its_budget() -> None:
    """A budget falls with the code. To raise one, change its row in docs/design/house.md, with the
    reason.
    """
    budget = budgets()
    found: Counter[str] = Counter()
    for path in MODULES.values():
        found[row_of(path)] += code_lines(path)
    wrong = {
        room: (found[room], budget.get(room))
        for room in found | budget
        if not found[room] <= budget.get(room, 0) < found[room] + SLACK
    }
    assert not wrong, f"lines of code and budget, by room: {wrong}"


def test_functions_stay_within_seventy_lines_without_their_docstring() -> None:
    long = []
    for module in MODULES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node, clean=False)
                length = (node.end_lineno or 0) - node.lineno + 1 - (docstring.count("\n") + 1 if docstring else 0)
                if length > FUNCTION_LINES_MAX:
                    long.append(f"{module}:{node.lineno} {node.name} has {length} lines")
    assert not long, "\n".join(long)


def test_every_module_and_every_public_function_and_class_has_a_docstring() -> None:
    bare = [module for module in MODULES if ast.get_docstring(tree(module)) is None]
    for module in MODULES:
        for node in tree(module).body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and ast.get_docstring(node) is None:
                bare.append(f"{module}:{node.lineno} {node.name}")
    assert not bare, "\n".join(bare)


def test_nothing_is_left_over() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error")
    assert not [f"{module}: {mark}" for module, path in MODULES.items() for mark in marks if mark in path.read_text()]


def test_nothing_prints_outside_of_tools() -> None:
    printing = [
        f"{module}:{node.lineno}"
        for module in MODULES
        if not module.startswith("stateformat.tools")
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not printing


def modules_after(statement: str, cwd: Path) -> set[str]:
    """Modules that a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=cwd)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        (
            (
                "import contextlib\nfrom stateformat.tools.ckpt.main import main\nimport sys; sys.argv = ['ckpt', '--help']\n"
                "with contextlib.suppress(SystemExit): main()"
            ),
            "pyarrow numpy pyspark s3fs fsspec",
        ),
        ("import stateformat", "pyarrow click pyspark s3fs fsspec pandas stateformat.backends stateformat.tools"),
        ("import stateformat.backends.exporting.export", "pyiceberg deltalake duckdb sqlalchemy pandas"),
        ("import stateformat.backends.spark", "pyspark pandas"),
        # Spark does so in each session that uses a data source, ours or not.
        ("import stateformat.backends.spark.data_source.pyspark_stateformat", "pyarrow numpy stateformat.model"),
        ("import stateformat.backends.dataflow, stateformat.backends.local", "pyspark s3fs fsspec click"),
        ("import stateformat.backends.connectors, stateformat.backends.storage", "pyspark s3fs psycopg"),
    ],
)
def test_what_is_heavy_is_imported_where_it_is_used(statement: str, absent: str, tmp_path: Path) -> None:
    assert modules_after(statement, tmp_path).isdisjoint(absent.split())


@pytest.mark.parametrize("door", [None, "reading", "backends.spark", "backends.storage"])
def test_a_lazy_door_leads_to_every_name_that_it_lists(door: str | None) -> None:
    from importlib import import_module

    package = import_module(f"stateformat.{door}" if door else "stateformat")
    for_checkers = [
        alias.asname
        for block in tree(package.__name__).body
        if isinstance(block, ast.If)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert sorted(for_checkers, key=str) == package.__all__
    assert set(package.__all__) <= set(dir(package))
    for public in package.__all__:
        assert getattr(package, public) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


MOVED = {
    "backends.importing": "Imported ImportSpec import_checkpoint",
    "inspecting": "CheckpointDiff StateChanges StateRange diff_checkpoints",
    "keys": "register_key_hash",
    "requests": "JobRequest RequestAnswer RequestOutcome",
    "schema": "CLEAR DELETE UPSERT",
    "segments": "WriteOptions",
    "states": (
        "broadcast_state committables_state coordinator_state even_split_state in_flight_state list_state map_state "
        "progress_state timers union_state value_state"
    ),
    "storage": "Stats",
}


@pytest.mark.parametrize("home", MOVED)
def test_a_name_that_has_moved_works_and_says_where_it_is(home: str) -> None:
    old = "stateformat.backends.foreign" if home == "backends.importing" else "stateformat"
    root, new = importlib.import_module(old), importlib.import_module(f"stateformat.{home}")
    for name in MOVED[home].split():
        said = rf"{old}\.{name} moves to stateformat\.{home} and leaves here in 0\.3: import it from there"
        with pytest.warns(DeprecationWarning, match=said):
            assert getattr(root, name) is getattr(new, name)
        assert name not in root.__all__


FORMER = {
    "stateformat.Problem": "it is stateformat.Finding now",
    "stateformat.redistribution.Refusal": "it is stateformat.Finding now, with other arguments",
    "stateformat.redistribution.WarningCode": "it is stateformat.ErrorKind now",
    "stateformat.requests.StopRequest": r"write JobRequest\(RequestKind.STOP, ...\)",
    "stateformat.storage.folders_in": "every Storage has all methods now, so call them",
    "stateformat.storage.ListsNames": "every Storage has all methods now, so call them",
}


@pytest.mark.parametrize("name", FORMER)
def test_a_name_that_another_replaces_works_and_says_which(name: str) -> None:
    home, _, old = name.rpartition(".")
    module = importlib.import_module(home)
    with pytest.warns(DeprecationWarning, match=rf"{name} leaves in 0\.3: {FORMER[name]}") as warned:
        assert getattr(module, old) is not None
    assert len(warned) == 1
    assert old not in getattr(module, "__all__", ())


def test_the_root_offers_what_the_author_of_a_runtime_needs() -> None:
    assert len(importlib.import_module("stateformat").__all__) <= 40


SHOWN = ("= lazy(", "def __dir__")


@pytest.mark.parametrize(
    "door", sorted(one for one in PACKAGES if any(how in MODULES[one].read_text() for how in SHOWN))
)
def test_a_door_shows_what_it_offers_and_nothing_that_it_needs_itself(door: str) -> None:
    module = importlib.import_module(door)
    assert [name for name in dir(module) if not name.startswith("__")] == sorted(module.__all__)

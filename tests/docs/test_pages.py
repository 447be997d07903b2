"""What the pages and the examples show runs as it stands, and prints what they say."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import stateformat
from stateformat.backends.local import LocalRun, LocalRuntime, VirtualClock
from stateformat.backends.storage.memory import MemoryStorage
from tests.servers.server import BUCKET, S3Server
from tests.worlds import recipes
from tests.worlds.recipes import DOCS, Recipe, RecipePage, shell

ROOT = Path(__file__).resolve().parents[2]
PAGES = recipes.PAGES
ONE_PROGRAM = ROOT / "docs" / "operators.md"
"""Its snippets go on from each other, and run in this process."""
ELSEWHERE = tuple(ROOT / "docs" / name for name in ("data.md", "bootstrap.md", "moving-from-structured-streaming.md"))
"""Their recipes need a store, files or Spark, and run in tests/data, bootstrap and spark."""
SNIPPETS = recipes.snippets(page for page in PAGES if page not in (ONE_PROGRAM, *ELSEWHERE))


def those_that_start_spark(yes: bool) -> list[Any]:
    return [
        pytest.param(code, printed, id=name)
        for name, code, printed in SNIPPETS
        if (recipes.STARTS_SPARK in code) is yes
    ]


@pytest.mark.parametrize(("code", "printed"), those_that_start_spark(False))
def test_a_python_snippet_runs_as_it_stands_and_prints_what_is_shown(
    code: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})
    assert capfd.readouterr().out == printed or not printed


@pytest.mark.truth
@pytest.mark.parametrize(("code", "printed"), those_that_start_spark(True))
def test_a_snippet_that_starts_spark_runs_as_a_program_and_prints_what_is_shown(
    code: str, printed: str, tmp_path: Path
) -> None:
    # tests/spark has the same in the session that is there.
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed or not printed


def test_the_snippets_of_the_page_on_operators_run_one_after_another_and_print_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "operators"}
    snippets = re.findall(recipes.SNIPPET, ONE_PROGRAM.read_text(), re.DOTALL)
    assert len(snippets) >= 14
    for code, printed in snippets:
        exec(compile(code, str(ONE_PROGRAM), "exec"), names)
        assert capsys.readouterr().out == printed
    MemoryStorage.reset("halves")


def test_nothing_says_how_to_install_from_an_index_that_does_not_have_it() -> None:
    pages = [*DOCS.glob("*.md"), ROOT / "README.md"]
    said = {
        page.name for page in pages if re.search(r"(?<!Once released: `)pip install '?stateformat", page.read_text())
    }
    assert not said


def test_the_readme_is_short_and_has_four_doors() -> None:
    page = (ROOT / "README.md").read_text()
    assert len(page.splitlines()) <= 150
    doors = re.findall(r"^\*\*(I [^*]+)\*\*.*?```bash\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    assert [door for door, _, _ in doors] == [
        "I have a Spark query.",
        "I have a Flink savepoint",
        "I write a job.",
        "I write a runtime",
    ]
    assert [len(command.splitlines()) for _, command, _ in doors] == [1] * 4
    assert page.count("×", page.index("asked:begin"), page.index("asked:end")) >= 10


def test_the_library_is_shown_in_twenty_five_lines() -> None:
    code = re.findall(recipes.SNIPPET, (DOCS / "for-runtime-authors.md").read_text(), re.DOTALL)[0][0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 25


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in [*PAGES, ROOT / "CHANGELOG.md"]
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken


def test_a_long_page_begins_with_its_contents() -> None:
    long = [page for page in PAGES if len(page.read_text().splitlines()) > 600]
    assert len(long) >= 6
    missing = []
    for page in long:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        begins = text[: text.index("\n## ")]
        for heading in re.findall(r"^## (.*)$", text, re.MULTILINE):
            anchor = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())
            if f"(#{anchor})" not in begins:
                missing.append(f"{page.name}: {heading}")
    assert not missing, "a page of more than 600 lines has a link to each of its sections above the first"


def test_every_make_target_the_readme_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert named
    assert named <= targets


def test_the_loggers_that_the_docs_name_are_those_of_modules_that_log() -> None:
    log = re.compile(r"^logger = logging\.getLogger\(__name__\)$", re.MULTILINE)
    folders = [ROOT / name for name in ("stateformat", "redistribution", "backends", "tools")]
    logging = {
        ".".join(("stateformat", *file.relative_to(ROOT).with_suffix("").parts[file.is_relative_to(folders[0]) :]))
        for folder in folders
        for file in folder.rglob("*.py")
        if not any(parent.is_symlink() for parent in file.parents) and log.search(file.read_text())
    }
    named = {
        (page.name, name)
        for page in PAGES
        for line in page.read_text().splitlines()
        if re.match(r"\| `(WARNING|INFO|DEBUG)` \|", line)
        for name in re.findall(r"`((?:\w+|)\.[\w.]+\*?)`", line)
    } | {
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"\b(?:DEBUG|INFO|WARNING|ERROR) ([a-z_]+\.[\w.]+)", page.read_text())
    }
    assert len(named) > 10
    assert not [
        (page, name)
        for page, name in sorted(named)
        if not any(module == name or (name[-1] == "*" and module.startswith(name[:-1])) for module in logging)
    ]
    roots = {name for page in PAGES for name in re.findall(r"log to loggers [^`.]*`(\w+)`", page.read_text())}
    assert roots == {"stateformat"}


# ---- every example of a concept runs as it stands and prints what it says

CONCEPTS = Path(__file__).resolve().parents[2] / "examples" / "concepts"
CONCEPT_FILES = sorted(CONCEPTS.glob("*.py"))


def run_concept(example: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Run a file in a folder of its own. Returns what it should print."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(example), *arguments])
    runpy.run_path(str(example), run_name="__main__")
    return "".join(
        line.removeprefix("# ") for line in example.read_text().partition("# It prints:\n")[2].splitlines(True)
    )


@pytest.mark.parametrize("example", [pytest.param(p, id=p.stem) for p in CONCEPT_FILES if p.stem != "on_s3"])
def test_an_example_prints_what_it_says(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_concept(example, tmp_path, monkeypatch) == capsys.readouterr().out != ""


@pytest.mark.s3
def test_the_example_on_s3_prints_what_it_says(
    moto: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("ENDPOINT_URL", moto.endpoint), ("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret")):
        monkeypatch.setenv(f"AWS_{name}", value)
    printed = run_concept(CONCEPTS / "on_s3.py", tmp_path, monkeypatch, f"s3://{BUCKET}/on-s3-example")
    assert printed == capsys.readouterr().out != ""


def test_an_example_is_small() -> None:
    assert len(CONCEPT_FILES) >= 11
    assert max(len(example.read_text().splitlines()) for example in CONCEPT_FILES) <= 75


# ---- the examples, in small form: what they claim about themselves holds

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DAYS = 20
INTERVAL_US = 1


@pytest.fixture
def hops(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import hops

    yield hops
    for name in set(sys.modules) - before:
        if str(EXAMPLES) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_hops_are_those_of_a_breadth_first_search_though_runs_are_lost_while_records_go_round(
    hops: ModuleType, tmp_path: Path
) -> None:
    routes, out = tmp_path / "routes.csv", tmp_path / "out"
    hops.write_routes(routes, days=DAYS)
    store = stateformat.open(str(tmp_path / "store"), durable=False)
    for parallelism in (4, 6):
        runtime = LocalRuntime(store, checkpoint_interval_us=INTERVAL_US, clock=VirtualClock())
        run = runtime.begin(hops.hops_job(routes, out, parallelism, batch_rows=300))
        assert isinstance(run, LocalRun)
        step_until(run, lambda: hops.goes_round(store.open()))
        # It is dropped here: nobody closes it, as nobody closes a process that was killed.
    outcome = LocalRuntime(store).run(hops.hops_job(routes, out, 3))
    assert outcome.sentence.startswith("the job has finished: every input has ended")
    wanted = hops.breadth_first(routes)
    assert {number for _, _, number in wanted} == {0, 1, 2, 3}
    assert hops.committed(out) == wanted


def step_until(run: LocalRun, holds: Callable[[], bool]) -> None:
    """Step a run until something holds of the checkpoint that it has published last."""
    published = 0
    while not (run.published > published and holds()):
        published = run.published
        assert run.step(), "the run has ended before"


def test_the_search_by_the_book_goes_level_by_level_and_keeps_days_apart(hops: ModuleType, tmp_path: Path) -> None:
    routes = tmp_path / "routes.csv"
    lines = ["1,JFK,A", "1,A,B", "1,JFK,B", "1,B,C", "1,C,JFK", "1,X,Y", "2,B,D", "2,JFK,B"]
    routes.write_text("\n".join(["day,airport,neighbour", *lines]))
    found = {
        ("1", "JFK", 0),
        ("1", "A", 1),
        ("1", "B", 1),
        ("1", "C", 2),
        ("2", "JFK", 0),
        ("2", "B", 1),
        ("2", "D", 2),
    }
    assert dict(hops.breadth_first(routes)) == dict.fromkeys(found, 1)


# ---- the pages for teams run as they stand, on a fixture of each system

FIXTURES = ROOT / "tests" / "foreign" / "fixtures"
TEAMS = {
    "for-spark-teams.md": ("sales", "spark-4.3.0/window/checkpoint"),
    "for-flink-teams.md": ("savepoint", "flink-2.3.0/core-rocksdb-canonical/savepoint"),
    "for-runtime-authors.md": None,
    "index.md": ("sales", "spark-4.3.0/window/checkpoint"),
}
"""Of each page, the folder that its commands name, and the fixture that lies there."""
FOREIGN_RECIPES = dict(
    re.findall(
        r"<!-- recipe: (\w+) -->\n```bash\n(.*?)```",
        "".join((DOCS / page).read_text() for page in ("foreign.md", *TEAMS)),
        re.DOTALL,
    )
)


def run_recipe(recipe: str, folder: Path, **variables: Path | int) -> str:
    """What the shell prints; ``ckpt`` is that of this environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **{name: str(value) for name, value in variables.items()}}
    done = subprocess.run(
        ["bash", "-euc", recipe], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_recipe_is_run() -> None:
    assert set(FOREIGN_RECIPES) == {"back", "correct", "forget", "move", "partitions", "query", "repair"}


def test_a_spark_query_gets_another_number_of_partitions(tmp_path: Path) -> None:
    query = shutil.copytree(FIXTURES / "spark-4.3.0" / "aggregate" / "checkpoint", tmp_path / "query")
    run_recipe(FOREIGN_RECIPES["partitions"], tmp_path, QUERY=query, COPY=tmp_path / "copy")
    before, after = stateformat.open(query).open(), stateformat.open(tmp_path / "copy").open()
    assert [operator.parallelism for operator in before.graph.operators] == [3]
    assert [operator.parallelism for operator in after.graph.operators] == [12]
    contents = [
        Counter(map(repr, one.read("operator-0", "default").table().drop_columns(["_key_group"]).to_pylist()))
        for one in (before, after)
    ]
    assert contents[0] == contents[1]
    assert sorted(path.name for path in (tmp_path / "copy" / "state" / "0").iterdir() if path.name.isdigit()) == sorted(
        map(str, range(12))
    )


def test_a_spark_query_goes_back_to_an_older_batch(tmp_path: Path) -> None:
    query = shutil.copytree(FIXTURES / "spark-4.3.0" / "totals-with-crc" / "checkpoint", tmp_path / "query")
    places = {"QUERY": query, "COPY": tmp_path / "copy"}
    newest, older = (record.checkpoint_id for record in stateformat.open(query).history()[:2])
    run_recipe(FOREIGN_RECIPES["back"], tmp_path, ID=older, **places)
    assert [record.checkpoint_id for record in stateformat.open(query).history()[:2]] == [newest, older]
    found, wanted = (
        sorted(map(repr, one.read("operator-0", "default").table().to_pylist()))
        for one in (stateformat.open(places["COPY"]).open(), stateformat.open(query).open(older))
    )
    assert found == wanted
    assert stateformat.open(places["COPY"]).open().id == older
    assert not list((tmp_path / "copy" / "state").rglob(f"{newest}.*"))
    # A checksum of Hadoop's beside which its file is gone keeps Spark from writing that file again.
    orphans = [path for path in (tmp_path / "copy").rglob(".*.crc") if not (path.parent / path.name[1:-4]).exists()]
    assert not orphans


def test_a_damaged_spark_query_is_repaired(tmp_path: Path) -> None:
    query = Path(shutil.copytree(FIXTURES / "spark-4.3.0" / "window" / "checkpoint", tmp_path / "query"))
    number = stateformat.open(query).open().id
    snapshot = query / "state" / "0" / "1" / "9.snapshot"
    snapshot.write_bytes(snapshot.read_bytes()[:-9])
    printed = run_recipe(FOREIGN_RECIPES["repair"], tmp_path, QUERY=query, COPY=tmp_path / "copy")
    assert "of this batch nothing is lost" in " ".join(printed.split())
    assert stateformat.open(tmp_path / "copy").open().id == number


def test_a_topic_of_a_spark_query_is_moved(tmp_path: Path) -> None:
    query = Path(shutil.copytree(FIXTURES / "spark-4.3.0" / "aggregate" / "checkpoint", tmp_path / "query"))
    for log in (query / "offsets").iterdir():
        log.write_text(log.read_text().rpartition("\n")[0] + '\n{"events":{"0":70,"1":90}}')
    run_recipe(FOREIGN_RECIPES["move"], tmp_path, QUERY=query, COPY=tmp_path / "copy")
    properties = stateformat.open(tmp_path / "copy").open().record.properties
    assert properties["spark.offsets.0"] == '{"events":{"0":0,"1":0}}'


@pytest.mark.parametrize("recipe", ["correct", "forget"])
def test_the_state_of_a_spark_query_is_corrected(tmp_path: Path, recipe: str) -> None:
    query = FIXTURES / "spark-4.3.0" / "totals-with-crc" / "checkpoint"
    text = FOREIGN_RECIPES[recipe].replace('ckpt diff "$QUERY" "$COPY"', 'ckpt diff "$QUERY" "$COPY" || test $? = 1')
    printed = run_recipe(text, tmp_path, QUERY=query, COPY=tmp_path / "copy")
    before, after = (
        {row["k"]: row for row in stateformat.open(at).open().read("operator-0", "default").table().to_pylist()}
        for at in (query, tmp_path / "copy")
    )
    assert before["key-2"]["sum"] != 100
    if recipe == "correct":
        before["key-2"]["sum"] = 100
        assert re.search(r"changed\n.* 0 +0 +1\n", printed)
    else:
        del before["key-2"]
    assert after == before
    assert "Proved" in printed


@pytest.mark.parametrize("form", ["core-hashmap-canonical", "core-rocksdb-canonical"])
def test_a_flink_savepoint_is_queried(tmp_path: Path, form: str) -> None:
    printed = run_recipe(FOREIGN_RECIPES["query"], tmp_path, SAVEPOINT=FIXTURES / "flink-2.3.0" / form / "savepoint")
    [head, *found, _, count, _, _] = printed.splitlines()[-8:]  # One key is cut, which the page says.
    assert (head.split(), count) == (["key", "mean"], "3 rows")
    entries = [
        json.loads(line) for line in (FIXTURES / "flink-2.3.0" / form / "expected.jsonl").read_text().splitlines()
    ]
    means = [one["value"] for one in entries if (one["operator"], one["state"]) == ("by-string", "mean")]
    greatest = sorted((value["f1"] / value["f0"] for value in means), reverse=True)[:3]
    assert [float(line.split()[-1]) for line in found] == greatest


# ---- docs/night.md, followed word by word: every block runs, and prints what the page shows

_VARYING = (
    (r"[0-9a-f]{32}", "ID"),
    (r"[0-9a-f]{12}(-dirty)?", "VERSION"),
    (r"\d{4}-\d\d-\d\d\d\d:\d\d(:\d\d)?", "TIME"),
    (r"savepoints/\d+-[0-9a-f]{8}", "SAVEPOINT"),
    (r"\d+(s|min|h|d)(?=ago|[^a-z]|$)", "AGE"),
    (r"[\d.,]+[KM]?i?B", "SIZE"),
)
_OF_A_RUNNING_JOB = ("savepoint", "--running", "watch", "stop", "report")
"""What these show depends on when they ask."""


def same_as_on_the_page(recipe: Recipe, printed: str) -> bool:
    """Whether two outputs differ at most in ids, times, sizes, and in how lines break for them."""

    def plain(text: str) -> str:
        if "watch" in recipe.code:
            return text.partition("\n")[0]
        text = "".join(text.split())
        for pattern, name in _VARYING:
            text = re.sub(pattern, name, text)
        running = any(word in recipe.code for word in _OF_A_RUNNING_JOB)
        return re.sub(r"[\d.,]+", "N", text) if running else text

    return not recipe.shown or plain(printed) == plain(recipe.shown)


NIGHT = RecipePage(DOCS / "night.md", same_as_on_the_page)


@pytest.fixture
def night_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, of a short name, as lines break at names. A job that the page has
    started and a failure has left is ended.
    """
    tmp_path = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NIGHT_FOLDER", str(tmp_path))
    (tmp_path / "examples").symlink_to(DOCS.parent / "examples")
    yield tmp_path
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                process.name != f"{os.getpid()}"
                and f"NIGHT_FOLDER={tmp_path}\0".encode() in (process / "environ").read_bytes()
            ):
                os.kill(int(process.name), signal.SIGKILL)
    shutil.rmtree(tmp_path)


def test_the_blocks_of_the_readme_run_in_order_in_one_folder_and_print_what_it_shows(
    night_folder: Path, pytestconfig: pytest.Config
) -> None:
    page = RecipePage(ROOT / "README.md", same_as_on_the_page)
    (night_folder / "tests").symlink_to(ROOT / "tests")
    [install] = re.findall(r"```sh\n(.*?)```", page.path.read_text(), re.DOTALL)
    _, *copies = install.splitlines()
    assert len(copies) == 2
    shell("\n".join(copies), os.environ)
    ran = [(recipe, ran_as_shell(recipe, night_folder)) for recipe in page.recipes()]
    assert len(ran) == 5
    page.check(ran, update=pytestconfig.getoption("--update"))
    for command in re.findall(r"`ckpt (\w+ [\w-]+-store)`", page.path.read_text()):
        shell(f"ckpt {command}", os.environ)


def ran_as_shell(recipe: Recipe, folder: Path) -> str:
    """What a block of Python or of shell prints; the folder is shown as ``/data``."""
    code = f"python - <<'EOF'\n{recipe.code}EOF" if recipe.language == "python" else recipe.code
    return shell(code, os.environ).replace(f"{folder}", "/data")


@pytest.mark.parametrize("name", TEAMS)
def test_the_page_for_a_team_prints_what_it_shows_and_is_short(
    name: str, night_folder: Path, pytestconfig: pytest.Config
) -> None:
    page = RecipePage(DOCS / name, same_as_on_the_page)
    if TEAMS[name] is not None:
        folder, fixture = TEAMS[name]
        shutil.copytree(FIXTURES / fixture, night_folder / folder)
    # The others have variables and tests of their own.
    own = [recipe for recipe in page.recipes() if recipe.code not in FOREIGN_RECIPES.values()]
    ran = [(recipe, ran_as_shell(recipe, night_folder)) for recipe in own]
    assert ran
    page.check(ran, update=pytestconfig.getoption("--update"))
    assert len(page.path.read_text().splitlines()) <= 150


@pytest.mark.truth
def test_the_page_runs_from_top_to_bottom_and_prints_what_it_shows(
    night_folder: Path, pytestconfig: pytest.Config
) -> None:
    ran = [
        (recipe, shell(recipe.code, os.environ, errors=True).replace(f"{night_folder}", "/data"))
        for recipe in NIGHT.recipes()
    ]
    NIGHT.check(ran, update=pytestconfig.getoption("--update"))


# ---- the three walks lead through functions that exist

WALKS = Path(__file__).resolve().parents[2] / "docs" / "design" / "walks.md"
STEPS = sorted(set(re.findall(r"\[`([\w.]+)`\]\(([^)]+\.py)\)", WALKS.read_text())))


def defined(file: Path) -> set[str]:
    """Functions and classes of a file, methods by the class's name."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return found


def test_every_walk_has_steps() -> None:
    assert WALKS.read_text().count("\n## ") == 4
    assert len(STEPS) > 30


@pytest.mark.parametrize(("name", "file"), STEPS)
def test_a_step_names_a_function_that_exists(name: str, file: str) -> None:
    assert name in defined((WALKS.parent / file).resolve())

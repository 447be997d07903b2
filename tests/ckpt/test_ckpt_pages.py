"""Every page of ``ckpt``, word for word: ``pages/``, written anew with ``--update``; and pages of
any width and character set."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.backends.storage import MemoryStorage
from stateformat.states import broadcast_state, even_split_state
from stateformat.tools.ckpt.text import render
from tests import stores
from tests.ckpt.ckpt_runs import page, run

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


def test_rows_too_wide_for_a_table_are_shown_one_by_one(tmp_path: Path) -> None:
    job, words = stores.counts_job(), pa.table({"word": ["x" * 200, "y" * 200], "n": [1, 2]})
    rows = {("counter", "counts"): lambda i: stores.owned(words, ["word"], job.graph.operators[1], i)}
    stores.Job(job.job_id, job.graph, job.states, rows).publish(sf.open(str(tmp_path)), None)
    text = page("inspect", tmp_path, "--rows", 1)
    assert "      row 1\n" in text
    assert "x" * 60 in text

"""The examples, in small form: what they claim about themselves holds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import stateformat
from stateformat.backends.local import LocalRun, LocalRuntime, VirtualClock

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

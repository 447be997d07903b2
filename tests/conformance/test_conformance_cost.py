"""What a failure has cost is shown in the progress, the log, the records and `ckpt watch`."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from stateformat.backends.runtime import JobOutcome, Progress
from stateformat.backends.runtime.reports import FailureCost, cost_in
from tests.ckpt.ckpt_runs import run as ckpt
from tests.conformance_jobs import Line
from tests.played_stage import EVERYWHERE, PlayedStage


@EVERYWHERE
def test_a_failure_costs_the_time_and_the_rows_behind_the_newest_checkpoint(
    stage: PlayedStage, executor: str, caplog: pytest.LogCaptureFixture
) -> None:
    line = Line(stage, executor)
    shown: list[Progress] = []
    stage.calls.fails("op/0 row 7")
    pace: dict[str, Any] = {"checkpoint_rows": 4} if executor != "local" else {"checkpoint_interval_us": 30_000}
    with caplog.at_level(logging.INFO, "stateformat"):
        outcome = line.run(progress=shown.append, keep=None, **pace)
    line.check()
    assert isinstance(outcome, JobOutcome)
    assert outcome.restarts == 1
    cost = FailureCost(shown[-1].failures, shown[-1].lost_us, shown[-1].rows_again)
    assert cost.failures == 1
    assert cost.lost_us > 0 or executor == "spark"  # Spark's clock stands still here.
    assert 0 < cost.rows_again <= 12
    said = f"since it was started, {cost.words}"
    assert [record.message for record in caplog.records if "the job goes on from" in record.message] == [
        record.message for record in caplog.records if record.message.endswith(said)
    ]
    assert any(news.endswith(said) for progress in shown for news in progress.news)
    assert shown[-1].line().endswith(cost.words)
    records = stage.store.history()
    assert cost_in(dict(records[0].properties)).rows_again == cost.rows_again
    watched = ckpt("watch", stage.directory / "store", "--until-end", "--format", "json").out.splitlines()
    failed = [event for event in map(json.loads, watched) if event["event"] == "failed"]
    assert [event["message"].partition(" and ")[2] for event in failed] == [cost.words.partition(" and ")[2]]


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        (FailureCost(), ""),
        (FailureCost(1, 3_400_000, 1), "1 failure cost 3.4 s and 1 row read again"),
        (FailureCost(1200, 50_000, 12_000), "1,200 failures cost 0.1 s and 12,000 rows read again"),
    ],
)
def test_the_cost_in_words_and_back_from_a_record(cost: FailureCost, words: str) -> None:
    assert cost.words == words
    assert cost_in(cost.properties) == cost


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "7", '{"failures":1}', "[" * 100_000),
        *(
            f'{{"failures":{told},"lost_us":1,"rows_again":1}}'
            for told in ('"x"', "Infinity", "true", "-1", "1e3", 1 << 60)
        ),
    ],
)
def test_a_record_that_tells_nonsense_tells_nothing(text: str) -> None:
    assert cost_in({"stateformat.failures": text}) == FailureCost()

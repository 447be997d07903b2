"""Options of ``ckpt rewrite`` that a query does not take, and what is advised instead."""

from __future__ import annotations

import shlex
from pathlib import Path

import pyarrow as pa
import pytest

from stateformat.backends.rewrite.queries import _InTypes
from tests.ckpt.ckpt_runs import document, failure, page
from tests.foreign.test_spark_repartition import FIXTURES

AGGREGATE = FIXTURES / "spark-4.3.0" / "aggregate" / "checkpoint"


@pytest.mark.parametrize(
    ("options", "message", "advised"),
    [
        ("--where k='a'", "give --to with an empty one", "--where k='a' --to {copy}"),
        ("--where k='a' --to {copy} --rename operator-0=x", "--rename and", "--where k='a' --to {copy}"),
        ("--to {copy} --operator operator-0", "give one of these", "--operator operator-0 --where n=1 --to {copy}"),
        (
            "--transform {functions}:same --where k='a' --to {copy}",
            "delete first, and then rewrite the copy",
            "--where k='a' --to {copy}",
        ),
        (
            "--transform {functions}:same --rekey --prove --to {copy}",
            "look at the copy with `ckpt diff`",
            "--transform {functions}:same --rekey --to {copy}",
        ),
    ],
)
def test_options_that_a_query_does_not_take_are_refused_and_what_is_advised_is_taken(
    options: str, message: str, advised: str, tmp_path: Path
) -> None:
    places = {"copy": str(tmp_path / "copy"), "functions": f"operator-0/default={tmp_path / 'fixes.py'}"}
    (tmp_path / "fixes.py").write_text("def same(rows):\n    return rows\n")

    def words(text: str) -> list[str]:
        return shlex.split(text.replace("'", '"\'"').format(**places))

    assert message in failure("rewrite", AGGREGATE, *words(options), status=2)["message"]
    assert not (tmp_path / "copy").exists()
    page("rewrite", AGGREGATE, *words(advised))
    assert (tmp_path / "copy" / "metadata").exists()


@pytest.mark.parametrize("change", [("--where", "value > 0"), ("--transform", "{}/fixes.py:same")])
def test_a_state_that_counts_the_rows_of_another_is_refused_for_every_change(
    change: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "fixes.py").write_text("def same(rows):\n    return rows\n")
    query = FIXTURES / "spark-4.3.0" / "join-outer" / "checkpoint"
    option, value = change[0], change[1].format(tmp_path)
    named = [option, value, "--state", "left-keyToNumValues"]
    told = failure("rewrite", query, "--to", tmp_path / "copy", *named, status=2)["message"]
    assert "counts the rows of operator-0/left-keyWithIndexToValue, and follows them: change those" in told
    assert not (tmp_path / "copy").exists()


def test_a_condition_names_a_column_that_is_a_word_of_sql_as_a_query_does(tmp_path: Path) -> None:
    query = FIXTURES / "spark-4.3.0" / "window" / "checkpoint"

    def deleted(condition: str, name: str) -> dict[str, int]:
        (found,) = document("rewrite", query, "--where", condition, "--to", tmp_path / name)["transformed"]
        return {one: found[one] for one in ("rows_before", "rows_after")}

    plain = deleted("window.start < TIMESTAMP '2026-03-01 10:30:00'", "plain")
    assert plain == deleted("\"window\".start < TIMESTAMP '2026-03-01 10:30:00'", "quoted")
    assert 0 < plain["rows_after"] < plain["rows_before"]
    told = failure("rewrite", query, "--where", "window.begin is null", "--to", tmp_path / "none", status=2)["message"]
    assert "begin" in told
    assert "syntax error" not in told


def test_wider_numbers_are_fitted_and_those_that_do_not_fit_are_refused() -> None:
    rows = pa.table({"n": pa.array([1, 2], pa.int32()), "f": pa.array([0.5, None], pa.float32())})

    def giving(n: list[int], f: list[float | None]) -> pa.Table:
        wide = pa.table({"n": pa.array(n, pa.int64()), "f": pa.array(f, pa.float64())})
        made = _InTypes(lambda _: wide)(rows)
        assert isinstance(made, pa.Table)
        return made

    assert giving([3, 4], [0.25, None]).equals(
        pa.table({"n": pa.array([3, 4], pa.int32()), "f": pa.array([0.25, None], pa.float32())})
    )
    assert giving([3, 4], [float("inf"), float("nan")])["f"].to_pylist()[0] == float("inf")
    with pytest.raises(ValueError, match="column 'f' has a number that float cannot hold"):
        giving([3, 4], [1e300, None])
    with pytest.raises(pa.ArrowInvalid, match="not in range"):
        giving([1 << 40, 4], [0.25, None])

"""Scale in small: pages stay pages, and requests do not grow with handles."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from benchmarks.scale_stores import many_handles
from stateformat import manifest as mf
from stateformat.backends.storage.local import LocalStorage
from stateformat.documents import JsonColumn, JsonRows
from stateformat.model import CheckpointId, Handle
from stateformat.reading import StoreCheckpoint, load_record
from stateformat.redistribution import plan_restore, rescale
from stateformat.store import CheckpointStore, open as sf_open
from stateformat.tools.ckpt.json_text import LONG, pieces
from stateformat.validation import validate
from tests.ckpt.ckpt_runs import document, page

OPERATORS, SUBTASKS = 45, 20
KEYED_PER_ELEVEN = 6


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty-five operators of twenty subtasks, every mode that subtasks have."""
    folder = tmp_path_factory.mktemp("scale") / "store"
    many_handles(folder, OPERATORS, SUBTASKS)
    return folder


# ---- commands ------------------------------------------------------------------------------------


def test_a_page_of_many_operators_shows_the_first_and_the_largest_and_says_what_it_leaves_out(store: Path) -> None:
    text = page("inspect", store)
    assert "operator-0039" in text
    assert "operator-0040 " not in text.split("States")[0]
    for words in (
        "and 5 more operators (--operator UID shows one, --format json all)",
        "the 20 largest of 45",
        "and 25 more states",
    ):
        assert words in text
    assert len(text.splitlines()) < 200
    narrow = page("inspect", store, "--operator", "operator-0044")
    assert "operator-0044" in narrow
    assert "more operators" not in narrow


def test_json_of_many_operators_is_whole(store: Path) -> None:
    found = document("inspect", store)
    states = found["states"]
    assert len(found["operators"]) == len(states) == OPERATORS
    for name in ("handles", "rows"):
        assert sum(state[name] for state in states) == found["totals"][name]
    assert [len(state["subtasks"]) for state in states] == [SUBTASKS] * OPERATORS
    assert [sum(entry["rows"] for entry in state["subtasks"]) for state in states] == [s["rows"] for s in states]


def test_the_page_of_a_plan_of_many_operators_shows_sums_and_the_most_loaded(store: Path) -> None:
    text = page("explain-restore", store, "--parallelism", "30")
    assert "and 25 more operators (--format json lists all)" in text
    assert f"{30 * OPERATORS:,} subtasks of 45 operators" in text
    assert "most loaded" in text
    assert len(text.splitlines()) < 80
    found = document("explain-restore", store, "--parallelism", "30")
    assert [len(load["subtasks"]) for load in found["load"]] == [30] * OPERATORS
    for name in ("rows", "bytes"):
        sums = [sum(entry[name] for entry in load["subtasks"]) for load in found["load"]]
        assert sums == [load[name] for load in found["load"]]
    slices = found["plan"]["slices"]
    assert len({len(column) for column in slices.values()}) == 1
    keyed = [rows for mode, rows in zip(slices["mode"], slices["rows"], strict=True) if mode == "keyed"]
    assert sum(keyed) == 8192 * sum(number % 11 < KEYED_PER_ELEVEN for number in range(OPERATORS))


def test_many_refusals_are_told_in_part_on_the_page_and_whole_in_json(store: Path) -> None:
    arguments = ("explain-restore", store, "--parallelism", "5000")
    found = document(*arguments, status=1)["plan"]["refusals"]
    assert len(found) > 20
    assert f"and {len(found) - 20} more refusals (--format json lists all)" in page(*arguments, status=1)


def test_what_is_rescaled_to_many_subtasks_validates_and_can_be_collected(store: Path, tmp_path: Path) -> None:
    found = document("validate", store, "--level", "full")
    assert (found["ok"], found["checked"]["segments"]) == (True, OPERATORS)
    assert document("gc", store, "--keep", "1")["deleted"] is False
    assert not document("rescale", store, "--parallelism", "30", "--dry-run")["refused"]
    text = page("rescale", store, "--parallelism", "30", "--to", tmp_path / "target")
    assert "and 25 more (--format json lists all)" in text
    assert len(text.splitlines()) < 40
    assert document("validate", tmp_path / "target")["ok"]


# ---- requests ------------------------------------------------------------------------------------


class Requests(LocalStorage):
    """A local storage that counts what it is asked."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.asked: Counter[str] = Counter()

    def read(self, path: str) -> pa.Buffer:
        self.asked[f"read {path.split('/')[0]}"] += 1
        return super().read(path)

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        self.asked[f"read {path.split('/')[0]}"] += 1
        return super().read_range(path, offset, length)

    def size(self, path: str) -> int:
        self.asked["size"] += 1
        return super().size(path)

    def list(self, prefix: str) -> Any:
        self.asked["list"] += 1
        return super().list(prefix)


def _requests(folder: Path, subtasks: int) -> dict[str, Counter[str]]:
    many_handles(folder, 3, subtasks)
    storage = Requests(folder)
    found = {}

    def counted(name: str) -> None:
        found[name], storage.asked = storage.asked, Counter()

    checkpoint = StoreCheckpoint(storage, load_record(storage, CheckpointId(2)))
    assert checkpoint.handles.num_rows == 3 * subtasks
    counted("open")
    checkpoint.plan_restore(checkpoint.graph.at(subtasks + 7)).check()
    counted("plan")
    assert validate(storage, level="quick").ok
    counted("validate quick")
    return found


def test_requests_to_the_storage_do_not_grow_with_handles(tmp_path: Path) -> None:
    few, many = _requests(tmp_path / "few", 5), _requests(tmp_path / "many", 500)
    assert few == many
    assert few["plan"] == Counter()
    assert few["open"].total() == 2
    # A footer for each of the three segments, and nothing that is asked for each handle.
    assert few["validate quick"]["read segments"] == 3
    assert few["validate quick"]["size"] == 0


def test_a_permit_for_a_checkpoint_that_was_planned_does_not_read_its_manifest_again(tmp_path: Path) -> None:
    many_handles(tmp_path, 3, 5)
    storage = Requests(tmp_path)
    store = CheckpointStore(storage)
    checkpoint = store.open()
    handles = checkpoint.handles
    assert store.permit_of(checkpoint).checkpoint().handles is handles
    assert storage.asked["read manifests"] == 1


# ---- what handles say of their segments ----------------------------------------------------------


@st.composite
def segments(draw: st.DrawFn) -> tuple[list[int], list[int], list[Handle]]:
    """Rows per group of a segment, its row groups, and handles that cut it, some of them wrong."""
    counts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=8).filter(any))
    total = sum(counts)
    cuts = sorted(draw(st.sets(st.integers(1, total - 1), max_size=3))) if total > 1 else []
    row_groups = [after - before for before, after in zip([0, *cuts], [*cuts, total], strict=True)]
    handles = []
    for _ in range(draw(st.integers(0, 4))):
        first = draw(st.integers(0, len(counts) - 1))
        last = draw(st.integers(first, len(counts) - 1))
        own = counts[first : last + 1]
        start = sum(counts[:first])
        if draw(st.integers(0, 3)) == 0:
            at = draw(st.integers(0, len(own) - 1))
            own = [*own[:at], own[at] + 1, *own[at + 1 :]]
        if draw(st.integers(0, 5)) == 0:
            start += 1
        handle = Handle("o", "s", "keyed", draw(st.integers(0, 5)), 0, None, 1)
        groups = {"first_group": first, "last_group": last, "rows_per_group": own}
        handles.append(handle._replace(row_start=start, rows=sum(own), **groups))
    return counts, row_groups, handles


def _rows_of_groups(counts: list[int]) -> list[int]:
    return [group for group, count in enumerate(counts) for _ in range(count)]


@given(segments())
@settings(max_examples=200, deadline=None)
def test_handles_are_judged_by_their_groups_as_row_by_row(case: tuple[list[int], list[int], list[Handle]]) -> None:
    counts, _, handles = case
    rows = _rows_of_groups(counts)
    wrong = set()
    for number, handle in enumerate(handles):
        held = Counter(rows[handle.row_start : handle.row_start + handle.rows])
        said = {handle.first_group + nth: count for nth, count in enumerate(handle.rows_per_group) if count}  # type: ignore[operator]
        cut = any(held[group] != counts[group] for group in held)
        if dict(held) != said or cut:
            wrong.add(number)
    table = mf.handles_table(handle._replace(subtask=number) for number, handle in enumerate(handles))
    whole = np.zeros(32_768, np.int64)
    whole[: len(counts)] = counts
    assert {subtask for subtask, _ in mf.group_faults(whole, mf.handle_rows(table), whole=True)} == wrong


@given(segments())
@settings(max_examples=200, deadline=None)
def test_row_groups_are_judged_as_row_by_row(case: tuple[list[int], list[int], list[Handle]]) -> None:
    counts, row_groups, handles = case
    handles = [handle for handle in handles if _is_right(handle, counts)]
    rows = _rows_of_groups(counts)
    expected = False
    start = 0
    for size in row_groups:
        for handle in handles:
            low, high = max(start, handle.row_start), min(start + size, handle.row_start + handle.rows)
            if low >= high:
                continue
            begins = low == handle.row_start or rows[low - 1] != rows[low]
            ends = high == handle.row_start + handle.rows or rows[high - 1] != rows[high]
            expected |= not (begins and ends) and rows[low] != rows[high - 1]
        start += size
    found = list(mf.row_group_faults(row_groups, mf.handle_rows(mf.handles_table(handles))))
    assert bool(found) is expected


def _is_right(handle: Handle, counts: list[int]) -> bool:
    first = handle.first_group or 0
    own = list(handle.rows_per_group or [])
    return handle.row_start == sum(counts[:first]) and own == counts[first : first + len(own)]


# ---- tables of handles ---------------------------------------------------------------------------


def test_rows_that_are_taken_are_those_of_the_table_in_one_chunk_or_many() -> None:
    table = mf.handles_table(Handle(f"o{i % 3}", "s", "keyed", i, 0, None, 1, digest=bytes([i]) * 16) for i in range(9))
    order = pa.array([8, 0, None, 3, 3])
    plain = mf.take_rows(table.select(["subtask", "digest"]), order)
    digests = [None if i is None else bytes([i]) * 16 for i in order.to_pylist()]
    assert plain.to_pydict() == {"subtask": order.to_pylist(), "digest": digests}
    many = pa.concat_tables([table.slice(i, 1) for i in range(9)])
    assert mf.take_rows(many.select(["subtask", "digest"]), order).equals(plain)


@given(st.lists(st.one_of(st.none(), st.integers(0, 4))))
def test_first_uses_are_where_each_code_stands_first(values: list[int | None]) -> None:
    codes: dict[int, int] = {}
    column = [-1 if value is None else codes.setdefault(value, len(codes)) for value in values]
    found = mf.first_uses(np.array(column, np.int64)).tolist()
    assert found == [column.index(code) for code in range(len(codes))]


def test_runs_and_codes_are_the_same_in_one_chunk_or_many() -> None:
    values = ["a", "a", None, None, "b", "a", "a", "a", None]
    for size in range(1, 10):
        column = pa.chunked_array([pa.array(values[i : i + size], pa.string()) for i in range(0, 9, size)])
        found, starts = mf.runs(column)
        assert found.to_pylist() == ["a", None, "b", "a", None]
        assert starts.tolist() == [0, 2, 4, 5, 8, 9]
        codes, count = mf.codes_of(column)
        assert codes.tolist() == [0, 0, -1, -1, 1, 0, 0, 0, -1]
        assert count == 2


@pytest.mark.parametrize("rows", [1, 3, 7, 40])
def test_plans_cuts_and_rules_are_the_same_in_blocks_of_any_size(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many_handles(tmp_path, 11, 5)
    checkpoint = sf_open(str(tmp_path)).open()
    topology = checkpoint.graph.at(8)

    def derived() -> tuple[pa.Table, pa.Table]:
        plan = plan_restore(checkpoint, topology)
        cut = mf.cut_handles(checkpoint.manifest.full(), rescale(checkpoint, plan).slices)
        assert mf.handle_faults(cut) == mf.sharing_faults(cut) == []
        return plan.assigned, cut

    whole = derived()
    for name in ("redistribution.tables._BLOCK_ROWS", "manifest.table._TOGETHER", "manifest.rules.BATCH_ROWS"):
        monkeypatch.setattr(f"stateformat.{name}", rows)
    for before, after in zip(whole, derived(), strict=True):
        # Each block has dictionaries of its own, so tables are compared by their values.
        assert after.schema == before.schema
        assert after.to_pylist() == before.to_pylist()


def test_handles_of_one_segment_that_disagree_are_found_far_apart() -> None:
    handle = Handle("o", "s", "even_split", 0, 0, None, 1, path="segments/p", segment_rows=5)
    others = [handle._replace(path="segments/q"), handle._replace(path=None), handle._replace(segment_rows=6)]
    (fault,) = mf.sharing_faults(mf.handles_table([handle, *others, handle]))
    assert fault.message.startswith("handle 3 (operator 'o', state 's', subtask 0, layer 0) breaks SPEC 4.1:")
    assert "segment_rows" in fault.message


def test_runs_of_states_break_where_operator_or_state_changes() -> None:
    names = [("a", "x"), ("a", "x"), ("a", "y"), ("b", "y"), ("b", "y"), ("a", "y")]
    table = mf.handles_table(Handle(operator, state, "keyed", 0, 0, None, 1) for operator, state in names)
    runs = [(("a", "x"), 0, 2), (("a", "y"), 2, 3), (("b", "y"), 3, 5), (("a", "y"), 5, 6)]
    assert list(mf.state_runs(table)) == runs
    assert list(mf.state_runs(table.slice(0, 0))) == []


# ---- JSON in pieces ------------------------------------------------------------------------------


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.text())
VALUES = st.recursive(SCALARS, lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)))


@given(VALUES, st.booleans())
def test_a_document_without_columns_is_what_json_makes_of_it(value: Any, ascii_only: bool) -> None:
    text = "".join(pieces(value, ensure_ascii=ascii_only))
    assert text == json.dumps(value, indent=2, ensure_ascii=ascii_only)


@pytest.mark.parametrize("count", [0, 1, 3, 40_000])
def test_columns_are_written_as_the_lists_that_they_stand_for(count: int) -> None:
    rows = JsonRows(number=np.arange(count) - 1, twice=np.arange(count) * 2)
    texts = JsonColumn(pa.chunked_array([pa.array(["a", None, 'b"'] * count)]))
    numbers = JsonColumn(pa.array(range(count), pa.int64()))
    found = json.loads("".join(pieces({"rows": rows, "in": [{"texts": texts}], "numbers": numbers})))
    objects = [{"number": i - 1 if i else None, "twice": 2 * i} for i in range(count)]
    assert found == {"rows": objects, "in": [{"texts": ["a", None, 'b"'] * count}], "numbers": list(range(count))}
    assert list(rows) == objects
    assert list(texts) == ["a", None, 'b"'] * count
    assert rows.greatest(2, "twice") == objects[:-3:-1]


def test_long_lists_of_scalars_take_a_line_an_entry() -> None:
    text = "".join(pieces({"long": list(range(LONG + 1))}))
    assert json.loads(text) == {"long": list(range(LONG + 1))}
    assert len(text.splitlines()) == LONG + 5

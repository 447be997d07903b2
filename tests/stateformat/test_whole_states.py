"""Many small states of one checkpoint, read whole: each is what it is alone, in any order."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import stateformat as sf
from stateformat.errors import DamagedCheckpoint
from stateformat.keys import DEFAULT_KEY_HASH
from stateformat.manifest import Manifest
from stateformat.reading import Checkpoint
from stateformat.segments import groups_of_keys
from stateformat.states import value_state

STATES = 150
PARALLELISM = 2


def name_of(number: int) -> str:
    return f"s{number:03}"


def rows_of(number: int) -> pa.Table:
    """Every tenth state has no rows; most have so few that one subtask has none of some."""
    keys = pa.array(range(number, number + number % 10), pa.int64())
    return pa.table({"k": keys, "v": pc.multiply(keys, number)})


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    states = [
        value_state("op", name_of(number), keys={"k": pa.int64()}, values={"v": pa.int64()}) for number in range(STATES)
    ]
    store = sf.open("memory://whole-states")
    graph = sf.JobGraph((sf.Operator("op", PARALLELISM, 128),))
    pending = store.begin(job_id="states", graph=graph, states=states, parent=None)
    for subtask in range(PARALLELISM):
        with pending.context.subtask("op", subtask) as writer:
            for number in range(STATES):
                rows = rows_of(number)
                groups = groups_of_keys([rows["k"]], 128, DEFAULT_KEY_HASH)
                writer.write(name_of(number), rows.filter(pa.array(groups * PARALLELISM // 128 == subtask)))
        pending.add(writer)
    pending.publish()
    return store.open()


def again(checkpoint: Checkpoint, handles: pa.Table | None = None) -> Checkpoint:
    """The checkpoint opened anew, perhaps with other handles."""
    manifest = None if handles is None else Manifest(handles)
    return Checkpoint(checkpoint.storage, checkpoint.record, manifest=manifest)


def found(checkpoint: Checkpoint, number: int) -> pa.Table:
    return checkpoint.state("op", name_of(number)).table().sort_by("k")


@pytest.mark.parametrize("step", [1, -1, 7, 143])
def test_states_are_the_same_in_any_order(checkpoint: Checkpoint, step: int) -> None:
    opened = again(checkpoint)
    for at in range(STATES):
        number = at * step % STATES
        assert found(opened, number).equals(rows_of(number)), number


def test_each_subtask_has_its_part(checkpoint: Checkpoint) -> None:
    for number in range(0, STATES, 11):
        parts = [checkpoint.read("op", name_of(number), subtask).table() for subtask in range(PARALLELISM)]
        whole = checkpoint.read("op", name_of(number)).table()
        assert pa.concat_tables(parts).equals(whole)
        assert checkpoint.read("op", name_of(number), PARALLELISM).table().num_rows == 0


def test_a_pickled_task_holds_its_own_handles_only(checkpoint: Checkpoint) -> None:
    task = checkpoint.read("op", name_of(99))
    assert task.handles.num_rows == task.slices.num_rows == PARALLELISM
    alone = task.with_slices(task.slices)
    assert len(pickle.dumps(task)) < 2 * len(pickle.dumps(alone))
    other = pickle.loads(pickle.dumps(task))
    assert (other.handles, other.slices) == (task.handles, task.slices)
    assert other.table().equals(task.table())
    assert alone.table().equals(task.table())


def test_parts_of_a_whole_task_are_not_the_whole(checkpoint: Checkpoint) -> None:
    task = checkpoint.read("op", name_of(99))
    whole = task.table()
    halves = [task.with_slices(task.slices.slice(at, 1)).table() for at in range(PARALLELISM)]
    assert [half.num_rows for half in halves] == task.slices["rows"].to_pylist()
    assert pa.concat_tables(halves).equals(whole)
    assert pa.concat_tables(part.table() for part in task.split(3)).equals(whole)


def _beyond(handles: pa.Table, row: int) -> pa.Table:
    return _changed(handles, "subtask", row, 5)


def _text(handles: pa.Table, row: int) -> pa.Table:
    paths = handles["path"].combine_chunks().cast(pa.binary()).to_pylist()
    paths[row] = b"\xff/" + paths[row]
    data = pa.array(paths, pa.binary())
    return _with(handles, "path", pa.Array.from_buffers(pa.string(), len(data), data.buffers()))


def _unsorted(handles: pa.Table, row: int) -> pa.Table:
    numbers = [*range(handles.num_rows)]
    numbers[row], numbers[row - 1] = numbers[row - 1], numbers[row]
    return handles.take(numbers)


def _again(handles: pa.Table, row: int) -> pa.Table:
    return pa.concat_tables([handles.slice(0, row), handles.slice(row + 1), handles.slice(row, 1)])


def _changed(handles: pa.Table, column: str, row: int, value: object) -> pa.Table:
    values = handles[column].to_pylist()
    values[row] = value
    return _with(handles, column, pa.array(values, handles.schema.field(column).type))


def _with(handles: pa.Table, column: str, values: pa.Array) -> pa.Table:
    at = handles.schema.get_field_index(column)
    return handles.set_column(at, handles.schema.field(at), values)


@pytest.mark.parametrize(("harm", "is_refused"), [(_beyond, True), (_text, True), (_unsorted, False), (_again, False)])
def test_damage_of_one_state_is_its_own(
    checkpoint: Checkpoint, harm: Callable[[pa.Table, int], pa.Table], is_refused: bool
) -> None:
    row = checkpoint.handles["state"].to_pylist().index(name_of(115)) + 1
    opened = again(checkpoint, harm(checkpoint.manifest.full(), row))
    for number in range(100, 130):
        if number == 115 and is_refused:
            with pytest.raises((DamagedCheckpoint, UnicodeDecodeError)):
                found(opened, number)
        else:
            assert found(opened, number).equals(rows_of(number)), number

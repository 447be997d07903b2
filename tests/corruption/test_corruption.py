"""Damaged checkpoints: damage is always noticed, and never read as wrong rows. These are a small
part of the cases of ``make test-truth``.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import DamagedCheckpoint
from stateformat.graph import Status
from stateformat.history import reachable
from stateformat.model import Handle, Kind, Mode
from stateformat.storage import Storage
from stateformat.store import CheckpointStore
from stateformat.tools.ckpt.main import main as ckpt
from stateformat.validation import validate
from stateformat.validation.segments import segment_of, segments_of
from tests.ckpt.ckpt_runs import program
from tests.corruption import corruption, corruption_runs, corruption_stores
from tests.corruption.corruption import Case, Objects, Stores
from tests.forgery import Forger, get, put
from tests.tally import Tally


@pytest.fixture(scope="module")
def stores() -> Stores:
    return corruption_stores.stores()


def test_the_stores_together_have_everything_that_can_be_damaged(stores: Stores) -> None:
    opened = (CheckpointStore(cast("Storage", Objects(objects))) for objects in stores.values())
    checkpoints = [store.open(record.checkpoint_id) for store in opened for record in store.history()]
    states = [state for checkpoint in checkpoints for state in checkpoint.states]
    assert {state.mode for state in states} == set(Mode)
    assert {state.kind for state in states if state.kind} == set(Kind)
    features = {feature for checkpoint in checkpoints for feature in checkpoint.record.required_features}
    required = {"finished_operators", "layers", "in_flight", "committables", "rescaled", "processing_time_timers"}
    assert features == required
    assert {feature for checkpoint in checkpoints for feature in checkpoint.record.optional_features} == {"ttl"}
    assert {operator.status for checkpoint in checkpoints for operator in checkpoint.graph.operators} == set(Status)
    assert any(operator.finishing for checkpoint in checkpoints for operator in checkpoint.graph.operators)
    assert any(checkpoint.record.parent for checkpoint in checkpoints)
    inline = {
        (state.mode, checkpoint.manifest.inline(path) is not None)
        for checkpoint in checkpoints
        for state in checkpoint.states
        for path in checkpoint.read(state.operator, state.name).handles["path"].to_pylist()
    }
    assert inline == {(mode, held) for mode in Mode for held in (True, False)}
    columns = [
        metadata.row_group(0).column(metadata.num_columns - 2)
        for codec in corruption_stores.CODECS
        for path, data in stores[codec].items()
        if path.startswith("segments/")
        for metadata in [pq.read_metadata(pa.BufferReader(data))]
    ]
    stored = {(column.compression, "BYTE_STREAM_SPLIT" in column.encodings) for column in columns}
    assert stored >= {*product(("UNCOMPRESSED", "LZ4", "ZSTD", "SNAPPY"), (True, False))}


def test_validation_looks_at_exactly_the_segments_that_retention_keeps(stores: Stores) -> None:
    for objects in stores.values():
        store = CheckpointStore(cast("Storage", Objects(objects)))
        for record in store.history():
            manifest = store.open(record.checkpoint_id).manifest
            handles, bounds = segments_of(manifest, np.ones(manifest.handles.num_rows, bool))
            segments = [segment_of(record, manifest, handles, bounds, number) for number in range(len(bounds) - 1)]
            found = [(segment.path, segment.facts["size_bytes"], segment.inline is not None) for segment in segments]
            kept = reachable(manifest.full()).to_pylist()
            assert found == [(row["path"], row["size_bytes"], row["inline"]) for row in kept]


def test_a_damaged_object_is_noticed_and_gives_right_rows_or_an_error(stores: Stores) -> None:
    found = corruption.Outcome()
    for name, objects in stores.items():
        found.add(corruption_runs.tried(name, objects, stride=1199))
    assert not found.wrong, "\n".join(text for _, text in found.wrong[:10])
    assert len(found.lines) > 10
    for line in found.lines:
        assert found.of(line, "noticed") == found.of(line, "tried") > 0, line
    assert sum(found.of(line, "error") for line in found.lines) > 300


BETWEEN = "both ends, and every seventh length between"
NOTES = {
    corruption.NEWEST: "the one before is the newest then, by design",
    **{f"{corruption.CUT}: {sort}": BETWEEN for sort in ("record", "manifest", "segment")},
}


@pytest.mark.truth
@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", corruption_stores.NAMES)
def test_every_damage_is_noticed_and_gives_right_rows_or_an_error(stores: Stores, store: str, tally: Tally) -> None:
    """Every byte of every object flipped, objects cut, zeroed, removed, swapped, made older."""
    found = corruption_runs.tried(store, stores[store])
    wrong = [line for line, _ in found.wrong]
    for line in found.lines:
        tried, noticed = found.of(line, "tried"), found.of(line, "noticed")
        tally.add(line, tried=tried, noticed=noticed, wrong=wrong.count(line), note=NOTES.get(line, ""))
    right, errors = (sum(found.of(line, what) for line in found.lines) for what in ("right", "error"))
    tally.add("what was damaged, read", tried=right + errors, noticed=errors, wrong=0, note="the rest is right")
    assert not wrong, "\n".join(text for _, text in found.wrong[:20])
    assert sum(found.of(line, "tried") for line in found.lines) == len(corruption.cases(store, stores[store]))
    flipped = sum(found.of(line, "tried") for line in found.lines if line.startswith(corruption.FLIP))
    assert flipped == sum(len(data) for data in stores[store].values())


def test_without_its_newest_record_a_store_is_what_it_was_before(stores: Stores) -> None:
    """By design (SPEC.md section 2.3): a checkpoint exists exactly when its record does. See also
    ``ckpt history``.
    """
    newest = max(path for path in stores["keyed"] if path.startswith("checkpoints/"))
    found = corruption.Bench(stores["keyed"]).judge(Case("keyed", corruption.REMOVE, newest))
    assert found.lines == [corruption.NEWEST]
    assert not found.wrong


# ---- page headers: no checksum covers them -------------------------------------------------------


class Segment:
    """The state ``v`` of an operator in one segment, which is read in ranges."""

    def __init__(self, objects: Mapping[str, bytes], operator: str) -> None:
        self._objects = objects
        self._checkpoint = CheckpointStore(cast("Storage", Objects(objects))).open()
        self._handle = Handle(**self._checkpoint.read(operator, "v").handles.to_pylist()[0])
        self.data = objects[str(self._handle.path)]
        self.rows = self.read(self.data)

    def read(self, data: bytes) -> pa.Table:
        storage = cast("Storage", Objects({**self._objects, str(self._handle.path): data}))
        return corruption.read_in_ranges(storage, record=self._checkpoint.record, handle=self._handle)

    def header(self, row_group: int, column: str) -> int:
        metadata = pq.read_metadata(pa.BufferReader(self.data))
        chunks = [metadata.row_group(row_group).column(i) for i in range(metadata.num_columns)]
        return int(next(chunk.data_page_offset for chunk in chunks if chunk.path_in_schema == column))


@pytest.mark.parametrize(
    ("operator", "group", "found", "other", "message"),
    [
        # Two flipped bits turn BYTE_STREAM_SPLIT into PLAIN, or back; the page checksum still fits.
        ("e", 0, b"\x15\x04\x15\x12\x15\x06\x15\x06", b"\x15\x04\x15\x00\x15\x06\x15\x06", "a page says an encoding"),
        ("p", 0, b"\x15\x04\x15\x00\x15\x06\x15\x06", b"\x15\x04\x15\x12\x15\x06\x15\x06", "a page says an encoding"),
        # One flipped bit: two values, one of them null, become three, and Arrow still finds enough
        # rows.
        ("e", 1, b"\x1c\x15\x04\x15\x12", b"\x1c\x15\x06\x15\x12", "(.*its pages have 3 values|has 3 values)"),
    ],
)
def test_a_page_header_that_contradicts_the_footer_is_refused(
    stores: Stores, operator: str, group: int, found: bytes, other: bytes, message: str
) -> None:
    segment = Segment(stores["none"], operator)
    at = segment.data.index(found, segment.header(group, "n"))
    with pytest.raises(DamagedCheckpoint, match=f"column n:? {message}"):
        segment.read(segment.data[:at] + other + segment.data[at + len(found) :])


def _rewritten(objects: Mapping[str, bytes], name: str, **options: Any) -> dict[str, bytes]:
    """Return the same store, with the segment of operator ``e`` rewritten with other Parquet
    options, as another program may do.
    """
    storage = MemoryStorage(name)
    for path, data in objects.items():
        put(storage, path, data)
    forger = Forger(storage, 1)
    at = forger.find("e", "v")
    forger.set_rows(at, forger.table_of(at), **options)
    forger.seal()
    found = {item.path: get(storage, item.path) for item in storage.list("")}
    MemoryStorage.reset(name)
    return found


def test_data_pages_of_version_2_are_believed_by_the_digest_of_the_whole(stores: Stores) -> None:
    """Their headers say how long levels are. One flipped bit there gives other rows, and the footer
    cannot show it.
    """
    rewritten = _rewritten(stores["none"], "pages-2", data_page_version="2.0", use_dictionary=False)
    segment = Segment(rewritten, "e")
    assert segment.rows.equals(Segment(stores["none"], "e").rows)
    assert validate(cast("Storage", Objects(rewritten)), level="full").ok
    for column in ("n", "s"):
        start = 8 * segment.header(0, column)
        for bit in range(start, start + 8 * 30):
            with pytest.raises(DamagedCheckpoint):
                segment.read(corruption.flipped(segment.data, bit))


def test_a_page_without_a_checksum_is_a_problem_and_no_slice_of_it_is_read(stores: Stores) -> None:
    rewritten = _rewritten(stores["none"], "no-checksum", write_page_checksum=False)
    storage = cast("Storage", Objects(rewritten))
    assert validate(storage).ok
    (problem,) = validate(storage, level="full").problems
    assert (problem.clause, problem.operator, problem.state, problem.subtask) == ("SPEC 5.5", "e", "v", 0)
    assert "row group 0: column _key_group: a page has no checksum" in problem.message
    with pytest.raises(DamagedCheckpoint, match="column _key_group: a page has no checksum"):
        Segment(rewritten, "e")
    # Read as a whole, it is checked by its digest.
    whole = CheckpointStore(storage).open().read("e", "v").table()
    assert whole.equals(CheckpointStore(cast("Storage", Objects(stores["none"]))).open().read("e", "v").table())


@pytest.mark.parametrize(
    ("store", "columns", "stride"),
    [
        ("none", ("n",), 29),
        pytest.param("none", ("_key_group", "k", "n", "d", "s"), 3, marks=pytest.mark.truth),
        *(pytest.param(codec, ("n", "s"), 5, marks=pytest.mark.truth) for codec in ("lz4", "zstd", "snappy")),
    ],
)
def test_no_two_flipped_bits_of_a_page_header_make_other_rows(
    stores: Stores, tally: Tally, store: str, columns: tuple[str, ...], stride: int
) -> None:
    tried = errors = wrong = 0
    for operator in "ep":
        segment = Segment(stores[store], operator)
        for column in columns:
            # Arrow's headers of data pages have this length here. If one is shorter, its page is
            # hit too.
            start = 8 * segment.header(0, column)
            for bits in list(combinations(range(start, start + 8 * 22), 2))[::stride]:
                changed = bytearray(segment.data)
                for bit in bits:
                    changed[bit // 8] ^= 1 << bit % 8
                tried += 1
                try:
                    wrong += not segment.read(bytes(changed)).equals(segment.rows)
                except DamagedCheckpoint:
                    errors += 1
    note = "read by slice; the rest gives right rows"
    tally.add("two bits of a page header flipped", tried=tried, noticed=errors, wrong=wrong, note=note)
    assert wrong == 0
    assert errors > tried * 3 // 4


# ---- the command ---------------------------------------------------------------------------------


def _sample(stores: Stores, count: int) -> list[Case]:
    rng = random.Random(7)
    by_line: dict[str, list[Case]] = {}
    for name, objects in stores.items():
        for case in corruption.cases(name, objects):
            by_line.setdefault(case.line, []).append(case)
    for group in by_line.values():
        rng.shuffle(group)
    return [*chain.from_iterable(zip(*(group[:count] for group in by_line.values()), strict=False))][:count]


def _is_sentence(text: str) -> bool:
    return bool(text.strip()) and "Traceback" not in text and "bug" not in text


@pytest.mark.parametrize(("count", "processes"), [(12, 0), pytest.param(50, 4, marks=pytest.mark.truth)])
def test_the_command_notices_damage_in_text_and_in_json(
    stores: Stores, tally: Tally, tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int, processes: int
) -> None:
    chosen, wrong = _sample(stores, count), []
    fed = {name: corruption.Bench(objects).fed for name, objects in stores.items()}
    assert len(chosen) == count
    for number, case in enumerate(chosen):
        root = tmp_path / str(number)
        for path, data in corruption.damaged(stores[case.store], case).items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        arguments = ["validate", f"{root}@{fed[case.store][case.path]}", "--level", "full"]
        status, told = ckpt([*arguments, "--format", "json"]), capsys.readouterr()
        document = json.loads(told.out)
        messages = [problem["message"] for problem in document.get("problems", ())]
        messages += [document["error"]["message"]] if "error" in document else []
        again, page = ckpt(arguments), capsys.readouterr()
        # Status 3 means that there is no such checkpoint, as when its record is gone.
        allowed = (1, 3) if case.path.startswith("checkpoints/") else (1,)
        said = _is_sentence("".join(messages)) and _is_sentence(page.out + page.err) and messages
        if status not in allowed or again != status or not said:
            wrong.append(f"{case}: {status}, {again}: {told} {page}")
        if number < processes:
            apart = program(*arguments)
            if apart.returncode != status or apart.stdout.splitlines()[1:] != page.out.splitlines()[1:]:
                wrong.append(f"{case}: a process says {apart}, not {page}")
        shutil.rmtree(root)
    note = f"{processes} of them also in a process of its own"
    tally.add("sample of all, by ckpt validate", tried=count, noticed=count - len(wrong), wrong=len(wrong), note=note)
    assert not wrong, "\n".join(wrong[:5])

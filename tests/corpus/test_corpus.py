"""The corpus for other implementers is what its script writes, and holds for the library and for
readers without it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.model import Mode
from tests.corpus import make_corpus
from tests.corpus.bases import BASES
from tests.corpus.cases import CASES, OPEN, READ
from tests.golden.make_golden import rows_of
from tests.stateformat.independent_readers import JsonAndParquet, Sql
from tests.stateformat.test_independent_readers import compare

CORPUS = Path(make_corpus.__file__).parent
TOLD: dict[str, Any] = json.loads((CORPUS / "cases.json").read_text())
BROKEN = {case["store"].partition("/")[2]: case for case in TOLD["broken"]}


def files(folder: Path) -> dict[str, bytes]:
    written = [*folder.rglob("sound/**/*"), *folder.rglob("broken/**/*"), folder / "cases.json", folder / "README.md"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in written if path.is_file()}


def test_the_corpus_is_what_its_script_writes(tmp_path: Path) -> None:
    make_corpus.main(tmp_path)
    made, kept = files(tmp_path), files(CORPUS)
    assert made.keys() == kept.keys()
    if TOLD["pyarrow"] != pa.__version__:  # Another one compresses to other bytes.
        made, kept = ({name: found[name] for name in ("README.md",)} for found in (made, kept))
    assert [name for name, data in made.items() if data != kept[name]] == []


def test_every_section_that_can_be_broken_has_a_case_and_every_feature_a_sound_store() -> None:
    sections = {case.section for case in CASES}
    told = "2.2 2.3 3.1 3.2 3.3 3.4 3.5 3.6 3.7 4.1 4.2 4.3 4.4 4.5 4.6 5.1 5.2 5.3 5.4 5.5 5.6 5.7 6.2 6.4 6.5 6.6 7.2 7.4"
    assert sections >= {*told.split(), "8.1", "8.2", "8.4"}
    records = [record for name in BASES for record in sf.open(CORPUS / "sound" / name).history()]
    features = {feature for record in records for feature in record.required_features}
    assert features == {
        *("finished_operators", "layers", "in_flight"),
        *("committables", "rescaled", "processing_time_timers"),
    }
    assert {state.mode for record in records for state in record.states} == set(Mode)
    assert {state.kind for record in records for state in record.states if state.kind} == set(sf.Kind)


@pytest.mark.parametrize("name", BASES)
def test_a_sound_store_is_accepted_and_every_reader_gives_its_rows(name: str, tmp_path: Path) -> None:
    folder = CORPUS / "sound" / name
    store = sf.open(folder)
    rows = json.loads((folder / "rows.json").read_text())
    for record in store.history():
        report = sf.validate(store, record.checkpoint_id, level="full")
        assert report.problems == ()
        # What a repair leaves behind is told as long as it is there.
        assert report.warnings == () or name == "repaired"
        found = rows_of(store.open(record.checkpoint_id))
        assert json.loads(json.dumps(found)) == rows[str(record.checkpoint_id)]
    reader = JsonAndParquet(folder)
    # The others know nothing of rows that expire.
    checkpoint = store.open().with_expired()
    assert compare(checkpoint, reader, reader) > 0
    if name != "evolved":  # Nobody evolves rows in that SQL.
        assert compare(checkpoint, Sql(folder, tmp_path), reader) > 0


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_broken_store_is_told_as_its_page_says(case: Any) -> None:
    said = BROKEN[case.name]
    store = sf.open(CORPUS / "broken" / case.name)
    findings = sf.validate(store, level="full").findings
    assert (str(findings[0].kind), findings[0].clause, findings[0].severity) == (case.kind, case.told, case.severity)
    found = [{"kind": str(one.kind), "clause": one.clause, "severity": one.severity} for one in findings]
    assert [one for i, one in enumerate(found) if one not in found[:i]] == said["findings"]
    assert (said["section"], said["reader"], said["what"]) == (case.section, case.reader, case.what)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_library_refuses_what_a_reader_must_refuse_and_never_fails_otherwise(case: Any) -> None:
    store = sf.open(CORPUS / "broken" / case.name)
    refused = set()
    try:
        checkpoint = store.open()
        states = [(state.operator, state.name) for state in checkpoint.states if checkpoint.handles.num_rows]
    except sf.CheckpointError:
        assert case.reader == OPEN or case.name == "4.1-mode-differs"
        return
    assert case.reader != OPEN
    for operator, name in states:
        try:
            checkpoint.read(operator, name).table()
        except sf.CheckpointError:
            refused.add(f"{operator}/{name}")
    if case.reader == READ:
        assert case.state in refused


@pytest.mark.parametrize(
    "name", ["2.3-manifest-missing", "3.1-not-json", "3.2-newer-version", "3.3-unknown-feature", "4.1-column-missing"]
)
def test_readers_without_the_library_refuse_what_they_cannot_read(name: str) -> None:
    """They verify nothing, so they notice what they cannot read and nothing else."""
    with pytest.raises((AssertionError, OSError, ValueError, KeyError)):
        JsonAndParquet(CORPUS / "broken" / name).read("count", "sums", 0)

"""The JSON Schemas that the package ships, held against what is printed and written."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from jsonschema import Draft202012Validator

from stateformat.errors import DamagedCheckpoint, UnsupportedFormat
from stateformat.model import GIVEN_UP_PROPERTY
from stateformat.record import decode_record
from stateformat.store import open as open_store
from stateformat.tools.ckpt.docs import SCHEMAS, schemas
from tests.ckpt.ckpt_runs import SCHEMA, conforms, document, run
from tests.forgery import Forger, seal
from tests.frozen import READ, WRITE, called, worlds

TESTS = Path(__file__).resolve().parents[1]
CROSSED, EVOLVED, EXPIRING, FINISHED = (
    max((TESTS / "corpus/sound" / name / "checkpoints").iterdir())
    for name in ("crossed", "evolved", "expiring", "finished")
)
RECORDS = [
    path
    for folder in ("golden", "corpus/sound")
    for path in sorted((TESTS / folder).rglob("checkpoints/*.json"))
    if path.read_bytes() != b"{"
]
"""All but the one that a repair of the corpus has left behind."""
OTHER = {str: 0, int: "1", bool: 1, list: {}, dict: []}
"""A value of another type."""

CALLS = (
    "inspect FLIGHTS --operator delays", "inspect FLIGHTS --operator sink", "inspect FLIGHTS --operator flights",
    "inspect EXPIRING --operator count", "get FLIGHTS --operator delays --state sums --key '\"N004\"'",
    "get FLIGHTS --operator delays --state sums --key '\"N004\"' --all", "diff FLIGHTS@1 FLIGHTS --rows 3",
    "du FLIGHTS --keep 1 --price 0.02", "sql FLIGHTS 'from states' --to OUT/rows.csv",
    "export FLIGHTS --operator delays --state sums --to OUT/rows.parquet", "rescale FLIGHTS --parallelism 6 --dry-run",
    "rewrite FLIGHTS --parallelism 3 --rename-column delays/sums.n=count --prove", "rollback FLIGHTS@1",
    "pin FIVE safe", "history FIVE", "validate FIVE --all", "LOSE segments", "repair FIVE",
    "repair FIVE --restore-from FIVE@safe --yes", "unpin FIVE safe", "rescale FIVE --parallelism 3", "LOSE manifests",
    "repair FIVE@6 --yes",
)  # fmt: skip
"""What :mod:`tests.frozen` does not show, in this order; ``LOSE`` deletes the newest object."""
ELSEWHERE = {
    "ckpt-progress progress-epoch progress-job progress-log progress-failure progress-outcome": "spark/test_spark_program.py",
    "ckpt-run run": "ckpt/test_ckpt_run.py",
    "ckpt-savepoint savepoint ckpt-stop stop rescale-running": "ckpt/test_ckpt_asking.py",
    "ckpt-watch watch-job watch-checkpoint watch-event": "ckpt/test_ckpt_watch.py",
    "changed-member": "ckpt/test_ckpt_diff.py",
    "contents.unread contents.messages": "ckpt/test_ckpt_reading.py",
    "start column-of-a-plan": "ckpt/test_ckpt_explain_flow.py",
    "history-FOLDER.passed_over": "ckpt/test_ckpt_below.py",
    "copy-of-a-Structured-Streaming-query.sources": "foreign/test_spark_offsets.py",
    "repair-of-a-Structured-Streaming-query.lost repair-of-a-Structured-Streaming-query.to": "foreign/test_spark_repair.py",
    "rewrite-of-a-Structured-Streaming-query": "foreign/test_spark_rewrite.py",
    "export-to-a-folder.states.notes": "exporting/test_export_parquet.py",
    "import.finished import.positions": "foreign/test_ckpt_import.py",
}
"""What only the named tests show, since it takes a running job, another program or rare damage."""
SHARED = r"\.given_up\.|^(rollback|repair-yes)\.changes\."
"""What a test below shows, and members of a published checkpoint that rolling back never fills."""


@pytest.fixture(scope="module")
def record() -> Draft202012Validator:
    schema = json.loads((SCHEMAS / "record.json").read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_the_files_are_those_that_the_tables_of_the_docs_make() -> None:
    made = schemas()
    assert made == {path.name: path.read_text(encoding="utf-8") for path in SCHEMAS.iterdir()}


# ---- The record


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: str(path.relative_to(TESTS)))
def test_every_sound_record_is_as_its_schema_says(record: Draft202012Validator, path: Path) -> None:
    record.validate(json.loads(path.read_bytes()))


def unsealed(path: Path) -> Any:
    members = json.loads(path.read_bytes())
    del members["digest"]
    return members


def sealed(members: Mapping[str, Any]) -> Any:
    return json.loads(seal(members))


def refused(record: Draft202012Validator, members: Mapping[str, Any]) -> None:
    """Neither the schema nor the reader takes a record with these members, and a right digest."""
    assert not record.is_valid(sealed(members))
    with pytest.raises((DamagedCheckpoint, UnsupportedFormat)):
        decode_record(seal(members))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every object or array inside a value, with each of its names or indices."""
    if isinstance(value, dict | list):
        for at in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, at
            yield from places(value[at])


def test_what_breaks_a_type_is_refused_by_the_schema_and_by_the_reader(record: Draft202012Validator) -> None:
    tried = 0
    for path in (CROSSED, EVOLVED, EXPIRING, FINISHED):
        members = unsealed(path)
        for holder, at in list(places(members)):
            right = holder[at]
            holder[at] = OTHER[type(right)]
            refused(record, members)
            holder[at] = right
            tried += 1
    assert tried > 250


def test_a_member_that_the_schema_demands_is_demanded_by_the_reader(record: Draft202012Validator) -> None:
    members, demanded = unsealed(CROSSED), 0
    for holder, at in [place for place in places(members) if isinstance(place[0], dict)]:
        right = holder.pop(at)
        if not record.is_valid(sealed(members)):
            demanded += 1
            refused(record, members)
        holder[at] = right
    assert demanded > 50


def test_a_member_of_a_later_version_is_allowed(record: Draft202012Validator) -> None:
    members = unsealed(CROSSED)
    members["operators"][0]["later"] = members["later"] = {"more": 1}
    record.validate(sealed(members))
    decode_record(seal(members))


# ---- The manifest


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: str(path.relative_to(TESTS)))
def test_every_manifest_has_the_columns_of_its_schema(path: Path) -> None:
    schema = json.loads((SCHEMAS / "manifest.json").read_text())
    columns = schema["properties"]
    table = pq.read_table(path.parents[1] / json.loads(path.read_bytes())["manifest"]["path"])
    assert {column.name: str(column.type) for column in table.schema} == {
        name: column["arrow"] for name, column in columns.items()
    }
    assert table.schema.names == list(columns) == schema["required"]
    validator = Draft202012Validator(schema)
    for row in table.to_pylist():
        validator.validate({name: value.hex() if isinstance(value, bytes) else value for name, value in row.items()})


# ---- Documents


class Seen:
    """Which objects and members of the schema have occurred."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.documents = 0

    def add(self, command: str, document: Any) -> None:
        conforms(command, document)
        self.documents += 1
        self._walk({"$ref": f"#/$defs/ckpt-{command}"}, document, "")

    def _walk(self, schema: Mapping[str, Any], value: Any, place: str) -> None:
        if "$ref" in schema:
            place = schema["$ref"].rpartition("/")[2]
            self.names.add(place)
            schema = SCHEMA["$defs"][place]
        for choice in schema.get("anyOf", ()):
            if Draft202012Validator({**choice, "$defs": SCHEMA["$defs"]}).is_valid(value):
                self._walk(choice, value, place)
                break
        if isinstance(value, dict):
            for name in value.keys() & schema.get("properties", {}).keys():
                self.names.add(f"{place}.{name}")
                self._walk(schema["properties"][name], value[name], f"{place}.{name}")
        elif isinstance(value, list):
            for item in value:
                self._walk(schema.get("items", {}), item, place)


def parts(schema: Mapping[str, Any], place: str) -> Iterator[str]:
    """The names that :class:`Seen` may have of a definition."""
    yield place
    for name, member in schema.get("properties", {}).items():
        yield from parts(member, f"{place}.{name}")
    for inner in (*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])):
        yield from list(parts(inner, place))[1:]


def printed(form: str, places: Mapping[str, Path]) -> Any:
    """The document of a call whose words begin with names of places."""
    words = []
    for word in shlex.split(form):
        name, rest = re.fullmatch(r"([A-Z]*)(.*)", word, re.DOTALL).groups()
        words.append(f"{places[name]}{rest}" if name in places else word)
    return run(*words, "--format", "json").document


@pytest.fixture
def shown(five: Path, own_flights: Path, tmp_path: Path) -> Seen:
    """What the calls print, which conforms to its schema."""
    (tmp_path / "out").mkdir()
    places = {
        "FIVE": five,
        "FLIGHTS": own_flights,
        "OUT": tmp_path / "out",
        "EXPIRING": TESTS / "corpus/sound/expiring",
    }
    seen = Seen()
    for form in CALLS:
        if form.startswith("LOSE"):
            max((five / form.split()[1]).rglob("*.parquet")).unlink()
        else:
            found = printed(form, places)
            assert "error" not in found, (form, found)
            seen.add(form.split()[0], found)
    return seen


def test_each_kind_of_document_is_as_its_schema_says(shown: Seen) -> None:
    assert shown.documents == len(CALLS) - 2


def test_what_a_checkpoint_was_published_without_is_as_its_schema_says(counts: Path, tmp_path: Path) -> None:
    state = {"operator": "count", "state": "totals", "effect": "keys", "rows": 2, "rows_besides": 1}
    forger = Forger(open_store(str(counts)).storage, 1)
    told = {"checkpoint_id": 1, "rows": 3, "states": [state]}
    forger.record = replace(forger.record, properties={GIVEN_UP_PROPERTY: json.dumps(told)})
    forger.seal()
    assert document("inspect", counts)["given_up"] == told
    assert document("report", counts, "--to", tmp_path / "page.html")["checkpoint"]["given_up"] == told


@pytest.mark.truth
@pytest.mark.timeout(1800)
def test_all_documents_of_forty_stores_are_as_their_schemas_say_and_show_each_part_of_it(
    shown: Seen, tmp_path: Path
) -> None:
    Draft202012Validator.check_schema(SCHEMA)
    folder = tmp_path / "frozen"
    folder.mkdir()

    def say(arguments: Sequence[str], hidden: Path) -> str:
        shown.add(arguments[0], run(*arguments).document)
        return ""

    for _, store in worlds(folder / "stores"):
        for form in (*READ, *WRITE):
            called(f"{form} --format json", store, folder, writes=form in WRITE, say=say)
        shutil.rmtree(store)
    print(f"{shown.documents:,} documents with {len(shown.names):,} parts of the schema")
    unseen = {part for name, schema in SCHEMA["$defs"].items() for part in parts(schema, name)} - shown.names
    elsewhere = {name: TESTS / test for names, test in ELSEWHERE.items() for name in names.split()}
    assert all(test.exists() for test in elsewhere.values())
    unseen = {part for part in unseen if not re.search(SHARED, part)}
    assert {part for part in unseen if not any(f"{part}.".startswith(f"{name}.") for name in elsewhere)} == set()
    assert not [name for name in elsewhere if not any(f"{part}.".startswith(f"{name}.") for part in unseen)]

"""The publication record: identity of encode and decode, strictness, and what damaged or hostile
bytes come to.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings, strategies as st

from stateformat import model
from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput, UnsupportedFormat
from stateformat.graph import Edge, JobGraph, Operator, OperatorId, Partitioner, SubtaskSet
from stateformat.manifest import handles_table
from stateformat.model import Field, FormerStatus, Handle, Mode, ParentRef, Record, RescaledFrom, SchemaVersion, State
from stateformat.record import decode_record, encode_record, optional_features, required_features
from stateformat.ttl import NO_TIME_US, Ttl

HASH = "spark-murmur3-seed42"
HOUR = Ttl(3_600_000_000, "processing_time", "read_and_write")
SOURCE, COUNT = OperatorId("source"), OperatorId("count")


def rich_record() -> Record:
    """A record with every member, optional ones and unicode too."""
    tags = Field(6, "tags", ("list", Field(7, "element", "utf8")))
    struct = Field(4, "place", ("struct", (Field(5, "x", "double"), tags)))
    mapping = Field(8, "m", ("map", Field(9, "key", "int8", nullable=False), Field(10, "value", "decimal(38,9)")))
    user, count = Field(1, "user", "utf8"), Field(2, "n", "int64", False, "0")
    schemas = SchemaVersion(1, (user,)), SchemaVersion(3, (user, count, struct, mapping))
    expiring = SchemaVersion(1, (user, Field(2, "ttl_last_access", "timestamp_us", nullable=False)))
    source = Operator(SOURCE, 3, 128, "Source", HASH, "c1", SubtaskSet(((0, 0),)), SubtaskSet(((2, 2),)))
    former = FormerStatus(SOURCE, 2, SubtaskSet(((1, 1),)), SubtaskSet())
    parent = ParentRef(model.CheckpointId(41), model.AttemptId("a" * 32))
    return Record(
        checkpoint_id=model.CheckpointId(42),
        attempt_id=model.AttemptId("0123456789abcdef" * 2),
        kind=model.CheckpointKind.RESCALE,
        job_id=model.JobId("job"),
        job_name='Umsätze "heute" \U0001f680\n',
        graph=JobGraph(
            (source, Operator(COUNT, 4, 128, "", HASH, coordinator=True)),
            (Edge("e1", SOURCE, COUNT, Partitioner.HASH, 1, ("user",)), Edge("e2", COUNT, COUNT, feedback=True)),
        ),
        states=(
            State(COUNT, "counts", Mode.KEYED, schemas, model.Kind.MAP, ("user",), last_field_id=10),
            State(
                COUNT,
                "seen",
                Mode.KEYED,
                (expiring,),
                model.Kind.VALUE,
                ("user",),
                None,
                2,
                HOUR,
                1_790_000_000_000_000,
            ),
            State(COUNT, "mail", Mode.IN_FLIGHT, (SchemaVersion(1, ()),), edge="e1", key_columns=("user",)),
        ),
        manifest=model.ManifestRef("manifests/00000000000000000042-x.parquet", 1234, "f" * 32, 99),
        totals=model.Totals(5, 6, 7, 8),
        created_at_us=1_790_000_000_000_000,
        writer="stateformat 0.1.0",
        parent=parent,
        stop=model.Stop(model.StopMode.DRAIN, "req-1"),
        rescaled_from=RescaledFrom(parent, (former,)),
        properties={"owner": "team \\ data", "": "é"},
        required_features=("finished_operators", "in_flight", "rescaled"),
        optional_features=("future_thing",),
    )


def members() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode_record(rich_record()))
    del found["digest"]
    return found


def sealed(value: dict[str, Any] | str) -> bytes:
    """Bytes with a right digest around members, or around text that is an object without its last
    brace.
    """
    body = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))[:-1]
    return f'{body},"digest":"{xxhash.xxh3_128_hexdigest(body.encode())}"}}\n'.encode()


def refused(data: bytes) -> DamagedCheckpoint:
    with pytest.raises(DamagedCheckpoint) as caught:
        decode_record(data, path="checkpoints/00000000000000000042.json")
    assert str(caught.value).startswith("record checkpoints/00000000000000000042.json is damaged: ")
    return caught.value


# ---- strategies ----------------------------------------------------------------------------------

names = st.text(min_size=1, max_size=8)
texts = st.text(max_size=12)
counts = st.integers(0, 2**53 - 1)
ids = st.integers(1, 2**31 - 1)
hexes = st.text("0123456789abcdef", min_size=32, max_size=32)
primitives = st.sampled_from(
    ["bool", "int8", "int64", "float", "double", "utf8", "binary", "date32", "timestamp_us_utc", "decimal(5,2)"]
)


def fields_of(types: st.SearchStrategy[Any]) -> st.SearchStrategy[Field]:
    return st.builds(Field, id=ids, name=names, type=types, nullable=st.booleans(), default=st.none() | texts)


types = st.recursive(
    primitives,
    lambda inner: st.one_of(
        st.lists(fields_of(inner), min_size=1, max_size=3).map(lambda found: ("struct", tuple(found))),
        fields_of(inner).map(lambda found: ("list", found)),
        st.tuples(fields_of(inner), fields_of(inner)).map(lambda found: ("map", *found)),
    ),
    max_leaves=4,
)
schemas = st.builds(SchemaVersion, id=ids, fields=st.lists(fields_of(types), max_size=3).map(tuple))
strings = st.lists(texts, max_size=2).map(tuple)
states = st.builds(
    State,
    operator=names,
    name=names,
    mode=st.sampled_from(Mode),
    schemas=st.lists(schemas, min_size=1, max_size=2).map(tuple),
    kind=st.none() | st.sampled_from(model.Kind),
    key_columns=strings,
    edge=st.none() | texts,
    last_field_id=st.integers(0, 2**31 - 1),
)
edges = st.builds(
    Edge,
    id=names,
    source=names,
    target=names,
    partitioner=st.sampled_from(Partitioner),
    input=counts,
    key_columns=strings,
    feedback=st.booleans(),
)
references = st.builds(ParentRef, st.integers(1, 40), hexes)


@st.composite
def operators(draw: st.DrawFn) -> Operator:
    parallelism = draw(st.integers(1, 12))
    statuses = st.sampled_from(["running", "finished", "finishing"])
    where = draw(st.lists(statuses, min_size=parallelism, max_size=parallelism))
    return Operator(
        uid=OperatorId(draw(names)),
        parallelism=parallelism,
        max_parallelism=draw(st.integers(parallelism, 32768)),
        name=draw(texts),
        key_hash=draw(names),
        chain=draw(st.none() | texts),
        finished=SubtaskSet.of(i for i, what in enumerate(where) if what == "finished"),
        finishing=SubtaskSet.of(i for i, what in enumerate(where) if what == "finishing"),
        coordinator=draw(st.booleans()),
    )


formers = operators().map(lambda found: FormerStatus(found.uid, found.parallelism, found.finished, found.finishing))
features = st.sets(st.sampled_from(["committables", "finished_operators", "in_flight", "layers", "rescaled"]))
records = st.builds(
    Record,
    checkpoint_id=st.integers(41, 2**53 - 1),
    attempt_id=hexes,
    kind=st.sampled_from(model.CheckpointKind),
    job_id=names,
    graph=st.builds(JobGraph, st.lists(operators(), max_size=3).map(tuple), st.lists(edges, max_size=2).map(tuple)),
    states=st.lists(states, max_size=2).map(tuple),
    manifest=st.builds(model.ManifestRef, st.just("manifests/a/b.parquet"), st.integers(1, 2**30), hexes, counts),
    totals=st.builds(model.Totals, counts, counts, counts, counts),
    created_at_us=st.integers(-(2**53) + 1, 2**53 - 1),
    job_name=texts,
    writer=texts,
    parent=st.none() | references,
    stop=st.none() | st.builds(model.Stop, st.sampled_from(model.StopMode), texts),
    rescaled_from=st.none() | st.builds(RescaledFrom, references, st.lists(formers, max_size=2).map(tuple)),
    properties=st.dictionaries(texts, texts, max_size=3),
    required_features=features.map(lambda found: tuple(sorted(found))),
    optional_features=st.sets(texts, max_size=3).map(lambda found: tuple(sorted(found))),
)


@settings(max_examples=100, deadline=None)
@given(records)
def test_decode_gives_back_what_encode_was_given(record: Record) -> None:
    assert decode_record(encode_record(record)) == record


# ---- the bytes -----------------------------------------------------------------------------------


def test_bytes_are_plain_json_with_the_digest_last() -> None:
    data = encode_record(rich_record())
    assert decode_record(data) == rich_record()
    head, tail = data.rsplit(b',"digest":"', 1)
    assert tail == xxhash.xxh3_128_digest(head).hex().encode() + b'"}\n'
    found = json.loads(data)
    assert list(found)[:3] == ["format", "version", "required_features"]
    assert found["operators"][0]["status"] == "partially_finished"
    assert found["operators"][0]["finished"] == [[0, 0]]
    assert found["states"][0]["schemas"][1]["fields"][2]["type"]["struct"][1]["type"]["list"]["name"] == "element"
    assert found["parent"] == {"checkpoint_id": 41, "attempt_id": "a" * 32}


def test_absent_members_stay_absent() -> None:
    plain = replace(rich_record(), parent=None, stop=None, rescaled_from=None, required_features=())
    found = json.loads(encode_record(plain))
    assert not {"parent", "stop", "rescaled_from"} & set(found)
    assert "chain" not in found["operators"][1]
    assert "kind" not in found["states"][2]
    assert "edge" not in found["states"][0]
    assert decode_record(encode_record(plain)) == plain


def test_every_flipped_byte_is_refused_or_harmless() -> None:
    data = bytearray(encode_record(rich_record()))
    before = decode_record(bytes(data))
    for position in range(len(data)):
        for flip in (0x01, 0x20, 0x80, 0xFF):
            data[position] ^= flip
            with suppress(DamagedCheckpoint, UnsupportedFormat):
                assert decode_record(bytes(data)) == before, position
            data[position] ^= flip
    assert decode_record(bytes(data)) == before


def test_every_torn_or_grown_record_is_refused() -> None:
    data = encode_record(rich_record())
    for length in range(len(data)):
        refused(data[:length])
    for grown in (data + b"\n", data + b" ", b" " + data, b"\xef\xbb\xbf" + data, data + data, data[:-1] + b"\r\n"):
        refused(grown)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.text('{}[]":,0123.eE-+truefalsn \\ud8', max_size=80).map(str.encode))
def test_garbage_is_damage_and_no_other_error(data: bytes) -> None:
    refused(data)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_stands_in_a_member_the_answer_is_a_record_or_an_error_of_ours(data: st.DataObject) -> None:
    found = members()
    place: Any = found
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    scalars = st.booleans() | st.integers(-3, 5) | st.integers(2**52, 2**70) | texts | st.floats() | st.none()
    values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner))
    place[key] = data.draw(values)
    with suppress(DamagedCheckpoint, UnsupportedFormat):
        assert isinstance(decode_record(sealed(json.loads(json.dumps(found)))), Record)


# ---- versions and features -----------------------------------------------------------------------


@pytest.mark.parametrize("data", [sealed, lambda found: json.dumps(found).encode()], ids=["right digest", "no digest"])
def test_a_newer_version_is_unsupported_and_nothing_else_is_looked_at(data: Callable[[dict[str, Any]], bytes]) -> None:
    newer = {"format": "stateformat", "version": 2, "ratio": 0.5, "operators": None, "ids": [2**60]}
    with pytest.raises(UnsupportedFormat, match=r"version 2; this reader knows 1. Upgrade") as caught:
        decode_record(data(newer))
    assert caught.value.kind is ErrorKind.UNSUPPORTED_VERSION


def test_an_unknown_required_feature_is_refused_by_name_before_any_member() -> None:
    found = members() | {"required_features": ["layers", "telepathy"], "operators": 3}
    with pytest.raises(UnsupportedFormat, match="'telepathy'") as caught:
        decode_record(sealed(found))
    assert caught.value.kind is ErrorKind.UNSUPPORTED_FEATURE
    assert caught.value.details["features"] == ["telepathy"]


def test_unknown_members_and_optional_features_are_ignored() -> None:
    found = members()
    found["x_new"] = {"deep": [1, {"a": True}]}
    found["operators"][0]["x_new"] = "y"
    found["optional_features"] = ["a", "b"]
    assert decode_record(sealed(found)) == replace(rich_record(), optional_features=("a", "b"))


@pytest.mark.parametrize("version", [0, -1, "1", True])
def test_what_is_no_version_is_damage(version: Any) -> None:
    assert refused(sealed(members() | {"version": version})).details["member"] == "version"


def test_features_are_listed_exactly_when_used() -> None:
    plain = JobGraph((Operator(COUNT, 2, 4),))
    ended = JobGraph((Operator(COUNT, 2, 4, finishing=SubtaskSet.of([1])),))
    keyed = State(COUNT, "s", Mode.KEYED, (SchemaVersion(1, ()),))
    mail = replace(keyed, mode=Mode.IN_FLIGHT)
    base, delta = (Handle("count", "s", "keyed", 0, layer, None, 1) for layer in (0, 2))
    pending = base._replace(mode="committables")
    former = RescaledFrom(ParentRef(model.CheckpointId(1), model.AttemptId("a" * 32)))
    assert required_features(plain, [keyed], handles_table([]), None) == ()
    assert required_features(plain, [keyed], handles_table([base]), None) == ()
    assert required_features(ended, [keyed], handles_table([base]), None) == ("finished_operators",)
    assert required_features(plain, [keyed], handles_table([base, delta]), None) == ("layers",)
    every = ("committables", "finished_operators", "in_flight", "layers", "rescaled")
    assert required_features(ended, [keyed, mail], handles_table([base, delta, pending]), former) == every


# ---- strictness ----------------------------------------------------------------------------------


def change(path: str, value: Any) -> bytes:
    """The rich record with the member at a JSON path replaced (or removed, by ``...``), under a
    right digest.
    """
    found: Any = members()
    place = found
    *steps, last = path.replace("]", "").replace("[", ".").split(".")
    for step in steps:
        place = place[int(step) if isinstance(place, list) else step]
    if value is ...:
        del place[last]
    else:
        place[int(last) if isinstance(place, list) else last] = value
    return sealed(found)


WRONG: list[tuple[Any, ...]] = [
    ("job_id", ..., "is missing"),
    ("job_id", "", "is empty"),
    ("operators[1].parallelism", "4", "is a string where an integer is expected"),
    ("operators[1].parallelism", True, "is true or false where an integer"),
    ("operators[1].parallelism", 0, "must be from 1"),
    ("operators[1].max_parallelism", 3, "must be from 4"),
    ("operators[1].max_parallelism", 32769, "to 32768"),
    ("operators[0].finished[0]", [2, 1], "is [2, 1]"),
    ("operators[0].finished[0]", [0, 3], "within subtasks 0 to 2"),
    ("operators[0].finished[0]", [0], "not a pair"),
    ("operators[0].status", "running", "make it partially_finished", ErrorKind.STATUS_CONTRADICTION),
    ("operators[0].status", "tired", "not one of running"),
    ("edges[0].partitioner", "random", "not one of forward"),
    ("states[0].schemas", [], "is empty"),
    ("states[0].schemas[1].fields[1].id", 0, "must be from 1"),
    ("states[0].schemas[1].fields[1].type", "pickle", "unknown type", ErrorKind.UNSUPPORTED_TYPE),
    ("states[0].schemas[1].fields[1].type", "decimal(05,2)", "not written as"),
    ("states[0].schemas[1].fields[2].type", {"union": []}, "exactly one of"),
    ("states[0].schemas[1].fields[2].type.struct", [], "has 0 fields"),
    ("states[0].schemas[1].fields[1].nullable", 1, "is an integer where true or false"),
    ("states[1].ttl", 5, "is an integer where an object"),
    ("states[1].ttl.field", 1, "is 1, column 'user' of schema 1; it is the id of 'ttl_last_access'"),
    ("states[1].ttl.field", 9, "is 9, no column of schema 1"),
    ("states[1].ttl.field", "2", "is a string where an integer"),
    ("states[1].ttl.duration_us", 0, "must be from 1"),
    ("states[1].ttl.duration_us", -1, "must be from 1"),
    ("states[1].ttl.clock", "sundial", "none of event_time, processing_time"),
    ("states[1].ttl.refresh", "read", "none of write, read_and_write"),
    ("states[1].ttl.now_us", "noon", "is a string where an integer"),
    ("parent.checkpoint_id", 42, "not less than"),
    ("parent.attempt_id", "A" * 32, "lower-case hexadecimal"),
    ("manifest.path", "manifests/../../etc/passwd", "leaves the store", ErrorKind.INVALID_PATH),
    ("manifest.path", "/etc/passwd", "leaves the store", ErrorKind.INVALID_PATH),
    ("manifest.path", "segments/a", "does not lie under manifests/", ErrorKind.INVALID_PATH),
    ("manifest.digest", "f" * 31, "not 32"),
    ("properties.owner", 3, "is an integer where a string"),
    ("required_features", ["rescaled", "layers"], "is not sorted"),
    ("format", "iceberg", "not a record of a checkpoint"),
    ("checkpoint_id", 43, "the object's name says 42"),
]


@pytest.mark.parametrize("case", WRONG, ids=[f"{path}={value!r}" for path, value, *_ in WRONG])
def test_each_wrong_member_is_named_by_its_path(case: tuple[Any, ...]) -> None:
    path, value, message, *kind = case
    error = refused(change(path, value))
    assert message in str(error)
    assert [error.kind] == (kind or [ErrorKind.DAMAGED_RECORD])
    assert str(error.details["member"]) == path


@pytest.mark.parametrize("field", [{"type": "int64"}, {"nullable": True}])
def test_the_time_of_the_last_access_is_a_timestamp_without_nulls(field: dict[str, Any]) -> None:
    found = members()
    found["states"][1]["schemas"][0]["fields"][1] |= field
    assert "is no timestamp_us without nulls" in str(refused(sealed(found)))


@pytest.mark.parametrize("now_us", [None, NO_TIME_US, 0, 2**53 - 1])
def test_the_time_of_a_checkpoint_is_kept_though_states_compare_without_it(now_us: int | None) -> None:
    seen = replace(rich_record().states[1], ttl_now_us=now_us)
    found = decode_record(encode_record(replace(rich_record(), states=(seen,)))).states[0]
    assert (found, found.ttl_now_us) == (rich_record().states[1], now_us)


def test_times_that_json_cannot_hold_are_clipped() -> None:
    for watermark, kept in ((-(2**63), NO_TIME_US), (2**63 - 1, 2**53 - 1)):
        seen = replace(rich_record().states[1], ttl_now_us=watermark)
        assert decode_record(encode_record(replace(rich_record(), states=(seen,)))).states[0].ttl_now_us == kept


def test_states_whose_rows_expire_are_an_optional_feature() -> None:
    assert optional_features(rich_record().states) == ("ttl",)
    assert optional_features(rich_record().states[:1]) == ()


@pytest.mark.parametrize("ranges", [[[0, 0], [1, 1]], [[2, 2], [0, 0]], [[0, 1], [1, 2]]])
def test_ranges_are_sorted_disjoint_and_not_adjacent(ranges: list[list[int]]) -> None:
    assert refused(change("operators[0].finished", ranges)).details["member"] == "operators[0].finished[1]"
    both = refused(change("operators[0].finishing", [[0, 0]]))
    assert "subtask 0 of 'source' is both finished and finishing" in str(both)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ('"x":1.0', "not an integer"),
        ('"x":1e3', "not an integer"),
        ('"x":NaN', "not an integer"),
        ('"x":-Infinity', "not an integer"),
        ('"x":null', "null"),
        ('"x":[null]', "null"),
        ('"x":9007199254740992', "magnitude"),
        ('"x":-9007199254740992', "magnitude"),
        ('"x":' + "9" * 1_000_000, "magnitude"),
        ('"job_id":"other"', "'job_id' appears twice"),
        ('"x":{"a":1,"a":1}', "'a' appears twice"),
        ('"x": 1', "white space"),
        ('"x":[1,\n2]', "white space"),
        ('"x":"\\ud800"', "lone surrogate"),
        ('"x":"\t"', "not JSON"),
    ],
    ids=range(15),
)
def test_what_json_allows_and_the_format_does_not_is_refused_even_in_unknown_members(extra: str, message: str) -> None:
    body = json.dumps(members(), ensure_ascii=False, separators=(",", ":"))[:-1]
    began = time.perf_counter()
    assert message in str(refused(sealed(f"{body},{extra}")))
    assert time.perf_counter() - began < 5


def test_strings_may_hold_brackets_escapes_and_the_word_null() -> None:
    text = '[{"null"}] \\" ' + "[" * 100 + "\\"
    record = replace(rich_record(), properties={text: text})
    assert decode_record(encode_record(record)) == record


@pytest.mark.parametrize("bracket", ["[", '{"a":', "[[{", '"', '"\\"'], ids=range(5))
def test_nesting_bombs_are_refused_before_they_are_parsed(bracket: str) -> None:
    body = json.dumps(members(), separators=(",", ":"))[:-1]
    bomb = f'{body},"x":{bracket * 100_000}'.encode()
    began = time.perf_counter()
    refused(bomb)
    assert time.perf_counter() - began < 5


def test_thirty_two_levels_are_read_and_more_levels_bytes_or_arrays_are_not() -> None:
    body = json.dumps(members(), ensure_ascii=False, separators=(",", ":"))[:-1]
    decode_record(sealed(f'{body},"x":{"[" * 31}{"]" * 31}'))
    for beyond in (
        sealed(f'{body},"x":{"[" * 32}{"]" * 32}'),
        b" " * (8 << 20),
        b'{"x":[' + b"[]," * (1 << 20) + b"[]]}\n",
    ):
        assert refused(beyond).kind is ErrorKind.LIMIT_EXCEEDED


# ---- what cannot be written ----------------------------------------------------------------------


def nested(depth: int) -> Field:
    inner = Field(1, "leaf", "int8")
    for level in range(depth):
        inner = Field(level + 2, "f", ("struct", (inner,)))
    return inner


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"graph": JobGraph((Operator(COUNT, 2),))}, "operators[0].max_parallelism is null"),
        ({"created_at_us": 2**53}, "magnitude"),
        ({"created_at_us": 1.5}, "not an integer"),
        ({"job_name": "\ud800"}, "surrogates not allowed"),
        ({"parent": ParentRef(model.CheckpointId(42), model.AttemptId("a" * 32))}, "not less than"),
        ({"manifest": model.ManifestRef("../x", 1, "f" * 32, 1)}, "leaves the store"),
        ({"required_features": ("magic",)}, "magic"),
        ({"states": (State(COUNT, "s", Mode.UNION, (SchemaVersion(1, (nested(9),)),)),)}, "nested deeper than 32"),
        ({"properties": {"a": object()}}, "not JSON serializable"),
    ],
    ids=range(9),
)
def test_a_record_that_could_not_be_read_is_not_written(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        encode_record(replace(rich_record(), **changes))
    assert message in str(caught.value)
    assert str(caught.value).startswith("the record of checkpoint 42 cannot be written: ")


def test_types_nested_eight_deep_are_written_and_read() -> None:
    record = replace(rich_record(), states=(State(COUNT, "s", Mode.UNION, (SchemaVersion(1, (nested(8),)),)),))
    assert decode_record(encode_record(record)) == record


def test_twenty_times_as_many_operators_are_read_in_about_twenty_times_the_time() -> None:
    def record_of(operators: int) -> bytes:
        graph = JobGraph(tuple(Operator(OperatorId(f"op-{i}"), 4, 128, key_hash="h") for i in range(operators)))
        return encode_record(replace(rich_record(), graph=graph, states=()))

    def seconds(operators: int) -> float:
        """Processor time, the least of some tries: what else runs here does not count."""
        data, found = record_of(operators), []
        for _ in range(3):
            began = time.process_time()
            assert len(decode_record(data).graph.operators) == operators
            found.append(time.process_time() - began)
        return min(found)

    # A loop in a loop would take 400 times as long.
    assert seconds(10_000) < 80 * seconds(500)


def test_a_repeated_member_is_found_in_one_pass() -> None:
    many = ",".join(f'"{i:x}":1' for i in range(300_000))
    start = time.process_time()
    error = refused(sealed(json.dumps(members())[:-1] + ',"x":{' + many + ',"zz":1,"zz":2,"zz":3}'))
    assert "'zz' appears twice" in str(error)
    assert time.process_time() - start < 5


def test_operators_that_have_all_finished_cost_nothing_per_subtask_and_are_limited_together() -> None:
    value = members()
    many = {**value["operators"][0], "parallelism": 32_768, "max_parallelism": 32_768, "finishing": []}
    many |= {"finished": [[0, 32_767]], "status": "fully_finished"}
    value["operators"] = [{**many, "uid": f"o{i}"} for i in range(129)]
    start = time.process_time()
    error = refused(sealed(value))
    assert error.kind is ErrorKind.LIMIT_EXCEEDED
    assert "4,194,304 subtasks" in str(error)
    assert time.process_time() - start < 1


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_what_two_sets_of_subtasks_share_is_found_by_ranges(one: set[int], other: set[int]) -> None:
    assert SubtaskSet.of(one) & SubtaskSet.of(other) == SubtaskSet.of(one & other)


def test_a_set_of_all_subtasks_there_could_be_costs_nothing() -> None:
    assert SubtaskSet.all(1 << 60) & SubtaskSet.of([3, 1 << 50]) == SubtaskSet.of([3, 1 << 50])

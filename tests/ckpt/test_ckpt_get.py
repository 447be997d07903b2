"""``ckpt get``: the rows of a key, now and along the history, against rows told in plain Python."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.store import open as open_store
from tests.ckpt.ckpt_runs import document, failure, page, run, words
from tests.servers.server import BUCKET, S3Server
from tests.worlds import stores
from tests.worlds.data import NEWEST, ROW_KEYS, USERS, data_store, expected_changes, expected_rows, user

FOREIGN = Path(__file__).parents[1] / "foreign/fixtures"
STATES = ("spent", "baskets", "recent", "reminders")
ONE = ("--operator", "delays", "--state", "sums")
ALIKE = {"user", "orders", "euros", "city", "town", "vip", "tier", "pieces", "_map_key", "_index", "amount"}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six checkpoints with deltas, a rescale and columns that changed."""
    folder = tmp_path_factory.mktemp("get") / "shop"
    data_store(str(folder))
    return folder


def key_options(state: str, key: object) -> tuple[str, ...]:
    return "--operator", "totals", "--state", state, "--key", json.dumps(key)


def shown(rows: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
    """The columns whose values are the same in Python and in JSON, in an order of their own."""
    alike = (type(None), bool, int, float, str)
    return sorted(
        ([name, row[name]] for row in rows for name in sorted(row) if name in ALIKE and isinstance(row[name], alike)),
        key=repr,
    )


def oracle(state: str, checkpoint_id: int, name: str | None, columns_of: int | None = None) -> list[dict[str, Any]]:
    rows = expected_rows("totals", state, checkpoint_id, columns_of=columns_of)
    return [row for row in rows if row["user"] == name]


@pytest.mark.parametrize("number", [0, 3, 18, 40, 77, 5999])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("checkpoint_id", [1, 3, NEWEST])
def test_the_rows_of_a_key_are_those_that_the_oracle_has(
    shop: Path, state: str, number: int, checkpoint_id: int
) -> None:
    wanted = oracle(state, checkpoint_id, user(number))
    found = document("get", f"{shop}@{checkpoint_id}", *key_options(state, user(number)), status=not wanted)
    assert (found["row_count"], found["key"]) == (len(wanted), {"user": user(number)})
    assert shown(found["rows"]) == shown(wanted)


@pytest.mark.parametrize("state", STATES)
def test_what_changed_when_is_what_the_oracle_says(shop: Path, state: str) -> None:
    changed = {end: expected_changes("totals", state, end - 1, end) for end in range(2, NEWEST + 1)}
    names = sorted({row["user"] for rows in changed.values() for row in rows}, key=str)
    for name in names[:: max(1, len(names) // 8)]:
        found = document("get", shop, *key_options(state, name), "--all")
        assert found["checkpoints"] == NEWEST
        ids = [entry["checkpoint_id"] for entry in found["history"]]
        assert ids == sorted(ids, reverse=True), "newest first"
        told = {entry["checkpoint_id"]: entry for entry in found["history"] if entry["changes"]}
        wanted = {end for end, rows in changed.items() if any(row["user"] == name for row in rows)}
        assert {end for end, entry in told.items() if entry["since"] is not None} == wanted
        for end, entry in told.items():
            before = {} if entry["since"] is None else by_key(state, oracle(state, entry["since"], name, NEWEST))
            now = by_key(state, oracle(state, end, name, NEWEST))
            assert (entry["rows_before"], entry["row_count"]) == (len(before), len(now))
            expected = [
                (before.get(key), now.get(key))
                for key in {**before, **now}
                if repr(before.get(key)) != repr(now.get(key))
            ]
            pairs = [(change["before"], change["after"]) for change in entry["changes"]]
            for side in (0, 1):
                assert shown(pair[side] or {} for pair in pairs) == shown(pair[side] or {} for pair in expected)
            words = {"insert": (True, False), "delete": (False, True), "update": (False, False)}
            for change in entry["changes"]:
                assert (change["before"] is None, change["after"] is None) == words[change["change"]]


def by_key(state: str, rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {repr([row[name] for name in ROW_KEYS["totals", state]]): row for row in rows}


def test_columns_that_changed_are_one_line_and_no_change_of_a_row(shop: Path) -> None:
    still = next(
        user(number)
        for number in range(USERS)
        if repr(oracle("spent", 4, user(number), NEWEST)) == repr(oracle("spent", 5, user(number), NEWEST)) != "[]"
    )
    found = document("get", f"{shop}@5", *key_options("spent", still), "--all")
    entry = found["history"][0]
    assert (entry["checkpoint_id"], entry["event"], entry["changes"]) == (5, "unchanged", [])
    assert [(change["change"], change["was"], change["column"]) for change in entry["column_changes"]] == [
        ("widened", None, "orders"),
        ("renamed", "town", "city"),
        ("added", None, "vip"),
        ("added", None, "tier"),
    ]
    assert [column["name"] for column in found["columns"]] == ["user", "orders", "euros", "city", "seen", "vip", "tier"]
    told = words("get", f"{shop}@5", *key_options("spent", still), "--all")
    assert "~ orders widened from int32 to int64 ~ town is now city ~ vip bool is new, false before" in told


def test_after_a_rollback_rows_come_in_the_columns_of_the_latest_schema(shop: Path, tmp_path: Path) -> None:
    store = tmp_path / "shop"
    shutil.copytree(shop, store)
    open_store(str(store)).rollback(1)
    found = document("get", store, *key_options("spent", user(18)), "--all")
    assert [(entry["checkpoint_id"], entry["kind"]) for entry in found["history"]][:2] == [
        (7, "rollback"),
        (6, "checkpoint"),
    ]
    newest = found["history"][0]
    assert {change["change"] for change in newest["column_changes"]} == {"narrowed", "renamed", "dropped"}
    (change,) = newest["changes"]
    (wanted,) = oracle("spent", 1, user(18), NEWEST)
    assert (change["after"]["orders"], change["after"]["city"]) == (wanted["orders"], wanted["city"])


def test_another_number_of_key_groups_is_no_change(shop: Path, tmp_path: Path) -> None:
    store = tmp_path / "shop"
    shutil.copytree(shop, store)
    assert document("rewrite", store, "--max-parallelism", 64)["checkpoint_id"] == 7
    found = document("get", store, *key_options("spent", user(18)), "--all")
    assert (found["max_parallelism"], found["history"][0]["checkpoint_id"]) == (64, 6)


def test_a_savepoint_below_the_store_is_asked_by_its_name(own_flights: Path) -> None:
    open_store(str(own_flights)).pin(1, "first")
    options = (*ONE, "--key", '"N004"')
    (now,), (then,) = (document("get", place, *options)["rows"] for place in (own_flights, f"{own_flights}@first"))
    assert (now["n"], then["n"]) == (1004, 4)
    along = document("get", f"{own_flights}@first", *options, "--all")
    assert [entry["event"] for entry in along["history"]] == ["present"]


def test_a_checkpoint_id_ends_the_history_there(shop: Path) -> None:
    found = document("get", f"{shop}@3", *key_options("spent", user(18)), "--all")
    assert (found["checkpoint_id"], found["checkpoints"]) == (3, 3)
    assert [entry["checkpoint_id"] for entry in found["history"]] == [2, 1]
    assert failure("get", f"{shop}@9", *key_options("spent", user(18)), "--all", status=3)["message"].startswith(
        "no checkpoint 9 of"
    )


@pytest.mark.parametrize("along", [(), ("--all",)])
def test_a_key_that_is_not_there_is_a_sentence_and_status_1(shop: Path, along: tuple[str, ...]) -> None:
    found = run("get", shop, *key_options("spent", "nobody"), *along)
    assert (found.status, found.err) == (1, "")
    assert "No rows of key nobody in" in found.out
    empty = document("get", shop, *key_options("spent", "nobody"), *along, status=1)
    assert not empty["history" if along else "rows"]


def test_only_the_row_groups_of_the_key_group_are_read(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    stores.counts_job(parallelism=1, keys=300_000).publish(store, None, options=WriteOptions(row_group_rows=4096))
    found = run("get", tmp_path / "store", "--key", '"w7"', "--verbose")
    assert "key         w7 · key group" in found.out
    whole = store.open().record.totals.bytes
    assert requests(found.err) == {"read_range": 4, "list": 2}, "record, manifest, footer, row group"
    assert read_bytes(found.err) < whole / 5


def test_along_the_history_each_part_of_a_segment_is_read_once(tmp_path: Path) -> None:
    """A base, then deltas that do not touch the key: what its checkpoints share is read once."""
    store, job = open_store(str(tmp_path / "store")), stores.counts_job(parallelism=1, keys=300_000)
    options = WriteOptions(inline_bytes_max=0, row_group_rows=4096)
    permit = job.publish(store, None, options=options)
    for n in range(4):
        delta = pa.table({"word": ["w7"], "_op": pa.array([0], pa.int8()), "n": [n]})
        permit = job.publish(
            store, permit, options=options, deltas={("counter", "counts"): lambda _, delta=delta: delta}
        )
    found = run("get", tmp_path / "store", "--key", '"w7"', "--all", "--verbose")
    # Five records and manifests; of the base footer and row group, of each delta all at once.
    assert requests(found.err)["read_range"] == 5 + 5 + 2 + 4
    assert found.out.count("changed") == 4
    untouched = run("get", tmp_path / "store", "--key", '"w8"', "--all", "--verbose")
    assert "changed" not in untouched.out
    assert requests(untouched.err)["read_range"] <= 5 + 5 + 2 + 4


def requests(table: str) -> dict[str, int]:
    """How often each operation stands in the table of ``--verbose``."""
    lines = re.findall(r"(?m)^(read_range|read|list|open_input|size|exists) +([\d,]+)", table)
    return {name: int(calls.replace(",", "")) for name, calls in lines}


def read_bytes(table: str) -> int:
    (found,) = re.findall(r"(?m)^read_range +[\d,]+ +[\d,]+ +([\d,]+)", table)
    return int(found.replace(",", ""))


@pytest.mark.s3
def test_on_s3_a_key_is_two_listings_the_record_the_manifest_and_a_request_a_small_layer(
    moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto.secret)
    monkeypatch.setenv("AWS_DEFAULT_REGION", moto.region)
    url = f"s3://{BUCKET}/get-{uuid.uuid4().hex}"
    data_store(url, **moto.options())
    place = (url, "--endpoint-url", moto.endpoint)
    found = run("get", *place, *key_options("spent", user(18)), "--verbose")
    assert found.status == 0
    # The base and the deltas of 2 and 5; the small ones lie in the manifest.
    assert requests(found.err) == {"list": 2, "read_range": 2 + 3}
    along = run("get", *place, *key_options("spent", user(18)), "--all", "--verbose")
    assert requests(along.err) == {"list": 2, "read_range": 2 * NEWEST + 3}


def test_a_key_of_several_columns_is_an_array_or_an_object(shop: Path) -> None:
    wanted = expected_rows("totals", "by_day")[0]
    day = wanted["day"].isoformat()
    for key in ([wanted["user"], day], {"day": day, "user": wanted["user"]}):
        (row,) = document("get", shop, *key_options("by_day", key))["rows"]
        assert (row["user"], row["day"], row["amount"]) == (wanted["user"], day, wanted["amount"])
    assert '{"user": "' in page("get", shop, *key_options("by_day", [wanted["user"], day]))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((*ONE, "--key", "[4]"), "its key column 'tailnum' is string, and 4 is int; give text, like \"abc\""),
        ((*ONE, "--key", '"N004'), "the key '\"N004' is not JSON .* write text in double quotes: "),
        ((*ONE, "--key", '["N004", 1]'), "has 2 values; give one for each of tailnum"),
        ((*ONE, "--key", '{"tail": 1}'), "'tail' is none of its key columns"),
        (("--key", '"N004"'), "has 5 states with keys; choose one: --operator 'delays' --state 'sums'; --operator"),
        (("--operator", "delays", "--key", '"N004"'), "operator 'delays' has 5 states with keys; choose one"),
        (
            ("--operator", "planes", "--key", "4"),
            "state 'splits' of 'planes' is even_split and has no keys; `ckpt insp",
        ),
        (("--operator", "plains", "--key", "4"), "has no operator 'plains', .* did you mean 'planes'"),
        (("--operator", "delays", "--state", "sum", "--key", "4"), "has no state 'sum'; did you mean 'sums'"),
    ],
    ids=lambda item: " ".join(item)[:40] if isinstance(item, tuple) else "",
)
@pytest.mark.parametrize("along", [(), ("--all",)])
def test_what_names_no_key_is_a_sentence(
    flights: Path, options: tuple[str, ...], sentence: str, along: tuple[str, ...]
) -> None:
    assert re.search(sentence, failure("get", flights, *options, *along, status=2)["message"])


def test_the_only_state_with_keys_need_not_be_named(counts: Path) -> None:
    found = document("get", counts, "--key", '"w7"')
    assert (found["operator"], found["state"], found["rows"]) == ("counter", "counts", [{"word": "w7", "n": 7}])


def test_a_damaged_record_and_a_lost_one_are_said_and_the_rest_is_shown(five: Path) -> None:
    key = ("--key", '"w7"', "--all")
    records = sorted((five / "checkpoints").iterdir())
    whole = document("get", five, *key)
    assert [(entry["checkpoint_id"], entry["event"]) for entry in whole["history"]] == [(2, "present")]
    records[2].write_text("{")
    damaged = document("get", five, *key, status=1)
    assert [(entry["checkpoint_id"], entry["event"]) for entry in damaged["history"]] == [
        (4, "unreadable"),
        (2, "present"),
    ]
    records[2].unlink()
    lost = document("get", five, *key, status=1)
    assert [(entry["checkpoint_id"], entry["error"] and entry["error"]["kind"]) for entry in lost["history"]] == [
        (4, "record_lost"),
        (2, None),
    ]
    assert "Checkpoint 4: cannot be read" in page("get", five, *key, status=1)


@pytest.mark.parametrize("what", ["segments", "manifests"])
def test_damaged_objects_of_one_checkpoint_are_said_and_the_rest_is_shown(five: Path, what: str) -> None:
    for path in (five / what).rglob("*"):
        if path.is_file() and re.search("0{5,}4", str(path.relative_to(five))):
            path.write_bytes(path.read_bytes()[:-9] + b"123456789")
    key = next(
        f'"w{number}"' for number in range(20)
        if document("get", five, "--key", f'"w{number}"')["rows"]
    )  # fmt: skip
    found = document("get", five, "--key", key, "--all", status=1)
    events = {entry["checkpoint_id"]: entry["event"] for entry in found["history"]}
    assert events == {4: "unreadable", 2: "present"}
    assert found["history"][0]["error"]["kind"].startswith(("damaged", "object_"))
    assert failure("get", f"{five}@4", "--key", key, status=1)["message"]


def test_another_state_of_the_same_name_ends_the_history(tmp_path: Path) -> None:
    store, job = open_store(str(tmp_path / "store")), stores.counts_job()
    permit = job.publish(store, None)
    other = declare.value_state("counter", "counts", keys={"word": pa.int64()}, values={"n": pa.int64()})
    rows = pa.table({"word": [7], "n": [70]})
    counter = job.graph.by_uid[other.operator]
    replace(
        job, states=(other,), rows={("counter", "counts"): lambda i: stores.owned(rows, ["word"], counter, i)}
    ).publish(store, permit)
    found = document("get", tmp_path / "store", "--key", "7", "--all", status=1)
    assert [(entry["checkpoint_id"], entry["event"]) for entry in found["history"]] == [
        (2, "present"),
        (1, "unreadable"),
    ]
    assert "has key columns word string in checkpoint 1" in found["history"][1]["error"]["message"]


@pytest.mark.parametrize(
    ("folder", "operator", "state", "key", "rows"),
    [
        ("flink-2.3.0/core-rocksdb-canonical/savepoint", "by-string", "sum", '"nul \\u0000 inside"', 1),
        ("flink-2.3.0/core-rocksdb-canonical/savepoint", "by-string", "words", '"nul \\u0000 inside"', 4),
        ("spark-4.3.0/totals-zstd/checkpoint", None, None, None, 1),
    ],
)
def test_foreign_checkpoints_are_asked_in_the_same_way(
    folder: str, operator: str | None, state: str | None, key: str | None, rows: int
) -> None:
    options = [
        text for name, value in (("operator", operator), ("state", state)) if value for text in (f"--{name}", value)
    ]
    if key is None:
        inspected = document("inspect", FOREIGN / folder, "--rows", 1)
        (one,) = [entry for entry in inspected["states"] if entry["key_columns"]]
        key = json.dumps([one["sample"][0][name] for name in one["key_columns"]])
    found = document("get", FOREIGN / folder, *options, "--key", key)
    assert (found["row_count"], found["system"] is None) == (rows, False)
    along = document("get", FOREIGN / folder, *options, "--key", key, "--all")
    assert along["history"][0]["row_count"] == rows


@pytest.mark.parametrize("along", [(), ("--all",)])
@pytest.mark.parametrize("columns", ["60", "80", "120"])
def test_pages_fit_and_say_what_is_cut(tmp_path: Path, columns: str, along: tuple[str, ...]) -> None:
    store = open_store(str(tmp_path / "store"))
    job = stores.counts_job()
    counter = job.graph.by_uid[job.states[0].operator]
    names = {name: pa.string() for name in ("text", "\x1b[31mred", "other")}
    state = declare.map_state("counter", "wide", keys={"word": pa.string()}, map_key=pa.int64(), values=names)
    rows = pa.table(
        {
            "word": ["a"] * 30,
            "_map_key": pa.array(range(30), pa.int64()),
            **{name: [f"{name} {'x' * 200}\n"] * 30 for name in names},
        }
    )
    replace(
        job, states=(state,), rows={("counter", "wide"): lambda i: stores.owned(rows, ["word"], counter, i)}
    ).publish(store, None)
    for encoding in ("utf-8", "ascii"):
        found = run("get", tmp_path / "store", "--key", '"a"', *along, COLUMNS=columns, encoding=encoding)
        assert found.status == 0
        assert max(map(len, found.out.splitlines())) <= int(columns)
        assert "10 more" in found.out
        assert "marks values that are cut" in found.out
        assert "\x1b" not in found.out
    whole = document("get", tmp_path / "store", "--key", '"a"', *along)
    listed = whole["history"][0]["changes"] if along else whole["rows"]
    assert len(listed) == 30


def test_a_key_with_many_rows_is_told_from_a_file_and_json_has_all(tmp_path: Path) -> None:
    store, job = open_store(str(tmp_path / "store")), stores.counts_job()
    counter = job.graph.by_uid[job.states[0].operator]
    state = declare.list_state("counter", "log", keys={"word": pa.string()}, values={"n": pa.int64()})

    def rows(count: int) -> pa.Table:
        column = pa.array(range(count), pa.int64())
        return pa.table({"word": ["a"] * count, "_index": column, "n": column})

    job = replace(
        job, states=(state,), rows={("counter", "log"): lambda i: stores.owned(rows(70_000), ["word"], counter, i)}
    )
    permit = job.publish(store, None)
    replace(job, rows={("counter", "log"): lambda i: stores.owned(rows(40_000), ["word"], counter, i)}).publish(
        store, permit
    )
    found = document("get", tmp_path / "store", "--key", '"a"')
    assert [row["n"] for row in found["rows"]] == [*range(40_000)]
    along = document("get", tmp_path / "store", "--key", '"a"', "--all")
    assert [(entry["checkpoint_id"], entry["change_count"]) for entry in along["history"]] == [(2, 30_000), (1, 70_000)]
    assert sorted(change["before"]["n"] for change in along["history"][0]["changes"]) == [*range(40_000, 70_000)]
    assert "and 29,980 more changes" in page("get", tmp_path / "store", "--key", '"a"', "--all")


def test_a_state_whose_declaration_is_damaged_is_told_so() -> None:
    broken = Path(__file__).resolve().parents[1] / "corpus" / "broken" / "3.6-field-named-twice"
    assert "two fields of one name" in failure("get", broken, "--key", "1", status=1)["message"]

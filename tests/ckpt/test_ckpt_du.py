"""``ckpt du``: pages, JSON, other systems, damage, and the requests that it takes.

``ckpt top``: its page, its JSON, and that the keys shown are those that ``ckpt get`` takes.
"""

from __future__ import annotations

import json
import re
import shlex
import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs

import pyarrow as pa
import pytest

from stateformat.states import declare
from stateformat.store import open as open_store
from tests.ckpt.ckpt_runs import document, failure, fingerprint, page, run, words
from tests.ckpt.test_ckpt_get import FOREIGN, read_bytes, requests
from tests.servers.fault_proxy import FaultProxy, Request
from tests.servers.server import BUCKET, S3Server
from tests.storage.linking import counted_store
from tests.worlds import stores

SAVEPOINTS = Path(__file__).resolve().parents[1] / "foreign" / "fixtures"


def test_the_page_adds_up_folders_checkpoints_and_states(five: Path) -> None:
    page("pin", f"{five}@3", "keep-me")
    before = fingerprint(five)
    for width in ("60", "80"):
        shown = page("du", five, "--keep", 2, "--price", 0.023, COLUMNS=width)
        assert max(map(len, shown.splitlines())) <= int(width)
        for text in ("--keep 2", "stay under", "savepoints/keep-me/", "counter/counts", "a month", "under two names"):
            assert text in shown
    found = document("du", five, "--keep", 2, "--price", 0.023)
    planned = document("gc", five, "--keep", 2)
    assert (found["keep"]["bytes"], found["keep"]["shared_bytes"]) == (planned["bytes"], planned["shared_bytes"])
    assert planned["shared_bytes"] > 0
    assert planned["savepoints"] == ["keep-me"]
    assert "never touched" in page("gc", five, "--keep", 2)
    assert fingerprint(five) == before
    assert "stay: a pin or a copy shares them" in page("gc", five, "--keep", 2, "--delete")
    assert document("validate", f"{five}@keep-me", "--level", "full")["ok"]


def test_damage_leaves_the_sizes_and_says_what_it_hides(five: Path) -> None:
    (five / "checkpoints/00000000000000000004.json").write_bytes(b"{}")
    found = document("du", five, "--keep", 1, status=1)
    assert [one["checkpoint_id"] for one in found["checkpoints"]] == [6, 5, 3, 2]
    assert [one["checkpoint_id"] for one in found["unreadable"]] == [4]
    assert "Stopped:" in words("du", five, status=1)


@pytest.mark.parametrize("place", ["spark-4.3.0/aggregate/checkpoint", "flink-2.3.0/brief-hashmap-native/savepoint"])
def test_of_another_systems_checkpoints_the_files_are_told(place: str) -> None:
    folder = SAVEPOINTS / place
    folder = folder if any(path.is_file() for path in folder.iterdir()) else next(folder.iterdir())
    found = document("du", folder, "--price", 1)
    files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    assert (found["bytes"], found["objects"]) == (sum(files), len(files))
    assert found["system"]
    assert found["garbage"] is None
    assert found["checkpoints"][0]["bytes"] > 0
    assert "the folder itself" in page("du", folder)


def test_money_has_two_decimals_and_objects_are_those_of_the_folders(five: Path) -> None:
    found = document("du", five, "--keep", 2, "--price", 0.023)
    assert found["price"]["month"] == found["bytes"] / 10**9 * 0.023
    assert "a month <0.01 · --keep 2 saves <0.01 " in words("du", five, "--keep", 2, "--price", 0.023)
    bytes_, freed = found["bytes"], found["keep"]["bytes"] - found["keep"]["shared_bytes"]
    shown = words("du", five, "--keep", 2, "--price", 1e9)
    assert f"a month {bytes_:,.2f} · --keep 2 saves {freed:,.2f} " in shown
    before = sum(path.is_file() for path in five.rglob("*"))
    page("gc", five, "--keep", 2, "--delete")
    gone = before - sum(path.is_file() for path in five.rglob("*"))
    assert f"· {gone} objects" in shown


def test_what_is_no_price_or_no_store_is_refused(five: Path, tmp_path: Path) -> None:
    for price in ("-1", "inf", "nan", "cheap"):
        assert failure("du", five, "--price", price, status=2)
    assert failure("du", tmp_path / "nowhere", status=3)["kind"] == "store_not_found"


@pytest.mark.s3
def test_on_s3_each_folder_is_listed_once_and_each_record_and_manifest_read_once(
    moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}/store"
    store = counted_store(url, **moto.options())
    store.pin(2, "p")
    for name, value in (
        ("ACCESS_KEY_ID", moto.key),
        ("SECRET_ACCESS_KEY", moto.secret),
        ("DEFAULT_REGION", moto.region),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    with FaultProxy(moto) as proxy:
        document("du", url, "--keep", 1, "--endpoint-url", proxy.endpoint)
        asked = Counter(_asked(request) for request in proxy.requests)
    records = "list checkpoints"
    assert asked.pop(records) == 2  # Once more at the end, to learn whether they have changed.
    assert asked.pop("checkpoints") == asked.pop("manifests") == 3
    listed = ("manifests", "segments", "requests", "savepoints", "savepoints/p")
    assert {name: asked.pop(f"list {name}") for name in listed} == dict.fromkeys(listed, 1)
    assert set(asked) == {"uploads"}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Lists by word: "hot's" has 900 entries, nine others have ten each, one of them no word."""
    job = stores.counts_job()
    counter = job.graph.by_uid[job.states[0].operator]
    state = declare.list_state("counter", "log", keys={"word": pa.string()}, values={"t": pa.string()})
    keys = ["hot's"] * 900 + [word for word in (*"abcdefgh", None) for _ in range(10)]
    index = [*range(900), *([*range(10)] * 9)]
    rows = pa.table({"word": keys, "_index": pa.array(index, pa.int64()), "t": ["x" * 1000] * 10 + ["y"] * 980})
    job = replace(job, states=(state,), rows={("counter", "log"): lambda i: stores.owned(rows, ["word"], counter, i)})
    job.publish(open_store(str(tmp_path / "log")), None)
    return tmp_path / "log"


def test_the_keys_with_most_and_the_skew(log: Path) -> None:
    (state,) = document("top", log, "--limit", 2)["states"]
    keys = state["keys"]
    assert (keys["count"], keys["rows"], keys["bytes"], keys["skew"]) == (10, 990, None, round(900 * 10 / 990, 2))
    assert keys["greatest"][0]["key"] == {"word": "hot's"}
    assert [entry["rows"] for entry in keys["greatest"]] == [900, 10]
    groups = state["key_groups"]
    assert (groups["count"], groups["greatest"][0]["rows"]) == (128, 900)
    assert groups["greatest"][0]["key_group"] == keys["greatest"][0]["key_group"]
    assert state["subtasks"]["greatest"][0]["rows"] == max(
        entry["rows"] for entry in document("inspect", log)["states"][0]["subtasks"]
    )
    assert state["subtasks"]["skew"] == document("inspect", log)["states"][0]["skew"]


def test_keys_are_ranked_by_the_sum_of_a_column_and_by_a_part_of_them() -> None:
    query = SAVEPOINTS / "spark-4.3.0/window/checkpoint"
    counts: Counter[tuple[str, ...]] = Counter()
    rows = document("sql", query, "select window, k, count from default", "--rows", "1000")["rows"]
    for row in rows:
        for key in ((json.dumps(row["window"]), json.dumps(row["k"])), (json.dumps(row["k"]),)):
            counts[key] += row["count"]
    for per, width in (((), 2), (("--per", "k"), 1)):
        wanted = {key: number for key, number in counts.items() if len(key) == width}
        found = document("top", query, "--by", "count", *per, "--limit", "1000")
        keys = found["states"][0]["keys"]
        assert (found["by"], found["per"], keys["count"], keys["rows"]) == ("count", [*per[1:]], len(wanted), len(rows))
        assert {tuple(map(json.dumps, one["key"].values())): one["sum"] for one in keys["greatest"]} == wanted
        assert keys["sum"] == sum(wanted.values())
        assert [one["sum"] for one in keys["greatest"]] == sorted(wanted.values(), reverse=True)
    shown = page("top", query, "--by", "count", "--limit", "1")
    assert re.search(r"^    2026-03-01 10:\d\d to 10:\d\d  .* {2,}\d+  █+$", shown, re.MULTILINE)
    per_key = document("top", query, "--per", "k")["states"][0]["keys"]
    assert per_key["greatest"][0]["rows"] == max(Counter(json.dumps(row["k"]) for row in rows).values())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--by", "cnt"), "has the column 'cnt'; did you mean 'count'"),
        (("--by", "k"), "--by takes a column of numbers, and 'k' has none"),
        (("--per", "shop"), "has the column 'shop'"),
        (("--by", "count", "--no-keys"), "leave --no-keys and --by bytes out"),
    ],
)
def test_what_no_state_can_be_ranked_by_is_a_sentence(options: tuple[str, ...], sentence: str) -> None:
    assert sentence in failure("top", SAVEPOINTS / "spark-4.3.0/window/checkpoint", *options, status=2)["message"]


def test_the_page_ends_with_the_command_that_shows_the_first_key(log: Path) -> None:
    found = " ".join(page("top", log, COLUMNS="200").split())
    (command,) = re.findall(r"`(ckpt get .*)` shows its rows", found)
    shown = run(*shlex.split(command)[1:])
    assert (shown.status, shown.err) == (0, "")
    assert "and 880 more rows" in shown.out


def test_every_key_shown_is_one_that_get_takes(log: Path) -> None:
    (state,) = document("top", log, "--by", "bytes", "--limit", 20)["states"]
    for entry in state["keys"]["greatest"]:
        (key,) = entry["key"].values()
        found = document("get", log, "--key", json.dumps(key))
        assert (found["row_count"], found["key_group"]) == (entry["rows"], entry["key_group"])
    assert sum(entry["bytes"] for entry in state["keys"]["greatest"]) == state["keys"]["bytes"]


def test_of_states_whose_keys_are_all_alike_nothing_is_read(counts: Path) -> None:
    found = run("top", counts, "--verbose")
    assert requests(found.err)["read_range"] == 2, "record and manifest"
    assert "Every key has one row; --by bytes tells their size." in found.out
    (state,) = document("top", counts, "--by", "bytes")["states"]
    assert state["keys"]["count"] == 20


def test_without_keys_record_and_manifest_are_all_that_is_read(log: Path) -> None:
    found = run("top", log, "--no-keys", "--verbose")
    assert requests(found.err) == {"read_range": 2, "list": 2}
    assert document("top", log, "--no-keys")["states"][0]["keys"] is None


def test_by_rows_only_the_key_columns_are_read(tmp_path: Path) -> None:
    job = stores.counts_job(parallelism=1)
    counter = job.graph.by_uid[job.states[0].operator]
    state = declare.list_state("counter", "log", keys={"k": pa.int64()}, values={"t": pa.string()})
    count = 200_000
    numbers = pa.array(range(count), pa.int64())
    texts = [f"{number * 2654435761 % 2**32:032x}" for number in range(count)]
    rows = pa.table({"k": numbers, "_index": pa.array([0] * count, pa.int64()), "t": texts})
    job = replace(job, states=(state,), rows={("counter", "log"): lambda i: stores.owned(rows, ["k"], counter, i)})
    job.publish(open_store(str(tmp_path / "log")), None)
    by = {name: read_bytes(run("top", tmp_path / "log", "--by", name, "--verbose").err) for name in ("rows", "bytes")}
    assert by["rows"] < by["bytes"] / 2


def test_every_mode_of_state_is_shown(flights: Path) -> None:
    states = document("top", flights)["states"]
    assert {state["mode"] for state in states} >= {"keyed", "union", "even_split", "broadcast", "progress", "in_flight"}
    rows = [state["rows"] for state in states]
    assert rows == sorted(rows, reverse=True)
    assert page("top", flights, COLUMNS="60")
    assert "did you mean 'sums'" in failure("top", flights, "--state", "summs", status=2)["message"]


def test_damage_is_a_sentence(whole: Path) -> None:
    for path in (whole / "segments").rglob("*.parquet"):
        path.write_bytes(path.read_bytes()[:-9] + b"123456789")
    assert "digest" in failure("top", whole, "--by", "bytes", status=1)["message"]
    assert document("top", whole, "--no-keys")["states"]


@pytest.mark.parametrize(
    "folder", ["flink-2.3.0/core-rocksdb-canonical/savepoint", "spark-4.3.0/totals-zstd/checkpoint"]
)
@pytest.mark.parametrize("by", ["rows", "bytes"])
def test_foreign_checkpoints_are_counted_too(folder: str, by: str) -> None:
    states = document("top", FOREIGN / folder, "--by", by)["states"]
    keyed = [state for state in states if state["mode"] == "keyed"]
    assert keyed
    for state in keyed:
        sums = document("inspect", FOREIGN / folder, "--operator", state["operator"], "--state", state["state"])
        assert state["bytes"] == sums["states"][0]["bytes"]
        if state["keys"]["count"]:
            assert sum(entry["rows"] for entry in state["keys"]["greatest"]) <= state["keys"]["rows"] == state["rows"]
        assert state["key_groups"]["greatest"][0]["rows"]
    assert words("top", FOREIGN / folder, "--by", by, "--no-keys")


def _asked(request: Request) -> str:
    """What is asked for: a listing of a folder, or an object in one."""
    query = parse_qs(request.query, keep_blank_values=True)
    if "uploads" in query:
        return "uploads"
    if "list-type" in query:
        return f"list {query['prefix'][0].partition('store/')[2].rstrip('/')}"
    return request.key.rpartition("store/")[2].partition("/")[0]

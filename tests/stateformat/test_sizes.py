"""What a store costs: named and own bytes, what is shared, garbage, what retention would free."""

from __future__ import annotations

import json
import random
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import stateformat as sf
from stateformat.errors import InvalidInput, NotFound
from stateformat.inspecting import sizes_document
from stateformat.segments import WriteOptions
from stateformat.store import CheckpointStore
from tests import stores
from tests.stateformat.test_golden import GOLDEN
from tests.storage.linking import counted_store


@pytest.fixture(scope="module")
def _mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five checkpoints, some segments carried from one to the next, some inline; and garbage."""
    folder = tmp_path_factory.mktemp("sizes") / "store"
    store = stores.flights_store(str(folder))
    stores.rescale_newest(store, 3)
    stores.rescale_newest(store, 2)
    store.rollback(2)
    for name in ("segments/00000000000000000002/lost-0001.parquet", "manifests/00000000000000000002-lost.parquet"):
        with store.storage.open_output(name) as output:
            output.write(b"x" * 777)
    return folder


@pytest.fixture
def mixed(_mixed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(_mixed, tmp_path / "store"))


def plainly(folder: Path) -> dict[str, Any]:
    """The same by walking: what each record names, in sets."""
    named: dict[int, set[str]] = {}
    of_state: dict[tuple[str, str], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    inline: dict[int, dict[str, int]] = {}
    for path in (folder / "checkpoints").iterdir():
        record = json.loads(path.read_bytes())
        number = record["checkpoint_id"]
        rows = pq.read_table(folder / record["manifest"]["path"]).to_pylist()
        named[number] = {f"checkpoints/{path.name}", record["manifest"]["path"]}
        inline[number] = {row["path"]: len(row["inline"]) for row in rows if row["inline"] is not None}
        for row in rows:
            if row["path"] is not None and row["inline"] is None:
                named[number].add(row["path"])
                of_state[row["operator"], row["state"]][number].add(row["path"])
    # What lies beside the folders is no part of a store.
    files = {str(path.relative_to(folder)): path for path in folder.glob("*/**/*") if path.is_file()}
    size = {name: path.stat().st_size for name, path in files.items()}

    def total(paths: set[str]) -> int:
        return sum(size[path] for path in paths)

    return {
        "bytes": sum(size.values()),
        "objects": len(size),
        "checkpoints": {
            number: {
                "bytes": total(paths),
                "own_bytes": total(paths - set().union(*(named[other] for other in named if other != number))),
                "inline_bytes": sum(inline[number].values()),
            }
            for number, paths in named.items()
        },
        "states": {
            key: {"bytes": total(set().union(*ids.values())), "newest_bytes": total(ids[max(named)])}
            for key, ids in of_state.items()
        },
        "folders": {
            f"{name}/": sum(size[path] for path in size if path.startswith(f"{name}/"))
            for name in ("checkpoints", "manifests", "segments", "requests")
        },
    }


@pytest.mark.parametrize("which", ["mixed", "golden"])
def test_the_sizes_are_those_of_a_plain_walk(which: str, mixed: Path, tmp_path: Path) -> None:
    folder = mixed if which == "mixed" else Path(shutil.copytree(GOLDEN[-1], tmp_path / "golden"))
    found, plain = sizes_document(sf.open(str(folder))), plainly(folder)
    assert (found["bytes"], found["objects"], found["shared_bytes"]) == (plain["bytes"], plain["objects"], 0)
    for one in found["checkpoints"]:
        expected = plain["checkpoints"][one["checkpoint_id"]]
        assert {name: one[name] for name in expected} == expected
        assert one["missing"] == 0
        own = sum(state["own_bytes"] for state in one["states"])
        assert own <= one["own_bytes"]
    assert len(found["checkpoints"]) == len(plain["checkpoints"])
    states = {(one["operator"], one["state"]): one for one in found["states"]}
    for key, expected in plain["states"].items():
        assert {name: states[key][name] for name in expected} == expected
        assert states[key]["own_bytes"] == states[key]["bytes"]
    folders = {one["folder"]: one["bytes"] for one in found["folders"]}
    assert {name: folders[name] for name in plain["folders"]} == plain["folders"]
    if which == "mixed":
        assert found["garbage"]["bytes"] == 2 * 777
        garbage = {one["folder"]: one["garbage_bytes"] for one in found["folders"]}
        assert (garbage["segments/"], garbage["manifests/"], garbage["checkpoints/"]) == (777, 777, 0)


@pytest.mark.parametrize("keep", [1, 2, 3, 9])
def test_what_keep_would_free_is_what_retention_frees(keep: int, mixed: Path) -> None:
    store = sf.open(str(mixed))
    found = sizes_document(store, keep=keep)
    planned = store.expire(keep, delete=False)
    assert found["keep"] == {
        "keep": keep,
        "records": len(planned.records),
        "objects": len(planned.objects) + len(planned.leftovers),
        "bytes": planned.size_bytes,
        "shared_bytes": 0,
        "stopped": planned.stopped,
    }
    before = plainly(mixed)["bytes"]
    store.expire(keep)
    assert before - plainly(mixed)["bytes"] == found["keep"]["bytes"]
    assert sizes_document(store)["garbage"]["objects"] == 0


@pytest.mark.parametrize("seed", range(8))
def test_damage_is_told_as_retention_tells_it(seed: int, mixed: Path) -> None:
    draw = random.Random(seed)
    store = sf.open(str(mixed))
    folder = draw.choice(["checkpoints", "manifests"])
    victim = draw.choice(sorted((mixed / folder).glob("0*")))
    if draw.random() < 0.5:
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-9])
    try:
        planned, collected = store.expire(2, delete=False), store.collect_garbage(delete=False)
    except NotFound:
        return
    found = sizes_document(store, keep=2)
    assert (found["keep"]["stopped"], found["keep"]["bytes"]) == (planned.stopped, planned.size_bytes)
    assert (found["garbage"]["stopped"], found["garbage"]["bytes"]) == (collected.stopped, collected.size_bytes)


def test_bytes_that_a_pin_shares_with_the_store_count_once_and_are_not_freed(tmp_path: Path) -> None:
    store = counted_store(str(tmp_path / "store"))
    before = sizes_document(store, keep=1)
    store.pin(1, "p")
    after = sizes_document(store, keep=1)
    record = next((tmp_path / "store/savepoints/p/checkpoints").iterdir()).stat().st_size
    assert after["bytes"] == before["bytes"] + record
    (pin,) = (one for one in after["folders"] if one["savepoint"] == "p")
    assert (pin["checkpoint_id"], pin["bytes"] - pin["shared_bytes"]) == (1, record)
    assert after["shared_bytes"] == pin["shared_bytes"] == after["keep"]["shared_bytes"]
    assert after["keep"]["bytes"] == before["keep"]["bytes"]
    (mine,) = (one for one in after["checkpoints"] if one["checkpoint_id"] == 1)
    assert mine["own_bytes"] == mine["bytes"] - pin["shared_bytes"]
    blocks = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert after["bytes"] == blocks - after["shared_bytes"]
    store.expire(1)
    last = sizes_document(store)
    (pin,) = (one for one in last["folders"] if one["savepoint"] == "p")
    assert (last["shared_bytes"], pin["shared_bytes"]) == (0, 0)


def test_a_price_is_per_decimal_gigabyte(mixed: Path) -> None:
    found = sizes_document(sf.open(str(mixed)), keep=1, price=1e9)
    assert found["price"]["month"] == pytest.approx(found["bytes"])
    assert found["price"]["garbage_month"] == pytest.approx(found["garbage"]["bytes"])
    assert found["price"]["keep_month"] == pytest.approx(found["keep"]["bytes"])
    assert sizes_document(sf.open(str(mixed)))["price"] is None


def test_a_store_that_changes_meanwhile_is_read_again(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stateformat.inspecting.sizes import naming

    store = sf.open(str(mixed))
    shared, ran = naming._shared, list[int]()

    def expire_once(storage: Any) -> Any:
        if not ran:
            ran.append(1)
            store.expire(1)
        return shared(storage)

    monkeypatch.setattr(naming, "_shared", expire_once)
    found = sizes_document(store)
    assert [one["checkpoint_id"] for one in found["checkpoints"]] == [5]
    assert found["garbage"]["stopped"] is None
    assert found["bytes"] == plainly(mixed)["bytes"]


def test_nothing_can_be_kept_of_a_store_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        sizes_document(sf.open(str(tmp_path / "nowhere")))
    store = sf.open(str(tmp_path / "store"))
    stores.counts_job().publish(store, None, options=WriteOptions(inline_bytes_max=0))
    with pytest.raises(InvalidInput, match="at least 1"):
        sizes_document(store, keep=0)
    assert isinstance(store, CheckpointStore)

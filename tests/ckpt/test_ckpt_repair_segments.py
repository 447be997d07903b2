"""``ckpt repair`` where segments are lost: what it shows, what it carries out, what it says."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from stateformat.documents.checkpoint import given_up_told
from stateformat.model import GIVEN_UP_PROPERTY
from stateformat.repairing import going_on
from stateformat.segments import WriteOptions
from stateformat.store import open as open_store
from tests import stores
from tests.ckpt.ckpt_runs import document, failure, fingerprint, page, run, words


@pytest.fixture
def flights(tmp_path: Path) -> Path:
    """A checkpoint with something of everything, each segment an object, and the pin ``safe``."""
    store = open_store(str(tmp_path / "store"))
    stores.flights_job().publish(store, None, options=WriteOptions(inline_bytes_max=0))
    store.pin(1, "safe")
    return tmp_path / "store"


def lose(store: Path, pattern: str, *, flip: bool = False) -> Path:
    path = sorted(store.glob(f"segments/*/{pattern}"))[0]
    data = path.read_bytes()
    path.unlink()  # The pin may be a link to it.
    if flip:
        path.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
    return path


def test_what_going_on_would_lose_is_listed_and_nothing_is_changed(flights: Path) -> None:
    lose(flights, "delays-sums-1-*")
    lose(flights, "sink-prepared-1-*")
    before = fingerprint(flights)
    found = document("repair", flights, status=1)
    lost = found["lost_segments"]
    assert (lost["checkpoint_id"], [each["missing"] for each in lost["segments"]]) == (1, [True, True])
    assert [(each["url"].rpartition("/")[2], each["segments"]) for each in lost["copies"]] == [("safe", 2)]
    by_state = {each["state"]: each for each in lost["give_up"]["rows"]}
    assert {name: each["effect"] for name, each in by_state.items()} == {"sums": "forgotten", "prepared": "output"}
    assert {each["state"] for each in lost["give_up"]["keys"]} == {"sums", "by_month", "last", "wake", "prepared"}
    text = words("repair", flights, status=1)
    assert "--give-up keys --yes` publishes checkpoint 2" in text
    assert "never committed, unless it was before" in text
    page("repair", flights, status=1, COLUMNS="60")
    assert fingerprint(flights) == before


def test_lost_segments_are_put_back_from_a_pin(flights: Path) -> None:
    before = fingerprint(flights)
    for pattern in ("planes-*", "delays-last-0-*"):
        lose(flights, pattern)
    done = document("repair", flights, "--restore-from", f"{flights}@safe", "--yes")
    assert (done["published"], len(done["put_back"]), done["given_up"]) == (False, 2, [])
    assert fingerprint(flights) == before
    assert document("validate", flights, "--level", "full")["ok"]
    assert words("repair", flights, "--restore-from", f"{flights}@safe").endswith("Nothing is wrong.")


def test_what_is_damaged_gets_a_new_path_and_the_rest_is_given_up(flights: Path) -> None:
    lose(flights, "delays-last-0-*", flip=True)
    broken = lose(flights, "delays-sums-1-*", flip=True)
    (flights / "savepoints/safe" / broken.relative_to(flights)).unlink()
    assert (
        "found nowhere" in failure("repair", flights, "--restore-from", f"{flights}@safe", "--yes", status=1)["message"]
    )
    done = document("repair", flights, "--restore-from", f"{flights}@safe", "--give-up", "rows", "--yes")
    assert (done["published"], done["kind"], done["checkpoint_id"]) == (True, "rewrite", 2)
    assert [each["new_path"] is not None for each in done["put_back"]] == [True]
    assert [each["state"] for each in done["given_up"]] == ["sums"]
    assert document("validate", flights, "--level", "full")["ok"]
    told = document("inspect", flights)["given_up"]
    assert (told["checkpoint_id"], told["rows"]) == (1, sum(each["rows"] for each in done["given_up"]))
    assert "given up" in page("inspect", flights)


def test_the_result_restores_at_the_same_and_another_parallelism(flights: Path) -> None:
    lose(flights, "delays-sums-1-*")
    page("repair", flights, "--give-up", "keys", "--yes")
    for parallelism in (4, 3, 8):
        assert not document("explain-restore", flights, "--parallelism", parallelism)["refused"]
    assert document("rescale", flights, "--parallelism", 3)["checkpoint_id"] == 3
    assert document("validate", flights, "--level", "full")["ok"]


@pytest.mark.parametrize(
    ("pattern", "options", "said"),
    [
        ("planes-splits-0-*", ["--give-up", "rows"], "positions of a source"),
        ("planes-splits-0-*", ["--give-up", "keys"], "positions of a source"),
        ("delays-sums-1-*", ["--restore-from", "{empty}"], "found nowhere"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(
    pattern: str, options: list[str], said: str, flights: Path, tmp_path: Path
) -> None:
    lose(flights, pattern)
    stores.counts_store(str(tmp_path / "empty"))
    before = fingerprint(flights)
    options = [option.format(empty=tmp_path / "empty") for option in options]
    assert said in failure("repair", flights, *options, "--yes", status=1)["message"]
    assert fingerprint(flights) == before


def test_damage_that_is_not_of_segments_is_not_gone_on_from(flights: Path) -> None:
    lose(flights, "delays-sums-1-*")
    next(flights.glob("manifests/*")).unlink()
    assert document("repair", flights, status=1)["lost_segments"] is None
    assert "more than segments" in failure("repair", flights, "--give-up", "rows", "--yes", status=1)["message"]
    next(flights.glob("checkpoints/*")).write_bytes(b"{")
    assert "cannot be read" in failure("repair", flights, "--give-up", "rows", "--yes", status=1)["message"]


def test_nothing_is_given_up_of_a_whole_checkpoint(flights: Path) -> None:
    before = fingerprint(flights)
    found = run("repair", flights, "--give-up", "rows", "--yes")
    assert (found.status, "Nothing is wrong." in found.out) == (0, True)
    assert fingerprint(flights) == before
    assert "a whole store" in failure("repair", flights, "--restore-from", f"{flights}@1", status=2)["message"]


def test_the_newest_may_be_named_by_its_id(flights: Path) -> None:
    lose(flights, "delays-sums-1-*")
    assert document("repair", f"{flights}@1", "--give-up", "rows", "--yes")["checkpoint_id"] == 2


@pytest.mark.parametrize(
    "told",
    [
        "{",
        "[]",
        "null",
        '{"checkpoint_id":1,"rows":Infinity,"states":[]}',
        '{"checkpoint_id":1,"rows":1,"states":7}',
        '{"checkpoint_id":1,"rows":1,"states":[{"operator":"a"}]}',
        "[" * 5000,
        '{"checkpoint_id":1,"rows":' + "9" * 5000 + ',"states":[]}',
    ],
)
def test_a_property_that_is_not_ours_is_shown_as_it_is(told: str) -> None:
    assert given_up_told({GIVEN_UP_PROPERTY: told}) is None


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_repair_says_what_it_leaves(flights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lose(flights, "delays-sums-1-*")

    def interrupt(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(going_on, "put_back", interrupt)
    found = run("repair", flights, "--restore-from", f"{flights}@safe", "--yes")
    assert found.status == 130
    assert "run it again to go on" in found.err
    monkeypatch.undo()
    assert not document("repair", flights, "--restore-from", f"{flights}@safe", "--yes")["published"]

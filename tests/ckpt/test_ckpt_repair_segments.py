"""``ckpt repair`` where segments are lost: what it shows, what it puts back, what it says."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from stateformat import repairing
from stateformat.documents.checkpoint import given_up_told
from stateformat.model import GIVEN_UP_PROPERTY
from stateformat.segments import WriteOptions
from stateformat.store import open as open_store
from stateformat.tools.ckpt.text import Look, draw_checkpoint
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


def test_what_is_lost_is_listed_and_nothing_is_changed(flights: Path) -> None:
    lose(flights, "delays-sums-1-*")
    lose(flights, "sink-prepared-1-*")
    before = fingerprint(flights)
    lost = document("repair", flights, status=1)["lost_segments"]
    assert (lost["checkpoint_id"], [each["missing"] for each in lost["segments"]]) == (1, [True, True])
    assert [(each["url"].rpartition("/")[2], each["segments"]) for each in lost["copies"]] == [("safe", 2)]
    assert [(each["state"], each["positions"]) for each in lost["states"]] == [("sums", False), ("prepared", False)]
    text = words("repair", flights, status=1)
    assert "start it with --drop delays/sums --drop sink/prepared, or" in text
    page("repair", flights, status=1, COLUMNS="60")
    assert fingerprint(flights) == before


def test_what_a_subtask_still_has_of_a_lost_state_is_exported(flights: Path, tmp_path: Path) -> None:
    lose(flights, "delays-sums-1-*")
    one = ("export", flights, "--operator", "delays", "--state", "sums", "--subtask")
    assert document(*one, 0, "--to", tmp_path / "sums.parquet")["rows"] > 0
    failure(*one, 1, "--to", tmp_path / "none.parquet", status=1)


def test_lost_segments_are_put_back_from_a_pin(flights: Path) -> None:
    before = fingerprint(flights)
    for pattern in ("planes-*", "delays-last-0-*"):
        lose(flights, pattern)
    done = document("repair", flights, "--restore-from", f"{flights}@safe", "--yes")
    assert (done["published"], len(done["put_back"])) == (False, 2)
    assert fingerprint(flights) == before
    assert document("validate", flights, "--level", "full")["ok"]
    assert words("repair", flights, "--restore-from", f"{flights}@safe").endswith("Nothing is wrong.")


def test_a_damaged_segment_is_put_back_once_it_is_moved_away(flights: Path) -> None:
    whole = fingerprint(flights)
    broken = lose(flights, "delays-last-0-*", flip=True)
    from_pin = ("repair", flights, "--restore-from", f"{flights}@safe", "--yes")
    assert "Move that object away and run this again" in failure(*from_pin, status=1)["message"]
    broken.unlink()
    assert len(document(*from_pin)["put_back"]) == 1
    assert fingerprint(flights) == whole


def test_without_positions_of_a_source_no_job_is_said_to_go_on(flights: Path) -> None:
    lose(flights, "planes-splits-0-*")
    text = words("repair", flights, status=1)
    assert "planes/splits holds positions of a source" in text
    assert "--drop" not in text


def test_what_is_found_nowhere_is_a_sentence(flights: Path, tmp_path: Path) -> None:
    lose(flights, "delays-sums-1-*")
    stores.counts_store(str(tmp_path / "empty"))
    before = fingerprint(flights)
    message = failure("repair", flights, "--restore-from", tmp_path / "empty", "--yes", status=1)["message"]
    assert "found nowhere" in message
    assert fingerprint(flights) == before


def test_where_more_than_segments_is_damaged_nothing_is_put_back(flights: Path) -> None:
    from_pin = ("repair", flights, "--restore-from", f"{flights}@safe", "--yes")
    lose(flights, "delays-sums-1-*")
    next(flights.glob("manifests/*")).unlink()
    assert document("repair", flights, status=1)["lost_segments"] is None
    assert "more than segments" in failure(*from_pin, status=1)["message"]
    next(flights.glob("checkpoints/*")).write_bytes(b"{")
    assert "cannot be read" in failure(*from_pin, status=1)["message"]


def test_a_place_is_a_whole_store_and_the_newest_may_be_named_by_its_id(flights: Path) -> None:
    assert "a whole store" in failure("repair", flights, "--restore-from", f"{flights}@1", status=2)["message"]
    lose(flights, "delays-sums-1-*")
    done = document("repair", f"{flights}@1", "--restore-from", f"{flights}@safe", "--yes")
    assert (done["checkpoint_id"], done["published"]) == (1, False)


def test_what_an_older_release_gave_up_is_shown(flights: Path) -> None:
    state = {"operator": "delays", "state": "sums", "effect": "forgotten", "rows": 10, "rows_besides": 4}
    told = {"checkpoint_id": 4, "attempt_id": "a" * 32, "scope": "rows", "rows": 14, "states": [state]}
    given_up = given_up_told({GIVEN_UP_PROPERTY: json.dumps(told)})
    assert given_up == {"checkpoint_id": 4, "rows": 14, "states": [state]}
    found = document("inspect", flights) | {"given_up": given_up}
    text = " ".join(" ".join(draw_checkpoint(found, Look(), found["created_at_us"])).split())
    assert "given up 14 rows of checkpoint 4, whose segments were lost: delays/sums 14" in text


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

    monkeypatch.setattr(repairing, "put_back", interrupt)
    found = run("repair", flights, "--restore-from", f"{flights}@safe", "--yes")
    assert found.status == 130
    assert "Run it again to go on" in found.err
    monkeypatch.undo()
    assert not document("repair", flights, "--restore-from", f"{flights}@safe", "--yes")["published"]

"""What lies below a folder that is no store: ``ckpt history`` lists it, every other command names
it, few requests are made for it and nothing is written. A path into a checkpoint names that.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import stateformat as sf
from stateformat.backends.storage import LocalStorage
from stateformat.backends.storage.local_tree import DirectoryTree
from stateformat.errors import ErrorKind, NotFound
from stateformat.history import below, places_below
from stateformat.inspecting import below_document
from stateformat.storage import instrumented, stats_of
from tests.ckpt.ckpt_runs import document, failure, fingerprint, page, run, words
from tests.worlds import stores

FIXTURES = Path(__file__).parents[1] / "foreign/fixtures"
JOB = "0000000000000000000000000cbded82"
SAVEPOINTS = ("savepoint-0cbded-0123456789ab", "savepoint-0cbded-0123456789cd")
LOOKED = 16 + 20
"""Folders of the tree that are looked into: 16 around checkpoints, and 20 of others."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three checkpoints of Flink, of which one was copied in part; two savepoints, of which one was
    cut; two queries; a store with a pin; 10,000 files of others."""
    top = tmp_path_factory.mktemp("below") / "all of it"
    job = top / "flink" / JOB
    shutil.copytree(FIXTURES / "flink-2.3.0/brief-rocksdb-checkpoint/savepoint" / JOB, job)
    for number in (9, 13):
        shutil.copytree(job / "chk-12", job / f"chk-{number}")
    (job / "chk-13/_metadata").rename(job / "chk-13/part")
    for name in SAVEPOINTS:
        shutil.copytree(FIXTURES / "flink-2.3.0/core-hashmap-canonical/savepoint", top / "savepoints" / name)
    cut = next(path for path in (top / "savepoints" / SAVEPOINTS[1]).iterdir() if path.name != "_metadata")
    cut.write_bytes(cut.read_bytes()[:-3])
    for team in ("a", "b"):
        shutil.copytree(FIXTURES / "spark-4.3.0/aggregate/checkpoint", top / "queries" / f"team {team}" / "orders")
    stores.counts_store(str(top / "ours"))
    page("pin", top / "ours", "kept")
    for number in range(20):
        (top / f"other/{number}").mkdir(parents=True)
        for name in range(500):
            os.close(os.open(top / f"other/{number}/{name}", os.O_CREAT))
    (top / ".trash").mkdir()
    (top / "again").symlink_to(top)
    (top / "round").symlink_to("round")
    before = fingerprint(top)
    yield top
    assert fingerprint(top) == before, "a test has changed it"


def url(path: Path) -> str:
    return path.as_uri()


def test_history_lists_what_lies_below_a_folder_nearest_first_with_what_is_whole(tree: Path) -> None:
    found = document("history", tree)
    assert found["folder"] == url(tree)
    assert [(one["path"], one["system"], one["id"], one["whole"]) for one in found["places"]] == [
        ("ours", None, 1, True),
        (f"flink/{JOB}/chk-13", "flink", 13, False),
        (f"flink/{JOB}/chk-12", "flink", 12, True),
        (f"flink/{JOB}/chk-9", "flink", 12, True),
        *[(f"savepoints/{name}", "flink", 1, name == SAVEPOINTS[0]) for name in SAVEPOINTS],
        ("ours/savepoints/kept", None, 1, True),
        ("queries/team a/orders", "spark", 5, True),
        ("queries/team b/orders", "spark", 5, True),
    ]
    assert [one["checkpoint"]["kind"] for one in found["places"] if one["checkpoint"]] == [
        *["checkpoint"] * 3,
        *["savepoint"] * 3,
        *["checkpoint"] * 2,
    ]
    assert (found["more"], found["left_out"]) == (0, 0)
    assert {one["path"] for one in found["passed_over"]} == {".trash", "again"}
    half, cut = (one["fault"] for one in found["places"] if not one["whole"])
    assert half["kind"] == "object_missing"
    assert "it has no _metadata" in half["message"]
    assert "it was cut" in cut["message"]
    written = Path(tree, "flink", JOB, "chk-12/_metadata").stat().st_mtime
    assert found["places"][2]["written_at_us"] == pytest.approx(written * 1e6, abs=1)


def test_each_address_of_the_list_opens_what_it_says(tree: Path) -> None:
    for one in document("history", tree)["places"]:
        if one["whole"]:
            assert document("inspect", one["address"])["attempt_id"] == one["checkpoint"]["attempt_id"]


def test_the_page_fits_a_terminal_and_ends_with_a_command_that_works(tree: Path) -> None:
    shown = page("history", tree)
    assert max(map(len, shown.splitlines())) <= 80
    assert f"ours\n  flink  13  -{' ' * 24}-  not whole  flink/" in shown
    assert "✗ savepoints/savepoint-0cbded-0123456789cd:" in shown
    command = shlex.split(shown.rpartition("`ckpt ")[2].partition("`")[0])
    assert run(*command).status == 0


def test_a_narrow_page_keeps_the_places_and_leaves_out_columns(tree: Path) -> None:
    shown = page("history", tree, COLUMNS="60")
    assert all(len(line) <= 60 or tree.as_uri() in line for line in shown.splitlines())
    assert "  of     id  state      place\n" in shown
    assert f"flink/{JOB}/chk-12" in "".join(shown.split())


def test_a_query_whose_state_is_a_link_is_not_whole_since_no_command_reads_it(tmp_path: Path) -> None:
    query = shutil.copytree(FIXTURES / "spark-4.3.0/aggregate/checkpoint", tmp_path / "all/query")
    (query / "state").rename(tmp_path / "elsewhere")
    (query / "state").symlink_to(tmp_path / "elsewhere")
    (one,) = document("history", tmp_path / "all")["places"]
    assert one["whole"] is not True
    assert "state is a symbolic link" in one["fault"]["message"]
    assert "state is a symbolic link" in failure("inspect", query, status=3)["message"]


def test_only_so_many_are_opened_and_the_others_are_counted(tree: Path) -> None:
    found = document("history", tree, "--limit", 2)
    assert (len(found["places"]), found["more"]) == (2, 7)
    assert "and 7 more checkpoints (--limit N)" in page("history", tree, "--limit", 2)


def test_a_search_ends_and_says_what_it_left_out(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(below, "FOLDERS", 3)
    message = failure("history", tree, status=3)["message"]
    assert "24 folders below it were not looked into; give one further down" in message
    monkeypatch.setattr(below, "FOLDERS", 4)
    found = document("history", tree)
    assert found["looked_into"] == 4
    assert found["left_out"] > 0
    assert "folders were not looked into, since 4 were: give a folder further down" in words("history", tree)
    monkeypatch.undo()
    monkeypatch.setattr(below, "DEPTH", 1)
    assert [one["path"] for one in document("history", tree)["places"]] == ["ours"]


def test_a_folder_costs_one_request_unless_something_in_it_has_the_name_of_a_part(tree: Path) -> None:
    storage = instrumented(LocalStorage(tree)).folder()
    assert storage is not None
    found = places_below(storage)
    stats = stats_of(storage)
    assert found.looked_into == LOOKED
    # Beside a look for each folder: records of two stores, `offsets` and `commits` of two queries,
    # the `chk-` of a job, and the first bytes of two savepoints.
    assert stats["list"].calls == found.looked_into + 2 + 4 + 1
    assert stats["read_range"].calls == 2
    assert stats.total.calls == stats["list"].calls + stats["read_range"].calls
    below_document(found, 50)
    assert stats.total.calls < 180, "opening and checking nine of them"
    assert {name for name, counts in stats.operations.items() if counts.calls} <= {
        *("list", "read_range", "read", "size", "open_input", "exists"),
    }


COMMANDS = (
    *("inspect", "top", "du", "validate", "explain-restore", "report", "repair", "gc", "sql 'select 1'"),
    *("rewrite", "get --key 1", "rescale --parallelism 2", "pin name", "copy there", "import --to there"),
    *("export --operator a --state b --to there.csv", "diff", "rollback"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_what_lies_below_its_folder(
    tree: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *others = shlex.split(command)
    given = {"diff": [f"{tree}@1", f"{tree}@2"], "rollback": [f"{tree}@1"]}.get(name, [str(tree)])
    error = failure(name, *given, *others, status=3)
    assert error["kind"] == "store_empty"
    assert (
        f"In it are ours (a store), flink/{JOB}/chk-12 (a Flink checkpoint or savepoint), flink/{JOB}/chk-9 (a Flink "
        f"checkpoint or savepoint), savepoints/{SAVEPOINTS[0]} (a Flink checkpoint or savepoint), savepoints/"
        f"{SAVEPOINTS[1]} (a Flink checkpoint or savepoint) and 3 more. Give one of them: `ckpt inspect {url(tree)}/ours`; "
        f"`ckpt history {url(tree)}` lists all"
    ) in error["message"]
    assert error["details"]["below"][:2] == [f"{url(tree)}/ours", f"{url(tree)}/flink/{JOB}@12"]
    assert not [*tmp_path.iterdir()]


def test_the_library_names_them_too(tree: Path) -> None:
    with pytest.raises(NotFound, match=r"In it are ours \(a store\)") as caught:
        sf.open(tree).open()
    assert caught.value.kind is ErrorKind.STORE_EMPTY


INSIDE = {
    f"flink/{JOB}/chk-12/part": f"flink/{JOB}@12",
    f"flink/{JOB}/chk-13": f"flink/{JOB}",
    f"flink/{JOB}/shared": f"flink/{JOB}",
    "queries/team a/orders/state": "queries/team a/orders",
    "queries/team a/orders/state/0/1": "queries/team a/orders",
    "queries/team a/orders/offsets/2": "queries/team a/orders",
    "queries/team a/orders/metadata": "queries/team a/orders",
    "ours/manifests": "ours",
    "ours/nothing": "ours",
    "ours/checkpoints/00000000000000000001.json": "ours@1",
}


@pytest.mark.parametrize("path", INSIDE)
@pytest.mark.parametrize("command", ["inspect", "history"])
def test_a_path_into_a_checkpoint_is_refused_with_the_address_of_that(tree: Path, path: str, command: str) -> None:
    address, _, checkpoint_id = INSIDE[path].partition("@")
    whole = url(tree / address) + (f"@{checkpoint_id}" if checkpoint_id else "")
    message = failure(command, tree / path, status=3)["message"]
    assert "it is a place in " in message.lower()
    assert f": `ckpt inspect {whole}`" in message
    assert run("inspect", whole).status == 0


def test_the_parent_of_stores_is_no_place_in_one(tree: Path, tmp_path: Path) -> None:
    assert "it is a place in" not in failure("inspect", tree / "none", status=3)["message"]
    assert "heck the address" in failure("history", tmp_path, status=3)["message"]
    assert document("history", tree / "ours/savepoints")["places"][0]["path"] == "kept"


def test_a_folder_that_may_not_be_listed_is_named_and_the_others_are_found(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = DirectoryTree.look

    def refused(folder: DirectoryTree) -> object:
        if folder.root.endswith("/queries"):
            raise PermissionError(13, "Permission denied", folder.root)
        return look(folder)

    monkeypatch.setattr(DirectoryTree, "look", refused)
    found = document("history", tree)
    assert [one["system"] for one in found["places"]] == [None, "flink", "flink", "flink", "flink", "flink", None]
    (why,) = (one["why"] for one in found["passed_over"] if one["path"] == "queries")
    assert "not permitted (Permission denied)" in why


def test_of_thousands_of_checkpoints_the_newest_are_opened(tmp_path: Path) -> None:
    job = tmp_path / "flink" / JOB
    shutil.copytree(FIXTURES / "flink-2.3.0/core-hashmap-canonical/savepoint", job / "chk-3000")
    for number in range(1, 3000):
        (job / f"chk-{number}").mkdir()
        os.link(job / "chk-3000/_metadata", job / f"chk-{number}/_metadata")
    found = document("history", tmp_path)
    assert (len(found["places"]), found["more"]) == (50, 2950)
    assert [one["path"] for one in found["places"][:2]] == [f"flink/{JOB}/chk-3000", f"flink/{JOB}/chk-2999"]
    assert [one["whole"] for one in found["places"][:2]] == [True, False]


def test_what_nobody_completed_is_said_to_be_incomplete(tmp_path: Path) -> None:
    (tmp_path / "job/chk-7").mkdir(parents=True)
    (tmp_path / "job/chk-7/part").write_bytes(b"x")
    message = failure("inspect", tmp_path, status=3)["message"]
    assert f"In it is job/chk-7 (begun by Flink). It is not complete; `ckpt history {url(tmp_path)}`" in message
    (one,) = document("history", tmp_path)["places"]
    assert (one["path"], one["whole"], one["checkpoint"]) == ("job/chk-7", False, None)


@pytest.mark.parametrize("place", ["state", "state/0", "state/0/0"])
def test_a_place_in_a_spark_query_is_told_at_every_depth(place: str, tmp_path: Path) -> None:
    fixture = Path(__file__).parents[1] / "foreign/fixtures/spark-4.3.0/window/checkpoint"
    query = Path(shutil.copytree(fixture, tmp_path / "sales"))
    for command in ("inspect", "history"):
        told = failure(command, query / place, status=3)["message"]
        assert f"It is a place in file://{query}, the checkpoint of a Spark query" in told
        assert "Move it" not in told

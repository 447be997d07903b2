"""What lies on a filesystem of fsspec is read as anything else, and nothing is published there."""

from __future__ import annotations

import functools
import json
import os
import pickle
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow.fs
import pytest
import s3fs
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry, known_implementations

import stateformat as sf
from stateformat.backends.storage import FsspecStorage
from stateformat.errors import CheckpointError, ErrorKind, InvalidInput, StorageError
from stateformat.storage import open_storage, without_secrets
from stateformat.store import CheckpointStore
from tests.ckpt.ckpt_runs import document, failure, page, run
from tests.foreign.flink_said import numbers
from tests.servers.azurite import AzuriteServer
from tests.servers.gcs import GcsServer
from tests.servers.server import BUCKET, S3Server
from tests.servers.webhdfs import running_webhdfs, serving
from tests.worlds.stores import counts_store

FIXTURES = Path(__file__).parent.parent / "foreign" / "fixtures"
FLINK = FIXTURES / "flink-2.3.0" / "brief-hashmap-native" / "savepoint"
SPARK = FIXTURES / "spark-4.3.0" / "aggregate" / "checkpoint"
FOREIGN = sorted(
    {path.parent for path in FIXTURES.glob("flink-*/*/savepoint/_metadata")}
    | {path.parents[1] for path in FIXTURES.glob("flink-*/*/savepoint/*/chk-*/_metadata")}
    | {*FIXTURES.glob("*spark-*/*/checkpoint")}
)


class Recorded(MemoryFileSystem):
    """A filesystem in memory that notes every request."""

    protocol = "recorded"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    asked: ClassVar[Counter[str]] = Counter()
    written: ClassVar[list[str]] = []
    refuses: ClassVar[bool] = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("recorded://"))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self.asked["ls"] += 1
        if self.refuses:
            raise PermissionError("listing is refused at recorded://?token=hunter2")
        return super().ls(path, detail=detail, **options)

    def info(self, path: str, **options: Any) -> Any:
        self.asked["info"] += 1
        return super().info(path, **options)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> Any:
        self.asked["cat_file"] += 1
        return super().cat_file(path, start=start, end=end, **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self.written += [path] if mode != "rb" else []
        return super()._open(path, mode=mode, **options)

    def rm_file(self, path: str) -> None:
        self.written.append(path)
        super()._rm(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.written.append(path)
        super().makedirs(path, exist_ok=exist_ok)


@pytest.fixture
def recorded() -> Iterator[type[Recorded]]:
    fsspec.register_implementation("recorded", Recorded, clobber=True)
    yield Recorded
    Recorded.store.clear()
    Recorded.pseudo_dirs[:] = [""]
    Recorded.refuses = False
    _registry.pop("recorded")


def put(recorded: type[Recorded], folder: Path, name: str = "place") -> str:
    """The address of a copy of a folder in the recorded filesystem, with nothing noted so far."""
    recorded().put(f"{folder}/", f"/{name}/", recursive=True)
    recorded.asked.clear()
    recorded.written.clear()
    return f"recorded://{name}"


def zipped(folder: Path, target: Path) -> str:
    return f"zip::{shutil.make_archive(str(target / 'archive'), 'zip', folder)}"


def rows_of(url: str, **options: Any) -> dict[tuple[str, str], list[Any]]:
    """Every row of every state that can be read, and the findings beside them."""
    store = sf.open(url, **options)
    checkpoint = store.open()
    found = {}
    for state in checkpoint.states:
        try:
            table = checkpoint.read(state.operator, state.name).table()
            columns = [numbers(column.combine_chunks()).to_pylist() for column in table.columns]
            found[state.operator, state.name] = sorted(map(repr, zip(*columns, strict=True)))
        except CheckpointError as error:
            found[state.operator, state.name] = [error.kind]
    found["", "findings"] = sorted(repr(finding.kind) for finding in sf.validate(store).findings)
    return found


@pytest.fixture(params=["recorded", "zip", "simplecache"])
def placed(request: pytest.FixtureRequest, tmp_path: Path, recorded: type[Recorded]) -> Callable[[Path], str]:
    """Puts a folder where only fsspec reads it."""

    def place(folder: Path) -> str:
        if request.param == "recorded":
            return put(recorded, folder)
        return zipped(folder, tmp_path) if request.param == "zip" else f"simplecache::file://{folder}"

    return place


@pytest.mark.parametrize("folder", [FLINK, SPARK], ids=["flink", "spark"])
def test_a_foreign_checkpoint_reads_the_same_through_fsspec_and_nothing_is_written(
    folder: Path, placed: Callable[[Path], str]
) -> None:
    assert rows_of(placed(folder)) == rows_of(str(folder))
    assert Recorded.written == []


@pytest.mark.truth
@pytest.mark.parametrize("place", ["recorded", "zip", "gcs", "azurite"])
@pytest.mark.parametrize("folder", FOREIGN, ids=[str(path.relative_to(FIXTURES)) for path in FOREIGN])
def test_every_fixture_reads_the_same_wherever_it_lies(
    folder: Path, place: str, tmp_path: Path, recorded: type[Recorded], request: pytest.FixtureRequest
) -> None:
    options: dict[str, Any] = {}
    if place == "recorded":
        url = put(recorded, folder)
    elif place == "zip":
        url = zipped(folder, tmp_path)
    else:
        server: GcsServer | AzuriteServer = request.getfixturevalue(place)
        url, options = f"{'gs' if place == 'gcs' else 'az'}://{BUCKET}/{os.urandom(8).hex()}", server.options()
        there = open_storage(url, **options).folder()
        assert there is not None
        for path in filter(Path.is_file, folder.rglob("*")):
            with there.open_output(str(path.relative_to(folder))) as output:
                output.write(path.read_bytes())
    assert rows_of(url, **options) == rows_of(str(folder))
    assert Recorded.written == []


@pytest.mark.parametrize(
    ("folder", "key", "bounds"),
    [
        (FLINK, ("--operator", "brief", "--state", "last", "--key", "1"), (40, 40, 40)),
        (SPARK, ("--key", '["雪", -2]'), (80, 40, 75)),
    ],
    ids=["flink", "spark"],
)
def test_looking_at_a_checkpoint_takes_few_requests(
    folder: Path, key: tuple[str, ...], bounds: tuple[int, ...], recorded: type[Recorded]
) -> None:
    url = put(recorded, folder)
    asked = []
    for command, more in (("inspect", ()), ("validate", ()), ("get", key)):
        recorded.asked.clear()
        assert run(command, url, *more).status == 0
        asked.append(recorded.asked.total())
    assert all(number <= bound for number, bound in zip(asked, bounds, strict=True)), asked
    assert recorded.written == []


def test_a_store_of_ours_is_read_and_its_savepoints_too(recorded: type[Recorded], tmp_path: Path) -> None:
    local = counts_store(str(tmp_path / "store"))
    local.pin(None, "kept")
    url = put(recorded, tmp_path / "store", "some/place")
    assert rows_of(url) == rows_of(local.url)
    assert rows_of(f"{url}@kept") == rows_of(f"{local.url}@kept")
    assert [one.name for one in sf.open(url).pins()] == ["kept"]
    assert recorded.written == []


@pytest.mark.parametrize("command", ["pin", "copy", "rescale", "gc", "rollback", "import", "rewrite"])
def test_nothing_is_published_where_a_create_may_not_refuse(
    command: str, recorded: type[Recorded], tmp_path: Path
) -> None:
    store = counts_store(str(tmp_path / "store"), 3)
    url, target = put(recorded, tmp_path / "store"), "recorded://target"
    arguments: dict[str, tuple[object, ...]] = {
        "pin": (url, "kept"),
        "copy": (store.url, target),
        "rescale": (url, "--parallelism", 3),
        "gc": (url, "--keep", 1, "--delete"),
        "rollback": (f"{url}@1",),
        "import": (FLINK, "--to", target),
        "rewrite": (store.url, "--to", target),
    }
    found = run(command, *arguments[command])
    assert found.status != 0
    assert "has no create that is known to refuse" in found.err, found
    assert recorded.written == []


def test_a_folder_is_written_once_where_no_store_could_be(recorded: type[Recorded], tmp_path: Path) -> None:
    url = put(recorded, SPARK)
    page("rescale", url, "--parallelism", 3, "--to", "recorded://rescaled")
    local = tmp_path / "rescaled"
    page("rescale", SPARK, "--parallelism", 3, "--to", local)
    assert rows_of("recorded://rescaled") == rows_of(str(local))
    export = ("export", url, "--operator", "operator-0", "--state", "default", "--to", "recorded://rows/all.parquet")
    page(*export)
    assert recorded().exists("/rows/all.parquet")
    assert "exists" in run(*export).err


@pytest.fixture(params=["recorded", "file", "gs", "az"])
def target(request: pytest.FixtureRequest, tmp_path: Path, recorded: type[Recorded]) -> tuple[str, list[str]]:
    """The address of a new folder, and the options of its storage for a command."""
    if request.param == "recorded":
        return "recorded://new", []
    if request.param == "file":
        return f"file:{tmp_path}/made%20here", []
    server: Any = request.getfixturevalue({"gs": "gcs", "az": "azurite"}[request.param])
    given = [part for name, value in server.options().items() for part in ("--option", f"{name}={value}")]
    return f"{request.param}://{BUCKET}/{uuid.uuid4().hex}", given


def test_every_command_that_writes_a_folder_writes_it_anywhere(
    target: tuple[str, list[str]], tmp_path: Path, recorded: type[Recorded]
) -> None:
    place, given = target
    job = FIXTURES / "flink-2.3.0/core-hashmap-canonical/savepoint"
    page("import", job, "--to", tmp_path / "ours", "--key-hash", "keep")
    rows = document("export", tmp_path / "ours", "--as", "parquet", "--to", f"{place}/rows", *given)["rows"]
    assert rows > 0
    document("export", tmp_path / "ours", "--as", "flink-savepoint", "--to", f"{place}/savepoint", *given)
    document("rescale", SPARK, "--parallelism", 3, "--to", f"{place}/query", *given)
    document("copy", SPARK, "--to", f"{place}/copy", *given)
    page("report", tmp_path / "ours", "--to", f"{place}/page.html", *given)
    for name, states in (("savepoint", job), ("copy", SPARK), ("query", SPARK)):
        assert document("validate", f"{place}/{name}", "--level", "full", *given)["problems"] == []
        totals = [
            document("inspect", where, *more)["totals"] for where, more in ((f"{place}/{name}", given), (states, ()))
        ]
        assert totals[0]["rows"] == totals[1]["rows"]
    options = dict(pair.split("=", 1) for pair in given[1::2])
    folder = open_storage(place, **options).folder()
    assert folder is not None
    assert b"<html" in bytes(folder.read("page.html"))
    assert any(item.path.startswith("rows/") for item in folder.list("rows/"))
    again = failure("copy", SPARK, "--to", f"{place}/copy", *given, status=2)
    assert "empty" in again["message"]


def test_a_file_of_a_folder_is_whole_or_absent_and_never_replaced(recorded: type[Recorded]) -> None:
    folder = open_storage("recorded://plain").folder()
    assert folder is not None
    output = folder.open_output("sub/one")
    output.write(b"12")
    assert not folder.list("")
    output.close()
    abandoned = folder.open_output("sub/two")
    abandoned.write(b"x")
    abandoned.abort()
    assert [(item.path, item.size_bytes) for item in folder.list("")] == [("sub/one", 2)]
    with pytest.raises(StorageError, match="exists already"), folder.open_output("sub/one") as other:
        other.write(b"3")
    assert folder.read("sub/one").to_pybytes() == b"12"
    assert folder.read_range("sub/one", 1, 9).to_pybytes() == b"2"
    assert folder.read_range("sub/one", 5, 9).to_pybytes() == b""
    folder.delete(["sub/one", "sub/none"])
    assert not folder.list("")


def test_a_program_hands_over_a_filesystem_of_its_own(recorded: type[Recorded], tmp_path: Path) -> None:
    store = counts_store(str(tmp_path / "store"))
    put(recorded, tmp_path / "store")
    inside = fsspec.filesystem("dir", path="/place", fs=recorded())
    for filesystem, root in ((recorded(), "place"), (inside, "")):
        handed = pickle.loads(pickle.dumps(FsspecStorage(filesystem, root)))
        assert CheckpointStore(handed).open().id == store.open().id


def test_s3fs_reads_where_a_program_or_a_chain_hands_it_over(moto: S3Server, tmp_path: Path) -> None:
    given = {"key": moto.key, "secret": moto.secret, "endpoint_url": moto.endpoint}
    filesystem, place = s3fs.S3FileSystem(**given), f"{BUCKET}/{uuid.uuid4().hex}"
    filesystem.put(f"{SPARK}/", f"{place}/query/", recursive=True)
    filesystem.put(zipped(SPARK, tmp_path).removeprefix("zip::"), f"{place}/query.zip")
    before = filesystem.find(place)
    expected = document("inspect", SPARK)["totals"]
    handed = CheckpointStore(FsspecStorage(filesystem, f"{place}/query"))
    assert handed.open().record.totals.bytes == expected["bytes"]
    option = ("--option", f"s3={json.dumps(given)}")
    for address in (f"zip::s3://{place}/query.zip", f"simplecache::s3://{place}/query"):
        assert document("inspect", address, *option)["totals"] == expected
    message = failure("inspect", f"zip::s3://{place}/none.zip", *option, status=3)["message"]
    assert f"zip::s3://{place}/none.zip" in message
    assert moto.secret not in message
    filesystem.invalidate_cache()
    assert filesystem.find(place) == before


def test_a_listing_that_is_refused_is_an_error_and_shows_no_secret(recorded: type[Recorded]) -> None:
    url = put(recorded, FLINK)
    recorded.refuses = True
    for command in ("inspect", "validate", "history"):
        error = failure(command, url, status=3)
        assert "at recorded://place: PermissionError." in error["message"]
        assert "hunter2" not in error["message"]


def test_the_folders_of_an_archive_are_named_as_they_are_opened(tmp_path: Path) -> None:
    url = zipped(SPARK.parent, tmp_path)
    inner = f"zip://checkpoint::{tmp_path}/archive.zip"
    assert f"`ckpt inspect {inner}`" in failure("inspect", url, status=3)["message"]
    assert document("inspect", inner)["checkpoint_id"] == sf.open(SPARK).open().id


def test_an_archive_on_a_server_is_read_without_showing_its_signature(tmp_path: Path) -> None:
    zipped(FLINK, tmp_path)
    with serving(functools.partial(_Ranges, directory=str(tmp_path))) as address:
        store = sf.open(f"zip::http://{address}/archive.zip?signature=hunter2")
        assert store.open().id == 1
        assert store.url == f"zip::http://{address}/archive.zip?***"
        assert "hunter2" not in repr(store.storage)


def test_a_folder_that_a_server_of_http_lists_is_read(tmp_path: Path) -> None:
    with serving(functools.partial(_Files, directory=str(FLINK.parent))) as address:
        assert rows_of(f"http://{address}/savepoint") == rows_of(str(FLINK))
        error = failure("inspect", f"http://{address}/nothing", status=3)
        assert f"there is no store at http://{address}/nothing" in error["message"]
    error = failure("inspect", f"http://{address}/savepoint", status=3)
    assert "cannot" in error["message"]


class _Files(SimpleHTTPRequestHandler):
    """Answers a request for a range with the whole file."""

    def log_message(self, *_: object) -> None:
        """Tests print nothing."""


class _Ranges(_Files):
    def do_GET(self) -> None:
        body = Path(self.translate_path(self.path)).read_bytes()
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{min(last, len(body) - 1)}/{len(body)}")
        self.send_header("Content-Length", str(len(body[first : last + 1])))
        self.end_headers()
        self.wfile.write(body[first : last + 1])

    def end_headers(self) -> None:
        self.send_header("Accept-Ranges", "bytes")
        super().end_headers()


@pytest.mark.parametrize("folder", [FLINK, SPARK], ids=["flink", "spark"])
def test_webhdfs_is_read_and_nothing_is_written(folder: Path) -> None:
    with running_webhdfs(folder.parent) as (address, requests):
        assert rows_of(f"webhdfs://{address}/{folder.name}") == rows_of(str(folder))
        requests.clear()
        page("inspect", f"webhdfs://{address}/{folder.name}")
        assert len(requests) <= 120
        assert "PUT" not in requests


def test_hdfs_is_read_through_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = []

    def connected(**how: Any) -> Any:
        connections.append((how["host"], how["port"], how["user"]))
        return pyarrow.fs.SubTreeFileSystem(str(FIXTURES), pyarrow.fs.LocalFileSystem())

    monkeypatch.setattr(pyarrow.fs, "HadoopFileSystem", connected)
    url = f"hdfs://ada@names:8020/{FLINK.relative_to(FIXTURES)}"
    assert rows_of(url) == rows_of(str(FLINK))
    assert {*connections} == {("names", 8020, "ada")}


def test_without_libhdfs_a_sentence_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def connected(**_: Any) -> Any:
        raise OSError("Unable to load libhdfs: libhdfs.so: cannot open shared object file")

    monkeypatch.setattr(pyarrow.fs, "HadoopFileSystem", connected)
    error = failure("inspect", "hdfs://names2:8020/x", status=2)
    assert "CLASSPATH" in error["message"]
    assert "webhdfs://" in error["message"]


def test_a_filesystem_that_is_not_installed_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"class": "nowhere.to.be.found.FileSystem", "err": "Install nowhere to access Nowhere"}
    monkeypatch.setitem(known_implementations, "nowhere", entry)
    with pytest.raises(InvalidInput, match="Install nowhere") as caught:
        open_storage("zip::nowhere://host/a.zip")
    assert caught.value.kind is ErrorKind.MISSING_DEPENDENCY


@pytest.mark.parametrize("url", ["nosuch://host/x", "zip::nosuch://host/a.zip", "nosuch::/x"])
def test_a_scheme_that_nobody_knows_is_refused_with_those_that_are(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"no storage for nosuch://.*known are abfs, .*s3") as caught:
        open_storage(url)
    assert caught.value.kind is ErrorKind.UNKNOWN_SCHEME


def test_options_of_a_filesystem_in_a_chain_are_json_by_its_scheme(tmp_path: Path, recorded: type[Recorded]) -> None:
    zipped(FLINK, tmp_path)
    recorded().put(str(tmp_path / "archive.zip"), "/archive.zip")
    url = "zip::recorded://archive.zip"
    page("inspect", url, "--option", 'recorded={"skip_instance_cache": true}')
    assert "write them as JSON" in failure("inspect", url, "--option", "recorded=x", status=2)["message"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("zip::https://u:pw@host/a.zip?sig=1", "zip::https://***@host/a.zip?***"),
        ("zip://in/side::https://u:pw@host/a.zip?sig=1", "zip://in/side::https://***@host/a.zip?***"),
        ("simplecache::zip://in::/data/a.zip", "simplecache::zip://in::/data/a.zip"),
        ("sftp://u:pw@host/x", "sftp://***@host/x"),
        ("s3://key:se::cret@bucket/x", "s3://***@bucket/x"),
    ],
)
def test_no_part_of_a_chain_shows_its_secrets(url: str, shown: str) -> None:
    assert without_secrets(url) == shown

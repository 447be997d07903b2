"""The storage of S3, Google Cloud Storage and Azure: the suite of every storage on each server."""

from __future__ import annotations

import multiprocessing
import re
import sys
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import obstore
import pytest
from fsspec.config import conf

from stateformat.backends.storage import object_clients
from stateformat.backends.storage.object_answers import redacted
from stateformat.backends.storage.object_clients import client_of, place_of
from stateformat.backends.storage.testing import StorageConformance
from stateformat.backends.storage.testing.objects import RECORD, SEGMENT, paths, put
from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.storage import CreateOutcome, Storage, open_storage, without_secrets
from tests.servers.fake_s3 import Fake
from tests.servers.fault_proxy import FaultProxy
from tests.servers.gcs import GcsServer
from tests.servers.server import BUCKET

SERVERS = {"gs": "gcs", "az": "azurite"}
"""The fixture of the server that a scheme is tested on."""


class ObjectStoreConformance(StorageConformance):
    scheme: str

    @pytest.fixture
    def options(self, request: pytest.FixtureRequest) -> dict[str, Any]:
        options: dict[str, Any] = request.getfixturevalue(SERVERS[self.scheme]).options()
        return options

    @pytest.fixture
    def storage(self, options: dict[str, Any]) -> Storage:
        return open_storage(f"{self.scheme}://{BUCKET}/{uuid.uuid4().hex}/store", **options)

    @pytest.fixture
    def unicode_url(self) -> str:
        return f"{self.scheme}://{BUCKET}/{uuid.uuid4().hex}/prüfung eins+zwei"


class TestGoogleCloudStorage(ObjectStoreConformance):
    scheme = "gs"


class TestAzure(ObjectStoreConformance):
    scheme = "az"


# Addresses


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("gs://bucket/a/b/", "gs://bucket/a/b"),
        ("gcs://bucket/a", "gs://bucket/a"),
        ("az://container/a", "az://container/a"),
        ("abfs://container/a", "az://container/a"),
        ("abfss://c-1@account1.dfs.core.windows.net/a%20b", "abfss://c-1@account1.dfs.core.windows.net/a%20b"),
        ("wasbs://c-1@account1.blob.core.windows.net", "abfss://c-1@account1.dfs.core.windows.net"),
        ("wasb://c-1@account1.blob.core.chinacloudapi.cn/a", "abfss://c-1@account1.dfs.core.chinacloudapi.cn/a"),
    ],
)
def test_each_address_is_shown_as_one_that_opens_again(url: str, shown: str) -> None:
    storage = open_storage(url)
    assert storage.url == without_secrets(storage.url) == shown
    assert open_storage(shown).url == shown


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("gs://", "is no address of a store. Write gs://bucket/prefix"),
        ("gs://bucket//a", "is no address of a store"),
        ("az://container/a/../b", "is no address of a store"),
        ("gs://user:hunter2@bucket/a", "names a bucket and nothing else"),
        ("abfss://c:hunter2@account1.dfs.core.windows.net/a", "or CONTAINER@ACCOUNT.dfs.core.windows.net"),
        ("abfss://c@hunter2/a", "or CONTAINER@ACCOUNT.dfs.core.windows.net"),
        ("abfss://space@onelake.dfs.fabric.microsoft.com/a", "in Microsoft Fabric"),
        ("s3://b/a", "with a bucket of 2 to 255 characters"),
        ("az://container/a?sv=2024&sig=hunter2", "goes on with a query.*sas_token"),
        ("s3://bucket/a?X-Amz-Signature=hunter2", "goes on with a query"),
        ("gs://bucket?token=hunter2", "goes on with a query"),
    ],
)
def test_an_address_that_names_no_bucket_is_refused_and_no_secret_repeated(url: str, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence) as raised:
        open_storage(url)
    assert raised.value.kind is ErrorKind.INVALID_URL
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("domain", ["windows.net", "chinacloudapi.cn", "usgovcloudapi.net"])
def test_an_account_of_another_cloud_is_asked_there(domain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "https://elsewhere.example")
    given = {"account_key": "aHVudGVyMg=="}
    place, _ = place_of(f"abfss://container@account1.dfs.core.{domain}/a", given)
    signed = obstore.sign(client_of(place, given).once, "GET", "k", timedelta(minutes=1))
    assert signed.startswith(f"https://account1.blob.core.{domain}/container/k?")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"endpoint_url": "http://minio:9000", "key": "ada", "secret": "hunter2", "use_ssl": False}),
        ({"endpoint_url": "http://other"}, {"endpoint_url": "http://other", "key": "ada", "secret": "hunter2"}),
        ({"key": "bob", "secret": "x"}, {"endpoint_url": "http://minio:9000", "key": "bob", "secret": "x"}),
        ({"profile": "work"}, {"endpoint_url": "http://minio:9000", "profile": "work"}),
        ({"anon": True}, {"endpoint_url": "http://minio:9000", "anon": True}),
    ],
)
def test_what_options_leave_out_is_taken_from_the_configuration_of_fsspec(
    given: dict[str, Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(conf, "s3", {"endpoint_url": "http://minio:9000", "key": "ada", "secret": "hunter2"})
    monkeypatch.setitem(conf, "s3a", {"use_ssl": "false", "default_block_size": 5})
    monkeypatch.setitem(conf, "gs", {"token": "of another service"})
    assert object_clients.configured("s3n://bucket", given) == {"use_ssl": False, **expected}
    assert "hunter2" not in repr(open_storage("s3://bucket/store"))


@pytest.mark.parametrize(("scheme", "extra"), [("gs", "gcs"), ("az", "azure")])
def test_without_obstore_the_line_that_installs_it_is_told(
    scheme: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_clients, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=rf"pip install 'stateformat\[{extra}\]'") as raised:
        open_storage(f"{scheme}://bucket/a")
    assert raised.value.kind is ErrorKind.MISSING_DEPENDENCY


# What servers answer


@pytest.fixture(params=SERVERS)
def opened(request: pytest.FixtureRequest) -> Storage:
    options = request.getfixturevalue(SERVERS[request.param]).options(tries=1)
    return open_storage(f"{request.param}://{BUCKET}/{uuid.uuid4().hex}", **options)


def test_a_probe_is_no_object_of_the_store_and_the_bucket_need_not_be_asked_again(opened: Storage) -> None:
    assert not opened.exists()
    assert opened.create(RECORD, b"x") is CreateOutcome.CREATED
    assert opened.exists()
    opened.delete([RECORD])
    assert not opened.exists(), "a probe is no store"
    assert opened.list("") == []
    folder = opened.folder()
    assert folder is not None
    assert paths(folder, "") == [".probe"]


def test_a_folder_is_read_whatever_it_holds(opened: Storage) -> None:
    for name in ("segments/1/a", "manifests/x", "requests/y"):
        put(opened, name, b"x")
    folder = opened.folder()
    assert folder is not None
    assert paths(folder, "seg") == ["segments/1/a"]
    look = folder.look()
    assert (list(look.folders), look.files) == (["manifests", "requests", "segments"], {})
    inside = look.folders["segments"].look().folders["1"]
    assert paths(inside, "") == ["a"]
    written_us = inside.look().files["a"]
    assert written_us is not None
    assert 2020 < datetime.fromtimestamp(written_us / 1e6, UTC).year < 2100
    above = inside.above()
    assert above is not None
    assert above.url == look.folders["segments"].url


@pytest.mark.parametrize("scheme", SERVERS)
def test_a_bucket_that_is_not_there_is_told_by_every_method(scheme: str, request: pytest.FixtureRequest) -> None:
    storage = open_storage(f"{scheme}://no-such-bucket/a", **request.getfixturevalue(SERVERS[scheme]).options(tries=1))
    assert not storage.exists()
    calls = [
        lambda: storage.read(RECORD),
        lambda: storage.size(RECORD),
        lambda: storage.list("checkpoints/"),
        lambda: storage.create(RECORD, b"x"),
        lambda: storage.delete([SEGMENT]),
        lambda: put(storage, SEGMENT, b"x"),
        lambda: put(storage, SEGMENT, bytes(17 << 20)),
    ]
    for call in calls:
        with pytest.raises(StorageError, match=r"there is no bucket 'no-such-bucket'\. Create it"):
            call()


@pytest.mark.parametrize(("scheme", "wrong"), [("gs", {"token": "hunter2"}), ("az", {"account_key": "aHVudGVyMg=="})])
def test_credentials_that_are_refused_are_told_and_not_shown(
    scheme: str, wrong: dict[str, str], request: pytest.FixtureRequest
) -> None:
    options = request.getfixturevalue(SERVERS[scheme]).options(tries=1, **wrong)
    storage = open_storage(f"{scheme}://{BUCKET}/a", **options)
    for call in (lambda: storage.list(""), lambda: storage.create(RECORD, b"x")):
        with pytest.raises(StorageError, match=r"the credentials were refused|not permitted") as raised:
            call()
        assert raised.value.kind is ErrorKind.STORAGE_REFUSED
        assert not [value for value in wrong.values() if value in f"{raised.value!s}{storage!r}"]


def failing(scheme: str, fake: Fake, **more: Any) -> Storage:
    """A store on a server that fails as told."""
    options = {
        "gs": {"endpoint_url": fake.endpoint, "token": "x"},
        "az": {
            "endpoint_url": f"{fake.endpoint}/account1",
            "account_name": "account1",
            "account_key": "aHVudGVyMg==",
        },
    }
    return open_storage(f"{scheme}://bucket/job", tries=1, **{**options[scheme], **more})


@pytest.mark.parametrize("scheme", SERVERS)
@pytest.mark.parametrize("there", [False, True], ids=["new", "a probe was copied here"])
def test_a_server_that_ignores_the_condition_is_refused_before_anything_is_created(
    scheme: str, there: bool, fake: Fake
) -> None:
    place = {"gs": "/bucket/job/.probe", "az": "/account1/bucket/job/.probe"}[scheme]
    fake.honors_condition = False
    fake.objects |= {place: b"probe\n"} if there else {}
    storage = failing(scheme, fake)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"it created job/\.probe twice") as raised:
            storage.create(RECORD, b"x")
        assert raised.value.kind is ErrorKind.STORAGE_UNSUITABLE
    assert [*fake.objects] == [place]


OLD = "AuthenticationFailed</Code><Detail>Request date header too old</Detail><Code>"
"""What Azure says of a clock."""


@pytest.mark.parametrize(
    ("scheme", "answer", "kind", "sentence"),
    [
        ("gs", (403, "AccessDenied"), ErrorKind.STORAGE_REFUSED, "the credentials have the right storage.objects."),
        (
            "az",
            (403, "AuthorizationPermissionMismatch"),
            ErrorKind.STORAGE_REFUSED,
            "the credentials have the right Storage Blob Data ",
        ),
        ("az", (403, OLD), ErrorKind.STORAGE_REFUSED, "the clocks of this machine and of the server"),
        ("gs", (400, "invalid_grant: not in a reasonable timeframe"), ErrorKind.STORAGE_REFUSED, "the clocks of this"),
        *(
            (scheme, (501, "NotImplemented"), ErrorKind.STORAGE_UNSUITABLE, "Use a server with conditional writes")
            for scheme in SERVERS
        ),
    ],
)
def test_a_listing_and_a_create_that_are_refused_are_told(
    scheme: str, answer: tuple[int, str], kind: ErrorKind, sentence: str, fake: Fake
) -> None:
    fake.everything = answer
    storage = failing(scheme, fake)
    for call in (storage.exists, lambda: storage.list(""), lambda: storage.create(RECORD, b"x")):
        with pytest.raises(StorageError, match=re.escape(sentence)) as raised:
            call()
        assert raised.value.kind is kind
    assert fake.sent("PUT", RECORD) == 0


@pytest.mark.parametrize(
    ("scheme", "options", "variable"),
    [
        ("gs", {"token": None}, "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az", {"account_key": None, "msi_endpoint": "http://127.0.0.1:1/"}, "AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_missing_credentials_are_told_before_anything_is_sent(
    scheme: str, options: dict[str, Any], variable: str, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "HOME": str(tmp_path),
        "GCE_METADATA_HOST": "127.0.0.1:1",
        "GCE_METADATA_IP": "127.0.0.1:1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StorageError, match=f"there are no usable credentials .*{variable}"):
        failing(scheme, fake, **options).list("")
    assert fake.log == []


def test_a_listing_of_several_pages_is_whole_and_ends_with_its_prefix(
    gcs: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.servers.gcs.PAGE_NAMES", 3)
    storage = open_storage(f"gs://{BUCKET}/{uuid.uuid4().hex}", **gcs.options())
    names = [f"segments/{folder}/{number:04}" for folder in (1, 2, 3) for number in range(7)]
    for name in names:
        put(storage, name, b"x")
    assert paths(storage, "segments/") == names
    assert paths(storage, "segments/2/000") == names[7:14]
    storage.delete(names)
    assert storage.list("") == []


def test_an_upload_that_is_aborted_leaves_no_parts(gcs: GcsServer) -> None:
    storage = open_storage(f"gs://{BUCKET}/{uuid.uuid4().hex}", **gcs.options())
    output = storage.open_output(SEGMENT)
    output.write(bytes(40 << 20))
    assert len(gcs.buckets[BUCKET].uploads) == 1
    output.abort()
    assert gcs.buckets[BUCKET].uploads == {}
    assert storage.list("") == []


# Processes


def used_in_child(url: str, options: dict[str, Any]) -> str:
    try:
        return str(open_storage(url, **options).list(""))
    except StorageError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_not_left_waiting(gcs: GcsServer) -> None:
    url = f"gs://{BUCKET}/{uuid.uuid4().hex}"
    assert open_storage(url, **gcs.options()).list("") == []
    with multiprocessing.get_context("fork").Pool(1) as pool:
        told = pool.apply(used_in_child, (url, gcs.options()))
        pool.close()
        pool.join()
    assert "it was forked from one that used obstore" in told
    assert "Start workers by 'spawn' or 'forkserver'" in told


def test_stores_of_one_bucket_share_a_client_and_other_options_do_not(gcs: GcsServer) -> None:
    options = gcs.options()
    place, _ = place_of(f"gs://{BUCKET}/a", options)
    assert client_of(place, options) is client_of(place_of(f"gcs://{BUCKET}/b", options)[0], dict(options))
    assert client_of(place, options) is not client_of(place, {**options, "tries": 2})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tries": "none"}, "tries is 'none'. It takes a number"),
        ({"tries": 0}, "which allows 0 tries"),
        ({"read_timeout": "soon"}, "read_timeout is 'soon'. It takes seconds"),
        ({"service_account_key": "{"}, "no Google Cloud Storage client can be made with these options"),
        ({"endpoint_url": "localhost:1"}, "is no URL"),
        ({"token": 3}, r"token of gs:// storage is of type int\. It takes text"),
        ({"token": ""}, r"token of gs:// storage is empty\. Give it, or leave it out"),
        ({"read_timeout": -1}, r"read_timeout is -1\. It takes seconds, more than 0"),
    ],
    ids=str,
)
def test_options_that_no_client_takes_are_told_in_a_sentence(options: dict[str, Any], sentence: str) -> None:
    given = {"endpoint_url": "http://127.0.0.1:1", "token": "x", **options}
    with pytest.raises(InvalidInput, match=sentence):
        open_storage("gs://bucket/job", **given).list("checkpoints/")


@pytest.mark.parametrize(
    ("url", "options", "sentence"),
    [
        ("az://container/a", {}, r"names no account of Azure\. Write abfss://container@ACCOUNT"),
        ("az://container/a", {"account_name": 3}, "account_name of az:// storage is of type int. It takes text"),
        ("az://container/a", {"account_name": "account1", "account_key": ""}, "account_key of az:// storage is empty"),
        (
            "abfss://container@account1.dfs.core.windows.net/a",
            {"account_name": "account2"},
            "in the account 'account1', and the option account_name is 'account2'",
        ),
    ],
    ids=str,
)
def test_an_account_that_is_missing_or_another_is_told(url: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        open_storage(url, **options).list("checkpoints/")


@pytest.mark.parametrize("variable", ["AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_TOKEN"])
def test_a_secret_that_would_lose_to_one_of_the_environment_is_refused(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"account_name": "account1", "client_id": "c", "tenant_id": "t", "client_secret": "hunter2"}
    assert open_storage("az://container/a", **given)
    monkeypatch.setenv(variable, "aHVudGVyMg==")
    with pytest.raises(InvalidInput, match=f"would take {variable}.*Unset that variable") as raised:
        open_storage("az://container/a", **given)
    assert "hunter2" not in str(raised.value)


def test_a_signature_that_is_given_goes_before_a_key_of_the_environment(
    gcs: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "aHVudGVyMg==")
    with FaultProxy(gcs) as proxy:
        given = {
            "endpoint_url": proxy.endpoint,
            "account_name": "account1",
            "sas_token": "?sv=2024&sig=abc",
            "tries": 1,
        }
        with pytest.raises(StorageError, match="the credentials were refused"):
            open_storage("az://container/a", **given).list("checkpoints/")
        assert "sig=abc" in proxy.requests[0].query


def test_no_message_of_a_client_shows_a_signature() -> None:
    text = 'Bearer hunter2, "sig=hunter2" X-Amz-Signature=hunter2&X-Amz-Credential=hunter2 (access_token=hunter2)'
    assert redacted(text, ()).count("***") == 5
    assert "hunter2" not in redacted(text, ())


def test_opening_a_store_imports_no_client() -> None:
    import subprocess

    code = (
        "import sys; from stateformat.storage import open_storage; print(open_storage('gs://bucket/prefix').url);"
        "print([name for name in ('obstore', 'botocore', 's3fs', 'fsspec') if name in sys.modules])"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.split("\n")[:2] == ["gs://bucket/prefix", "[]"]

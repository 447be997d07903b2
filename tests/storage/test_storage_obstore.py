"""Reading S3 with obstore: what is told when obstore fails, and what it is told of settings."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.config
import botocore.session
import pytest

from stateformat.backends.storage.s3 import client as s3_client, obstore as s3_obstore
from stateformat.backends.storage.s3.obstore import FAILURES_MAX, Unsuitable, open_store
from stateformat.backends.storage.testing.objects import MISSING, SEGMENT, put
from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.storage import Storage, open_storage
from tests.servers.fake_s3 import OBSTORE, RANGE_FAULTS, S3FS, Fake
from tests.servers.server import BUCKET, S3Server
from tests.servers.suite import S3Conformance

pytestmark = pytest.mark.s3

DATA = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def _imported_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has imported obstore before: it was not a process that this one was forked from."""
    monkeypatch.setattr(s3_obstore, "_imported_by", os.getpid())


@pytest.mark.truth
class TestReadWithObstoreOnARealServer(S3Conformance):
    @pytest.fixture
    def server(self, rgw: S3Server) -> S3Server:
        return rgw

    @pytest.fixture
    def options(self, server: S3Server) -> dict[str, Any]:
        return server.options(client="obstore")


ERRORS = {
    "gone": (404, "NoSuchKey"),
    "no bucket": (404, "NoSuchBucket"),
    "refused": (403, "SignatureDoesNotMatch"),
    "busy": (503, "SlowDown"),
    "broken": (500, "InternalError"),
    "no range": (416, "InvalidRange"),
}
FAULTS = (*ERRORS, *RANGE_FAULTS[:4])


@pytest.fixture
def fake() -> Iterator[Fake]:
    """A new server, and with it new clients, for each test."""
    server = Fake()
    server.objects[f"/bucket/store/{SEGMENT}"] = DATA
    yield server
    server.stop()


def fail(fake: Fake, fault: str, of: str = "") -> None:
    fake.of, fake.everything, fake.fault = of, ERRORS.get(fault), fault


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_client, "_PAUSE_SECONDS", 0.001)


def opened(fake: Fake, **more: Any) -> Storage:
    config = {"connect_timeout": 5, "read_timeout": 5}
    region = {"region_name": "eu-west-1"}
    given = {"endpoint_url": fake.endpoint, "key": "AKID", "secret": "sesame", "client_kwargs": region, **more}
    return open_storage("s3://bucket/store", config_kwargs=config, **given)


def test_obstore_reads_where_it_is_installed_and_nothing_else_is_asked_for(fake: Fake) -> None:
    assert opened(fake).read(SEGMENT).to_pybytes() == DATA
    assert opened(fake).read_range(SEGMENT, 100, 50).to_pybytes() == DATA[100:150]
    assert fake.agents == [OBSTORE] * 2


def test_the_option_names_the_client_that_reads(fake: Fake) -> None:
    assert opened(fake, client="s3fs").read(SEGMENT).to_pybytes() == DATA
    assert opened(fake, client="obstore").read(SEGMENT).to_pybytes() == DATA
    assert fake.agents == [S3FS, OBSTORE]


def test_where_obstore_is_not_installed_s3fs_reads(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_obstore, "find_spec", lambda name: None)
    assert opened(fake).read(SEGMENT).to_pybytes() == DATA
    assert fake.agents == [S3FS]
    with pytest.raises(InvalidInput, match=re.escape("pip install 'stateformat[obstore]'")) as told:
        opened(fake, client="obstore")
    assert told.value.kind is ErrorKind.MISSING_DEPENDENCY


def test_a_client_that_there_is_not_is_refused(fake: Fake) -> None:
    with pytest.raises(InvalidInput, match=r"no client 'boto3'\. Known are obstore, s3fs"):
        opened(fake, client="boto3")


@pytest.mark.parametrize("fault", FAULTS)
def test_what_obstore_alone_does_not_get_is_read_all_the_same(fake: Fake, fault: str) -> None:
    storage = opened(fake)
    fail(fake, fault, OBSTORE)
    assert storage.read_range(SEGMENT, 10, 500).to_pybytes() == DATA[10:510]
    assert fake.agents == [OBSTORE, S3FS]


def told(storage: Storage, path: str) -> tuple[type[Exception], str] | bytes:
    """What a read gives or raises."""
    try:
        return storage.read_range(path, 10, 500).to_pybytes()
    except (StorageError, OSError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_as_it_is_without_obstore(fake: Fake, fault: str) -> None:
    fail(fake, fault)
    with_obstore, without = opened(fake), opened(fake, client="s3fs")
    answer = told(with_obstore, SEGMENT)
    assert fake.agents[0] == OBSTORE
    assert answer == told(without, SEGMENT)
    assert (answer == b"") is (fault == "no range")
    assert answer == b"" or (answer[0] is FileNotFoundError) is (fault == "gone")


def test_obstore_is_given_up_when_only_s3fs_can_read(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    storage = opened(fake)
    fail(fake, "ranges ignored", OBSTORE)
    with caplog.at_level(logging.WARNING, logger="stateformat.backends.storage.s3.obstore"):
        for _ in range(FAILURES_MAX + 2):
            assert storage.read(SEGMENT).to_pybytes() == DATA
    assert fake.agents == [OBSTORE, S3FS] * FAILURES_MAX + [S3FS] * 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_failures_that_pass_do_not_end_it(fake: Fake) -> None:
    storage = opened(fake)
    for number in range(3 * FAILURES_MAX):
        fail(fake, "busy" if number % FAILURES_MAX else "", OBSTORE)
        assert storage.read(SEGMENT).to_pybytes() == DATA
    assert fake.agents.count(OBSTORE) == 3 * FAILURES_MAX


# Settings and credentials


def sent(fake: Fake, client: str, **options: Any) -> tuple[str, str, str | None]:
    """Who signed a read, for which region, and the token."""
    fake.log.clear()
    opened(fake, client=client, **options).read(SEGMENT)
    ((_, _, sent),) = fake.log
    headers = {name.lower(): value for name, value in sent.items()}
    signed = re.search(r"Credential=([^/]+)/\d+/([^/]+)/s3", headers.get("authorization", "Credential=-/0/-/s3"))
    assert signed is not None
    return signed[1], signed[2], headers.get("x-amz-security-token")


def test_credentials_come_from_where_botocore_finds_them(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.write_text(
        "[profile "
        "mine]\naws_access_key_id=AKIDPROFILE\naws_secret_access_key=s\naws_session_token=t3\nregion=us-west-2\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "t2")
    # What obstore would read from the environment and botocore does not.
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    none: dict[str, Any] = {"key": None, "secret": None}
    for options, due in (
        ({}, ("AKID", "eu-west-1", None)),
        ({"token": "t1"}, ("AKID", "eu-west-1", "t1")),
        (none, ("AKIDENV", "eu-west-1", "t2")),
        ({**none, "profile": "mine", "client_kwargs": {}}, ("AKIDPROFILE", "us-west-2", "t3")),
        ({"anon": True, **none}, ("-", "-", None)),
    ):
        assert sent(fake, "obstore", **options) == due
        assert fake.agents == [OBSTORE]
        if options.get("profile") is None:
            assert sent(fake, "s3fs", **options) == due


def test_credentials_that_are_renewed_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    assert s3_obstore._credentials({})()["expires_at"] is not None
    assert s3_obstore._credentials({"key": "a", "secret": "b"})()["expires_at"] is None


def client(config: dict[str, Any], **arguments: Any) -> Any:
    """A client of botocore's."""
    credentials = {"aws_access_key_id": "AKID", "aws_secret_access_key": "s", "region_name": "eu-west-1"}
    made = botocore.config.Config(**config)
    return botocore.session.Session().create_client("s3", config=made, **{**credentials, **arguments})


KEYS = {"key": "AKID", "secret": "s"}


@pytest.mark.parametrize(
    ("bucket", "config", "arguments", "endpoint", "in_host"),
    [
        ("b-b", {}, {}, "https://b-b.s3.eu-west-1.amazonaws.com", True),
        ("b.b", {}, {}, "https://s3.eu-west-1.amazonaws.com", False),
        ("b-b", {"s3": {"addressing_style": "path"}}, {}, "https://s3.eu-west-1.amazonaws.com", False),
        ("b-b", {}, {"endpoint_url": "http://host:9000"}, "http://host:9000", False),
        ("b-b", {"s3": {"addressing_style": "virtual"}}, {"endpoint_url": "http://h:9"}, "http://b-b.h:9", True),
    ],
)
def test_the_bucket_stands_where_botocore_puts_it(
    bucket: str, config: Any, arguments: Any, endpoint: str, in_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://elsewhere")
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    made = client(config, **arguments)
    found = open_store(bucket, KEYS, made).config
    assert found["endpoint"] == found["endpoint_url_s3"] == endpoint
    assert (found["virtual_hosted_style_request"], found["region"]) == (str(in_host).lower(), "eu-west-1")
    # What botocore itself makes of it (without the region, at Amazon).
    url = made.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "key"}).partition("?")[0]
    due = f"{endpoint}/key" if in_host else f"{endpoint}/{bucket}/key"
    assert url in (due, due.replace(".eu-west-1", ""))


@pytest.mark.parametrize(
    ("options", "config", "arguments", "named"),
    [
        ({}, {"proxies": {"http": "http://proxy"}}, {}, "setting proxies"),
        ({}, {"s3": {"use_accelerate_endpoint": True}}, {}, "setting s3 use_accelerate_endpoint"),
        ({}, {"use_dualstack_endpoint": True}, {}, "setting use_dualstack_endpoint"),
        ({}, {"signature_version": "s3"}, {}, "signature_version"),
        ({"client_kwargs": {"verify": False}}, {}, {}, "client_kwargs verify"),
        ({"s3_additional_kwargs": {"SSECustomerKey": "k"}}, {}, {}, "s3_additional_kwargs SSECustomerKey"),
        ({}, {}, {"endpoint_url": "http://user:word@host"}, "endpoint"),
    ],
)
def test_a_setting_that_obstore_may_take_otherwise_is_not_guessed_at(
    options: Any, config: Any, arguments: Any, named: str
) -> None:
    made = client(config, **{"endpoint_url": None if "dualstack" in named else "http://host", **arguments})
    with pytest.raises(Unsuitable, match=f"what obstore would make of .*{named}"):
        open_store("bucket", {**KEYS, **options}, made)


def test_a_bundle_of_certificates_counts_where_the_endpoint_is_secure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", "/etc/ssl/certs/ca-certificates.crt")
    open_store("bucket", KEYS, client({}, endpoint_url="http://host"))
    with pytest.raises(Unsuitable, match="AWS_CA_BUNDLE"):
        open_store("bucket", KEYS, client({}, endpoint_url="https://host", verify=False))


def test_a_setting_that_obstore_does_not_know_is_refused_if_obstore_was_asked_for(fake: Fake) -> None:
    of_client = {"region_name": "eu-west-1", "verify": False}
    assert opened(fake, client_kwargs=of_client).read(SEGMENT).to_pybytes() == DATA
    assert fake.agents == [S3FS]
    with pytest.raises(
        InvalidInput, match=r"client is .obstore., and what .* client_kwargs verify is not known\. Leave"
    ):
        opened(fake, client_kwargs=of_client, client="obstore").read(SEGMENT)
    assert fake.agents == [S3FS]


# Processes


def read_in_child(pickled: bytes) -> bytes:
    storage: Storage = pickle.loads(pickled)
    return storage.read(SEGMENT).to_pybytes()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_reads_without_the_threads_of_its_parent(fake: Fake) -> None:
    storage = opened(fake, client="obstore")
    assert storage.read(SEGMENT).to_pybytes() == DATA
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(read_in_child, (pickle.dumps(storage),)).get(60) == DATA
    assert fake.agents == [OBSTORE, S3FS]


def test_a_spawned_child_reads_with_obstore(fake: Fake) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pickled = pickle.dumps(opened(fake))
        assert pool.apply_async(read_in_child, (pickled,)).get(60) == DATA
    assert fake.agents == [OBSTORE]


def test_where_obstore_was_imported_before_us_s3fs_reads(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore  # noqa: F401

    monkeypatch.setattr(s3_obstore, "_imported_by", 0)
    assert opened(fake, client="obstore").read(SEGMENT).to_pybytes() == DATA
    assert fake.agents == [S3FS]


def test_a_missing_object_and_large_reads_are_as_without_obstore(moto: S3Server) -> None:
    storage = open_storage(f"s3://{BUCKET}/large", **moto.options(client="obstore"))
    large = os.urandom(9 * 2**20)
    put(storage, SEGMENT, large)
    assert storage.read(SEGMENT).to_pybytes() == large
    assert storage.read_range(SEGMENT, 5, 2**23 + 9).to_pybytes() == large[5 : 5 + 2**23 + 9]
    with pytest.raises(FileNotFoundError):
        storage.read(MISSING)

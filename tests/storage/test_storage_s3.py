"""The S3 storage: the suite of every storage on a mock server, and faults that no mock shows."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest

from stateformat.backends.storage import object_clients, objects, s3
from stateformat.backends.storage.object_clients import client_of, place_of
from stateformat.backends.storage.s3 import S3Storage, _botocore
from stateformat.backends.storage.testing.objects import RECORD, SEGMENT, paths, put
from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.graph import JobGraph
from stateformat.history import collect_garbage
from stateformat.storage import REFUSALS, CreateOutcome, Storage, instrumented, open_storage
from stateformat.store import CheckpointStore
from tests.ckpt.ckpt_runs import run
from tests.servers.fake_s3 import IMPATIENT, KEY, SECRET, Fake, options_for
from tests.servers.fault_proxy import Fault, FaultProxy
from tests.servers.server import BUCKET, S3Server
from tests.servers.suite import MockConformance
from tests.worlds.stores import operator

pytestmark = pytest.mark.s3
SOON_SECONDS = 30


class TestS3Storage(MockConformance):
    pass


def test_a_whole_bucket_can_be_a_store(moto: S3Server) -> None:
    bucket = f"whole-{uuid.uuid4().hex}"
    moto.client.create_bucket(Bucket=bucket)
    storage = open_storage(f"s3://{bucket}/", **moto.options())
    assert storage.url == f"s3://{bucket}"
    assert storage.exists()
    assert storage.create(RECORD, b"x") is CreateOutcome.CREATED
    assert paths(storage, "") == [RECORD]
    assert [item["Key"] for item in moto.client.list_objects_v2(Bucket=bucket)["Contents"]] == [".probe", RECORD]


# Against the mock server


@pytest.fixture
def prefix() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def storage(moto: S3Server, prefix: str) -> S3Storage:
    opened = open_storage(f"s3://{BUCKET}/{prefix}", **moto.options())
    assert isinstance(opened, S3Storage)
    return opened


def keys(moto: S3Server, prefix: str) -> list[str]:
    answer = moto.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix + "/")
    return [item["Key"] for item in answer.get("Contents", ())]


def test_a_prefix_exists_when_something_lies_under_it(moto: S3Server, prefix: str, storage: S3Storage) -> None:
    moto.client.put_object(Bucket=BUCKET, Key=prefix + "-longer/segments/x", Body=b"x")
    assert not storage.exists()
    assert storage.create(RECORD, b"x") is CreateOutcome.CREATED
    assert storage.exists()
    storage.delete([RECORD])
    assert keys(moto, prefix) == [f"{prefix}/.probe"]
    assert not storage.exists(), "a probe is no store"
    put(storage, SEGMENT, b"x")
    assert storage.exists()
    assert keys(moto, prefix) == [f"{prefix}/{name}" for name in (".probe", SEGMENT)]
    assert paths(storage, "") == [SEGMENT]


def test_keys_that_are_no_objects_are_not_listed(moto: S3Server, prefix: str, storage: S3Storage) -> None:
    for key in ("segments/", "segments/.hidden", "savepoints/1/segments/x", "README"):
        moto.client.put_object(Bucket=BUCKET, Key=f"{prefix}/{key}", Body=b"x")
    put(storage, SEGMENT, b"x")
    assert paths(storage, "") == paths(storage, "segments/") == [SEGMENT]


def test_a_key_with_an_empty_part_is_told(moto: S3Server, prefix: str, storage: S3Storage) -> None:
    moto.client.put_object(Bucket=BUCKET, Key=f"{prefix}/segments/a//b", Body=b"x")
    with pytest.raises(StorageError, match=r"segments/a//b. contained empty path segment\)\. Rename or remove it"):
        storage.list("segments/")


def test_a_key_with_an_empty_part_beside_a_store_is_passed_over(
    moto: S3Server, prefix: str, storage: S3Storage
) -> None:
    moto.client.put_object(Bucket=BUCKET, Key=f"{prefix}//other", Body=b"x")
    assert storage.exists()
    store = CheckpointStore(storage)
    store.begin(job_id="job", graph=JobGraph((operator("a", 1),)), states=(), parent=None).publish()
    assert [record.checkpoint_id for record in store.history()] == [1]
    assert collect_garbage(storage, delete=True).stopped is None


def test_what_a_server_lists_beside_the_prefix_is_passed_over(storage: S3Storage, prefix: str) -> None:
    import obstore

    def ignoring(*_: Any, **__: Any) -> list[list[dict[str, Any]]]:
        return [[{"path": f"{above}/{SEGMENT}", "size": 1} for above in ("x" * len(prefix), prefix)]]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(obstore, "list", ignoring)
        assert paths(storage, "segments/") == [SEGMENT]


@pytest.mark.parametrize("told", [True, False])
def test_a_page_of_uploads_that_does_not_say_where_the_next_begins_is_followed_by_its_last(
    storage: S3Storage, prefix: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = [{"Key": f"{prefix}/segments/{name}", "UploadId": name} for name in "ab"]
    asked: list[str] = []

    def call(_: S3Storage, method: str, **given: Any) -> Any:
        if method == "list_parts":
            return {"Parts": [{"Size": 1}]}
        asked.append(given.get("UploadIdMarker", ""))
        uploads = begun[len(asked) - 1 : len(asked)] if told else []
        return {"Uploads": uploads, "IsTruncated": len(asked) < 2}

    monkeypatch.setattr(S3Storage, "_call", call)
    if told:
        assert [item.name for item in storage.leftovers()] == ["a", "b"]
        assert asked == ["", "a"]
    else:
        refused(storage.leftovers, "the response was cut off")


def test_names_after_a_record_cost_one_request_however_many_are_before_it(
    moto: S3Server, storage: S3Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [f"checkpoints/{number:020}.json" for number in range(9)]
    for record in records:
        assert storage.create(record, b"x") is CreateOutcome.CREATED
    monkeypatch.setattr(objects, "_LISTED_AT_ONCE", 2)
    with FaultProxy(moto) as proxy:
        through = open_storage(storage.url, **moto.options(proxy.endpoint))
        assert through.names_after(records[7]) == [records[8]]
        assert [request.method for request in proxy.requests] == ["GET"]
        assert "start-after" in proxy.requests[0].query
    assert storage.names("checkpoints/") == records


def test_a_listing_and_a_delete_of_several_pages_are_whole(storage: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_LISTED_AT_ONCE", 3)
    monkeypatch.setattr(objects, "_DELETED_AT_ONCE", 4)
    names = [f"segments/1/{number:04}" for number in range(10)]
    for name in names:
        put(storage, name, b"")
    assert paths(storage, "segments/") == names
    storage.delete(names)
    assert storage.list("") == []


def test_an_aborted_large_object_leaves_no_upload_open(moto: S3Server, prefix: str, storage: S3Storage) -> None:
    output = storage.open_output(SEGMENT)
    output.write(bytes(2 * objects.PART_BYTES + 1))
    uploads = moto.client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    assert [upload["Key"] for upload in uploads if prefix in upload["Key"]] == [f"{prefix}/{SEGMENT}"]
    output.abort()
    dropped = storage.open_output(SEGMENT)
    dropped.write(b"half")
    del dropped
    answer = moto.client.list_multipart_uploads(Bucket=BUCKET)
    assert [upload for upload in answer.get("Uploads", ()) if prefix in upload["Key"]] == []
    assert storage.list("") == []


@pytest.mark.parametrize("size_bytes", [objects.PART_BYTES - 1, objects.PART_BYTES, 2 * objects.PART_BYTES])
def test_an_object_at_the_border_of_a_part_comes_back_whole(storage: S3Storage, size_bytes: int) -> None:
    body = (uuid.uuid4().bytes * (size_bytes // 16 + 1))[:size_bytes]
    put(storage, SEGMENT, body)
    assert storage.read(SEGMENT).to_pybytes() == body
    assert storage.read_range(SEGMENT, 5, size_bytes).to_pybytes() == body[5:]


def test_the_environment_gives_endpoint_and_credentials(
    moto: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    storage = open_storage(f"s3://{BUCKET}/{prefix}")
    assert storage.create(RECORD, b"x") is CreateOutcome.CREATED
    assert storage.read(RECORD).to_pybytes() == b"x"
    assert keys(moto, prefix) == [f"{prefix}/.probe", f"{prefix}/{RECORD}"]


def every_call(storage: Storage) -> list[Callable[[], object]]:
    return [
        lambda: storage.read(RECORD),
        lambda: storage.read_range(RECORD, 0, 4),
        lambda: storage.size(RECORD),
        lambda: storage.open_input(RECORD),
        lambda: storage.list("checkpoints/"),
        lambda: storage.create(RECORD, b"x"),
        lambda: put(storage, SEGMENT, b"x"),
    ]


def test_the_number_of_connections_can_be_chosen(storage: S3Storage) -> None:
    for given, connections in (({}, 32), ({"max_pool_connections": 3}, 3)):
        client = _botocore(storage._client, {**storage._options, "config_kwargs": given})
        assert client.meta.config.max_pool_connections == connections


def in_child(pickled: bytes) -> tuple[str, bytes]:
    """Run in a child: use a storage that was used before in the parent."""
    storage = pickle.loads(pickled)
    outcome = storage.create("checkpoints/2", b"child")
    return outcome.value, storage.read(RECORD).to_pybytes()


def test_a_pickled_storage_works_in_another_process(storage: S3Storage) -> None:
    assert storage.create(RECORD, b"parent") is CreateOutcome.CREATED
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(in_child, (pickle.dumps(storage),)) == ("created", b"parent")
        pool.close()
        pool.join()
    assert storage.read("checkpoints/2").to_pybytes() == b"child"


def test_another_process_gets_clients_of_its_own(storage: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage.create(RECORD, b"x") is CreateOutcome.CREATED
    first = storage._client
    assert storage._client is first
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert storage._client is not first
    assert storage.create("checkpoints/2", b"x") is CreateOutcome.CREATED


def test_a_missing_bucket_is_told_by_every_method(moto: S3Server) -> None:
    storage = open_storage("s3://no-such-bucket/prefix", **moto.options(config_kwargs=IMPATIENT))
    assert not storage.exists()
    for call in every_call(storage):
        with pytest.raises(StorageError, match=r"no bucket 'no-such-bucket'\. Create it, or check the URL") as raised:
            call()
        assert moto.endpoint in str(raised.value)


# Addresses and options


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        *((url, {}, "s3://bucket/prefix") for url in ("s3://", "s3:///prefix", "s3://b/p", "s3://bucket//x")),
        *((url, {}, "s3://bucket/prefix") for url in ("s3://bucket/a/../b", "s3://bucket/a\nb")),
        ("s3://hunter2:hunter2@bucket/prefix", {}, "Pass credentials"),
        ("s3://bucket/prefix", {"endpoint_url": "localhost:9000"}, r"localhost:9000.*http://"),
        ("s3://bucket/prefix", {"endpoint_url": "http://h:1/?token=hunter2"}, "endpoint_url"),
        ("s3://bucket/prefix", {"endpoint_url": "http://u:p@h#hunter2"}, "endpoint_url"),
        ("s3://bucket/prefix", {"endpoint_url": "ftp://h?x=hunter2"}, "endpoint_url"),
    ],
)
def test_an_address_that_names_no_bucket_or_server_is_refused_and_no_secret_repeated(
    url: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words) as raised:
        open_storage(url, **options)
    assert raised.value.kind is ErrorKind.INVALID_URL
    assert "hunter2" not in f"{raised.value} {raised.value.details}"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"client_kwargs": {"zz": 1}}, r"client_kwargs has no 'zz'\. It takes .*region_name"),
        ({"config_kwargs": {"zz": 1}}, r"config_kwargs has no 'zz'\. It takes .*read_timeout"),
        ({"client_kwargs": 3}, r"client_kwargs .* is of type int\. It takes a mapping"),
        ({"s3_additional_kwargs": [1]}, r"s3_additional_kwargs .* is of type list\. It takes a mapping"),
        ({"secret": 3}, r"secret .* is of type int\. It takes text"),
        ({"client_kwargs": {"region_name": 3}}, "no S3 client can be made with these options"),
        ({"config_kwargs": {"use_dualstack_endpoint": True}}, "config_kwargs has no 'use_dualstack_endpoint'"),
        ({"s3_additional_kwargs": {"SSECustomerKey": "k"}}, "s3_additional_kwargs has no 'SSECustomerKey'"),
        ({"config_kwargs": {"retries": 3}}, r"config_kwargs\['retries'\] is 3\. It takes a mapping"),
        ({"config_kwargs": {"retries": {"max_attempts": "x"}}}, r"config_kwargs\['retries'\] is .* It takes a mapping"),
        ({"config_kwargs": {"retries": {"max_attempts": -1}}}, "which allows 0 tries"),
        ({"config_kwargs": {"retries": {"total_max_attempts": 0}}}, "which allows 0 tries"),
        ({"secret": None}, r"have key and no secret\. Give key and secret, or leave all out"),
        ({"key": None, "secret": None, "token": "t"}, "have token and no key and no secret"),
        ({"key": None, "secret": None, "client_kwargs": {"aws_access_key_id": "k"}}, "have key and no secret"),
        ({"key": ""}, "key of s3:// storage is empty"),
        ({"endpoint_url": "", "use_ssl": False}, "use_ssl is false without an endpoint"),
    ],
    ids=str,
)
def test_options_that_no_client_takes_are_told_in_a_sentence(options: dict[str, Any], sentence: str) -> None:
    given = options_for("http://127.0.0.1:1", **{"config_kwargs": IMPATIENT, **options})
    with pytest.raises(InvalidInput, match=sentence):
        open_storage("s3://bucket/job", **given).list("checkpoints/")


def test_without_obstore_the_line_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(InvalidInput, match=re.escape("pip install 'stateformat[s3]'")) as raised:
        open_storage("s3://bucket/prefix")
    assert raised.value.kind is ErrorKind.MISSING_DEPENDENCY


def test_without_botocore_what_needs_it_is_told_with_the_line_that_installs_it(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (object_clients, s3):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == "botocore" else find_spec(name))
    storage = opened(fake)
    assert storage.create(RECORD, b"x") is CreateOutcome.CREATED
    given = options_for(fake.endpoint, profile="mine")
    for call, words in (
        (storage.leftovers, "pip install 'stateformat[s3]'"),
        (lambda: open_storage("s3://bucket/job", **given).list(""), "pip install botocore"),
    ):
        with pytest.raises(InvalidInput, match=re.escape(words)) as raised:
            call()
        assert raised.value.kind is ErrorKind.MISSING_DEPENDENCY


def test_opening_a_store_imports_no_client() -> None:
    code = (
        "import sys; from stateformat.storage import open_storage; print(open_storage('s3://bucket/prefix').url);"
        "print([name for name in ('obstore', 'botocore', 's3fs', 'fsspec') if name in sys.modules])"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.split("\n")[:2] == ["s3://bucket/prefix", "[]"]


def test_a_used_storage_shows_no_credentials(moto: S3Server, prefix: str) -> None:
    storage = open_storage(f"s3://{BUCKET}/{prefix}", **moto.options(token="session-token"))
    assert storage.create(RECORD, b"x") is CreateOutcome.CREATED
    for shown in (storage.url, repr(storage), str(storage)):
        assert shown.count(prefix) == 1
        assert not [text for text in (KEY, SECRET, "session-token") if text in shown]


# Against servers that fail in every way


def opened(fake: Fake, **config: Any) -> Storage:
    return open_storage("s3://bucket/job", **options_for(fake.endpoint, config_kwargs={**IMPATIENT, **config}))


def test_a_server_that_ignores_the_condition_is_refused_before_anything_is_created(fake: Fake) -> None:
    fake.honors_condition = False
    storage = opened(fake)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"ignores If-None-Match: it created job/\.probe twice") as raised:
            storage.create(RECORD, b"x")
        assert raised.value.kind is ErrorKind.STORAGE_UNSUITABLE
    assert fake.sent("PUT", RECORD) == 0
    assert list(fake.objects) == ["/bucket/job/.probe"]


def test_a_server_that_does_not_know_the_condition_is_refused(fake: Fake) -> None:
    fake.everything = (501, "NotImplemented")
    with pytest.raises(StorageError, match="If-None-Match") as raised:
        opened(fake).create(RECORD, b"x")
    assert raised.value.kind is ErrorKind.STORAGE_UNSUITABLE
    assert fake.sent("PUT", RECORD) == 0


@pytest.mark.parametrize("first", [(409, "ConditionalRequestConflict"), (500, "InternalError"), "drop", "drop applied"])
def test_only_a_refused_condition_proves_that_the_server_heeds_it(fake: Fake, first: Any) -> None:
    fake.script[("PUT", ".probe")] = first
    assert opened(fake).create(RECORD, b"x") is CreateOutcome.CREATED
    assert fake.sent("PUT", ".probe") == (2 if first == "drop applied" else 3)
    fake.honors_condition = False
    fake.script[("PUT", ".probe")] = first
    with pytest.raises(StorageError, match="ignores If-None-Match"):
        opened(fake).create("checkpoints/2", b"x")
    assert fake.sent("PUT", "/2") == 0


def test_a_probe_that_was_copied_here_proves_nothing(fake: Fake) -> None:
    fake.objects["/bucket/job/.probe"] = b"probe\n"
    assert opened(fake).create(RECORD, b"x") is CreateOutcome.CREATED
    assert fake.sent("PUT", ".probe") == 1
    fake.honors_condition = False
    with pytest.raises(StorageError, match="ignores If-None-Match"):
        opened(fake).create("checkpoints/2", b"x")
    assert fake.sent("PUT", "/2") == 0


def test_a_store_is_probed_once_and_each_further_storage_asks_once(fake: Fake) -> None:
    for number, probes in ((0, 2), (2, 1), (4, 1)):
        storage, before = opened(fake), len(fake.log)
        for more in (0, 1):
            assert storage.create(f"checkpoints/{number + more}", b"x") is CreateOutcome.CREATED
        names = [(method, path.rpartition("/")[2]) for method, path, _ in fake.log[before:]]
        assert names == [("PUT", ".probe")] * probes + [("PUT", str(number)), ("PUT", str(number + 1))]


def test_the_one_request_carries_the_condition_and_the_whole_body(fake: Fake) -> None:
    storage = opened(fake)
    body = bytes(range(256)) * 16384
    assert storage.create(RECORD, body) is CreateOutcome.CREATED
    assert fake.sent("PUT", RECORD) == 1
    assert fake.objects[f"/bucket/job/{RECORD}"] == body
    method, path, headers = fake.log[-1]
    assert (method, path, headers["if-none-match"]) == ("PUT", f"/bucket/job/{RECORD}", "*")


@pytest.mark.parametrize(
    ("action", "outcome"),
    [
        ((412, "PreconditionFailed"), CreateOutcome.CONFLICT),
        ((409, "ConditionalRequestConflict"), CreateOutcome.CONFLICT),
        ((500, "InternalError"), CreateOutcome.UNKNOWN),
        ((502, "BadGateway"), CreateOutcome.UNKNOWN),
        ((503, "SlowDown"), CreateOutcome.UNKNOWN),
        ((504, "GatewayTimeout"), CreateOutcome.UNKNOWN),
        ((429, "TooManyRequests"), CreateOutcome.UNKNOWN),
        ((400, "RequestTimeout"), CreateOutcome.UNKNOWN),
        ((400, "KMS.ThrottlingException"), CreateOutcome.UNKNOWN),
        ("drop", CreateOutcome.UNKNOWN),
        ("drop applied", CreateOutcome.UNKNOWN),
        ("hang", CreateOutcome.UNKNOWN),
    ],
)
def test_a_create_that_fails_is_sent_once_and_its_outcome_told(fake: Fake, action: Any, outcome: CreateOutcome) -> None:
    storage = opened(fake, read_timeout=0.5)
    # The connection is kept from here on: clients like to send again on a kept connection that
    # breaks.
    assert storage.create("checkpoints/0", b"x") is CreateOutcome.CREATED
    fake.script[("PUT", RECORD[12:])] = action
    assert storage.create(RECORD, b"x") is outcome
    assert fake.sent("PUT", RECORD) == 1
    assert (f"/bucket/job/{RECORD}" in fake.objects) is (action == "drop applied")
    # It was one attempt and no more: the storage goes on afterwards.
    assert storage.create("checkpoints/2", b"x") is CreateOutcome.CREATED


@pytest.mark.parametrize("config", [{"retries": {"max_attempts": 9}}, {"retries": {"mode": "adaptive"}}])
def test_no_option_turns_retries_of_the_one_request_on(fake: Fake, config: dict[str, Any]) -> None:
    storage = opened(fake, **config)
    storage.create("checkpoints/0", b"x")
    fake.script[("PUT", RECORD[12:])] = (500, "InternalError")
    assert storage.create(RECORD, b"x") is CreateOutcome.UNKNOWN
    assert fake.sent("PUT", RECORD) == 1


REFUSED = [
    ((403, "AccessDenied"), "not permitted (AccessDenied). Check that the key has the right s3:"),
    ((403, "InvalidAccessKeyId"), "the credentials were refused (InvalidAccessKeyId). Check the options"),
    ((400, "ExpiredToken"), "the credentials were refused (ExpiredToken)"),
    ((403, "RequestTimeTooSkewed"), "the clocks of this machine and of the server differ too much"),
    ((400, "AuthorizationHeaderMalformed"), "the bucket 'bucket' is in another region"),
    ((301, "Moved"), "the request was redirected"),
    ((404, "NoSuchBucket"), "there is no bucket 'bucket'. Create it, or check the URL and the endpoint"),
    ((400, "InvalidArgument"), "InvalidArgument"),
]


@pytest.mark.parametrize(("answer", "sentence"), REFUSED, ids=[answer[1] for answer, _ in REFUSED])
def test_a_refusal_is_an_error_with_a_sentence_and_no_secret(
    fake: Fake, answer: tuple[int, str], sentence: str
) -> None:
    storage = opened(fake)
    assert storage.create("checkpoints/0", b"x") is CreateOutcome.CREATED
    fake.everything = answer
    # Not those that begin with a HEAD, whose answer has no body.
    read, _, _, _, *others = every_call(storage)
    more: list[Callable[[], object]] = [lambda: storage.delete([SEGMENT]), lambda: storage.delete([RECORD])]
    for call in (read, *others, *more, CheckpointStore(storage).history):
        with pytest.raises(StorageError, match=re.escape(sentence)) as raised:
            call()
        assert raised.value.kind is ErrorKind.STORAGE_REFUSED
        assert fake.endpoint in str(raised.value)
        assert not [secret for secret in (KEY, SECRET) if secret in str(raised.value)]


@pytest.mark.parametrize(
    ("operation", "right"),
    [("list", "s3:ListBucket"), ("read", "s3:GetObject"), ("create", "s3:PutObject"), ("delete", "s3:DeleteObject")],
)
def test_the_right_that_is_missing_is_named(fake: Fake, operation: str, right: str) -> None:
    storage = opened(fake)
    fake.everything = (403, "AccessDenied")
    given: dict[str, Any] = {"list": ("",), "read": (RECORD,), "create": (RECORD, b"x"), "delete": ([RECORD],)}
    with pytest.raises(StorageError, match=f"Check that the key has the right {right} on 'bucket'"):
        getattr(storage, operation)(*given[operation])


def test_what_did_nothing_and_may_pass_is_no_refusal(fake: Fake) -> None:
    storage = opened(fake)
    assert storage.create("checkpoints/0", b"x") is CreateOutcome.CREATED
    fake.script[("PUT", RECORD[12:])] = (400, "BadDigest")
    with pytest.raises(StorageError, match="BadDigest") as raised:
        storage.create(RECORD, b"x")
    assert raised.value.kind not in REFUSALS
    assert storage.create(RECORD, b"x") is CreateOutcome.CREATED


@pytest.mark.parametrize("user", ["", "user:hunter2@"])
def test_a_server_that_is_not_there_is_told(user: str) -> None:
    with socket.socket() as reserved:
        # Bound and not listening: nobody else gets the port, and a connection is refused.
        reserved.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{reserved.getsockname()[1]}"
        storage = open_storage("s3://bucket/job", **options_for(f"http://{user}{host}", config_kwargs=IMPATIENT))
        for call in (storage.exists, *every_call(storage)) if not user else (lambda: storage.list(""),):
            with pytest.raises(StorageError, match=f"at http://{host}: ") as raised:
                call()
            assert "hunter2" not in str(raised.value)
            assert user or "no connection (Connect). Check endpoint_url" in str(raised.value)


def test_missing_credentials_are_told(fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name, value in elsewhere(tmp_path, "").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    assert fake.log == []
    whole = options_for(fake.endpoint, profile="x", config_kwargs=IMPATIENT)
    assert open_storage("s3://bucket/job", **whole).create(RECORD, b"x") is CreateOutcome.CREATED
    fake.log.clear()
    for options, words in (({}, r"no usable credentials .*AWS_ACCESS_KEY_ID"), ({"profile": "x"}, "ProfileNotFound")):
        storage = open_storage("s3://bucket/job", endpoint_url=fake.endpoint, config_kwargs=IMPATIENT, **options)
        for call in (lambda: storage.list(""), lambda: storage.create(RECORD, b"x")):  # noqa: B023 - called at once
            with pytest.raises(StorageError, match=words):
                call()
    assert fake.log == []


def test_credentials_and_the_region_that_are_asked_for_are_what_was_missing(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in elsewhere(tmp_path, "").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    fake.region = "eu-south-2"
    fake.objects |= {f"/bucket/{place}/{RECORD}": b"there" for place in "cd"}
    where = {"endpoint_url": fake.endpoint, "config_kwargs": IMPATIENT}
    refused(lambda: open_storage("s3://bucket/a", **where).read(RECORD), "there are no usable credentials")
    keys = {"key": KEY, "secret": SECRET}
    refused(lambda: open_storage("s3://bucket/b", **where, **keys).read(RECORD), "is in another region")
    given = {"region": "eu-south-2"}
    assert bytes(open_storage("s3://bucket/c", **where, **keys, **given).read(RECORD)) == b"there"
    for name, value in {**elsewhere(tmp_path, SECRET), "AWS_DEFAULT_REGION": "eu-south-2"}.items():
        monkeypatch.setenv(name, value)
    assert bytes(open_storage("s3://bucket/d", **where).read(RECORD)) == b"there"


def refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(StorageError, match=words):
        call()


def elsewhere(tmp_path: Path, key: str) -> dict[str, str]:
    """The environment of a machine that is none of Amazon's."""
    files = dict.fromkeys(("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"), str(tmp_path / "none"))
    keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), key)
    return {**files, **keys, "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}


# Settings and credentials


def sent(fake: Fake, **options: Any) -> tuple[str, str, str | None]:
    """Who signed a request, for which region, and the token."""
    fake.log.clear()
    given = options_for(fake.endpoint, config_kwargs=IMPATIENT, **options)
    open_storage("s3://bucket/job", **given).create(RECORD, b"x")
    headers = fake.log[-1][2]
    signed = re.search(r"Credential=([^/]+)/\d+/([^/]+)/s3", headers.get("authorization", "Credential=-/0/-/s3"))
    assert signed is not None
    return signed[1], signed[2], headers.get("x-amz-security-token")


def test_credentials_come_from_options_then_the_profile_then_the_environment(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = ("[profile mine]", "aws_access_key_id=AKIDPROFILE", "aws_secret_access_key=s", "aws_session_token=t3")
    (tmp_path / "config").write_text("\n".join((*lines, "region=us-west-2", "")))
    environment = {"ACCESS_KEY_ID": "AKIDENV", "SECRET_ACCESS_KEY": "s", "SESSION_TOKEN": "t2"}
    # What obstore alone would take from the environment.
    environment |= {"SKIP_SIGNATURE": "true", "VIRTUAL_HOSTED_STYLE_REQUEST": "true", "ENDPOINT_URL_S3": "http://none"}
    environment |= {"CONFIG_FILE": str(tmp_path / "config"), "SHARED_CREDENTIALS_FILE": str(tmp_path / "none")}
    for name, value in environment.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    none: dict[str, Any] = {"key": None, "secret": None}
    assert sent(fake) == (KEY, "us-east-1", None)
    assert sent(fake, token="t1") == (KEY, "us-east-1", "t1")
    assert sent(fake, **none) == ("AKIDENV", "us-east-1", "t2")
    empty = {"aws_access_key_id": None, "region_name": "us-east-1"}
    assert sent(fake, client_kwargs=empty) == (KEY, "us-east-1", None)
    assert sent(fake, **none, profile="mine", client_kwargs={}) == ("AKIDPROFILE", "us-west-2", "t3")
    assert sent(fake, **none, anon=True) == ("-", "-", None)


PROFILES = """
[profile all]
endpoint_url = {}
[profile one]
endpoint_url = http://user:hunter2@all.none
services = mine
[services mine]
s3 =
  endpoint_url = {}
[profile none]
endpoint_url = http://all.none
ignore_configured_endpoint_urls = true
"""


@pytest.mark.parametrize("by", ["option", "AWS_PROFILE", "fsspec"])
@pytest.mark.parametrize("profile", ["all", "one"])
def test_a_profile_names_the_server_and_messages_do(
    profile: str, by: str, fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in elsewhere(tmp_path, "").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    keys = "aws_access_key_id = AKIDPROFILE\naws_secret_access_key = hunter2\n"
    (tmp_path / "profiles").write_text(PROFILES.format(fake.endpoint, fake.endpoint).replace("]\nend", f"]\n{keys}end"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "profiles"))
    options = {"config_kwargs": IMPATIENT, **({"profile": profile} if by == "option" else {})}
    if by == "AWS_PROFILE":
        monkeypatch.setenv("AWS_PROFILE", profile)
    if by == "fsspec":
        monkeypatch.setitem(fsspec.config.conf, "s3", {"profile": profile})
    storage = open_storage("s3://bucket/job", **options)
    assert storage.create(RECORD, b"x") is CreateOutcome.CREATED
    assert "AKIDPROFILE" in fake.log[-1][2]["authorization"]
    fake.script[("PUT", RECORD.rpartition("/")[2])] = (403, "AccessDenied")
    with pytest.raises(StorageError, match=re.escape(f"at {fake.endpoint}: not permitted")) as raised:
        storage.create(RECORD, b"x")
    assert "hunter2" not in str(raised.value)
    assert object_clients.server_name(object_clients.S3, {"profile": "none"}) == "AWS"


def test_a_profile_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody's")
    with pytest.raises(StorageError, match=r"has no such profile .*~/\.aws/config"):
        open_storage("s3://bucket/job").list("")


def test_without_tls_messages_name_the_server_as_it_is_asked(fake: Fake) -> None:
    https = fake.endpoint.replace("http://", "https://")
    storage = open_storage("s3://bucket/job", **options_for(https, config_kwargs=IMPATIENT), use_ssl=False)
    assert f"at {fake.endpoint}" in storage._where  # type: ignore[attr-defined]


def test_credentials_that_are_renewed_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.session import Session

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    assert object_clients._credentials(Session())()["expires_at"] is not None


@pytest.mark.parametrize(
    ("bucket", "options", "url"),
    [
        ("b-b", {}, "https://b-b.s3.eu-west-1.amazonaws.com/k"),
        ("b.b", {}, "https://s3.eu-west-1.amazonaws.com/b.b/k"),
        ("b-b", {"config_kwargs": {"s3": {"addressing_style": "path"}}}, "https://s3.eu-west-1.amazonaws.com/b-b/k"),
        ("b-b", {"endpoint_url": "http://host:9000"}, "http://host:9000/b-b/k"),
        (
            "b-b",
            {"endpoint_url": "http://h:9", "config_kwargs": {"s3": {"addressing_style": "virtual"}}},
            "http://b-b.h:9/k",
        ),
    ],
)
def test_the_bucket_stands_where_botocore_puts_it(
    bucket: str, options: dict[str, Any], url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import obstore

    for name, value in elsewhere(tmp_path, "x").items():
        monkeypatch.setenv(name, value)
    place, _ = place_of(f"s3://{bucket}", given := {"key": "a", "secret": "b", "region": "eu-west-1", **options})
    signed = obstore.sign(client_of(place, given).once, "GET", "k", timedelta(minutes=1))
    assert signed.partition("?")[0] == url


def test_a_bundle_of_certificates_that_is_not_there_is_told(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none.pem"))
    with pytest.raises(StorageError, match=r"none\.pem"):
        opened(fake).list("")


def in_forked_child(pickled: bytes) -> str:
    try:
        return str(pickle.loads(pickled).list(""))
    except StorageError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_not_left_waiting(storage: S3Storage) -> None:
    assert storage.list("") == []
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert "Start workers by 'spawn'" in pool.apply_async(in_forked_child, (pickle.dumps(storage),)).get(60)


# What the user of a program is told


def inspect(endpoint: str, environment: dict[str, str], status: int = 3) -> str:
    """The one line of ``ckpt inspect`` on standard error."""
    begun = time.monotonic()
    found = run("inspect", "s3://bucket/job", "--endpoint-url", endpoint, **environment)
    assert time.monotonic() - begun < SOON_SECONDS
    assert (found.status, found.out) == (status, "")
    assert len(found.err.splitlines()) == 1, found.err
    return found.err


@pytest.mark.parametrize(
    ("answer", "sentence"), [REFUSED[0], ((404, "NotFound"), "the server there is not an S3 server")]
)
def test_what_the_server_refuses_is_one_line(
    fake: Fake, tmp_path: Path, answer: tuple[int, str], sentence: str
) -> None:
    fake.everything = answer
    line = inspect(fake.endpoint, elsewhere(tmp_path, SECRET))
    assert f"ckpt: cannot list checkpoints/ in s3://bucket/job at {fake.endpoint}: {sentence}" in line
    assert SECRET not in line


def test_missing_credentials_are_one_line_before_anything_is_sent(fake: Fake, tmp_path: Path) -> None:
    assert "there are no usable credentials" in inspect(fake.endpoint, elsewhere(tmp_path, ""))
    assert fake.log == []


def test_a_server_that_cannot_be_reached_is_told_soon(tmp_path: Path) -> None:
    line = inspect("http://nowhere.invalid", elsewhere(tmp_path, SECRET))
    assert "no connection (Connect). Check endpoint_url" in line


@pytest.mark.parametrize("endpoint", ["localhost:9000", "http://", "user:hunter2@localhost"])
def test_an_endpoint_that_is_no_url_is_misuse(tmp_path: Path, endpoint: str) -> None:
    line = inspect(endpoint, elsewhere(tmp_path, SECRET), status=2)
    assert "is no URL. Write http:// or https://" in line
    assert "hunter2" not in line


def test_an_endpoint_of_a_configuration_file_that_is_no_url_is_told(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("[default]\nendpoint_url = localhost:9000\n")
    environment = {**elsewhere(tmp_path, SECRET), "AWS_CONFIG_FILE": str(tmp_path / "config")}
    found = run("inspect", "s3://bucket/job", **environment)
    assert found.status == 3
    assert "Invalid endpoint: localhost:9000. Check the options" in found.err


# More of what servers do


def test_anonymous_requests_are_not_signed(fake: Fake) -> None:
    storage = open_storage("s3://bucket/job", endpoint_url=fake.endpoint, anon=True, config_kwargs=IMPATIENT)
    assert storage.create(RECORD, b"x") is CreateOutcome.CREATED
    assert {headers.get("authorization") for _, _, headers in fake.log} == {None}


def test_additional_arguments_reach_the_conditional_request_and_each_of_an_upload(fake: Fake) -> None:
    additional = {"ServerSideEncryption": "AES256", "RequestPayer": "requester"}
    options = options_for(fake.endpoint, config_kwargs=IMPATIENT, s3_additional_kwargs=additional)
    storage = open_storage("s3://bucket/job", **options)
    storage.create(RECORD, b"x")
    assert fake.log[-1][2]["x-amz-server-side-encryption"] == "AES256"
    assert fake.log[-1][2]["if-none-match"] == "*"
    with storage.open_output(SEGMENT) as output:
        output.write(bytes(objects.PART_BYTES))
    begin, *others = fake.log[-3:]
    assert begin[2]["x-amz-server-side-encryption"] == "AES256"
    assert [each[2]["x-amz-request-payer"] for each in (begin, *others)] == ["requester"] * 3


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ({"AWS_ENDPOINT_URL": "http://none.invalid", "AWS_ENDPOINT_URL_S3": "{}"}, {}),
        ({"AWS_ENDPOINT_URL": "http://none.invalid"}, {"endpoint_url": "{}"}),
        ({"AWS_REGION": "eu-south-2", "AWS_DEFAULT_REGION": "us-east-1"}, {"endpoint_url": "{}"}),
        ({}, {"endpoint_url": "{}", "client_kwargs": {"endpoint_url": "http://none.invalid"}}),
        ({}, {"endpoint_url": "{s}", "use_ssl": False}),
    ],
    ids=str,
)
def test_uploads_go_where_every_other_request_goes(
    fake: Fake, environment: dict[str, str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"": fake.endpoint, "s": fake.endpoint.replace("http:", "https:")}
    there = {"{}": place[""], "{s}": place["s"]}
    for name, value in environment.items():
        monkeypatch.setenv(name, there.get(value, value))
    given = {name: there.get(value, value) if isinstance(value, str) else value for name, value in options.items()}
    storage = open_storage("s3://bucket/job", key=KEY, secret=SECRET, config_kwargs=IMPATIENT, **given)
    fake.everything = (403, "AccessDenied")
    for ask in (lambda: storage.list(""), storage.leftovers):
        refused(ask, "not permitted")
    regions = [re.findall(r"Credential=[^/]+/\d+/([^/]+)/", each[2]["authorization"]) for each in fake.log]
    assert regions == [[environment.get("AWS_REGION", "us-east-1")]] * 2


def test_a_server_that_ignores_ranges_is_refused(fake: Fake) -> None:
    storage = opened(fake)
    storage.create(RECORD, b"0123456789")
    fake.fault = "ranges ignored"
    with pytest.raises(StorageError, match="ignores ranges") as raised:
        storage.read_range(RECORD, 3, 4)
    assert raised.value.kind is ErrorKind.STORAGE_UNSUITABLE


def test_an_answer_of_another_range_is_refused(fake: Fake) -> None:
    storage = opened(fake)
    storage.create(RECORD, b"0123456789")
    fake.fault = "another range"
    for offset in (0, 3):
        with pytest.raises(StorageError, match="ignores ranges") as raised:
            storage.read_range(RECORD, offset, 4)
        assert raised.value.kind is ErrorKind.STORAGE_UNSUITABLE
    fake.fault = ""
    assert storage.read_range(RECORD, 3, 4).to_pybytes() == b"3456"


def test_an_answer_that_is_shorter_than_its_range_is_no_shorter_object(fake: Fake) -> None:
    storage = opened(fake)
    storage.create(RECORD, b"0123456789")
    fake.fault = "short body"
    for read in (lambda: storage.read(RECORD), lambda: storage.read_range(RECORD, 3, 4)):
        with pytest.raises(StorageError, match="the response was cut off"):
            read()


def test_a_probe_without_any_answer_creates_nothing(fake: Fake) -> None:
    fake.everything = (500, "InternalError")
    with pytest.raises(StorageError, match="InternalError") as raised:
        opened(fake).create(RECORD, b"x")
    assert raised.value.kind is ErrorKind.STORAGE_FAILED
    assert fake.sent("PUT", RECORD) == 0


# What is tried again, and how often


@pytest.fixture
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_clients, "_PAUSE_SECONDS", 0.0)


PATIENT = {"connect_timeout": 2, "read_timeout": 2}
PASSING = [500, 502, 503, 504, (409, "OperationAborted"), 429, (400, "RequestTimeout"), (400, "BadDigest"), "drop"]


@pytest.mark.usefixtures("_no_pauses")
@pytest.mark.parametrize("action", PASSING)
def test_what_can_be_done_twice_is_tried_again_a_few_times(fake: Fake, action: Any) -> None:
    storage = open_storage("s3://bucket/job", **options_for(fake.endpoint, config_kwargs=PATIENT))
    name = SEGMENT.rpartition("/")[2]
    fake.script[("PUT", name)] = action
    put(storage, SEGMENT, b"state")
    fake.script[("GET", name)] = action
    assert storage.read(SEGMENT).to_pybytes() == b"state"
    fake.script[("DELETE", name)] = action
    storage.delete([SEGMENT])
    assert fake.objects == {}
    sent = [fake.sent(method, name) for method in ("PUT", "GET", "DELETE")]
    # Below us, aiohttp sends once more what a kept connection has lost.
    assert sent == [2, 2, 2] or (action == "drop" and min(sent) >= 2)
    fake.everything = action
    with pytest.raises(StorageError, match=SEGMENT):
        storage.read(SEGMENT)
    again = fake.sent("GET", name) - sent[1]
    assert again == object_clients.TRIES_MAX or (action == "drop" and again >= object_clients.TRIES_MAX)


@pytest.mark.usefixtures("_no_pauses")
@pytest.mark.parametrize("action", [(400, "InvalidArgument"), (403, "AccessDenied"), (404, "NoSuchKey"), 501])
def test_what_will_not_pass_is_not_tried_again(fake: Fake, action: Any) -> None:
    storage = open_storage("s3://bucket/job", **options_for(fake.endpoint, config_kwargs=PATIENT))
    fake.everything = action
    with pytest.raises((StorageError, FileNotFoundError)):
        storage.read(SEGMENT)
    assert fake.sent("GET", SEGMENT) == 1


@pytest.mark.usefixtures("_no_pauses")
def test_a_server_that_takes_requests_and_never_answers_is_not_asked_again_and_again(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_clients, "_SILENCE_SECONDS_MAX", 0.4)
    config = {"connect_timeout": 2, "read_timeout": 0.25}
    storage = open_storage("s3://bucket/job", **options_for(fake.endpoint, config_kwargs=config))
    fake.everything = "hang"
    with pytest.raises(StorageError, match="no connection"):
        storage.read(SEGMENT)
    assert 1 <= fake.sent("GET", SEGMENT) < object_clients.TRIES_MAX


@pytest.mark.usefixtures("_no_pauses")
@pytest.mark.parametrize(("retries", "tries"), [({"total_max_attempts": 1}, 1), ({"max_attempts": 2}, 3)])
def test_the_number_of_tries_can_be_chosen(fake: Fake, retries: dict[str, int], tries: int) -> None:
    config = {**PATIENT, "retries": retries}
    storage = open_storage("s3://bucket/job", **options_for(fake.endpoint, config_kwargs=config))
    fake.everything = 500
    with pytest.raises(StorageError):
        storage.read(SEGMENT)
    assert fake.sent("GET", SEGMENT) == tries


@pytest.mark.usefixtures("_no_pauses")
def test_a_request_that_is_sent_again_is_a_retry_of_the_store_that_asked(fake: Fake) -> None:
    one, two = (
        instrumented(open_storage("s3://bucket/job", **options_for(fake.endpoint, config_kwargs=PATIENT)))
        for _ in range(2)
    )
    fake.script[("PUT", SEGMENT.rpartition("/")[2])] = 503
    put(one, SEGMENT, b"state")
    assert (one.stats.retries, one.stats.waits, one.stats["open_output"].objects) == (1, 1, 1)
    fake.everything = 503
    with pytest.raises(StorageError):
        one.read(SEGMENT)
    assert (one.stats.retries, one.stats["read"].calls, one.stats["read"].failures) == (object_clients.TRIES_MAX, 1, 1)
    assert two.stats.retries == 0


# Large objects


def test_parts_go_several_at_once_and_a_bounded_number(
    moto: S3Server, storage: S3Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    blocks = [os.urandom(1 << 20) for _ in range(27)]
    with FaultProxy(moto) as proxy:
        # Answers come late, so parts are under way together.
        proxy.reset(lambda request: Fault.SLOW if "partNumber" in request.query else None)
        through = open_storage(storage.url, **moto.options(proxy.endpoint))
        with through.open_output(SEGMENT) as output:
            for block in blocks:
                output.write(block)
        assert 2 <= proxy.most_under_way <= objects.PARTS_AT_ONCE
    assert storage.read(SEGMENT).to_pybytes() == b"".join(blocks)


def test_a_part_that_fails_leaves_nothing(moto: S3Server, storage: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    with FaultProxy(moto) as proxy:
        proxy.reset(lambda request: Fault.ERROR_500_BEFORE if "partNumber=2&" in request.query else None)
        through = open_storage(storage.url, **moto.options(proxy.endpoint, tries=1))
        with pytest.raises(StorageError, match=SEGMENT):
            put(through, SEGMENT, bytes(16 << 20))
    assert storage.list("") == []
    assert storage.leftovers() == []


@pytest.mark.truth
def test_uploads_that_were_never_finished_are_told_and_discarded(
    storage: S3Storage, moto: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    for other in (f"{prefix}/savepoints/1/{SEGMENT}", f"{prefix}-longer/{SEGMENT}"):
        moto.client.create_multipart_upload(Bucket=BUCKET, Key=other)
    first = storage.open_output(SEGMENT)
    first.write(bytes(11 << 20))
    second = moto.client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/manifests/x")
    found = storage.leftovers()
    assert [item.path for item in found] == ["manifests/x", SEGMENT]
    assert found[1].size_bytes <= 10 << 20
    assert found[0].name == second["UploadId"]
    assert storage.list("") == []
    storage.discard(found)
    storage.discard(found)
    assert storage.leftovers() == []
    with pytest.raises(StorageError, match=SEGMENT):
        first.close()
    assert storage.list("") == []
    answer = moto.client.list_multipart_uploads(Bucket=BUCKET)
    for upload in answer["Uploads"]:
        moto.client.abort_multipart_upload(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])
    assert len([upload for upload in answer["Uploads"] if prefix in upload["Key"]]) == 2

"""A store that begins with the content of another store's checkpoint, and jobs that start from a
savepoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from golden.make_golden import rows_of

import stateformat as sf
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import ErrorKind, InvalidInput
from stateformat.model import CheckpointKind, Stop, StopMode
from stateformat.storage import Storage, check_no_secrets, checkpoint_address, split_id, without_secrets
from stateformat.store import CheckpointStore
from tests import stores
from tests.stateformat.test_golden import GOLDEN


@pytest.fixture
def empty() -> Iterator[CheckpointStore]:
    name = f"empty-{uuid4().hex}"
    yield sf.open(f"memory://{name}")
    MemoryStorage.reset(name)


def bytes_of(storage: Storage) -> dict[str, bytes]:
    return {item.path: storage.read(item.path).to_pybytes() for item in storage.list("")}


# The library --------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_store_begins_with_any_checkpoint_of_another_one_which_is_only_read(
    folder: Path, empty: CheckpointStore
) -> None:
    source = sf.open(str(folder))
    before = bytes_of(source.storage)
    checkpoint = source.open()
    permit = empty.start_from(checkpoint)
    record, old = permit.record, checkpoint.record
    assert (record.checkpoint_id, record.parent, record.job_id) == (old.checkpoint_id + 1, old.ref, old.job_id)
    assert (record.kind, record.stop, record.properties) == (CheckpointKind.CHECKPOINT, None, {})
    assert (record.graph, record.states, record.rescaled_from) == (old.graph, old.states, old.rescaled_from)
    assert rows_of(empty.open()) == rows_of(checkpoint)
    assert sf.validate(empty.storage, level="full").problems == ()
    assert bytes_of(source.storage) == before
    assert empty.collect_garbage(delete=False).objects == ()


def test_what_an_interrupted_beginning_left_is_used_or_collected(tmp_path: Path) -> None:
    source = stores.counts_store(str(tmp_path / "source"), checkpoints=2, keys=20_000)
    whole = sf.open(str(tmp_path / "whole"))
    whole.start_from(source.open())
    copied = [item.path for item in whole.storage.list("segments/")]
    assert copied
    (manifest,) = (item.path for item in whole.storage.list("manifests/"))
    for stands in (copied[:1], copied, [*copied, manifest]):
        broken = sf.open(str(tmp_path / f"broken-{len(stands)}"))
        for path in stands:
            with broken.storage.open_output(path) as output:
                output.write(whole.storage.read(path))
        permit = broken.start_from(source.open())
        assert sorted(broken.open().read("counter", "counts").table().to_pylist(), key=str) == sorted(
            source.open().read("counter", "counts").table().to_pylist(), key=str
        )
        garbage = broken.collect_garbage(delete=True)
        assert [item.path for item in garbage.objects] == [path for path in stands if path == manifest]
        assert sf.validate(broken.storage, level="full").problems == ()
        assert permit.ref.checkpoint_id == 3


def test_of_two_beginnings_of_one_store_one_wins_and_the_other_copies_nothing_over_it(empty: CheckpointStore) -> None:
    first, second = (stores.counts_store(f"memory://source-{uuid4().hex}") for _ in range(2))
    won = empty.start_from(first.open())
    with pytest.raises(InvalidInput, match="is not empty: it holds checkpoint 2") as caught:
        empty.start_from(second.open())
    assert caught.value.kind is ErrorKind.STORE_NOT_EMPTY
    assert empty.open().record.ref == won.ref


def test_a_stop_is_left_behind(empty: CheckpointStore) -> None:
    source = sf.open(f"memory://source-{uuid4().hex}")
    stores.counts_job().publish(source, None, stop=Stop(StopMode.NO_DRAIN, "f" * 32))
    savepoint = sf.open(f"memory://savepoint-{uuid4().hex}")
    source.copy(source.open(), savepoint)
    assert savepoint.open().record.stop is not None
    assert empty.start_from(savepoint.open()).record.stop is None


# Addresses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://KEY:SECRET@bucket/x", "s3://***@bucket/x"),
        ("s3://KEY:SEC/RET@bucket/x", "s3://***@bucket/x"),
        ("s3://KEY:SEC/RE/T@bucket", "s3://***@bucket"),
        ("s3://KEY:SECRET", "s3://***@"),
        ("gs://SECRET@bucket", "gs://***@bucket"),
        ("az://place/x?sig=SECRET", "az://place/x?***"),
        ("az://place/x#SECRET", "az://place/x?***"),
        ("https://u:SECRET@host:80/x?y=SECRET", "https://***@host:80/x?***"),
        ("s3://bucket/x@y", None),
        ("s3://bucket", None),
        ("http://[::1]:80/x", None),
        ("file:///a@b?c#d", None),
        ("memory://a@b", None),
        ("/plain:path/a@b?c", None),
        ("relative", None),
    ],
)
def test_a_url_is_shown_without_what_may_be_a_secret_and_refused_where_it_would_be_kept(
    url: str, shown: str | None
) -> None:
    assert without_secrets(url) == (shown or url)
    if shown is None:
        check_no_secrets(url, "the URL")
        return
    with pytest.raises(InvalidInput, match="the URL is more than an address") as caught:
        check_no_secrets(url, "the URL")
    assert "SEC" not in str(caught.value)
    assert "SEC" not in str(caught.value.details)


@pytest.mark.parametrize(
    ("address", "parts"),
    [("s", ("s", None)), ("s@7", ("s", 7)), ("s@7/", ("s@7/", None)), ("a@b", ("a@b", None)), ("a@b@3", ("a@b", 3))],
)
def test_an_address_ends_in_an_id_or_names_the_newest(address: str, parts: tuple[str, int | None]) -> None:
    assert checkpoint_address(address) == parts
    assert split_id(address)[0] == parts[0]


@pytest.mark.parametrize("address", ["", " ", "@3", "s@0", f"s@{2**53}", "s@" + "9" * 5000])
def test_an_address_that_names_nothing_is_refused(address: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        checkpoint_address(address)
    assert len(str(caught.value)) < 200

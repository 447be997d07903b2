"""Addresses as people, Flink and Spark write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stateformat.backends.connectors import FileSink
from stateformat.errors import ErrorKind, InvalidInput
from stateformat.storage import (
    absolute,
    is_local,
    lies_in,
    local_path,
    named_address,
    named_below,
    open_storage,
    resolved,
)
from tests.ckpt.ckpt_runs import document, failure
from tests.worlds.stores import counts_store


@pytest.mark.parametrize("form", ["file:{}", "file://{}", "file://localhost{}", "FILE:{}", "File://{}", "{}"])
def test_a_local_path_is_written_with_any_number_of_slashes(form: str, tmp_path: Path) -> None:
    place = tmp_path / "a store 100%"
    counts_store(str(place))
    url = form.format(str(place).replace("%", "%25").replace(" ", "%20") if form != "{}" else place)
    assert document("inspect", url)["checkpoint_id"] == 1
    assert is_local(url)
    assert absolute(url) == url
    assert lies_in(url, str(tmp_path))
    assert not lies_in(str(tmp_path), url)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("dbfs:/q/x", "/dbfs/q/x"),
        ("dbfs:///q", "/dbfs/q"),
        ("DBFS:/Volumes/main/q", "/Volumes/main/q"),
        ("/Volumes/main/q", "/Volumes/main/q"),
    ],
)
def test_a_path_of_databricks_is_where_the_cluster_has_mounted_it(
    url: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "isdir", lambda place: place in ("/dbfs", "/Volumes"))
    assert resolved(url) == path
    assert open_storage(url).url == f"file://{path}"


@pytest.mark.parametrize("url", ["dbfs:/q/x", "dbfs:///q", "dbfs:/Volumes/main/q", "/Volumes/main/q"])
def test_elsewhere_a_sentence_says_how_to_reach_a_path_of_databricks(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "isdir", lambda _: False)
    assert "copy the folder" in failure("inspect", url, status=2)["message"]


@pytest.mark.parametrize("url", ["C:\\data\\q", "d:/data/q", "file:///C:/data/q", "file:/c:/q", "\\\\server\\share"])
def test_a_path_of_windows_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="Windows") as caught:
        open_storage(url)
    assert caught.value.kind is ErrorKind.INVALID_URL


@pytest.mark.parametrize("url", ["a:b", "a/b::c", "./zip::x", "/data/a::b", "/data/a://b"])
def test_a_path_with_colons_is_a_path(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_local(url)
    assert open_storage(url).url.startswith("file:///")


@pytest.mark.parametrize("form", ["local://{}", "simplecache::file://{}", "zip://inside::{}", "file:{}"])
def test_a_place_is_known_by_every_name_that_it_has(form: str, tmp_path: Path) -> None:
    assert lies_in(form.format(tmp_path / "query" / "copy"), str(tmp_path / "query"))
    assert not lies_in(form.format(tmp_path / "other"), str(tmp_path / "query"))


@pytest.mark.parametrize(
    ("name", "folder", "inside"),
    [
        ("file:/data/a b%20c/x", "file:///data/a%20b%2520c", "x"),
        ("file:///data/q/x", "file:///data/q", "x"),
        ("/data/q/x/y", "file:///data/q", "x/y"),
        ("s3a://bucket/q/x", "s3://bucket/q", "x"),
        ("s3n://bucket/q/x", "s3://bucket", "q/x"),
        ("s3p://bucket/a::b/x", "s3://bucket/a::b", "x"),
        ("gcs://bucket/q/x", "gs://bucket/q", "x"),
        ("wasbs://c@ada.blob.core.windows.net/q/x", "abfss://c@ada.dfs.core.windows.net/q", "x"),
        ("abfs://c@ada.dfs.core.windows.net/q/x", "abfss://c@ada.dfs.core.windows.net/q", "x"),
        ("HDFS://node:8020//q/x", "hdfs://node:8020/q", "x"),
        ("hdfs:/q/x", "hdfs:///q", "x"),
        ("s3://other/q/x", "s3://bucket/q", None),
        ("s3://bucket/q", "s3://bucket/q", None),
        ("s3://bucket/q/../x", "s3://bucket/q", None),
        ("abfss://c@eve.dfs.core.windows.net/q/x", "abfss://c@ada.dfs.core.windows.net/q", None),
        ("file:/C:/q/x", "file:///data", None),
    ],
)
def test_a_name_in_a_checkpoint_is_compared_with_its_folder_however_both_are_written(
    name: str, folder: str, inside: str | None
) -> None:
    assert named_below(name, folder) == inside


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("file:/a b/x%20", "/a b/x%20"),
        ("s3a://bucket/q/x", "s3://bucket/q/x"),
        ("wasb://c@ada.blob.core.windows.net/q", "abfss://c@ada.dfs.core.windows.net/q"),
        ("hdfs:/q/x", "hdfs:///q/x"),
        ("dbfs:/q/x", "/dbfs/q/x"),
    ],
)
def test_what_a_checkpoint_names_elsewhere_has_an_address(
    name: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "isdir", lambda place: place == "/dbfs")
    assert named_address(name) == address


def test_a_path_that_spark_has_encoded_is_a_path_of_this_machine_or_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "isdir", lambda place: place == "/dbfs")
    assert local_path("file:///in/a%20b.csv") == "/in/a b.csv"
    assert local_path("dbfs:/in/a.csv") == "/dbfs/in/a.csv"
    for url in ("s3a://bucket/a.csv", "simplecache::file:///in/a", "zip://a::/in/b.zip", "file://host/in/a"):
        assert local_path(url) is None
    assert local_path("/in/a://b") == "/in/a:/b"


def test_a_store_is_one_place_under_each_scheme_of_its_service() -> None:
    assert lies_in("s3a://bucket/q/copy", "s3://bucket/q")
    assert lies_in("wasbs://c@ada.blob.core.windows.net/q", "abfss://c@ada.dfs.core.windows.net")
    assert not lies_in("s3a://bucket/q", "gs://bucket/q")


def test_a_directory_whose_name_begins_like_a_chain_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    counts_store(str(tmp_path / "a::b"))
    assert document("inspect", "a::b")["checkpoint_id"] == 1
    assert absolute("a::b") == str(tmp_path / "a::b")
    assert "no storage for a:" in failure("inspect", "a::c", status=2)["message"]


def test_an_address_that_has_lost_a_slash_is_refused_and_no_folder_of_that_name_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "one slash fewer" in failure("inspect", "s3a:/bucket/q", status=2)["message"]
    with pytest.raises(InvalidInput, match="one slash fewer"):
        FileSink("gs:/bucket/q")
    assert [*tmp_path.iterdir()] == []


def test_a_file_sink_takes_the_address_of_a_folder_as_every_command_does(tmp_path: Path) -> None:
    assert FileSink(f"file:{tmp_path}/a%20b").places == (str(tmp_path / "a b"),)


def test_a_container_is_written_as_azure_writes_it() -> None:
    with pytest.raises(InvalidInput, match=r"abfss://CONTAINER@ACCOUNT.*3 to 63 characters"):
        open_storage("abfss://c@account1.dfs.core.windows.net/q")

"""Addresses as people, Flink and Spark write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.storage import absolute, is_local, lies_in, open_storage, resolved
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

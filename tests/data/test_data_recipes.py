"""The recipes of docs/data.md run as they stand and print what the page shows, on disk and on S3.

Those that need Spark run in tests/spark. ``--update`` puts what they print into the page.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.servers.server import BUCKET, S3Server
from tests.worlds import recipes as data_recipes
from tests.worlds.data import data_store

FOREIGN = Path(__file__).resolve().parents[1] / "foreign" / "fixtures"
NOT_ON_S3 = ("Never read the segments", "A Flink savepoint, a Spark query")
"""The sections that do not open the store by its URL."""
SLOW_ON_S3 = ("Files", "Iceberg", "Delta", "Correct the state of a job")
"""Sections of many processes; tests/exporting and tests/ckpt try the same commands on S3."""
HEADINGS = data_recipes.headings(spark=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store, made once."""
    folder = tmp_path_factory.mktemp("made") / "shop"
    data_store(str(folder), durable=False)
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with state of Flink and of Spark."""
    shutil.copytree(FOREIGN / "flink-2.3.0" / "core-hashmap-canonical" / "savepoint", tmp_path / "savepoint")
    shutil.copytree(FOREIGN / "spark-4.3.0" / "totals-with-crc" / "checkpoint", tmp_path / "query")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_recipe_runs_as_it_stands_and_prints_what_is_shown(
    heading: str, made: Path, folder: Path, pytestconfig: pytest.Config
) -> None:
    shutil.copytree(made, folder / "shop")
    data_recipes.PAGE.check(list(data_recipes.run(heading)), update=pytestconfig.getoption("--update"))


@pytest.fixture(scope="module")
def made_on_s3(moto: S3Server) -> str:
    """The store in a bucket, made once: its prefix."""
    data_store(f"s3://{BUCKET}/recipes/made", **moto.options())
    return "recipes/made/"


@pytest.fixture
def on_s3(made_on_s3: str, moto: S3Server, tmp_path: Path) -> str:
    """A copy of it."""
    copy = f"recipes/{tmp_path.name}"
    for found in moto.client.list_objects_v2(Bucket=BUCKET, Prefix=made_on_s3)["Contents"]:
        source = {"Bucket": BUCKET, "Key": found["Key"]}
        moto.client.copy_object(Bucket=BUCKET, Key=f"{copy}/{found['Key'].removeprefix(made_on_s3)}", CopySource=source)
    return f"s3://{BUCKET}/{copy}"


@pytest.mark.s3
@pytest.mark.parametrize(
    "heading",
    [
        pytest.param(heading, marks=[pytest.mark.truth] if heading in SLOW_ON_S3 else [])
        for heading in HEADINGS
        if heading not in NOT_ON_S3
    ],
)
def test_the_same_recipe_prints_the_same_of_a_store_on_s3(
    heading: str, on_s3: str, moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {
        "AWS_ENDPOINT_URL": moto.endpoint,
        "AWS_ACCESS_KEY_ID": moto.key,
        "AWS_SECRET_ACCESS_KEY": moto.secret,
        "AWS_REGION": moto.region,
        "AWS_DEFAULT_REGION": moto.region,
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    data_recipes.PAGE.check(list(data_recipes.run(heading, url=on_s3, environment=environment)), update=False)

"""Fixtures that several files of tests share."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers.fixtures import (  # noqa: F401
    azurite,
    fake,
    fake_server,
    gcs,
    models_of_services_are_read_once,
    moto,
    rgw,
)
from tests.tally import Tally

TALLY = pytest.StashKey[Tally]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="write the golden pages of ckpt anew")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TALLY] = Tally()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that may take long come first, so that none begins when the others have ended; and then
    the files that need Spark, so that one worker of ``pytest -n`` has most of them.
    """
    on_spark = {item.path for item in items if {"spark", "stage"} & {*getattr(item, "fixturenames", ())}}

    def turn(item: pytest.Item) -> tuple[float, bool]:
        limit = max((mark.args[0] for mark in item.iter_markers("timeout")), default=0)
        return -limit, item.path not in on_spark

    items.sort(key=turn)


def pytest_sessionfinish(session: pytest.Session) -> None:
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["tally"] = session.config.stash[TALLY].lines


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add what a worker of ``pytest -n`` has tried to what this process prints."""
    for line in getattr(node, "workeroutput", {}).get("tally", ()):
        node.config.stash[TALLY].add(**line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    table = config.stash[TALLY].table()
    if table:
        terminalreporter.section("faults tried")
        for line in table:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    """Where a test counts the faults that it tried; printed at the end of the run."""
    return pytestconfig.stash[TALLY]


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """One local Spark for the whole run: two cores, no UI, UTC, and Python workers of this very
    interpreter.
    """
    from pyspark.sql import SparkSession

    before = os.environ.get("PYSPARK_PYTHON")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .appName("tests")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", "-Djava.net.preferIPv4Stack=true")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.ansi.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.python.unix.domain.socket.enabled", "true")
        # Seconds for a Python worker to start; machines may be busy.
        .config("spark.python.authenticate.socketTimeout", "60")
        .config("spark.executorEnv.PYTHONSAFEPATH", "1")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        # The gateway's process ends with the session, or it would outlive the tests; its pipe must
        # be closed by hand.
        gateway = session.sparkContext._gateway
        session.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(timeout=30)
        if before is None:
            del os.environ["PYSPARK_PYTHON"]
        else:
            os.environ["PYSPARK_PYTHON"] = before


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Whoever runs the tests in the background may have had interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

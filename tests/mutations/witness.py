"""Run tests as pytest does, and print how each of them failed.

A test has noticed if an assertion failed, or an error of our tree was raised. A program that cannot
be imported or that uses a name that does not exist is no mistake that needs a test.
"""

from __future__ import annotations

import sys

import pytest

from stateformat.errors import CheckpointError


class Witness:
    """A plugin that keeps, for each failing test, how it failed: the first parameter set counts."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]):
        report = yield
        if report.failed and call.excinfo is not None:
            self.failed.setdefault(item.nodeid.partition("[")[0], how(call.excinfo.value))
        return report


def how(error: BaseException) -> str:
    if isinstance(error, AssertionError | pytest.fail.Exception):
        return "assertion"
    if isinstance(error, CheckpointError):
        return "declared"
    return f"{type(error).__name__}: {error}".replace("\n", " ")


if __name__ == "__main__":
    witness = Witness()
    status = pytest.main(["-q", "--tb=short", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[witness])
    for test, told in witness.failed.items():
        print("witness", test, told, sep="\t")
    sys.exit(status)

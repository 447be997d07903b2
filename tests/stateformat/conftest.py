"""Fixtures of the tests of the format's library."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worlds.stepping import World


@pytest.fixture
def world() -> Iterator[World]:
    """A store, its sink and stepped drivers, which end with the test."""
    with World() as made:
        yield made

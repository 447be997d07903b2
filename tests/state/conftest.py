"""Fixtures of tests of running state."""

from tests.state.state_world import impatient, walked, weakened  # noqa: F401

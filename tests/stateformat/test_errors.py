"""Errors as people and Spark's workers get them."""

from __future__ import annotations

import pickle

from stateformat.errors import DamagedCheckpoint, ErrorKind


def test_a_long_message_keeps_its_place_and_its_advice() -> None:
    names = ["default"] * 10_000
    error = DamagedCheckpoint(
        f"state/0/_metadata/metadata: its stores are named {names}; read another checkpoint",
        kind=ErrorKind.DAMAGED_MANIFEST,
    )
    assert len(str(error)) < 10_000
    assert str(error).startswith("state/0/_metadata/metadata: its stores are named ['default'")
    assert str(error).endswith("; read another checkpoint")
    assert "characters…]" in str(error)


def test_an_error_that_crosses_a_process_keeps_message_kind_and_details() -> None:
    error = DamagedCheckpoint("x" * 50_000, kind=ErrorKind.DAMAGED_SEGMENT, path="segments/a")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.kind, again.details) == (str(error), error.kind, error.details)

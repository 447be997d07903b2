"""Of several writes of a key the last one counts, whatever hashes of keys do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from stateformat.backends.foreign.byte_strings import ByteStrings
from stateformat.backends.foreign.spark import hdfs_store
from stateformat.backends.foreign.spark.chains import Chain

Write = tuple[bytes, int | None]


def chain(writes: list[Write]) -> Chain:
    keys = [key for key, _ in writes]
    lengths = np.array([len(key) for key in keys], np.int64)
    data = np.frombuffer(b"".join(keys) + bytes(8), np.uint8)
    sizes = np.array([-1 if value is None else value for _, value in writes], np.int64)
    starts = np.cumsum(lengths) - lengths
    return Chain(ByteStrings(data, starts, lengths), ByteStrings(data, np.arange(len(keys)), sizes))


def check(writes: list[Write]) -> None:
    alive: dict[bytes, tuple[int, int]] = {}
    for index, (key, value) in enumerate(writes):
        alive.pop(key, None)
        if value is not None:
            alive[key] = (index, value)
    found = hdfs_store._last_writes(chain(writes))
    got = {
        found.keys.data[start : start + size].tobytes(): (index, value)
        for start, size, index, value in zip(
            found.keys.start.tolist(),
            found.keys.length.tolist(),
            found.values.start.tolist(),
            found.values.length.tolist(),
            strict=True,
        )
    }
    assert got == alive
    assert len(found.keys) == len(alive)


words = st.sampled_from([bytes(8), b"\x01" + bytes(7), bytes(7) + b"\x01", b"abcdefgh"])
rows = st.lists(words, max_size=4).map(b"".join)
keys = st.one_of(rows, st.binary(max_size=20), st.sampled_from([b"", b"a", b"b", bytes(150), bytes(149) + b"x"]))


@given(st.lists(st.tuples(keys, st.one_of(st.none(), st.integers(0, 9))), max_size=60))
@settings(max_examples=200, deadline=None)
def test_the_last_write_of_a_key_wins_and_a_deletion_takes_it_away(writes: list[Write]) -> None:
    check(writes)


@given(st.lists(st.tuples(keys, st.one_of(st.none(), st.integers(0, 9))), max_size=60))
@settings(max_examples=50, deadline=None)
def test_keys_that_share_a_hash_stay_apart(writes: list[Write]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hdfs_store, "_PRIMES", np.zeros(3, np.uint64))
        check(writes)


def test_long_keys_that_differ_in_their_middle_alone_stay_apart() -> None:
    check([(bytes(400) + bytes([number]) + bytes(399), number) for number in (1, 2, 1, 3, 2)])

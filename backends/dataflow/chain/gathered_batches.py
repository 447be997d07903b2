"""Batches that wait to be processed as one."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa


class GatheredBatches:
    """Batches of one input, up to ``limit_bytes``; with 0 each is passed on as it comes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._input = 0

    def add(self, batch: pa.RecordBatch, input: int) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Take a batch; yield what to process now, with its input, in order."""
        if not self._limit_bytes:
            yield batch, input
            return
        size_bytes = batch.nbytes
        if self._held and (input != self._input or self._held_bytes + size_bytes > self._limit_bytes):
            yield from self.flush()
        self._held.append(batch)
        self._held_bytes += size_bytes
        self._input = input

    def flush(self) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield what is held as one batch, if anything is."""
        held, self._held, self._held_bytes = self._held, [], 0
        if held:
            yield held[0] if len(held) == 1 else pa.concat_batches(held), self._input

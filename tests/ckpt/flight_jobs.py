"""Programs that may go on from the golden store of flights, or not."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from stateformat.backends.connectors import CollectSink, RateSource
from stateformat.backends.dataflow import Dataflow, Operator, ValueState


class Delays(Operator):
    """Counts flights per plane."""

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return inputs[0]

    def states(self, *inputs: pa.Schema) -> list[ValueState]:
        columns = {"flights": pa.int64(), "minutes": pa.float32(), "late": pa.int64()}
        return [ValueState("sums", {"tailnum": pa.string()}, columns, renames={"n": "flights"}, defaults={"late": "0"})]

    def process(self, batch: pa.RecordBatch, input: int) -> Iterator[pa.RecordBatch]:
        yield batch


def changed() -> Dataflow:
    """One state of the flights job, with other columns."""
    flow = Dataflow("flights-job", name="Flights", parallelism=6)
    flights = flow.source(RateSource(), uid="flights", name="All flights")
    tailed = flights.map(lambda batch: batch, {"tailnum": pa.string()}, uid="tails")
    delays = tailed.key_by("tailnum").apply(Delays(), uid="delays", name="Delays per plane", parallelism=4)
    delays.apply(CollectSink(), uid="sink")
    return flow

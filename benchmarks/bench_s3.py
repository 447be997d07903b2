"""Restoring from S3 against the fewest requests: obstore's reads of the same objects.

On Ceph RGW, a real server on this machine, so a request costs the processor and next to no waiting;
rows that say so have a proxy in between that keeps every request for 10 ms. Processor times are
those of this process. Without the server there are no rows.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

import stateformat as sf
from benchmarks.measuring import Row, side_by_side
from benchmarks.scale_stores import publish_keyed
from stateformat.storage import open_storage

BUCKET = "bench"
DELAY_SECONDS = 0.01
THREADS = 16
MANY = (500, 500 * 2_500)
LARGE = (4, 4 * 2_000_000)

_PROXY = """
import asyncio, sys
port, target, delay = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
async def pipe(reader, writer, delay):
    try:
        while data := await reader.read(1 << 20):
            await asyncio.sleep(delay)
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
async def serve(reader, writer):
    there = await asyncio.open_connection("127.0.0.1", target)
    await asyncio.gather(pipe(reader, there[1], delay), pipe(there[0], writer, 0))
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", port)
    print("ready", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


class Stored(NamedTuple):
    """A published checkpoint on the server, and how many rows it has."""

    url: str
    rows: int


def write(options: dict[str, Any], url: str, parallelism: int, rows: int) -> Stored:
    rng = np.random.default_rng(0)
    table = pa.table({"key": rng.permutation(rows), "sum": rng.integers(0, 1 << 40, rows)})
    publish_keyed(sf.open(url, **options), table, parallelism, 1024)
    return Stored(url, rows)


def restoring(options: dict[str, Any], stored: Stored, parallelism: int | None = None) -> Callable[[], None]:
    """Reads all rows: as they were written, or as the subtasks of another parallelism get them."""
    checkpoint = sf.open(stored.url, **options).open()
    storage = open_storage(stored.url, **options)
    if parallelism is None:
        tasks = [checkpoint.read("sums", "sum")]
    else:
        plan = checkpoint.plan_restore(checkpoint.graph.at(parallelism))
        tasks = [checkpoint.restore(plan, "sums", subtask)["sum"] for subtask in range(parallelism)]

    def restore() -> None:
        count = sum(len(batch) for task in tasks for batch in replace(task, storage=storage).batches())
        assert count == stored.rows

    return restore


def fetching(options: dict[str, Any], stored: Stored) -> Callable[[], None]:
    """Reads the same segments with obstore alone, in as many threads as the storage."""
    import obstore.store

    store = obstore.store.S3Store(
        BUCKET,
        config={
            "endpoint": options["endpoint_url"],
            "access_key_id": options["key"],
            "secret_access_key": options["secret"],
            "region": options["client_kwargs"]["region_name"],
        },
        client_options={"allow_http": True},
    )
    prefix = stored.url.removeprefix(f"s3://{BUCKET}/")
    paths = sf.open(stored.url, **options).open().handles["path"].to_pylist()
    keys = [f"{prefix}/{path}" for path in paths]

    def fetch() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            assert all(len(found) for found in pool.map(lambda key: store.get(key).bytes(), keys))

    return fetch


def processor_seconds(action: Callable[[], None], rounds: int = 5) -> float:
    found = []
    for _ in range(rounds):
        start = time.process_time()
        action()
        found.append(time.process_time() - start)
    return statistics.median(found)


def rows_of(
    what: str, ours: Callable[[], None], against: Callable[[], None], label: str, budget: str = "–"
) -> list[Row]:
    mine, theirs = (side.seconds for side in side_by_side(ours, against))
    rows = [Row(what, f"{mine * 1e3:.0f} ms", f"{label}: {theirs * 1e3:.0f} ms", f"{mine / theirs:.2f} ×", "–")]
    mine, theirs = processor_seconds(ours), processor_seconds(against)
    texts = f"{mine * 1e3:.0f} ms", f"{label}: {theirs * 1e3:.0f} ms", f"{mine / theirs:.2f} ×", budget
    return [*rows, Row(f"{what}: processor time", *texts)]


@contextlib.contextmanager
def delayed(endpoint: str) -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    target = endpoint.rpartition(":")[2]
    command = [sys.executable, "-c", _PROXY, str(port), target, str(DELAY_SECONDS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
        try:
            assert proxy.stdout is not None
            assert proxy.stdout.readline() == "ready\n"
            yield f"http://127.0.0.1:{port}"
        finally:
            proxy.kill()


def measure() -> list[Row]:
    from tests.servers.rgw import available, running_rgw

    if why := available():
        print(f"S3 is left out: {why}")
        return []
    with running_rgw() as server:
        server.client.create_bucket(Bucket=BUCKET)
        options = server.options()
        many, large = write(options, f"s3://{BUCKET}/many", *MANY), write(options, f"s3://{BUCKET}/large", *LARGE)
        raw, plain = fetching(options, many), "obstore, bytes alone"
        whole = restoring(options, large)
        found = [
            *rows_of("restore 500 segments of 20 KB from S3", restoring(options, many), raw, plain),
            *rows_of("restore 4 segments of 16 MB from S3", whole, fetching(options, large), plain),
            *rows_of("restore them at 4 → 6", restoring(options, large, 6), whole, "4 → 4"),
        ]
        with delayed(server.endpoint) as endpoint:
            slow = {**options, "endpoint_url": endpoint}
            waits = MANY[0] * DELAY_SECONDS
            restore = restoring(slow, many)
            mine, theirs = (side.seconds for side in side_by_side(restore, fetching(slow, many), rounds=3))
            what = "restore 500 segments from S3, 10 ms more for each request"
            label = f"{plain}, {THREADS} threads: {theirs * 1e3:.0f} ms; 500 waits: {waits * 1e3:.0f} ms"
            found.append(Row(what, f"{mine * 1e3:.0f} ms", label, f"{mine / theirs:.2f} ×", "–"))
    return found

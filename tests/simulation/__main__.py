"""``python -m tests.simulation --seeds N --first F``: run seeds, print those that fail, and what
all of them did.

Each core has a process that takes one seed after the other; what is printed is in the order of the
seeds, and does not depend on how many there are.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.mutations import MUTATIONS
from tests.simulation.run import Failed, Tally, simulate


def main() -> int:
    """Exit status 1 where a seed has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--stop-after", type=int, default=20, help="failures after which to stop")
    parser.add_argument("--story", action="store_true", help="print what happened in each seed")
    parser.add_argument("--mutations", action="store_true", help="which seeds find what is broken on purpose")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    seeds = range(options.first, options.first + options.seeds)
    if options.mutations:
        for name, mutation in MUTATIONS.items():
            with mutation():
                found = list(itertools.islice((seed for seed in seeds if _fails(seed)), 3))
            print(f"{name}: {found or 'not found'}", flush=True)
        return 0
    return _run(seeds, options)


def _fails(seed: int) -> bool:
    try:
        simulate(seed)
    except Failed:
        return True
    return False


def _on_all_cores(seeds: range) -> Iterator[tuple[int, Tally | Failed]]:
    """What each seed came to, in their order. Seeds that nobody waits for any more are not run."""
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawned, logging.disable, (logging.CRITICAL,)) as pool:
        under_way = [(seed, pool.submit(simulate, seed)) for seed in seeds]
        try:
            for seed, future in under_way:
                try:
                    yield seed, future.result()
                except Failed as error:
                    yield seed, error
        finally:
            pool.shutdown(cancel_futures=True)


def _run(seeds: range, options: argparse.Namespace) -> int:
    counts: Counter[str] = Counter()
    failed: list[int] = []
    begun = time.perf_counter()
    for seed, tally in _on_all_cores(seeds):
        if isinstance(tally, Failed):
            failed.append(seed)
            print(f"{tally}\n", flush=True)
            if len(failed) >= options.stop_after:
                break
            continue
        counts.update(tally.counts)
        counts.update(seeds=1, attempts=tally.attempts, steps=tally.steps, checkpoints=tally.checkpoints)
        if options.story:
            print(f"seed {seed}", *tally.story, sep="\n  ")
    print(
        f"{time.perf_counter() - begun:.1f} s: "
        + ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    )
    print(f"failing seeds: {failed or 'none'}; each replays with `make simulate FIRST=<seed> SEEDS=1`")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Fuzz one target in this process: ``python -m tests.fuzz.run TARGET SECONDS SEED [PLACE]``.

With atheris, guided by coverage; libFuzzer leaves with another status than 0 for a finding, a
crash, a hang or more than 2.5 GB of memory. Without it with bytes from a seeded generator. Prints
``Done N runs`` when the time is up. Findings are written to files whose names begin with PLACE. A
run of more than ``HANG_CPU_SECONDS`` of processor time, which a loaded machine does not stretch,
ends the process, with the stack in its output and the bytes in ``PLACE`` + ``current``. So does a
process that waits for ever.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

HANG_CPU_SECONDS = 60
HANG_SECONDS = 300
LENGTH_MAX = 64


def guarded(test: Callable[[bytes], None], current: Path, seconds: int) -> Callable[[bytes], None]:
    """The test under a limit of processor time; after ``seconds`` it ends the process with success.
    ``current``: a file of the length and the bytes of what runs.
    """
    current.write_bytes(bytes(1 + LENGTH_MAX))
    with current.open("r+b") as file:
        running = mmap.mmap(file.fileno(), 1 + LENGTH_MAX)
    # With its stack written, the signal does what it does by default: it ends the process, whatever
    # that is in.
    faulthandler.register(signal.SIGPROF, all_threads=True, chain=True)
    faulthandler.dump_traceback_later(seconds + HANG_SECONDS, exit=True)
    done, end = 0, time.monotonic() + seconds

    def limited(data: bytes) -> None:
        nonlocal done
        running[: 1 + len(data)] = bytes([len(data)]) + data
        signal.setitimer(signal.ITIMER_PROF, HANG_CPU_SECONDS)
        try:
            test(data)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        done += 1
        if time.monotonic() > end:
            print(f"Done {done} runs", flush=True)
            # The exit of libFuzzer destroys what Arrow's threads still use, and can wait for ever.
            os._exit(0)

    return limited


def main() -> None:
    name, seconds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    place = sys.argv[4] if len(sys.argv) > 4 else "/tmp/"
    current = Path(f"{place}{name}-current")
    try:
        import atheris
    except ImportError:
        atheris = None
    if atheris is None:
        from tests.fuzz.targets import make

        test = guarded(make(name), current, seconds)
        chosen = random.Random(seed)
        while True:
            test(chosen.randbytes(chosen.randrange(48)))
    with atheris.instrument_imports(include=["stateformat"]):
        from tests.fuzz.targets import make
    test = guarded(make(name), current, seconds)
    limits = [f"-seed={seed}", f"-timeout={HANG_SECONDS}", "-rss_limit_mb=2500"]
    limits += [f"-report_slow_units={HANG_SECONDS}", f"-max_len={LENGTH_MAX}"]
    limits += ["-len_control=0", f"-artifact_prefix={place}"]
    atheris.Setup([sys.argv[0], *limits], test)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

"""Fuzz one target in this process, guided by coverage: ``python -m tests.fuzz.run TARGET SECONDS SEED [PLACE]``; findings are
written to files whose names begin with PLACE.

With atheris, whose libFuzzer prints ``Done N runs`` at the end and leaves with another status than 0 for a finding, a crash, a
hang of more than 5 s or more than 2 GB of memory. Without it (other platforms) with bytes from a seeded generator.
"""

from __future__ import annotations

import random
import sys
import time


def main() -> None:
    name, seconds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    try:
        import atheris
    except ImportError:
        atheris = None
    if atheris is None:
        from tests.fuzz.targets import make

        test = make(name)
        chosen, done, end = random.Random(seed), 0, time.monotonic() + seconds
        while time.monotonic() < end:
            test(chosen.randbytes(chosen.randrange(48)))
            done += 1
        print(f"Done {done} runs without atheris")
        return
    with atheris.instrument_imports(include=["stateformat"]):
        from tests.fuzz.targets import make
    test = make(name)
    place = sys.argv[4] if len(sys.argv) > 4 else "/tmp/"
    limits = [f"-max_total_time={seconds}", f"-seed={seed}", "-timeout=20", "-rss_limit_mb=2500"]
    limits += ["-max_len=64", "-len_control=0", f"-artifact_prefix={place}"]
    atheris.Setup([sys.argv[0], *limits], test)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

"""Try the planted mutations: ``python -m tests.mutations [NAME…]``.

Exit status: 0 all are found; 1 one is not; 2 they cannot be tried.
"""

from __future__ import annotations

import sys
import time

from tests.mutations.planted import planted, try_all


def main(names: list[str]) -> int:
    begun, missed = time.perf_counter(), 0
    try:
        mutations = planted(names)
        width, rooms = (max(map(len, column)) for column in zip(*((m.name, m.room) for m in mutations), strict=True))
        for mutation, reason in try_all(mutations):
            missed += bool(reason)
            print(f"{mutation.name:{width}}  {mutation.room:{rooms}}  {reason or 'found'}", flush=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{len(mutations) - missed} of {len(mutations)} found in {time.perf_counter() - begun:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``python -m stateformat`` is ``ckpt``, for where no folder of programs is on the path."""

from __future__ import annotations

import sys

from stateformat.tools.ckpt.__main__ import main

if __name__ == "__main__":
    sys.exit(main("python -m stateformat"))

"""What docs/ takes from the help of ``ckpt``: blocks of docs/cli.md, and the man page docs/ckpt.1.

``python -m stateformat.tools.ckpt.docs`` writes both; tests compare them with what stands there.
"""

from __future__ import annotations

from .cli_page import CLI_PAGE, help_of, missing, refreshed
from .man_page import MAN_PAGE, man_page

__all__ = ["CLI_PAGE", "MAN_PAGE", "help_of", "man_page", "missing", "refreshed"]

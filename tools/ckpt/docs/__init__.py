"""What is made from the product: from the help of ``ckpt`` the blocks of docs/cli.md and the man
page docs/ckpt.1, from its advice the table of docs/foreign.md, and from the tables of docs/json.md
the JSON Schemas in stateformat/schemas.

``python -m stateformat.tools.ckpt.docs`` writes them; tests compare them with what stands there.
"""

from __future__ import annotations

from .cli_page import CLI_PAGE, help_of, missing, refreshed
from .foreign_page import FOREIGN_PAGE, with_tasks
from .json_schemas import SCHEMAS, schemas
from .man_page import MAN_PAGE, man_page

__all__ = [
    "CLI_PAGE",
    "FOREIGN_PAGE",
    "MAN_PAGE",
    "SCHEMAS",
    "help_of",
    "man_page",
    "missing",
    "refreshed",
    "schemas",
    "with_tasks",
]

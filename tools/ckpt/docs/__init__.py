"""What is made from the help of ``ckpt`` and the tables of docs/json.md: blocks of docs/cli.md, the
man page docs/ckpt.1, and the JSON Schemas in stateformat/schemas.

``python -m stateformat.tools.ckpt.docs`` writes them; tests compare them with what stands there.
"""

from __future__ import annotations

from .cli_page import CLI_PAGE, help_of, missing, refreshed
from .json_schemas import SCHEMAS, schemas
from .man_page import MAN_PAGE, man_page

__all__ = ["CLI_PAGE", "MAN_PAGE", "SCHEMAS", "help_of", "man_page", "missing", "refreshed", "schemas"]

"""Refuses a build in which a link of ``stateformat/`` is no folder: the wheel would lack most of
the package, silently.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LinksAreFolders(BuildHookInterface):
    """``backends``, ``redistribution`` and ``tools`` are links in a checkout, folders in an sdist,
    and neither in a ZIP.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling says so
        """Raises ``SystemExit`` with the link that is none and what to do."""
        for wing in ("backends", "redistribution", "tools"):
            path = Path(self.root, "stateformat", wing)
            if not (path / "__init__.py").is_file():
                raise SystemExit(
                    f"stateformat/{wing} is not a folder: it should be a link to ../{wing}. This copy of the "
                    "repository was made without links, as a ZIP or on Windows. Clone it with "
                    "`git clone -c core.symlinks=true`, or build from the sdist."
                )

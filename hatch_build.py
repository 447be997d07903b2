"""What a build does beside copying: it gives README.md links for the page of an index, and refuses
a checkout in which a link of ``stateformat/`` is no folder.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeOfAnIndex(MetadataHookInterface):
    """Relative links of README.md lead to the tag of this version."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets ``readme``."""
        source = metadata["urls"]["Source"]
        tag = f"v{metadata['version']}"

        def absolute(link: re.Match[str]) -> str:
            image, target = link["image"] or "", link["target"]
            page = source.replace("//github.com", "//raw.githubusercontent.com") if image else f"{source}/blob"
            return f"{image}[{link['text']}]({page}/{tag}/{target})"

        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        relative = r"(?P<image>!)?\[(?P<text>[^\]]*)\]\((?!#|[a-z]+:)(?P<target>[^)]+)\)"
        metadata["readme"] = {"content-type": "text/markdown", "text": re.sub(relative, absolute, text)}


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

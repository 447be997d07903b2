"""Pages of the site that are not in docs/: the format, and the reference of every door, from its
docstrings. Guides come first in a search, and each cell of a table knows its column.
"""

from __future__ import annotations

import html
import posixpath
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
DOORS = {
    "stateformat": "stores, checkpoints, job graphs, errors",
    "stateformat.states": "declarations of states",
    "stateformat.requests": "requests to a running job",
    "stateformat.redistribution": "restore plans",
    "stateformat.inspecting": "changes of state, state over several checkpoints, metadata as tables",
    "stateformat.reporting": "what is known of a store, as one document",
    "stateformat.backends.dataflow": "dataflows, operators, sources, sinks, states",
    "stateformat.backends.dataflow.testing": "a harness for operators",
    "stateformat.backends.state": "states as an operator uses them",
    "stateformat.backends.connectors": "sources and sinks",
    "stateformat.backends.local": "the executor in this process",
    "stateformat.backends.spark": "the executor on Spark",
    "stateformat.backends.bootstrap": "rows as the first checkpoint of a job",
    "stateformat.backends.foreign": "checkpoints of other systems, read as if they were ours",
    "stateformat.backends.importing": "checkpoints of other systems as the first one of a store",
    "stateformat.backends.storage": "storages",
    "stateformat.storage": "what a storage must be",
}
"""What users import from, in the order of the reference."""
NAMES = {
    "stateformat.states": (
        "broadcast_state committables_state coordinator_state even_split_state in_flight_state list_state map_state "
        "progress_state timers union_state value_state"
    ),
    "stateformat.backends.importing": "ImportSpec Imported import_checkpoint prove_import",
    "stateformat.reporting": "LEVELS ReportLevel collect_report",
    "stateformat.requests": "JobRequest RequestAnswer RequestOutcome",
}
"""Of a module, or a door that other rooms use too: the names for users."""


ON_THE_SITE = {"stateformat/SPEC.md": "docs/spec.md", "stateformat/__init__.py": "docs/api/index.md"}
"""Files of the repository that have a page here."""
REFERENCE = ("api/", "spec.md", "json.md", "cli.md", "benchmarks.md", "design/", "task-life.md", "metadata-tables.md")
EXPLANATION = ("dataflow.md", "trust.md", "scale.md", "deprecation.md", "redistribution.md")
"""What a search shows below the guides, in this order from below."""


def on_files(files: Any, config: Any) -> Any:
    """Add the format and a page for each door."""
    files.append(File.generated(config, "spec.md", content=(ROOT / "stateformat" / "SPEC.md").read_text()))
    index = ["# Python reference", "", "Every public name, by the package that it is imported from.", ""]
    for door, about in DOORS.items():
        package = import_module(door)
        page = [f"# {door}", "", f"{about[0].upper()}{about[1:]}.", ""]
        names = NAMES[door].split() if door in NAMES else package.__all__
        for name in sorted(names, key=str.lower):
            page += [f"::: {door}.{name}", ""]
        files.append(File.generated(config, f"api/{door}.md", content="\n".join(page)))
        index.append(f"- [`{door}`]({door}.md): {about}")
    files.append(File.generated(config, "api/index.md", content="\n".join(index)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Point links out of docs/ at the format's page, or at the file in the repository."""
    folder = posixpath.dirname(page.file.src_uri)

    def target(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, match[1]))
        path = ON_THE_SITE.get(path, path)
        anchor = match[2] or ""
        if path.startswith("docs/"):
            return f"]({posixpath.relpath(path, posixpath.join('docs', folder))}{anchor})"
        return f"]({config.extra['repository']}/blob/main/{path}{anchor})"

    place = page.file.src_uri
    # The theme counts a title a thousand times.
    boost = 0.0005 if place.startswith(REFERENCE) else 0.5 if place in EXPLANATION else 10
    page.meta["search"] = {"boost": boost}
    return re.sub(r"\]\(((?:\.\./)+[\w./-]+)(#[\w-]*)?\)", target, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Each cell of a table has the name of its column, for narrow windows. Options are not cut at
    their dashes.
    """
    content = re.sub(r"<code>[^<]*</code>", lambda code: re.sub(r"--\w[\w-]*", r"<span>\g<0></span>", code[0]), content)
    return re.sub(r"<table>.*?</table>", _labelled, content, flags=re.DOTALL)


def _labelled(table: re.Match[str]) -> str:
    heads = [re.sub("<[^>]*>", "", head) for head in re.findall(r"<th[^>]*>(.*?)</th>", table[0], re.DOTALL)]
    if len(heads) < 3:  # Two columns explain themselves: a name, and what it is.
        return table[0]

    def row(match: re.Match[str]) -> str:
        cells = iter([*heads[1:], *[""] * match[0].count("<td")])
        first, *rest = match[0].split("<td")
        named = [f'<td data-th="{html.escape(html.unescape(next(cells)))}"{cell}' for cell in rest[1:]]
        return "".join([first, *[f"<td{cell}" for cell in rest[:1]], *named])

    return re.sub(r"<tr>.*?</tr>", row, table[0], flags=re.DOTALL)

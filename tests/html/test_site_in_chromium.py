"""The site of the docs in a real browser: every page, in a window of a desk and of a phone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.html import chromium
from tests.tally import Tally
from tests.test_tree import ROOT

WIDTHS = (1300, 390)
_CUT = """
JSON.stringify([...document.querySelectorAll('.md-content table, .md-content table *, .md-content h1, .md-content p')]
  .filter(node => node.getClientRects().length && !node.closest('pre'))
  .filter(node => { const box = node.getBoundingClientRect();
    const around = (node.closest('.md-content__inner') || document.body).getBoundingClientRect();
    return box.right > around.right + 0.5 || node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).overflowX != 'visible';
  }).slice(0, 3).map(node => node.outerHTML.slice(0, 120)))
"""
"""Parts of tables and texts that reach out of their column."""
_WIDE = "document.documentElement.scrollWidth - innerWidth"
_SEARCH = """
(() => { scrollTo(0, document.body.scrollHeight);
  const form = [...document.querySelectorAll('label[for=__search], .md-search__form')].map(one => one.getBoundingClientRect());
  return form.some(box => box.width > 0 && box.top >= 0 && box.bottom <= innerHeight && box.right <= innerWidth); })()
"""
"""Whether the search can be seen at the end of the page."""
_FOUND = (
    "JSON.stringify([...document.querySelectorAll('.md-search-result__link')].map(one => one.getAttribute('href')))"
)
WANTED = {
    "rename": ("operators", "data", "transform", "foreign", "library", "for-flink-teams"),
    "rollback": ("night", "foreign", "local", "spark", "transform", "library", "for-spark-teams"),
    "kafka": ("spark-sources", "spark", "moving-from-structured-streaming"),
    "hot key": ("night", "foreign", "data"),
}
"""What people look for, and the guides of which one comes first."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    return folder


class _Quiet(SimpleHTTPRequestHandler):
    """Says nothing of what it serves."""

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where a server of this machine has the site: of files, the theme hides its search."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tally: Tally) -> Iterator[chromium.Browser]:
    why = chromium.missing()
    if why:
        tally.skip("pages of the site in a real browser", why)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, chromium.chromium(Path(profile)) as one:
        yield one


@pytest.mark.truth
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_shows_all_of_itself_and_its_search_and_asks_nobody(
    site: Path, address: str, browser: chromium.Browser, width: int, tally: Tally
) -> None:
    pages = sorted(str(page.relative_to(site)) for page in site.rglob("*.html"))
    browser.look(width)
    wrong = []
    for page in pages:
        browser.requests.clear()
        browser.open(address + page.removesuffix("index.html"))
        others = [url for url in browser.requests if not url.startswith((address, "data:", "blob:"))]
        found = (browser.ask(_WIDE), json.loads(browser.ask(_CUT)), browser.ask(_SEARCH), others)
        if found != (0, [], True, []):
            wrong.append((page, *found))
    tally.add("pages of the site in a real browser", tried=len(pages), wrong=len(wrong))
    assert not wrong, "\n".join(map(str, wrong))
    assert len(pages) > 40


@pytest.mark.truth
@pytest.mark.parametrize("looked_for", WANTED)
def test_a_search_finds_a_guide_first(looked_for: str, address: str, browser: chromium.Browser) -> None:
    browser.look(WIDTHS[0])
    browser.open(address + "?q=" + looked_for.replace(" ", "+"))
    found: list[str] = []
    until = time.monotonic() + chromium.SECONDS_MAX
    while not found and time.monotonic() < until:
        found = json.loads(browser.ask(_FOUND))
    assert found, "the search shows nothing"
    first = found[0].removeprefix(address).partition("/")[0]
    assert first in WANTED[looked_for], found[:5]

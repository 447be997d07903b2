"""The page in a real browser: its layout, colors and requests, and whether anything in it runs."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stateformat.pages.report import report_page
from stateformat.reporting import collect_report
from tests.html import chromium
from tests.html.hostile import NAMES, hostile
from tests.tally import Tally
from tests.worlds import stores

WIDTHS = (360, 800, 1400)
_CONTRAST = """
(() => {
  const channels = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = node => {
    const box = node.closest('g') && node.closest('g').parentNode.querySelector(':scope > rect.op');
    if (box) return channels(getComputedStyle(box).fill);
    for (; node; node = node.parentElement) {
      const found = channels(getComputedStyle(node).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const least = [99, ''];
  let count = 0;
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !node.getClientRects().length || node.closest('title')) continue;
    const style = getComputedStyle(node);
    const color = node.closest('svg') ? style.fill : style.color;
    const [a, b] = [light(channels(color)), light(ground(node))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    count += 1;
    if (contrast < least[0]) least.splice(0, 2, contrast, texts.currentNode.data.trim());
  }
  return JSON.stringify([...least, count]);
})()
"""
_OPEN_ALL = "document.querySelectorAll('details').forEach(one => one.open = true)"
_TOO_WIDE = """
JSON.stringify([...document.querySelectorAll('body *')].filter(node =>
  !node.closest('.graph') && !node.closest('thead') && node.getBoundingClientRect().right > innerWidth + 0.5
).slice(0, 5).map(node => node.outerHTML.slice(0, 200)))
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, tally: Tally) -> Iterator[chromium.Browser]:
    """One browser for all pages; skips where there is none."""
    if why := chromium.missing():
        tally.skip("pages in a real browser", why)
        pytest.skip(why)
    with chromium.chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two checkpoints with something of everything, with findings and a fault."""
    store = stores.flights_store(str(tmp_path_factory.mktemp("report") / "store"))
    found = collect_report(store, now_us=store.open().record.created_at_us + 90 * 10**6)
    found = copy.deepcopy(found)
    problem = {"kind": "object_missing", "clause": "SPEC 2.1", "message": "segments/1 is gone", "advice": "mend it"}
    rest = {"path": "segments/1", "operator": "delays", "state": "sums", "subtask": 3}
    found["validation"].update(ok=False, problems=[{**problem, **rest}], warnings=[{**problem, **rest}])
    found["faults"] = [{"checkpoint_id": 3, "kind": "damaged_record", "message": "checkpoint 3 cannot be read"}]
    return found


def write(folder: Path, document: dict[str, Any]) -> Path:
    path = folder / "report.html"
    path.write_text("".join(report_page(document)), encoding="utf-8")
    return path


def grown(report: dict[str, Any]) -> dict[str, Any]:
    """The same job with two hundred operators and checkpoints, and names without a space."""
    document = copy.deepcopy(report)
    one = document["checkpoint"]["operators"][0]
    edge = document["checkpoint"]["edges"][0]
    names = [f"operator_{i}_{'x' * (i % 70)}" for i in range(200)]
    document["checkpoint"]["operators"] = [{**one, "uid": name, "name": ""} for name in names]
    document["checkpoint"]["edges"] = [
        {**edge, "id": name, "from": names[i // 3], "to": name} for i, name in enumerate(names) if i
    ]
    entry = document["history"]["checkpoints"][0]
    document["history"]["checkpoints"] = [{**entry, "checkpoint_id": 200 - i} for i in range(200)]
    document["states"] = [{**document["states"][5], "name": f"state_{'y' * i}"} for i in range(90)]
    return document


@pytest.mark.parametrize("make", [dict, hostile, grown], ids=["plain", "hostile", "large"])
def test_a_page_fits_every_screen_and_asks_for_nothing(
    browser: chromium.Browser, report: dict[str, Any], tmp_path: Path, make: Any
) -> None:
    path = write(tmp_path, make(report))
    browser.requests.clear()
    browser.complaints.clear()
    for width in WIDTHS:
        browser.look(width)
        browser.open(path)
        for opened in (False, True):
            assert browser.ask("innerWidth") == width
            assert browser.ask("document.documentElement.scrollWidth") <= width, (width, browser.ask(_TOO_WIDE))
            assert json.loads(browser.ask(_TOO_WIDE)) == [], (width, opened)
            browser.ask(_OPEN_ALL)
    assert (browser.requests, browser.complaints) == ([], [])


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_can_be_read_on_its_ground(
    browser: chromium.Browser, report: dict[str, Any], tmp_path: Path, *, dark: bool
) -> None:
    browser.look(1400, dark=dark)
    browser.open(write(tmp_path, report))
    browser.ask(_OPEN_ALL)
    least, text, count = json.loads(browser.ask(_CONTRAST))
    assert least >= 4.5, f"{text!r} has a contrast of {least:.2f}"
    assert count > 300
    ground = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(246, 247, 249)") is not dark


def test_no_hostile_name_runs(browser: chromium.Browser, report: dict[str, Any], tmp_path: Path) -> None:
    evil = hostile(report)
    browser.look(1400)
    browser.open(write(tmp_path, evil))
    browser.ask(_OPEN_ALL)
    browser.ask("document.querySelectorAll('*').forEach(node => node.dispatchEvent(new Event('mouseover')))")
    assert browser.ask("document.title") != "taken"
    assert browser.ask("document.scripts.length + document.images.length + frames.length") == 0
    assert browser.ask("document.querySelectorAll('[onload],[onerror],[onmouseover],[style],[href],[src]').length") == 0
    assert NAMES[0] in browser.ask("document.body.textContent")


def test_the_policy_of_the_page_stops_what_a_name_could_have_brought(
    browser: chromium.Browser, report: dict[str, Any], tmp_path: Path
) -> None:
    """Even if escaping failed, nothing would run or be loaded."""
    path = write(tmp_path, report)
    broken = path.read_text().replace("</main>", "<script>document.title='taken'</script><img src='http://x/y'></main>")
    path.write_text(broken)
    browser.open(path)
    assert browser.ask("document.title") != "taken"
    assert any("Content Security Policy" in text for text in browser.complaints)


def test_a_narrow_screen_has_a_narrow_drawing_and_a_table_row_is_a_block(
    browser: chromium.Browser, report: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path, report)
    for width, shown in ((360, ["graph narrow"]), (1400, ["graph wide"])):
        browser.look(width)
        browser.open(path)
        drawn = "[...document.querySelectorAll('.graph')].filter(x => x.getClientRects().length).map(x => x.className)"
        assert browser.ask(drawn) == shown
        browser.ask(_OPEN_ALL)
        assert browser.ask("getComputedStyle(document.querySelector('.stack tr')).display") == (
            "block" if width == 360 else "table-row"
        )


def test_on_paper_states_are_open_and_the_ground_is_white(
    browser: chromium.Browser, report: dict[str, Any], tmp_path: Path
) -> None:
    browser.look(800, dark=True, media="print")
    browser.open(write(tmp_path, report))
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    shut = "[...document.querySelectorAll('.states > details:not([open]) figure')]"
    assert browser.ask(f"{shut}.length") > 0
    assert browser.ask(f"{shut}.every(node => node.getBoundingClientRect().height > 20)") is True
    paper = browser.paper()
    assert paper.startswith(b"%PDF-")
    assert len(paper) > 20_000


def test_it_has_headings_titles_and_words_for_whoever_does_not_see_it(
    browser: chromium.Browser, report: dict[str, Any], tmp_path: Path
) -> None:
    browser.look(1400)
    browser.open(write(tmp_path, report))
    assert browser.ask("document.documentElement.lang") == "en"
    assert browser.ask("document.querySelectorAll('h1').length") == 1
    assert browser.ask("[...document.querySelectorAll('svg[role=img]')].every(x => x.querySelector('title'))") is True
    assert browser.ask("document.querySelectorAll('details table th[scope=col]').length") > 10
    assert browser.picture(height=900)[:4] == b"\x89PNG"

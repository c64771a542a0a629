"""The page is one file without a network, whose every control can be named and reached; in a browser it shows forests."""

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import specbeam as sb
from specbeam.apps.serve.trace import fates
from specbeam.generation import turns_of
from tests.apps.serve.conftest import LONG, SHORT

PAGE = Path(__file__).parents[3] / "src" / "specbeam" / "apps" / "serve" / "page" / "index.html"
VOID = {"meta", "link", "input", "br", "hr", "img"}


class Reader(HTMLParser):
    """Reads a page strictly: each element that is opened is closed, in order."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.ids = []
        self.unnamed = []
        self.links = []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if "id" in given:
            self.ids.append(given["id"])
        self.links += [given[name] for name in ("src", "href", "action") if name in given]
        if tag in ("input", "select", "textarea") and "label" not in self.open and "aria-label" not in given:
            self.unnamed.append(given)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_one_valid_file_that_asks_nobody_but_its_server():
    text = PAGE.read_text(encoding="utf-8")
    assert len(text.encode()) < 80_000
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    assert len(set(reader.ids)) == len(reader.ids)
    assert reader.unnamed == []
    assert reader.links == ["data:,"]
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in text
    assert text.count("NONCE") == 1
    for name in re.findall(r"byId\(\"(\w+)\"\)", text):
        assert name in reader.ids, name
    for media in ("prefers-color-scheme: dark", "prefers-reduced-motion"):
        assert media in text


def brightness(colour):
    """The relative luminance of a colour like #1f2328, by the WCAG."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_all_words_stand_out_from_their_ground_in_light_and_in_dark():
    """A contrast of 4.5 at least, of the words in drawings, too, which tools for accessibility cannot tell."""
    text = PAGE.read_text(encoding="utf-8")
    for start in (text.index("--ground"), text.index("--ground", text.index("prefers-color-scheme: dark"))):
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", text[start : text.index("}", start)]))
        for word in ("text", "faint", "root", "accepted", "rejected", "resampled", "unused"):
            for ground in ("ground", "panel"):
                light, dark = sorted((brightness(colours[name]) for name in (word, ground)), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (word, ground, colours)


METHODS = [sb.dsbd(3, 4, 2), sb.beam_search(3), sb.speculative_beam_search(3, depth=2), sb.rsd_s(2, 2), sb.sampling()]


@pytest.mark.parametrize("method", METHODS, ids=lambda one: one.name)
def test_each_node_of_a_turn_has_the_fate_that_the_verdict_gave_it(pair, method):
    count = 0
    for turn in turns_of(pair, LONG[:9], method, seed=3, **SHORT):
        leaves = fates(turn, str)
        nodes = leaves[: turn.forest.size]
        assert [leaf.parent for leaf in nodes] == turn.forest.parents.tolist()
        taken = {int(node) for step in turn.verdict.steps for node in step.beams.nodes if node >= 0}
        fresh = sum(int((step.beams.nodes < 0).sum()) for step in turn.verdict.steps)
        assert {place for place, leaf in enumerate(nodes) if leaf.fate == "accepted"} == taken
        assert [leaf.fate for leaf in leaves[turn.forest.size :]] == ["resampled"] * fresh
        reached = np.concatenate([step.parents for step in turn.verdict.steps])
        for leaf in nodes:
            assert (leaf.fate == "root") == (leaf.parent < 0)
            assert leaf.fate != "rejected" or leaf.parent in reached
            assert leaf.fate != "unused" or leaf.parent not in reached
        count += 1
    assert count > 0


def axe_source():
    """The source of axe-core, if the package that carries it is installed."""
    try:
        import axe_playwright_python
    except ImportError:
        return None
    return (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.slow
def test_in_a_browser_the_page_shows_the_text_of_the_server_and_each_turn(worded, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no Chromium")
    from tests.apps.serve.test_server import CONFIG, PROMPT, running

    axe = axe_source()
    expected = [sb.generate(worded, PROMPT, sb.dsbd(4), seed=7, max_new_tokens=24, top_k=10)[0].text]
    sizes = {"wide": (1280, 900, "light"), "narrow": (360, 800, "dark")}
    with running(CONFIG, worded) as (url, _), playwright.sync_playwright() as play:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = play.chromium.launch(executable_path=chromium, args=arguments)
        for name, (width, height, scheme) in sizes.items():
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme, bypass_csp=axe is not None
            )
            complaints = []
            page.on("console", lambda message, kept=complaints: kept.append(message.text))
            page.on("pageerror", lambda error, kept=complaints: kept.append(str(error)))
            page.goto(url)
            page.get_by_test_id("prompt").fill(PROMPT)
            page.get_by_test_id("tokens").fill("24")
            page.get_by_test_id("method").select_option("dsbd")
            page.get_by_test_id("more").locator("summary").click()
            page.get_by_test_id("setting-depth").fill("3")
            page.get_by_test_id("beside").select_option("beam_sampling")
            page.get_by_test_id("run").click()
            page.get_by_test_id("verdict").filter(has_text="wrote the same text").wait_for(timeout=120_000)
            assert page.get_by_test_id("text").first.inner_text().strip() == expected[0].strip()
            assert page.get_by_test_id("forest").first.locator("circle").count() > 3
            for _ in range(4):  # the last turns have no room for three layers
                page.get_by_role("button", name="Previous turn").first.click()
            assert "of 3 draft layers passed" in page.get_by_test_id("turn").first.inner_text()
            fates = page.evaluate("[...document.querySelectorAll('g.node')].map((one) => one.getAttribute('class'))")
            assert {"node root", "node rejected"} <= set(fates)
            overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert overflow <= 0
            assert complaints == []
            if axe is not None:
                page.evaluate(axe)
                assert page.evaluate("axe.run(document).then((found) => found.violations)") == []
            page.screenshot(path=str(tmp_path / f"{name}.png"), full_page=True)
            page.close()
        browser.close()

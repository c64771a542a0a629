"""The page is one file without a network, whose every control can be named and reached; in a browser it shows forests."""

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

import specbeam as sb
from specbeam.apps.serve.app import page_text
from tests.support.slow_parts import compile_slowly

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
    text = page_text("NONCE")
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
    text = page_text("")
    for start in (text.index("--ground"), text.index("--ground", text.index("prefers-color-scheme: dark"))):
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", text[start : text.index("}", start)]))
        for word in ("text", "faint", "root", "accepted", "rejected", "resampled", "unused"):
            for ground in ("ground", "panel", "band", "chosen")[: 4 if word == "text" else 2]:
                light, dark = sorted((brightness(colours[name]) for name in (word, ground)), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (word, ground, colours)


def axe_source():
    """The source of axe-core, if the package that carries it is installed."""
    try:
        import axe_playwright_python
    except ImportError:
        return None
    return (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


def playwright_and_chromium():
    """Playwright, and the path of a Chromium; skips the test where one of them is missing."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no Chromium")
    return playwright, chromium


@pytest.mark.slow
def test_in_a_browser_the_page_shows_the_text_of_the_server_and_each_turn(worded, tmp_path):
    playwright, chromium = playwright_and_chromium()
    from tests.apps.serve.test_server import CONFIG, PROMPT, running

    axe = axe_source()
    expected = [sb.generate(worded, PROMPT, sb.dsbd(4), seed=7, max_new_tokens=24, top_k=10)[0].text]
    sizes = {"wide": (1280, 900, "light"), "narrow": (390, 844, "dark")}
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
            page.get_by_test_id("beside").select_option("dsbd")
            page.get_by_test_id("run").click()
            page.get_by_test_id("error").filter(has_text="dsbd is compared with itself").wait_for()
            page.get_by_test_id("beside").select_option("beam_sampling")
            page.get_by_test_id("run").click()
            page.get_by_test_id("verdict").filter(has_text="wrote the same text").wait_for(timeout=120_000)
            assert page.get_by_test_id("text").first.inner_text().strip() == expected[0].strip()
            assert page.get_by_test_id("figures").locator("tr.first td").count() == 3
            fates = page.evaluate("[...document.querySelectorAll('g.node')].map((one) => one.getAttribute('class'))")
            assert {one.split()[1] for one in fates} >= {"rejected", "resampled"}
            turns = int(page.get_by_test_id("scrubber").first.get_attribute("max"))
            page.get_by_test_id("scrubber").first.fill("1")
            assert page.get_by_test_id("turn").first.inner_text().startswith(f"turn 1 of {turns}: ")
            assert page.get_by_test_id("text").first.inner_text().strip() != expected[0].strip()
            page.get_by_role("button", name="Next turn").first.click()
            assert "of 3 draft layers passed" in page.get_by_test_id("turn").first.inner_text()
            page.get_by_test_id("play").first.click()
            page.get_by_test_id("turn").first.filter(has_text=f"turn {turns} of").wait_for(timeout=60_000)
            page.get_by_test_id("share").click()
            shared = browser.new_page()
            shared.goto(page.url)
            shared.get_by_test_id("setting-depth").wait_for(state="attached")
            assert shared.get_by_test_id("setting-depth").input_value() == "3"
            assert shared.get_by_test_id("prompt").input_value() == PROMPT
            assert shared.get_by_test_id("beside").input_value() == "beam_sampling"
            shared.close()
            overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert overflow <= 0
            assert complaints == []
            if axe is not None:
                page.evaluate(axe)
                assert page.evaluate("axe.run(document).then((found) => found.violations)") == []
            page.screenshot(path=str(tmp_path / f"{name}.png"), full_page=True)
            page.close()
        browser.close()


FIGURES = """
const reports = (seconds) => seconds.map((one) => ({
  tokens: 12, seconds: one, passes_per_token: 1, target_passes: 12, draft_passes: 0, accepted: 0, first_token_seconds: one / 4,
}));
const answer = (name, seconds) => {
  const made = new Answer(name, true);
  made.drawn = reports([1])[0];
  made.timed = reports(seconds);
  return made;
};
const ratios = (one, other) => {
  showFigures([answer("one", one), answer("other", other)]);
  return [...document.querySelectorAll("#figures tbody tr")].map((row) => [row.children[0].textContent, row.lastChild.textContent]);
};
globalThis.ratios = ratios;
globalThis.helped = (about, law) => {
  methods = [{ name: "m", about, law, needs: "", settings: {} }];
  byId("method").replaceChildren(make("option", { value: "m" }, "m"));
  showMethod();
  return byId("help").innerHTML;
};
"""


@pytest.mark.slow
def test_in_a_browser_the_page_shows_ratios_of_times_only_beyond_the_spread_and_laws_as_sentences():
    playwright, chromium = playwright_and_chromium()
    text = page_text("NONCE").replace("</script>", FIGURES + "</script>")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.set_content(text)
        alike = dict(page.evaluate("ratios([1, 1.4, 1.1], [1.2, 1.05, 1.3])"))
        assert (alike["tokens per second"], alike["seconds"], alike["first token, ms"]) == ("–", "–", "–")
        assert alike["passes of the target"] == "1.00"
        apart = dict(page.evaluate("ratios([1, 1.1], [2, 2.2])"))
        assert (apart["tokens per second"], apart["seconds"]) == ("2.00", "0.50")
        assert dict(page.evaluate("ratios([1], [2])"))["seconds"] == "–"
        helped = page.evaluate("helped('Reads `n` tokens.', 'for more likely text')")
        assert "<p>Reads <code>n</code> tokens.</p>" in helped
        assert "Law: for more likely text. It needs the target alone." in helped
        browser.close()


@pytest.mark.slow
def test_in_a_browser_the_page_says_that_the_server_compiles(worded, monkeypatch):
    playwright, chromium = playwright_and_chromium()
    from tests.apps.serve.test_server import CONFIG, PROMPT, running

    with running(CONFIG, worded) as (url, _), playwright.sync_playwright() as play:
        compile_slowly(monkeypatch, seconds=1)
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = play.chromium.launch(executable_path=chromium, args=arguments)
        page = browser.new_page()
        page.goto(url)
        page.get_by_test_id("prompt").fill(PROMPT)
        page.get_by_test_id("tokens").fill("4")
        page.get_by_test_id("run").click()
        verdict = page.get_by_test_id("verdict")
        verdict.filter(has_text="The server compiles for its processor, once: ").wait_for(timeout=60_000)
        verdict.filter(has_text="Done.").wait_for(timeout=120_000)
        browser.close()

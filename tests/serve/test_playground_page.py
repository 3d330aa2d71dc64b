"""The playground's page as one who uses it sees it, in a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from axe_core_python import selenium as axe
from pacing import WAIT_S
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait
from serving import ThreadServer

from ddtree_trt import LLM, SamplingParams
from ddtree_trt.runtime.stats import STAGES

QUESTION = "Anna has 5 apples and buys 7 more. How many apples does she have?"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


@pytest.fixture
def page(browser: Any, server: ThreadServer) -> Iterator[Page]:
    page = Page(browser, server.url)
    yield page
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_message_is_answered_beside_ar_and_its_rounds_are_drawn(page: Page, tiny_engine: Path) -> None:
    page.choose("method", "ddtree")
    page.choose("budget", "16")
    page.send(QUESTION)
    with LLM(tiny_engine) as llm:
        messages = [{"role": "user", "content": QUESTION}]
        expected = llm.generate([messages], SamplingParams(max_tokens=200))[0].outputs[0].text
    assert page.answers == {"ddtree": expected, "ar": expected}
    assert "The same text as ar" in page.browser.find_element(By.CSS_SELECTOR, ".verdict").text
    count = int(page.find("round").get_attribute("max"))
    assert count > 1 and page.find("place").text.endswith(f" of {count}, the best")
    best, shown = page.round_shown(), []
    page.find("round").send_keys(Keys.END)
    for number in range(count, 0, -1):
        assert page.find("place").text.split(",")[0] == f"{number} of {count}"
        shown.append(page.round_shown())
        page.find("round").send_keys(Keys.ARROW_LEFT)
    accepted = [int(caption.split()[2]) for caption in shown]
    assert len(set(shown)) == count and int(best.split()[2]) == max(accepted) > min(accepted)
    for details in page.browser.find_elements(By.CSS_SELECTOR, ".times, #as-time"):
        details.find_element(By.TAG_NAME, "summary").click()
        assert "checking" in details.text and "undefined" not in details.text
    text = page.browser.find_element(By.TAG_NAME, "body").text
    assert not [stage for stage in STAGES if "_" in stage and stage in text] and "verify" not in text
    assert [line["message"] for line in page.browser.get_log("browser") if line["level"] == "SEVERE"] == []


def test_escape_stops_an_answer(page: Page, server: ThreadServer) -> None:
    page.choose("method", "ar")
    begun = server.passes.begun
    server.passes.wait_until(lambda requests: server.passes.begun < begun + 4)
    page.find("message").send_keys(QUESTION, Keys.ENTER)
    page.wait(lambda: page.answers.get("ar"))  # which then stands still
    page.find("message").send_keys(Keys.ESCAPE)
    server.passes.release()
    page.wait(lambda: page.idle)
    assert page.problem == "Stopped."


def test_errors_are_shown_in_words(page: Page) -> None:
    page.browser.execute_script("document.getElementById('tokens').removeAttribute('max')")
    page.find("tokens").clear()
    page.find("tokens").send_keys("99999")
    page.send(QUESTION)
    assert "99999 does not fit" in page.problem


def test_a_key_is_asked_for(browser: Any, guarded: ThreadServer) -> None:
    page = Page(browser, guarded.url)
    assert "API key" in page.problem and page.find("key").is_displayed()
    page.find("key").send_keys(guarded.http.headers["authorization"].removeprefix("Bearer "))
    page.find("message").send_keys(QUESTION, Keys.ENTER)
    page.wait(lambda: page.answers.get("ar"))
    page.wait(lambda: page.idle)
    assert page.problem == "" and len(set(page.answers.values())) == 1


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
def test_every_width_and_scheme_is_readable_and_accessible(page: Page, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    page.choose("budget", "16")
    found = axe.Axe().run(page.browser)["violations"]  # at the start, with the examples
    page.send(QUESTION)
    for name in ("as-text", "as-time"):
        page.open(name)
    assert page.browser.execute_script("return document.documentElement.scrollWidth") <= width
    found += axe.Axe().run(page.browser)["violations"]
    assert [(v["id"], [n["html"][:120] for n in v["nodes"]]) for v in found] == []


# Markdown: what is made of a text, and that nothing else can come of one

RENDERED = [
    (
        "a **b** *c* ***d*** `e*f*`",
        "<p>a <strong>b</strong> <em>c</em> <strong><em>d</em></strong> <code>e*f*</code></p>",
    ),
    ("6 * 3 * 2\nsnake_case __init__", "<p>6 * 3 * 2\nsnake_case __init__</p>"),
    ("- a\n- b\n  - c\n\nd", "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li></ul><p>d</p>"),
    ("3. a\n   still\n4. b", '<ol start="3"><li><p>a\nstill</p></li><li><p>b</p></li></ol>'),
    ("```python\nif *x*:\n    # y\n```\nz", "<pre><code>if *x*:\n    # y\n</code></pre><p>z</p>"),
    ("```\nopen", "<pre><code>open\n</code></pre>"),  # while the answer grows
    ("[a](https://b.c)", '<p><a href="https://b.c" target="_blank" rel="noopener noreferrer">a</a></p>'),
    ("[a](javascript:alert)", "<p>[a](javascript:alert)</p>"),
    ("<img src=x onerror=alert()>", "<p>&lt;img src=x onerror=alert()&gt;</p>"),
    ("", ""),
]
# Renders each source; gives the HTML, and the pieces of text that were asked for.
RENDER = """
const [sources, done] = arguments;
import("/playground/markdown.js").then(({ markdown }) => done(sources.map((source) => {
  const pieces = [];
  const box = document.createElement("div");
  box.append(...markdown(source, (from, to) => (pieces.push([from, to]), [source.slice(from, to)])));
  const names = [...box.querySelectorAll("*")].map((each) => each.localName);
  return { html: box.innerHTML, pieces, names };
})));
"""


# What would take a careless renderer for ever, or to the end of its stack.
HOSTILE = ["> " * 20_000 + "a", "1. " * 20_000 + "a", "`" * 20_000, "*a " * 20_000, "[" * 20_000, "* " * 20_000 + "a"]


def rendered(page: Page, sources: Sequence[str]) -> list[dict[str, Any]]:
    return list(page.browser.execute_async_script(RENDER, [*sources]))


def test_markdown_is_rendered_and_hostile_one_too(page: Page) -> None:
    sources, html = zip(*RENDERED, strict=True)
    assert [each["html"] for each in rendered(page, sources)] == [*html]
    assert all(each["names"] for each in rendered(page, HOSTILE))


def test_whatever_is_written_only_these_elements_are_made_and_no_word_is_lost_or_moved(page: Page) -> None:
    random = Random(0)
    marks = [*("* ** ` ``` # > [ --- <b> word".split()), "\n", "\n\n", "  ", "- ", "1. ", "> ", "# ", "](https://x.y)"]
    sources = ["".join(random.choices(marks, k=random.randint(1, 60))) for _ in range(300)]
    for source, made in zip(sources, rendered(page, sources), strict=True):
        assert set(made["names"]) <= {*"p h4 ul ol li pre code blockquote hr em strong a".split()}, source
        ends = [0, *(place for piece in made["pieces"] for place in piece)]
        assert ends == sorted(ends), source
        shown = "".join(source[begin:end] for begin, end in made["pieces"])
        assert shown.count("<b>") <= source.count("<b>"), source
        if "```" not in source and "](" not in source:
            assert shown.count("word") == source.count("word"), source


# The playground's page in a real browser: Debian's Chromium, driven through ChromeDriver


CHROMIUM, DRIVER = shutil.which("chromium") or "", shutil.which("chromedriver") or ""
if not (CHROMIUM and DRIVER):
    pytest.skip("no browser: apt-get install chromium chromium-driver", allow_module_level=True)

ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1280,900"
).split()


@contextmanager
def open_browser(directory: Path) -> Iterator[Any]:
    """A browser with its profile in `directory`."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (*ARGUMENTS, f"--user-data-dir={directory}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(WAIT_S)
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """The page, as one who uses it sees it."""

    def __init__(self, browser: Any, url: str) -> None:
        self.browser = browser
        browser.get(f"{url}/playground")
        self.wait(lambda: self.find("method").find_elements(By.TAG_NAME, "option") or self.problem)
        self.open("settings")

    def find(self, name: str) -> Any:
        return self.browser.find_element(By.ID, name)

    def wait(self, condition: Any) -> None:
        WebDriverWait(self.browser, WAIT_S, poll_frequency=0.05).until(lambda _: condition())

    @property
    def problem(self) -> str:
        return str(self.find("problem").text)

    @property
    def idle(self) -> bool:
        return bool(self.find("send").is_displayed())

    @property
    def answers(self) -> dict[str, str]:
        """The texts of the last turn by method."""
        boxes = self.browser.find_elements(By.CSS_SELECTOR, ".turn:last-child .answer")
        text = "return arguments[0].querySelector('.text').textContent"
        return {box.get_attribute("data-method"): self.browser.execute_script(text, box) for box in boxes}

    def send(self, text: str) -> None:
        self.find("message").send_keys(text, Keys.ENTER)
        self.wait(lambda: not self.idle or self.answers or self.problem)
        self.wait(lambda: self.idle)

    def choose(self, name: str, value: str) -> None:
        Select(self.find(name)).select_by_value(value)

    def open(self, name: str) -> None:
        self.find(name).find_element(By.TAG_NAME, "summary").click()

    def round_shown(self) -> str:
        """The caption, which agrees with the drawing."""
        caption = str(self.find("caption").text)
        nodes = self.browser.find_elements(By.CSS_SELECTOR, "#drawing rect")
        accepted = self.browser.find_elements(By.CSS_SELECTOR, "#drawing g.accepted")
        assert caption.startswith(f"{len(nodes) - 1} guesses, {len(accepted) - 1} accepted")
        return caption

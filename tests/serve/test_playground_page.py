"""The playground's page in a real browser: Debian's Chromium, driven through ChromeDriver."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pacing import WAIT_S
from serving import ThreadServer, thread_server

from ddtree_trt import LLM, SamplingParams

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
webdriver: Any = pytest.importorskip("selenium.webdriver", reason="the browser's driver is the package selenium")
if CHROMIUM is None or DRIVER is None:
    pytest.skip("no browser: apt-get install chromium chromium-driver", allow_module_level=True)

from axe_core_python.selenium import Axe  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

QUESTION = "Anna has 5 apples and buys 7 more. How many apples does she have?"
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)


@pytest.fixture(scope="module")
def server(tiny_engine: Path) -> Iterator[ThreadServer]:
    with thread_server(tiny_engine, playground=True) as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (*ARGUMENTS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(WAIT_S)
    yield driver
    driver.quit()


class Page:
    """The page, as one who uses it sees it."""

    def __init__(self, browser: Any, url: str) -> None:
        self.browser = browser
        browser.get(f"{url}/playground")
        self.wait(lambda: self.find("method").find_elements(By.TAG_NAME, "option") or self.problem)

    def find(self, name: str) -> Any:
        return self.browser.find_element(By.ID, name)

    def wait(self, condition: Any) -> None:
        WebDriverWait(self.browser, WAIT_S, poll_frequency=0.05).until(lambda _: condition())

    @property
    def problem(self) -> str:
        return str(self.find("problem").text)

    @property
    def idle(self) -> bool:
        return bool(self.find("send").is_enabled())

    @property
    def answers(self) -> dict[str, str]:
        """The texts of the last turn by method."""
        boxes = self.browser.find_elements(By.CSS_SELECTOR, ".turn:last-child .answer")
        text = "return arguments[0].querySelector('.text').textContent"
        return {box.get_attribute("data-method"): self.browser.execute_script(text, box) for box in boxes}

    @property
    def errors(self) -> list[str]:
        return [line["message"] for line in self.browser.get_log("browser") if line["level"] == "SEVERE"]

    def send(self, text: str) -> None:
        self.find("message").send_keys(text, Keys.ENTER)
        self.wait(lambda: not self.idle or self.answers)
        self.wait(lambda: self.idle)

    def choose(self, name: str, value: str) -> None:
        Select(self.find(name)).select_by_value(value)


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
    assert "identical: yes" in page.browser.find_element(By.CSS_SELECTOR, ".verdict").text
    count = int(page.find("round").get_attribute("max"))
    assert count > 1 and page.find("place").text == f"{count} of {count}"
    shown = []
    for _ in range(count):
        shown.append(page.find("caption").text)
        nodes = page.browser.find_elements(By.CSS_SELECTOR, "#drawing rect")
        accepted = page.browser.find_elements(By.CSS_SELECTOR, "#drawing g.accepted")
        assert shown[-1].startswith(f"{len(nodes) - 1} nodes, {len(accepted) - 1} accepted")
        page.find("round").send_keys(Keys.ARROW_LEFT)
    assert len(set(shown)) == count and page.find("place").text == f"1 of {count}"
    assert page.errors == []


def test_everything_can_be_done_with_keys(page: Page) -> None:
    page.browser.execute_script("document.activeElement.blur()")
    visited = []
    for _ in range(14):
        page.browser.switch_to.active_element.send_keys(Keys.TAB)
        visited.append(page.browser.switch_to.active_element.get_attribute("id"))
    assert [name for name in visited if name][:8] == [
        "message", "method", "budget", "temperature", "tokens", "seed", "beside", "send",
    ]  # fmt: skip
    page.find("beside").send_keys(Keys.SPACE)
    page.send(QUESTION)
    assert list(page.answers) == ["ddtree"]
    page.find("as-text").find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    assert "accepted" in page.find("list").text


def test_escape_stops_an_answer(page: Page, server: ThreadServer) -> None:
    begun = server.passes.begun
    server.passes.wait_until(lambda requests: server.passes.begun < begun + 4)  # the answer waits in the middle
    page.choose("method", "ar")
    page.find("message").send_keys(QUESTION, Keys.ENTER)
    page.wait(lambda: page.answers.get("ar"))
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


def test_a_key_is_asked_for(browser: Any, tiny_engine: Path) -> None:
    with thread_server(tiny_engine, playground=True, api_key="secret") as server:
        page = Page(browser, server.url)
        assert "API key" in page.problem and page.find("key").is_displayed()
        page.find("key").send_keys("secret")
        page.find("message").send_keys(QUESTION, Keys.ENTER)
        page.wait(lambda: page.answers.get("ar"))
        page.wait(lambda: page.idle)
        assert page.problem == "" and len(set(page.answers.values())) == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_every_width_and_scheme_is_readable_and_accessible(page: Page, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    page.choose("budget", "16")
    page.send(QUESTION)
    page.find("as-text").find_element(By.TAG_NAME, "summary").click()
    assert page.browser.execute_script("return document.documentElement.scrollWidth") <= width
    found = Axe().run(page.browser)["violations"]
    assert [(v["id"], [n["html"][:120] for n in v["nodes"]]) for v in found] == []

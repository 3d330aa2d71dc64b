"""The playground's page in a real browser: Debian's Chromium, driven through ChromeDriver."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pacing import WAIT_S, Passes
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

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


class Box(NamedTuple):
    """Where an element is in the window, in CSS pixels."""

    left: float
    top: float
    right: float
    bottom: float


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

    @property
    def errors(self) -> list[str]:
        return [line["message"] for line in self.browser.get_log("browser") if line["level"] == "SEVERE"]

    def send(self, text: str) -> None:
        self.find("message").send_keys(text, Keys.ENTER)
        self.wait(lambda: not self.idle or self.answers or self.problem)
        self.wait(lambda: self.idle)

    def send_and_wait_in_the_middle(self, text: str, passes: Passes, method: str) -> None:
        """Send a message whose answer by this method then stands still, until the passes are let go."""
        begun = passes.begun
        passes.wait_until(lambda requests: passes.begun < begun + 4)
        self.find("message").send_keys(text, Keys.ENTER)
        self.wait(lambda: self.answers.get(method))

    def choose(self, name: str, value: str) -> None:
        Select(self.find(name)).select_by_value(value)

    def open(self, name: str) -> None:
        self.find(name).find_element(By.TAG_NAME, "summary").click()

    def size(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def box(self, name: str) -> Box:
        rect = self.browser.execute_script("return arguments[0].getBoundingClientRect()", self.find(name))
        return Box(rect["left"], rect["top"], rect["right"], rect["bottom"])

    def round_shown(self) -> str:
        """The caption, which agrees with the drawing."""
        caption = str(self.find("caption").text)
        nodes = self.browser.find_elements(By.CSS_SELECTOR, "#drawing rect")
        accepted = self.browser.find_elements(By.CSS_SELECTOR, "#drawing g.accepted")
        assert caption.startswith(f"{len(nodes) - 1} guesses, {len(accepted) - 1} accepted")
        return caption

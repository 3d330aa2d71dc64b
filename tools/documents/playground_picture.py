"""A picture of the playground for the documents: `tools/documents/playground_picture.py ENGINE MESSAGE PICTURE.png`.

Serves the engine, sends the message on the page in Debian's Chromium, and takes the picture, with its
best round or the one that is asked for. Needs the packages chromium, chromium-driver and selenium.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from workbench.server import started_server

WAIT_S = 300.0
ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")


def main() -> None:
    parser = argparse.ArgumentParser(description="A picture of the playground.")
    parser.add_argument("engine", type=Path)
    parser.add_argument("message")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--budget", default="16")
    parser.add_argument("--round", type=int, help="the round that is drawn; the best unless given")
    parser.add_argument("--size", default="1280,930")
    args = parser.parse_args()
    with started_server(str(args.engine), "--playground") as address:
        take(f"{address}/playground", args)


def take(url: str, args: argparse.Namespace) -> None:
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in (*ARGUMENTS, f"--window-size={args.size}"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    try:
        browser.get(url)
        wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#budget option"))
        settings = browser.find_element(By.CSS_SELECTOR, "#settings summary")
        settings.click()
        Select(browser.find_element(By.ID, "budget")).select_by_value(args.budget)
        settings.click()
        browser.find_element(By.ID, "message").send_keys(args.message, Keys.ENTER)
        wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, ".verdict"))
        wait(browser, lambda: browser.find_element(By.ID, "send").is_displayed())
        if args.round is not None:
            slider = "const r = document.getElementById('round'); r.value = arguments[0]; "
            browser.execute_script(slider + "r.dispatchEvent(new Event('input'))", args.round)
        browser.execute_script("document.activeElement.blur(); document.getElementById('turns').scrollTop = 0")
        browser.save_screenshot(str(args.picture))
    finally:
        browser.quit()


def wait(browser: Any, condition: Any) -> None:
    WebDriverWait(browser, WAIT_S).until(lambda _: condition())


if __name__ == "__main__":
    main()

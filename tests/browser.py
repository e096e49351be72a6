"""A real headless browser for the tests of pages."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.needs import need_programs

SEVERE = "SEVERE"
LIMIT_S = 60


@contextmanager
def started_browser() -> Iterator["Browser"]:
    """Start Chromium, which the test needs."""
    need_programs("chromium", "chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    options.page_load_strategy = "normal"
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    flags = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--force-prefers-reduced-motion", *sandbox]
    for flag in flags:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """A browser with one page, which it loads from a file."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(
        self, page: Path, width: int = 1280, height: int = 800, *, dark: bool = False, script: bool = True
    ) -> None:
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._tell("Emulation.setEmulatedMedia", features=[scheme])
        self._tell("Emulation.setScriptExecutionDisabled", value=not script)
        self.driver.get(page.as_uri())

    def resize(self, width: int, height: int = 800) -> None:
        self._tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def _tell(self, command: str, **values: Any) -> None:
        self.driver.execute_cdp_cmd(command, values)

    def ask(self, script: str, *arguments: Any) -> Any:
        """Return what a script in the page returns."""
        return self.driver.execute_script(script, *arguments)

    def waits_for(self, script: str) -> bool:
        """Wait until a script in the page returns true."""
        return bool(WebDriverWait(self.driver, LIMIT_S).until(lambda _: self.ask(script)))

    def wheel(self, x: float, y: float, by: float, *, with_control: bool) -> None:
        """Turn the wheel at a place of the window."""
        modifiers = 2 if with_control else 0
        self._tell("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by, modifiers=modifiers)

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def complaints(self) -> list[str]:
        """Return what the console says since the last call: errors, and violations of the page's policy."""
        log: list[dict[str, Any]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [one["message"] for one in log if one["level"] == SEVERE or "Content Security" in one["message"]]

    def requests(self) -> list[str]:
        """Return the addresses that were asked for since the last call. What the policy stopped is none."""
        log: list[dict[str, Any]] = self.driver.get_log("performance")  # type: ignore[no-untyped-call]
        messages = [json.loads(one["message"])["message"] for one in log]
        failed = [one["params"] for one in messages if one["method"] == "Network.loadingFailed"]
        stopped = {one["requestId"] for one in failed if one.get("blockedReason") == "csp"}
        sent = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent if one["requestId"] not in stopped]

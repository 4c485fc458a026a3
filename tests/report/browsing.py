"""A real browser that looks at pages: how it is started, how a page is opened, what its first chart shows."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from numpy.typing import NDArray
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
PHONE, DESKTOP = 375, 1280
HIGH = "mhc-2"  # its losses are raised, so that the axis must follow when it is hidden


def start(profile: Path) -> webdriver.Chrome:
    """Debian's Chromium without a window, or a skip. The driver is named, so that none is looked for on the network."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver))


def load(browser: webdriver.Chrome, page: Path, width: int = DESKTOP, **features: str) -> None:
    """Open it anew, so wide, with media features such as a color scheme."""
    browser.get("about:blank")
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media(browser, "", **features)
    browser.get_log("performance")
    browser.get_log("browser")
    browser.get(page.as_uri())


def media(browser: webdriver.Chrome, kind: str, **features: str) -> None:
    given = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": kind, "features": given})


def pixels(browser: webdriver.Chrome, element: WebElement) -> NDArray[np.float64]:
    """What an element looks like, as grays from 0 to 1. (height,width)"""
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    return np.asarray(imread(io.BytesIO(element.screenshot_as_png)), np.float64)[..., :3].mean(-1)


def requests(browser: webdriver.Chrome) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def button(browser: webdriver.Chrome, name: str) -> WebElement:
    buttons = browser.find_elements(By.CSS_SELECTOR, "#loss-1 th button")
    return next(each for each in buttons if each.text == name)


def state(browser: webdriver.Chrome) -> dict[str, Any]:
    """What the first chart shows: curves, the labels of its vertical axis, the crosshair, the table beside it."""
    return browser.execute_script("""
        const figure = document.querySelector("#loss-1");
        const texts = (selector) => [...figure.querySelectorAll(selector)].map((element) => element.textContent);
        return {
          curves: [...figure.querySelectorAll(".series")].map((group) => group.dataset.name),
          axis: texts(".plot text[text-anchor=end]"),
          cross: figure.querySelectorAll(".cross line").length,
          dots: figure.querySelectorAll(".cross circle").length,
          at: texts(".legend caption")[0],
          rows: [...figure.querySelectorAll(".legend tbody tr")].map((row) => [...row.cells].map((c) => c.textContent)),
        };
    """)

"""The page in a real browser: it loads nothing, shows everything, fits phones, print and dark mode."""

import base64
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.report.browsing import DESKTOP, HIGH, PHONE, button, load, media, requests

pytestmark = pytest.mark.slow


def test_it_loads_nothing_and_shows_every_figure(browser: webdriver.Chrome, full_page: Path):
    load(browser, full_page)
    asked = requests(browser)
    assert [url for url in asked if url.startswith("file:")] == [full_page.as_uri()]
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert browser.get_log("browser") == []  # no error, no warning
    check_figures(browser)
    check_policy(browser)


def check_policy(browser: webdriver.Chrome) -> None:
    """Markup and scripts that someone adds can neither load nor run anything."""
    browser.execute_async_script("""
        const done = arguments[arguments.length - 1];
        window.ran = false;
        const script = document.createElement("script");
        script.textContent = "window.ran = true";
        document.body.append(script);
        const image = new Image();
        image.onload = image.onerror = () => done();
        image.src = "http://127.0.0.1:9/x.png";
    """)
    assert browser.execute_script("return window.ran") is False
    refused = [
        entry["message"] for entry in browser.get_log("browser") if "Content Security Policy" in entry["message"]
    ]
    assert len(refused) == 2


def check_figures(browser: webdriver.Chrome) -> None:
    images = browser.execute_script("""
        return [...document.images].map((image) => {
          const box = image.getBoundingClientRect();
          return [image.alt, image.complete, image.naturalWidth, box.width, box.height];
        });
    """)
    assert [image[0] for image in images] == [f"RMS and divergence, 2×32 {name}" for name in ("standard", "dar-block")]
    for _, complete, natural, width, height in images:
        assert complete
        assert min(natural, width, height) > 0
    drawn = browser.execute_script("""
        return [...document.querySelectorAll(".chart")].map((figure) => {
          const svg = figure.querySelector(".plot svg"), box = svg.getBoundingClientRect();
          const lines = [...svg.querySelectorAll(".line:not(.casing)")];
          return [figure.id, box.width, box.height, lines.map((line) => line.getTotalLength())];
        });
    """)
    assert [figure[0] for figure in drawn] == ["loss-1", "loss-2", "router-1"]
    assert [len(figure[3]) for figure in drawn] == [3, 1, 1]
    dotted = browser.find_elements(By.CSS_SELECTOR, ".chart .reference")
    assert [line.find_element(By.XPATH, "ancestor::figure").get_attribute("id") for line in dotted] == ["router-1"]
    for _, width, height, lengths in drawn:
        assert width > 500
        assert height > 200
        assert min(lengths) > 50


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_page_never_scrolls_sideways(browser: webdriver.Chrome, full_page: Path, width: int):
    load(browser, full_page, width)
    for details in browser.find_elements(By.TAG_NAME, "details"):
        browser.execute_script("arguments[0].open = true", details)
    root = "document.documentElement"
    seen, box, inside = browser.execute_script(f"return [innerWidth, {root}.clientWidth, {root}.scrollWidth]")
    assert seen == width
    assert inside == box
    tables = browser.find_elements(By.CSS_SELECTOR, ".scroll")
    sizes = [browser.execute_script("return [arguments[0].clientWidth, arguments[0].scrollWidth]", t) for t in tables]
    assert all(box <= width for box, _ in sizes)
    if width == PHONE:  # a wide table scrolls in a box of its own
        assert any(inside > box for box, inside in sizes)


def test_dark_mode(browser: webdriver.Chrome, full_page: Path):
    def colors() -> list[int]:
        script = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
        return [sum(int(part) for part in rgb[4:-1].split(",")) for rgb in browser.execute_script(script)]

    load(browser, full_page, prefers_color_scheme="light")
    background, text = colors()
    assert background > 700 > 150 > text
    media(browser, "", prefers_color_scheme="dark")
    background, text = colors()
    assert background < 100 < 600 < text
    line = browser.find_element(By.CSS_SELECTOR, "#loss-1 .c0 .line:not(.casing)")
    assert browser.execute_script("return getComputedStyle(arguments[0]).stroke", line) == "rgb(242, 242, 242)"
    card = browser.find_element(By.CSS_SELECTOR, ".panels figure")
    assert browser.execute_script("return getComputedStyle(arguments[0]).backgroundColor", card) == "rgb(255, 255, 255)"
    media(browser, "print", prefers_color_scheme="dark")
    assert colors()[0] > 700  # paper is white


def test_it_prints(browser: webdriver.Chrome, full_page: Path):
    load(browser, full_page, prefers_color_scheme="dark")
    button(browser, HIGH).click()
    folded = browser.find_element(By.CSS_SELECTOR, "details pre")
    assert browser.execute_script("return arguments[0].checkVisibility()", folded) is False
    media(browser, "print")
    shown = browser.execute_script("""
        const visible = (element) => element.checkVisibility(); // which a folded element is not
        return {
          configs: [...document.querySelectorAll("details pre")].map(visible),
          menu: visible(document.querySelector("nav")),
          methods: [...document.querySelectorAll("#loss-1 .legend tbody tr")].map(visible),
          figures: getComputedStyle(document.querySelector("figure")).breakInside,
        };
    """)
    assert shown == {"configs": [True] * 8, "menu": False, "methods": [True, True, False], "figures": "avoid"}
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    content = base64.b64decode(printed["data"])
    assert content.startswith(b"%PDF")
    assert len(content) > 20_000
    assert browser.execute_script("return [...document.querySelectorAll('details')].some((d) => d.open)") is False


def test_without_scripts_there_are_pictures(browser: webdriver.Chrome, full_page: Path):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        load(browser, full_page)
        script = "return [...document.querySelectorAll('.chart img')].map((i) => [i.naturalWidth, i.clientWidth])"
        pictures = browser.execute_script(script)
        assert len(pictures) == 3
        assert all(natural > 0 and wide > 300 for natural, wide in pictures)
        assert browser.find_elements(By.CSS_SELECTOR, ".legend") == []
        assert not browser.find_element(By.CSS_SELECTOR, ".script").is_displayed()
        assert requests(browser).count(full_page.as_uri()) == 1
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})

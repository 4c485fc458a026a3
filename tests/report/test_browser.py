"""The page in a real browser: it loads nothing, shows everything, and answers pointer, keys, paper and the dark."""

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from dualres.analyze.results import Analysis, write_analysis
from dualres.train.log import METRICS
from tests.report.conftest import STEPS
from tests.report.reading import charts, make, parsed
from tests.report.test_evaluations import evaluation

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
PHONE, DESKTOP = 390, 1280
HIGH = "mhc-2"  # its losses are raised, so that the axis must follow when it is hidden


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(driver))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def page(suite: Path, sparse: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With everything that a page can have."""
    folder = tmp_path_factory.mktemp("page")
    copied = Path(shutil.copytree(suite, folder / "suite"))
    raised = copied / f"{HIGH}-seed0" / METRICS
    rows = [json.loads(line) for line in raised.read_text().splitlines()]
    for row in rows:
        row.update({key: row[key] + 3 for key in ("loss", "validation_loss") if key in row})
    raised.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arrays = {"stream_rms": np.ones((2, 1)), "history_rms": np.ones((3, 1))}
    for run in ("standard-seed0", "dar-block-seed0"):
        write_analysis(copied / run / "analysis", Analysis({}, {}, arrays))
    evaluation(copied / "evaluations")
    make(folder / "report.html", copied, sparse)
    return folder / "report.html"


def load(browser: webdriver.Chrome, page: Path, width: int = DESKTOP, **features: str) -> None:
    """Open it anew, so wide, with media features such as a colour scheme."""
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


def test_it_asks_for_nothing_but_itself(browser: webdriver.Chrome, page: Path):
    load(browser, page)
    asked = requests(browser)
    assert [url for url in asked if url.startswith("file:")] == [page.as_uri()]
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert browser.get_log("browser") == []  # no error, no warning


def test_what_is_added_to_it_cannot_ask_either(browser: webdriver.Chrome, page: Path):
    """The policy holds even for markup that were to slip through, and for scripts of others."""
    load(browser, page)
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


def test_every_figure_is_visible(browser: webdriver.Chrome, page: Path):
    load(browser, page)
    images = browser.execute_script("""
        return [...document.images].map((image) => {
          const box = image.getBoundingClientRect();
          return [image.alt, image.complete, image.naturalWidth, box.width, box.height];
        });
    """)
    assert [image[0] for image in images] == [
        f"Sizes and disagreement, 2×32 {name}" for name in ("standard", "dar-block")
    ]
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
    for _, width, height, lengths in drawn:
        assert width > 500
        assert height > 200
        assert min(lengths) > 50


def test_a_method_can_be_hidden_and_the_axis_follows(browser: webdriver.Chrome, page: Path):
    load(browser, page)
    before = state(browser)
    assert before["curves"] == ["standard", "dar-block", HIGH]
    pressed = button(browser, HIGH)
    pressed.click()
    after = state(browser)
    assert after["curves"] == ["standard", "dar-block"]
    assert max(map(float, after["axis"])) < max(map(float, before["axis"])) - 2
    assert pressed.get_attribute("aria-pressed") == "false"
    assert after["rows"][2] == [HIGH, "", ""]
    pressed.send_keys(Keys.ENTER)  # as a keyboard does
    assert state(browser)["curves"] == before["curves"]
    assert state(browser)["axis"] == before["axis"]
    assert pressed.get_attribute("aria-pressed") == "true"
    show, hide = browser.find_elements(By.CSS_SELECTOR, "#loss-1 .every")
    hide.click()
    nothing = state(browser)
    assert (nothing["curves"], nothing["axis"]) == ([], before["axis"])
    show.click()
    assert state(browser)["curves"] == before["curves"]
    assert browser.get_log("browser") == []


def opacities(browser: webdriver.Chrome) -> list[float]:
    groups = browser.find_elements(By.CSS_SELECTOR, "#loss-1 .series")
    return [float(group.value_of_css_property("opacity")) for group in groups]


def test_a_button_that_is_pointed_at_brings_its_curve_forward(browser: webdriver.Chrome, page: Path):
    load(browser, page)
    ActionChains(browser).move_to_element(button(browser, HIGH)).perform()
    assert opacities(browser) == [0.2, 0.2, 1]
    button(browser, HIGH).click()
    assert opacities(browser) == [1, 1]  # there is nothing to bring forward
    button(browser, HIGH).click()
    assert opacities(browser) == [0.2, 0.2, 1]
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h1")).perform()
    assert opacities(browser) == [1, 1, 1]


def test_a_short_run_does_not_stretch_the_axis(browser: webdriver.Chrome, suite: Path, tmp_path: Path):
    """Its steep fall lies before a fifth of the others' tokens, which the axis leaves out."""
    copied = Path(shutil.copytree(suite, tmp_path / "suite"))
    make(tmp_path / "whole.html", copied / "standard-seed0", copied / "standard-seed1")
    run = copied / "dar-block-seed0"
    (run / "summary.json").unlink()
    (run / METRICS).write_text('{"step": 1, "tokens": 128, "loss": 90}\n{"step": 2, "tokens": 256, "loss": 80}\n')
    make(tmp_path / "short.html", copied / "standard-seed0", copied / "standard-seed1", run)
    axes = []
    for name in ("whole", "short"):
        load(browser, tmp_path / f"{name}.html")
        axes.append(state(browser)["axis"])
    assert axes[0] == axes[1]
    assert len(axes[0]) > 2


def test_a_pointer_reads_values(browser: webdriver.Chrome, page: Path):
    load(browser, page)
    [loss] = [chart for chart in charts(parsed(page.read_text())) if chart["name"] == "loss-1"]
    before = state(browser)
    assert (before["cross"], before["at"]) == (0, f"at {STEPS * 128:,} tokens")
    svg = browser.find_element(By.CSS_SELECTOR, "#loss-1 .plot svg")
    ActionChains(browser).move_to_element(svg).perform()
    found = state(browser)
    tokens = int(found["at"].split()[1].replace(",", ""))
    assert 8 * 128 < tokens < 16 * 128  # the middle
    at = loss["series"][0]["x"].index(tokens)
    for row, series in zip(found["rows"], loss["series"], strict=True):
        spread = "" if series["low"] is None else f"{series['low'][at]:.3f}–{series['high'][at]:.3f}"
        assert row == [series["name"], f"{series['mean'][at]:.4f}", spread]
    assert (found["cross"], found["dots"]) == (1, 3)
    button(browser, HIGH).click()
    ActionChains(browser).move_to_element(svg).perform()
    assert state(browser)["dots"] == 2
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h1")).perform()
    assert (state(browser)["cross"], state(browser)["at"]) == (0, before["at"])


def test_a_finger_reads_values(browser: webdriver.Chrome, page: Path):
    load(browser, page, PHONE)
    svg = browser.find_element(By.CSS_SELECTOR, "#loss-1 .plot svg")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", svg)
    box = browser.execute_script("return arguments[0].getBoundingClientRect().toJSON()", svg)
    point = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [point]})
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    found = state(browser)
    assert found["cross"] == 1  # it stays when the finger is lifted
    assert found["at"] != f"at {STEPS * 128:,} tokens"


def test_keys_read_values(browser: webdriver.Chrome, page: Path):
    load(browser, page)
    svg = browser.find_element(By.CSS_SELECTOR, "#loss-1 .plot svg")
    browser.execute_script("arguments[0].focus()", svg)
    keyboard = ActionChains(browser)
    keyboard.send_keys(Keys.ARROW_LEFT).perform()
    assert state(browser)["at"] == f"at {(STEPS - 1) * 128:,} tokens"
    ActionChains(browser).send_keys(Keys.HOME).perform()
    assert state(browser)["at"] == "at 128 tokens"
    spoken = svg.get_attribute("aria-valuetext")
    assert spoken is not None
    assert spoken.startswith("128 tokens: standard ")
    assert svg.get_attribute("aria-valuenow") == "128"
    ActionChains(browser).send_keys(Keys.ESCAPE).perform()
    assert state(browser)["cross"] == 0


def test_every_button_can_be_reached_by_keyboard(browser: webdriver.Chrome, page: Path):
    load(browser, page)
    reached = set()
    for _ in range(60):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        reached.add(browser.execute_script("return document.activeElement.innerText || document.activeElement.tagName"))
    assert {"standard", "dar-block", HIGH, "show all", "hide all", "svg"} <= reached
    button(browser, "standard").send_keys("")
    assert browser.execute_script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_page_never_scrolls_sideways(browser: webdriver.Chrome, page: Path, width: int):
    load(browser, page, width)
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


def test_the_dark_is_dark(browser: webdriver.Chrome, page: Path):
    def colours() -> list[int]:
        script = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
        return [sum(int(part) for part in text[4:-1].split(",")) for text in browser.execute_script(script)]

    load(browser, page, prefers_color_scheme="light")
    ground, ink = colours()
    assert ground > 700 > 150 > ink
    media(browser, "", prefers_color_scheme="dark")
    ground, ink = colours()
    assert ground < 100 < 600 < ink
    line = browser.find_element(By.CSS_SELECTOR, "#loss-1 .c0 .line:not(.casing)")
    assert browser.execute_script("return getComputedStyle(arguments[0]).stroke", line) == "rgb(242, 242, 242)"
    card = browser.find_element(By.CSS_SELECTOR, ".panels figure")
    assert browser.execute_script("return getComputedStyle(arguments[0]).backgroundColor", card) == "rgb(255, 255, 255)"
    media(browser, "print", prefers_color_scheme="dark")
    assert colours()[0] > 700  # paper is white


def test_it_prints(browser: webdriver.Chrome, page: Path):
    load(browser, page, prefers_color_scheme="dark")
    button(browser, HIGH).click()
    media(browser, "print")
    shown = browser.execute_script("""
        const visible = (element) => element.getClientRects().length > 0 && element.getBoundingClientRect().height > 0;
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


def test_without_scripts_there_are_pictures(browser: webdriver.Chrome, page: Path):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        load(browser, page)
        script = "return [...document.querySelectorAll('.chart img')].map((i) => [i.naturalWidth, i.clientWidth])"
        pictures = browser.execute_script(script)
        assert len(pictures) == 3
        assert all(natural > 0 and wide > 300 for natural, wide in pictures)
        assert browser.find_elements(By.CSS_SELECTOR, ".legend") == []
        assert not browser.find_element(By.CSS_SELECTOR, ".script").is_displayed()
        assert requests(browser).count(page.as_uri()) == 1
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})

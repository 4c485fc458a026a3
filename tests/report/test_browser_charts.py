"""The charts in a real browser: they answer buttons, pointer, finger and keys."""

import shutil
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from dualres.train.metrics import METRICS
from tests.report.browsing import HIGH, PHONE, button, load, state
from tests.report.conftest import STEPS
from tests.report.reading import charts, make, parsed

pytestmark = pytest.mark.slow


def test_a_method_can_be_hidden_and_the_axis_follows(browser: webdriver.Chrome, full_page: Path):
    load(browser, full_page)
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
    show, hide, _ = browser.find_elements(By.CSS_SELECTOR, "#loss-1 .every")
    hide.click()
    nothing = state(browser)
    assert (nothing["curves"], nothing["axis"]) == ([], before["axis"])
    show.click()
    assert state(browser)["curves"] == before["curves"]
    assert browser.get_log("browser") == []


def opacities(browser: webdriver.Chrome) -> list[float]:
    groups = browser.find_elements(By.CSS_SELECTOR, "#loss-1 .series")
    return [float(group.value_of_css_property("opacity")) for group in groups]


def test_a_button_that_is_pointed_at_brings_its_curve_forward(browser: webdriver.Chrome, full_page: Path):
    load(browser, full_page)
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


def test_a_pointer_reads_values(browser: webdriver.Chrome, full_page: Path):
    load(browser, full_page)
    [loss] = [chart for chart in charts(parsed(full_page.read_text())) if chart["name"] == "loss-1"]
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


def test_a_finger_reads_values(browser: webdriver.Chrome, full_page: Path):
    load(browser, full_page, PHONE)
    svg = browser.find_element(By.CSS_SELECTOR, "#loss-1 .plot svg")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", svg)
    box = browser.execute_script("return arguments[0].getBoundingClientRect().toJSON()", svg)
    point = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [point]})
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    found = state(browser)
    assert found["cross"] == 1  # it stays when the finger is lifted
    assert found["at"] != f"at {STEPS * 128:,} tokens"


def test_keys_read_values(browser: webdriver.Chrome, full_page: Path):
    load(browser, full_page)
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


def test_every_button_can_be_reached_by_keyboard(browser: webdriver.Chrome, full_page: Path):
    load(browser, full_page)
    reached = set()
    for _ in range(60):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        reached.add(browser.execute_script("return document.activeElement.innerText || document.activeElement.tagName"))
    assert {"standard", "dar-block", HIGH, "show all", "hide all", "svg"} <= reached
    button(browser, "standard").send_keys("")
    assert browser.execute_script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"

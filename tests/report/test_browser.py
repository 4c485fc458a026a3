"""The page in a real browser: it loads nothing, shows everything, fits phones, print and dark mode."""

import base64
import csv
import json
from pathlib import Path

import numpy as np
import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from dualres.report import samples
from dualres.report.page import make_page
from dualres.residual import registry
from dualres.train.provenance import PROVENANCE, Start
from dualres.util.atomic_files import write_text
from tests.report.browsing import DESKTOP, HIGH, PHONE, button, load, media, pixels, requests
from tests.report.reading import charts, copy_run, make, parsed

pytestmark = pytest.mark.slow

EVIL = "</pre></script><script>throw 1</script><b><img src=x onerror=alert(1)>"
FORMULA = "=HYPERLINK(1)"


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
    figure = browser.find_element(By.CSS_SELECTOR, ".panels img")
    dark = pixels(browser, figure)
    assert np.median(dark) < 0.15  # paper
    assert dark.max() > 0.8  # ink
    media(browser, "print", prefers_color_scheme="dark")
    assert colors()[0] > 700  # paper is white
    printed = pixels(browser, figure)
    assert np.median(printed) > 0.95
    assert printed.min() < 0.2


def test_a_table_shows_that_it_scrolls(browser: webdriver.Chrome, full_page: Path):
    """A shade at the right edge, until there is nothing more to the right; and keys scroll it."""
    load(browser, full_page, PHONE, prefers_color_scheme="light")
    box = browser.find_element(By.CSS_SELECTOR, "#comparison ~ .scroll")
    assert (box.aria_role, box.accessible_name) == ("region", box.find_element(By.TAG_NAME, "caption").text)

    def edge() -> float:
        return float(np.quantile(pixels(browser, box)[:, -2], 0.5))  # of a column of pixels, through rows and rules

    assert edge() < 0.9
    browser.execute_script("arguments[0].focus()", box)
    ActionChains(browser).send_keys(Keys.ARROW_RIGHT).perform()
    WebDriverWait(browser, 10).until(lambda _: browser.execute_script("return arguments[0].scrollLeft", box) > 0)
    browser.execute_script("arguments[0].scrollLeft = 1e4", box)
    assert edge() > 0.97
    media(browser, "", prefers_color_scheme="dark")
    assert edge() < 0.12
    browser.execute_script("arguments[0].scrollLeft = 0", box)
    assert edge() > 0.2


def test_numbers_are_legible(browser: webdriver.Chrome, full_page: Path):
    """All of a table's numbers have one size and one width of digits, and its second lines a little less."""
    load(browser, full_page, PHONE)
    styles = browser.execute_script("""
        return [...document.querySelectorAll(".scroll td")].map((cell) => {
          const of = (element) => parseFloat(getComputedStyle(element).fontSize);
          return [of(cell), getComputedStyle(cell).fontVariantNumeric, ...[...cell.querySelectorAll("small")].map(of)];
        });
    """)
    assert len({style[0] for style in styles}) == 1
    assert {style[1] for style in styles} == {"tabular-nums"}
    assert styles[0][0] >= 14
    assert min(size for style in styles for size in style[2:]) >= 13


def test_csv_files(browser: webdriver.Chrome, full_page: Path, tmp_path: Path):
    load(browser, full_page)
    behavior = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", behavior)

    def saved(name: str, selector: str) -> list[dict[str, str]]:
        browser.execute_script("arguments[0].click()", browser.find_element(By.CSS_SELECTOR, selector))
        file = tmp_path / f"{name}.csv"
        WebDriverWait(browser, 10).until(lambda _: file.exists())  # it is renamed when it is complete
        with file.open(newline="", encoding="utf-8") as lines:
            return list(csv.DictReader(lines))

    page = parsed(full_page.read_text())
    [data] = page.all("script", id="rows")
    expected = [{key: "" if value is None else value for key, value in row.items()} for row in json.loads(data.text)]
    compared = saved("comparison", "#comparison ~ p button")
    assert [list(row) for row in compared] == [list(row) for row in expected]
    for row, same in zip(compared, expected, strict=True):
        assert [type(same[key])(value) for key, value in row.items()] == [*same.values()]
    [loss] = [chart for chart in charts(page) if chart["name"] == "loss-1"]
    curves = saved("loss-1", "#loss-1 .legend p button:last-child")
    assert len(curves) == sum(len(series["x"]) + len(series["points"]) for series in loss["series"])
    first, single = loss["series"][0], loss["series"][2]
    assert [float(curves[0][key]) for key in ("tokens", "value", "low", "high")] == [
        *(first["x"][0], first["mean"][0], first["low"][0], first["high"][0])
    ]
    assert {row["low"] for row in curves if row["method"] == single["name"]} == {""}
    points = [[int(r["tokens"]), float(r["value"])] for r in curves if r["curve"].startswith("validation")]
    assert points == [point for series in loss["series"] for point in series["points"]]
    assert browser.get_log("browser") == []
    assert [url for url in requests(browser) if not url.startswith(("file:", "data:", "blob:"))] == []


def test_what_others_wrote_stays_text(
    browser: webdriver.Chrome, suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Names, provenance and samples: markup in them is shown, and a formula is none in a CSV file."""
    monkeypatch.setattr(samples, "_generate", lambda folder, changed: (EVIL, ""))
    monkeypatch.setattr(registry, "METHODS", {**registry.METHODS, FORMULA: registry.METHODS["dar-block"]})
    runs = [
        copy_run(suite / "standard-seed0", tmp_path / "one" / EVIL.replace("/", ""), train__dataset=EVIL),
        copy_run(suite / "dar-block-seed0", tmp_path / "two", residual__method=FORMULA, train__dataset=EVIL),
    ]
    (runs[0] / PROVENANCE).write_text(json.dumps({"starts": [{**dict.fromkeys(Start._fields, EVIL), "step": 3}]}))
    make(tmp_path / "page.html", *runs, samples=True)
    load(browser, tmp_path / "page.html")
    assert browser.get_log("browser") == []  # nor did a policy have to refuse anything
    shown = browser.execute_script(
        "return [document.body.innerText, document.querySelectorAll('img[src=x], b').length]"
    )
    assert EVIL in shown[0]
    assert shown[1] == len(browser.find_elements(By.CSS_SELECTOR, "#comparison ~ .scroll b"))
    assert [url for url in requests(browser) if not url.startswith(("file:", "data:"))] == []
    text = browser.execute_script("return csv([{a: arguments[0], b: 'x,\"y\"', c: -1.5, d: null}])", FORMULA)
    assert text == f'a,b,c,d\r\n\'{FORMULA},"x,""y""",-1.5,\r\n'


def test_a_watched_page_updates_itself_and_looks_as_before(browser: webdriver.Chrome, suite: Path, tmp_path: Path):
    page, wait = tmp_path / "page.html", WebDriverWait(browser, 20)

    def write(refresh: float | None, *names: str) -> None:
        made = make_page([suite / f"{name}-seed0" for name in names], [], "x", with_samples=False, refresh=refresh)
        write_text(page, made)

    def curves() -> list[str]:
        return browser.execute_script(
            "return [...document.querySelectorAll('#loss-1 .series')].map((g) => g.dataset.name)"
        )

    write(0.5, "standard", "dar-block")
    load(browser, page, PHONE, prefers_color_scheme="dark")
    browser.execute_script("""
        document.querySelectorAll("#loss-1 th button")[1].click();
        document.querySelector("#comparison ~ .scroll").scrollLeft = 40;
        document.querySelectorAll("summary")[0].click();
        document.querySelectorAll("summary")[0].focus({ preventScroll: true });
        scrollTo(0, 700);
    """)
    assert curves() == ["standard"]
    write(0.5, "standard", "dar-block", "mhc-2")
    wait.until(lambda _: curves() == ["standard", "mhc-2"])  # the hidden one is still hidden
    write(None, "standard", "dar-block", "mhc-2")
    wait.until(lambda _: browser.execute_script("return document.documentElement.dataset.refresh === undefined"))
    wait.until(lambda _: curves() == ["standard", "mhc-2"])
    wait.until(lambda _: browser.execute_script("return scrollY") > 500)  # what was read, wherever it is now
    look = """
        const details = [...document.querySelectorAll("details")];
        const box = document.querySelector("#comparison ~ .scroll");
        const focused = document.activeElement === details[0].querySelector("summary");
        return [box.scrollLeft, details.map((each) => each.open), focused];
    """
    assert browser.execute_script(look) == [40, [True, False, False], True]
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 26)"
    assert {url for url in requests(browser) if not url.startswith("data:")} == {page.as_uri()}
    assert browser.get_log("browser") == []


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

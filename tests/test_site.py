"""README and docs as pages: wrapped lines, pictures for light and dark, an API page with every public name."""

import re
from pathlib import Path

import pytest

import dualres

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_prose_is_wrapped_at_100_columns(page: Path):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    long = [
        line for line in prose.splitlines() if len(line) > 100 and not line.startswith("|") and "](http" not in line
    ]
    assert not long


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_nothing_is_installed_from_an_index(page: Path):
    """The package is on none: extras are installed in the clone, or from a repository's address."""
    assert not re.search(r"pip install '?dualres(?!\[cpu,hub\] @ git\+)", page.read_text())


def test_light_and_dark_diagrams_differ_in_color_alone():
    light, dark = ((ROOT / "docs" / "images" / name).read_text() for name in ("dar.svg", "dar-dark.svg"))
    assert light != dark
    assert re.sub(r"#[0-9a-f]{6}", "", light) == re.sub(r"#[0-9a-f]{6}", "", dark)


def test_api_page_has_every_public_name():
    shown = re.findall(r"^::: dualres\.(\w+)$", (ROOT / "docs" / "reference" / "api.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(dualres.__all__)

"""Pages for tests: what one says, as tables and data, and what it is made of: changed runs and evaluations."""

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from dualres.cli import main
from dualres.evaluate import formats
from dualres.train.run_folder import CONFIG
from tests.evaluate.test_tables import everything

NO_END = {"meta", "link", "img"}


class Element:
    """An element with what is inside of it."""

    def __init__(self, name: str, attributes: dict[str, str]):
        self.name, self.attributes = name, attributes
        self.inside: list[Element | str] = []

    @property
    def text(self) -> str:
        return "".join(part if isinstance(part, str) else part.text for part in self.inside)

    @property
    def words(self) -> str:
        """The text on one line."""
        return " ".join(self.text.split())

    def all(self, name: str, **attributes: str) -> list["Element"]:
        """All elements of this name below it; `class_` stands for class."""
        wanted = {key.rstrip("_"): value for key, value in attributes.items()}
        found = []
        for part in self.inside:
            if isinstance(part, Element):
                if part.name == name and wanted.items() <= part.attributes.items():
                    found.append(part)
                found += part.all(name, **attributes)
        return found

    def rows(self) -> list[list[str]]:
        """Of a table, as text."""
        return [[c.text for c in line.inside if isinstance(c, Element)] for line in self.all("tr")]


class _Tree(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag, {key: value or "" for key, value in attrs})
        self.open[-1].inside.append(made)
        if tag not in NO_END:
            self.open.append(made)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].name == tag, f"</{tag}> ends <{self.open[-1].name}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].inside.append(data)


def parsed(text: str) -> Element:
    """The whole page; fails where an element ends that was not open."""
    tree = _Tree()
    tree.feed(text)
    tree.close()
    [root] = tree.open
    return root


def make(out: Path, *arguments: str | Path, samples: bool = False) -> Element:
    """The page of `dualres report`, by default without samples, which take time."""
    assert main(["report", *map(str, arguments), *([] if samples else ["--no-samples"]), "-o", str(out)]) == 0
    return parsed(out.read_text(encoding="utf-8"))


def charts(page: Element) -> list[dict[str, Any]]:
    [found] = page.all("script", id="charts")
    return json.loads(found.text)


def section(page: Element, name: str) -> Element:
    return next(part for part in page.all("section") if part.all("h2", id=name))


def copy_run(run: Path, to: Path, **changes: Any) -> Path:
    """With another config: `__` stands for the dots of a key."""
    shutil.copytree(run, to)
    described = json.loads((to / CONFIG).read_text())
    for key, value in changes.items():
        *path, last = key.split("__")
        at = described["config"]
        for part in path:
            at = at[part]
        at[last] = value
    (to / CONFIG).write_text(json.dumps(described))
    return to


def describe(run: Path, **changes: Any) -> None:
    """Other keys of config.json than the config's."""
    described = json.loads((run / CONFIG).read_text())
    (run / CONFIG).write_text(json.dumps({**described, **changes}))


def evaluation(folder: Path, **changes: Any) -> Path:
    """As `dualres evaluate` writes it."""
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps({**formats.as_data(*everything()), **changes}))
    return folder

"""Templates: what is escaped, what is refused, and that none of ours turns escaping off."""

import html
import re
from pathlib import Path

import pytest
from jinja2 import Template, UndefinedError

import dualres
from dualres.util.templates import environment

EVIL = "<b>&\"'"


def template(folder: Path, text: str) -> Template:
    (folder / "some.html").write_text(text)
    return environment(folder, html.escape).get_template("some.html")


def test_values_are_escaped_once(tmp_path: Path):
    text = "{% macro cell(x) %}<td>{{ x }}</td>{% endmacro %}{% set twice %}{{ x }}{{ x }}{% endset %}"
    made = template(
        tmp_path, text + '<a title="{{ x }}">{{ cell(x) }}</a>{{ twice }}{{ x ~ "," }}{{ [x, x]|join(";") }}'
    )
    safe = html.escape(EVIL)
    assert made.render(x=EVIL) == f'<a title="{safe}"><td>{safe}</td></a>{safe}{safe}{safe},{safe};{safe}'


def test_missing_values_and_values_that_are_no_text_are_refused(tmp_path: Path):
    made = template(tmp_path, "{{ x }}")
    with pytest.raises(UndefinedError):
        made.render()
    for value in (None, 3, ["a"]):
        with pytest.raises(AttributeError):
            made.render(x=value)


def test_no_template_turns_escaping_off():
    files = [*Path(dualres.__file__).parent.rglob("templates/*.*")]
    assert len(files) > 15
    for path in files:
        assert not re.search(r"\|\s*(force)?(safe|escape)|autoescape", path.read_text()), path

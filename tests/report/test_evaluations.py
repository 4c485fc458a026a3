"""The tables of `dualres evaluate` and the pictures of `dualres analyze` in the page."""

import base64
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dualres.analyze.analysis import Analysis, write_analysis
from dualres.analyze.figures import Panel, Section
from dualres.cli import main
from dualres.evaluate.tables import REFERENCE, tables
from tests.evaluate.test_tables import everything
from tests.report.reading import Element, evaluation, make, section


def check_tables(page: Element) -> None:
    part = section(page, "evaluation")
    for shown, table in zip(part.all("table"), tables(*everything()), strict=True):
        assert shown.all("caption")[0].text == table.title
        header, *rows = shown.rows()
        assert header == list(table.header)
        ours, theirs = rows[: len(table.rows)], rows[len(table.rows) :]
        assert [row[0] for row in ours] == [row[0].text for row in table.rows]
        for row, cells in zip(ours, table.rows, strict=True):
            assert row == [f"{cell.text} ± {cell.error}" if cell.error else cell.text for cell in cells]
        if table.reference:
            assert theirs[0] == [REFERENCE]
            assert [row[0] for row in theirs[1:]] == ["Baseline", "AttnRes", "DAR"]
        bold = [cell.text for row in table.rows for cell in row if cell.bold]
        assert [cell.text for cell in shown.all("b")] == bold
        assert bold
        assert all(note in part.text for note in table.notes)


def test_the_tables_are_rebuilt(suite: Path, tmp_path: Path):
    page = make(tmp_path / "page.html", suite, "--evaluation", evaluation(tmp_path / "evaluated"))
    check_tables(page)


def test_they_are_found_by_themselves(suite: Path, tmp_path: Path):
    copied = Path(shutil.copytree(suite, tmp_path / "copy"))
    evaluation(copied / "evaluations")
    check_tables(make(tmp_path / "page.html", copied))
    check_tables(make(tmp_path / "page.html", copied, "--evaluation", copied / "evaluations"))  # once
    inside = evaluation(copied / "standard-seed0" / "evaluations")
    check_tables(make(tmp_path / "page.html", inside.parent))


def test_what_an_older_version_wrote(suite: Path, tmp_path: Path):
    folder = evaluation(tmp_path / "<old>")
    data = json.loads((folder / "report.json").read_text())
    del data["tables"]
    (folder / "report.json").write_text(json.dumps(data))
    [notice] = section(make(tmp_path / "page.html", suite, "--evaluation", folder), "evaluation").all("p")
    assert f"{folder / 'report.json'} was written by an older version" in notice.text
    assert "rerun the same dualres evaluate command" in notice.text


def one_cell(cell: Any) -> list[dict[str, Any]]:
    return [{"title": "t", "header": ["a"], "rows": [[cell]], "reference": [], "notes": []}]


CELL = {"text": "1", "error": "", "bold": False}


def test_a_cell_as_it_is_written(suite: Path, tmp_path: Path):
    folder = evaluation(tmp_path / "evaluated", tables=one_cell(CELL))
    assert make(tmp_path / "page.html", suite, "--evaluation", folder)


@pytest.mark.parametrize(
    "tables",
    [None, 3, [{}], one_cell(3), one_cell({**CELL, "unit": "%"}), one_cell({"text": "1"})],
    ids=str,
)
def test_what_cannot_be_read(suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tables: Any):
    folder = evaluation(tmp_path / "evaluated", tables=tables)
    assert main(["report", str(suite), "--evaluation", str(folder), "-o", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert f"{folder / 'report.json'} cannot be read" in said
    assert "rerun the same dualres evaluate command" in said
    assert not (tmp_path / "page.html").exists()


def test_a_folder_without_a_report(suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(suite), "--evaluation", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 2
    assert f"--evaluation {tmp_path} has no report.json: pass the --out folder" in capsys.readouterr().err


def test_without_analyses_the_page_says_what_makes_them(suite: Path, tmp_path: Path):
    assert "dualres analyze RUN…" in section(make(tmp_path / "page.html", suite), "analyses").text


def write_fake(run: Path, name: str, tokens: int = 256) -> None:
    write_analysis(run / "analysis", Analysis({"name": name, "tokens_per_sequence": tokens}, {}, {}))


def test_the_first_seed_with_an_analysis_is_shown(suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    copied = Path(shutil.copytree(suite, tmp_path / "copy"))
    for run in ("standard-seed1", "dar-block-seed0", "dar-block-seed1"):
        write_fake(copied / run, run)
    seen: dict[str, str] = {}

    def stand_in(analyses: Mapping[str, Analysis]) -> list[Section]:
        seen.update({method: analysis.about["name"] for method, analysis in analyses.items()})
        panels = tuple(Panel(method, f'<svg xmlns="http://www.w3.org/2000/svg">{method}</svg>') for method in analyses)
        return [Section("cka", 'Alike & "<b>not', "What it <i>shows", panels)]

    monkeypatch.setattr("dualres.analyze.figures.sections", stand_in)
    part = section(make(tmp_path / "page.html", copied), "analyses")
    assert seen == {"standard": "standard-seed1", "dar-block": "dar-block-seed0"}
    assert "standard (seed 1, standard-seed1) and dar-block (seed 0, dar-block-seed0)." in part.text
    assert part.all("h3")[0].text == 'Alike & "<b>not'
    assert "What it <i>shows" in part.text
    images = part.all("img")
    assert [image.attributes["alt"] for image in images] == ['Alike & "<b>not, standard', 'Alike & "<b>not, dar-block']
    kind, _, content = images[0].attributes["src"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    opened, _, rest = base64.b64decode(content).decode().partition("<style>")
    assert (opened, rest.partition("</style>")[2]) == ('<svg xmlns="http://www.w3.org/2000/svg">', "standard</svg>")
    assert [caption.text for caption in part.all("figcaption")] == ["standard", "dar-block"]


def test_methods_of_several_scales_are_told_apart(
    suite: Path, sparse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    runs = [Path(shutil.copytree(run, tmp_path / run.name)) for run in (suite / "dar-block-seed0", sparse)]
    for run in runs:
        write_fake(run, run.name)
    monkeypatch.setattr("dualres.analyze.figures.sections", lambda analyses: [Section(n, n, "", ()) for n in analyses])
    part = section(make(tmp_path / "page.html", *runs), "analyses")
    assert [title.text for title in part.all("h3")] == ["2×32 dar-block", "2×32, 4 experts dar-block"]


def test_other_ways_of_looking_are_told(suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dualres.analyze.figures.sections", lambda analyses: [Section(n, n, "", ()) for n in analyses])
    copied = Path(shutil.copytree(suite, tmp_path / "suite"))
    write_fake(copied / "standard-seed0", "standard")
    write_fake(copied / "dar-block-seed0", "dar-block")
    text = section(make(tmp_path / "page.html", copied), "analyses").text
    assert "Protocol: unknown sequences of 256 tokens" in text
    write_fake(copied / "dar-block-seed0", "dar-block", 8)
    text = section(make(tmp_path / "page.html", copied), "analyses").text
    assert "Protocols differ" in text
    assert "of 8 tokens" in text


def test_a_wide_picture_has_a_line_of_its_own(suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pictures = [Panel(name, f'<svg width="{width}pt" height="90pt"/>') for name, width in (("a", 300), ("b", 900.5))]
    monkeypatch.setattr("dualres.analyze.figures.sections", lambda _: [Section("cka", "Alike", "", tuple(pictures))])
    run = Path(shutil.copytree(suite / "standard-seed0", tmp_path / "run"))
    write_fake(run, "standard")
    figures = section(make(tmp_path / "page.html", run), "analyses").all("figure")
    assert [figure.attributes.get("class") for figure in figures] == [None, "wide"]


def test_a_damaged_analysis_is_named(suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = Path(shutil.copytree(suite / "standard-seed0", tmp_path / "run"))
    (run / "analysis").mkdir()
    (run / "analysis" / "analysis.json").write_text("{")
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 2
    assert f"{run / 'analysis' / 'analysis.json'} cannot be read" in capsys.readouterr().err

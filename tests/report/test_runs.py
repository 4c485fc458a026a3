"""Folders as they are given: runs, suites, what is refused, what is not finished."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dualres.cli import main
from dualres.report.runs import find_runs
from dualres.train.metrics import METRICS
from dualres.train.run_folder import CONFIG, SUMMARY
from tests.report.conftest import STEPS
from tests.report.reading import charts, make, section
from tests.train.tiny import rows

NAMES = ["dar-block-seed0", "dar-block-seed1", "mhc-2-seed0", "standard-seed0", "standard-seed1"]


def test_a_suite_is_the_runs_inside_by_name(suite: Path):
    assert [run.folder.name for run in find_runs([suite])] == NAMES


def test_a_run_that_is_given_twice_counts_once(suite: Path):
    again = find_runs([suite / "standard-seed1", suite, suite / ".." / suite.name / "mhc-2-seed0"])
    assert [run.folder.name for run in again] == ["standard-seed1", *NAMES[:-1]]


def test_what_a_run_holds(suite: Path, sparse: Path, data: Path):
    folder = suite / "standard-seed1"
    [run] = find_runs([folder])
    written = rows(folder)
    assert run.training == tuple((row["tokens"], row["loss"]) for row in written if "loss" in row)
    assert [tokens for tokens, _ in run.validation] == [step * 4 * 32 for step in (8, 16, 24)]
    assert (run.seed, run.data, run.router, run.start) == (1, data, (), None)
    assert run.summary is not None
    assert run.validation[-1][1] == run.summary["validation_loss"]
    [experts] = find_runs([sparse])
    assert [value for _, value in experts.router] == [row["router_loss"] for row in rows(sparse) if "loss" in row]


def half_written(folder: Path) -> None:
    (folder / METRICS).write_text('{"step": 1, "tok')


def without_tokens(folder: Path) -> None:
    (folder / METRICS).write_text('{"step": 1, "loss": 2.0}\n')


def not_a_number(folder: Path) -> None:
    (folder / METRICS).write_text('{"step": 1, "tokens": 128, "loss": NaN}\n')


def no_objects(folder: Path) -> None:
    (folder / METRICS).write_text('"loss"\n')


def no_such_step(folder: Path) -> None:
    (folder / METRICS).write_text('{"step": 1, "tokens": 128, "loss": 2}\n{"step": 2, "validation_loss": 2}\n')


def broken_config(folder: Path) -> None:
    (folder / CONFIG).write_text("{")


def unknown_key(folder: Path) -> None:
    described = json.loads((folder / CONFIG).read_text())
    described["config"]["model"]["depth"] = 3
    (folder / CONFIG).write_text(json.dumps(described))


def broken_summary(folder: Path) -> None:
    (folder / SUMMARY).write_text("[")


def summary_without_loss(folder: Path) -> None:
    (folder / SUMMARY).write_text('{"validation_loss": null}')


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            half_written,
            f"{METRICS} cannot be read (it has no complete row): restore it, or remove this run from the command",
        ),
        (without_tokens, f"{METRICS} cannot be read (tokens is None in"),
        (not_a_number, f"{METRICS} cannot be read (loss is nan in"),
        (no_objects, f"{METRICS} cannot be read ("),
        (no_such_step, f"{METRICS} cannot be read (step 2 has no training loss)"),
        (broken_config, f"{CONFIG} cannot be read"),
        (unknown_key, "unknown key model.depth=3"),
        (broken_summary, f"{SUMMARY} cannot be read"),
        (summary_without_loss, f"{SUMMARY} has no validation_loss: delete it"),
    ],
)
def test_a_damaged_run_is_named_and_nothing_is_written(
    suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], says: str
):
    run = Path(shutil.copytree(suite / "standard-seed0", tmp_path / "run"))
    damage(run)
    assert main(["report", str(suite), str(run), "-o", str(tmp_path / "page.html")]) == 1
    said = capsys.readouterr().err
    assert f"{run / says.split()[0]}" in said or str(run) in said
    assert says in said
    assert not list(tmp_path.glob("page*"))


def test_what_is_no_run_is_refused(suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for given, says in (("empty", "is not a run and contains none"), ("file", "is a file"), ("none", "does not exist")):
        assert main(["report", str(suite), str(tmp_path / given), "-o", str(tmp_path / "page.html")]) == 2
        said = capsys.readouterr().err
        assert f"RUN {tmp_path / given} {says}" in said
        assert "pass" in said
    assert main(["report", str(suite), "-o", str(tmp_path)]) == 2
    assert f"-o {tmp_path} is a folder: use a file name such as {tmp_path / 'report.html'}" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.html"))


def test_a_summary_of_an_older_version_has_no_speed(suite: Path, tmp_path: Path):
    run = Path(shutil.copytree(suite / "mhc-2-seed0", tmp_path / "run"))
    (run / SUMMARY).write_text('{"validation_loss": 5.5}')
    rows = section(make(tmp_path / "page.html", suite / "standard-seed0", run), "comparison").all("table")[0].rows()
    assert rows[3][2:6:3] == ["5.5000", "—"]
    assert rows[3][4] == "—"


def test_help(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["report", "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert [
        part for part in ("RUN", "--evaluation", "report.html", "examples", "dualres suite") if part not in said
    ] == []


def test_only_runs_without_a_step(suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = Path(shutil.copytree(suite / "standard-seed0", tmp_path / "suite" / "run"))
    (run / METRICS).write_text("")
    (run / SUMMARY).unlink()
    assert main(["report", str(tmp_path / "suite"), "-o", str(tmp_path / "page.html")]) == 2
    assert f"no run in {tmp_path / 'suite'} has taken a step yet" in capsys.readouterr().err
    page = make(tmp_path / "page.html", suite, run)
    assert "No step taken yet: run." in page.text


def test_an_unfinished_run_has_a_curve_and_no_row(suite: Path, tmp_path: Path):
    copied = Path(shutil.copytree(suite, tmp_path / "copy"))
    run = copied / "dar-block-seed1"
    (run / SUMMARY).unlink()
    lines = (run / METRICS).read_text().splitlines(keepends=True)
    (run / METRICS).write_text("".join(lines[:10]) + lines[10][:9])  # as a crash leaves it: validated at step 8
    page = make(tmp_path / "page.html", copied)
    assert (
        f"Unfinished, shown as curves but not in the tables: dar-block-seed1 ({9 * 128:,} of {STEPS * 128:,}"
        in page.text
    )
    [chart] = charts(page)
    drawn = {series["name"]: series for series in chart["series"]}
    assert list(drawn) == ["standard", "dar-block", "dar-block, unfinished", "mhc-2"]
    assert drawn["dar-block, unfinished"]["x"][-1] == 9 * 128
    assert drawn["dar-block"]["x"][-1] == STEPS * 128  # not cut short by the other seed
    assert drawn["dar-block"]["color"] == drawn["dar-block, unfinished"]["color"]
    assert drawn["dar-block"]["style"] != drawn["dar-block, unfinished"]["style"]
    seeds = {row[0]: row[1] for row in section(page, "comparison").all("table")[0].rows()[2:]}
    assert seeds == {"standard": "2", "dar-block": "1", "mhc-2": "1"}


def test_nothing_finished_is_a_page_of_curves(suite: Path, tmp_path: Path):
    run = Path(shutil.copytree(suite / "standard-seed0", tmp_path / "run"))
    (run / SUMMARY).unlink()
    page = make(tmp_path / "page.html", run)
    assert "No run is finished yet" in section(page, "comparison").text
    assert not section(page, "comparison").all("table")
    assert len(charts(page)[0]["series"]) == 1

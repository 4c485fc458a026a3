"""Where runs were computed, on a page: code, machine and time of every start, and what was mixed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dualres.train.provenance import PROVENANCE, Start
from tests.report.reading import Element, make, section

EVIL = "<img src=x onerror=alert(1)>"
START = Start(0, "2026-11-18T08:00:00Z", "2026-11-18T09:02:03Z", "0.1.0", "0123456789abcdef", False, "2.13.0", "3.11.7")


def record(run: Path, *starts: Start | dict[str, Any]) -> None:
    listed = [start._asdict() if isinstance(start, Start) else start for start in starts]
    (run / PROVENANCE).write_text(json.dumps({"starts": listed}))


@pytest.fixture
def run(suite: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(suite / "standard-seed0", tmp_path / "run"))


def runs(page: Element) -> Element:
    return section(page, "runs")


def test_a_run(run: Path, tmp_path: Path):
    record(run, START._replace(platform="Linux x86_64", processor="Some CPU", processes=2, threads=3))
    [_, row] = runs(make(tmp_path / "page.html", run)).all("table")[0].rows()
    machine = "Some CPU Linux x86_64, processes: 2, threads: 3"
    assert row == ["run", "2026-11-18 08:00:00", "1:02:03", "0.1.0 012345678", "2.13.0", "3.11.7", machine]


def test_a_run_of_this_version_has_a_record(suite: Path, tmp_path: Path):
    part = runs(make(tmp_path / "page.html", suite))
    assert len(part.all("table")[0].rows()) == 6
    assert "older version" not in part.text
    assert "mix" not in part.text


def test_a_resumed_run_mixes(run: Path, tmp_path: Path):
    later = START._replace(step=1500, ended=None, modified=True, torch="2.14.0")
    record(run, START, later)
    part = runs(make(tmp_path / "page.html", run))
    rows = part.all("table")[0].rows()[1:]
    assert [row[0] for row in rows] == ["run", "run resumed after step 1,500"]
    assert rows[1][2:4] == ["—", "0.1.0 012345678 with changes"]
    mixed = "commits (012345678 and 012345678 with changes) and PyTorch versions (2.13.0 and 2.14.0)"
    assert f"These runs mix {mixed}:" in part.words


def test_a_start_whose_steps_were_lost_is_left_out(run: Path, tmp_path: Path):
    """It saved no checkpoint, so the next start computed everything again."""
    record(run, START, START._replace(step=50, torch="lost"), START._replace(step=50, torch="2.13.0"))
    part = runs(make(tmp_path / "page.html", run))
    assert [row[4] for row in part.all("table")[0].rows()[1:]] == ["2.13.0", "2.13.0"]
    assert "mix" not in part.text


def test_an_old_run_has_no_record(run: Path, suite: Path, tmp_path: Path):
    (run / PROVENANCE).unlink()
    part = runs(make(tmp_path / "page.html", run))
    assert not part.all("table")
    assert "because an older version of dualres trained them: run." in part.words


def test_the_first_steps_of_an_old_run_have_no_record(run: Path, tmp_path: Path):
    record(run, START._replace(step=5))
    part = runs(make(tmp_path / "page.html", run))
    assert part.all("table")
    assert "all or the first steps of these runs were not recorded" in part.words


def test_what_someone_wrote_into_it_is_text(run: Path, tmp_path: Path):
    odd = dict.fromkeys(Start._fields, EVIL)
    record(run, START, {**odd, "step": 1, "commit": 7, "torch": [EVIL], "threads": {"a": 1}})
    page = make(tmp_path / "page.html", run)
    assert EVIL in runs(page).text
    assert not page.all("b")
    assert [image for image in page.all("img") if not image.attributes["src"].startswith("data:")] == []

"""The page as text: the comparison's numbers, the paper's, what is escaped, what it may load."""

import base64
import hashlib
import json
import os
import re
import shutil
import statistics
import sys
from pathlib import Path

import pytest
import yaml

from dualres.cli import main
from dualres.config import paper
from dualres.config.loading import load_config
from dualres.config.schema import Config
from dualres.config.validation import build
from dualres.report.page import SCRIPT
from dualres.residual import registry
from dualres.train.run_folder import CONFIG, SUMMARY, read_config
from tests.report.reading import Element, copy_run, describe, make, section

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def page(suite: Path, tmp_path_factory: pytest.TempPathFactory) -> Element:
    return make(tmp_path_factory.mktemp("page") / "report.html", suite)


def losses(suite: Path, method: str) -> dict[int, float]:
    folders = suite.glob(f"{method}-seed*")
    return {int(f.name[-1]): json.loads((f / SUMMARY).read_text())["validation_loss"] for f in folders}


def test_what_was_compared_comes_first(page: Element, data: Path):
    [lead] = page.all("p", class_="lead")
    assert lead.text == f"This page compares residual methods: 3 at 2×32 (3,072 tokens of {data.name}, seeds 0 and 1)."
    assert "5 runs on a CPU, 1 thread. No run used a GPU." in page.text
    names = [heading.attributes["id"] for heading in page.all("h2")]
    assert names == ["comparison", "curves", "paper", "analyses", "runs", "configs"]
    assert [link.attributes["href"] for link in page.all("nav")[0].all("a")] == [f"#{name}" for name in names]


def test_the_comparison(page: Element, suite: Path):
    [table] = section(page, "comparison").all("table")
    header, place, standard, dar, mhc = table.rows()
    assert header == [
        *(
            "method",
            "seeds",
            "validation loss",
            "−\N{NO-BREAK SPACE}standard, paired by seed",
            "tokens/s",
            "peak memory",
            "parameters",
        )
    ]
    assert place == ["2×32"]
    ours, base = losses(suite, "dar-block"), losses(suite, "standard")
    differences = [ours[seed] - base[seed] for seed in (0, 1)]
    half = 12.706 * abs(differences[0] - differences[1]) / 2  # t · s / √2, s = |a − b| / √2
    text = f"{statistics.fmean(differences):+.4f} ± {half:.4f}".replace("-", "−")
    assert dar[:2] == ["dar-block", "2"]
    assert dar[2].startswith(f"{statistics.fmean(ours.values()):.4f} ± ")
    assert dar[3] == text
    assert mhc[:3] == ["mhc-2", "1", f"{losses(suite, 'mhc-2')[0]:.4f}"]  # one seed has no interval
    assert "×" in dar[4]
    assert "MiB" in dar[5]
    assert re.fullmatch(r"[\d,]+", standard[4])  # no ratio to itself
    assert standard[3] == ""
    summaries = [json.loads((suite / f"standard-seed{seed}" / SUMMARY).read_text()) for seed in (0, 1)]
    assert standard[4] == f"{statistics.fmean(s['tokens_per_second'] for s in summaries):,.0f}"
    means = {name: statistics.fmean(losses(suite, name).values()) for name in ("standard", "dar-block", "mhc-2")}
    best = min(means, key=means.__getitem__)
    assert [bold.text.split()[0] for bold in table.all("b")] == [f"{means[best]:.4f}"]
    notes = section(page, "comparison").words
    assert "95% confidence interval over seeds" in notes
    assert "not a benchmark" in notes


def test_parameters_are_counted(page: Element, sparse: Path, tmp_path: Path):
    rows = section(page, "comparison").all("table")[0].rows()
    d, layers, dense = 32, 2, 257 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32
    assert rows[2][-1] == f"{dense:,}"
    assert rows[4][-1] == f"{dense + 2 * layers * (2 * d * 8 + 8 + 3):,}"
    moe = section(make(tmp_path / "page.html", sparse), "comparison").all("table")[0].rows()[2]
    expert = 3 * 32 * 16  # of four in each layer, a token uses two
    total, active = (int(count) for count in moe[-1].replace(",", "").removesuffix(" active").split())
    assert total - active == layers * 2 * expert


def test_without_standard_there_is_no_difference(suite: Path, tmp_path: Path):
    page = make(tmp_path / "page.html", suite / "dar-block-seed0", suite / "mhc-2-seed0")
    assert "There is no finished run of standard at 2×32 to compare with." in page.text
    assert [row[3] for row in section(page, "comparison").all("table")[0].rows()[2:]] == ["—", "—"]


def test_seeds_that_standard_lacks_are_told(suite: Path, tmp_path: Path):
    page = make(tmp_path / "page.html", *(suite / f"{run}-seed0" for run in ("standard", "dar-block")), suite)
    assert "of the seeds" not in section(page, "comparison").all("table")[0].text
    runs = ("standard-seed0", "dar-block-seed0", "dar-block-seed1")
    page = make(tmp_path / "page.html", *(suite / run for run in runs))
    assert section(page, "comparison").all("table")[0].rows()[3][3].endswith(" 1 of the seeds")


def test_only_equal_settings_are_held_against_each_other(suite: Path, tmp_path: Path):
    """A dar-block with another budget has no `standard` to be compared with, and is not the best of the others."""
    other = copy_run(suite / "dar-block-seed0", tmp_path / "other", train__tokens=6144)
    summary = json.loads((other / SUMMARY).read_text())
    (other / SUMMARY).write_text(json.dumps({**summary, "validation_loss": 0.5}))
    page = make(tmp_path / "page.html", suite, other)
    [table] = section(page, "comparison").all("table")
    rows = {row[0]: row for row in table.rows() if len(row) > 1}
    assert rows["dar-block tokens=6144"][2:4] == ["0.5000", "—"]
    assert "±" in rows["dar-block tokens=3072"][3]
    assert "0.5000" not in [bold.text for bold in table.all("b")]
    assert [row[0] for row in table.rows() if len(row) == 1] == ["2×32, tokens=3072", "2×32, tokens=6144"]
    assert "no finished run of standard at 2×32, tokens=6144" in page.text


def test_other_means_have_no_ratio(suite: Path, tmp_path: Path):
    copied = Path(shutil.copytree(suite, tmp_path / "copy"))
    for seed in (0, 1):
        file = copied / f"dar-block-seed{seed}" / SUMMARY
        file.write_text(json.dumps({**json.loads(file.read_text()), "device": "cuda", "processes": 8}))
    page = make(tmp_path / "page.html", copied)
    rows = {row[0]: row for row in section(page, "comparison").all("table")[0].rows()[2:]}
    assert "×" in rows["mhc-2"][4]
    assert "×" not in "".join(rows["dar-block"][4:6])
    assert "2 runs on a GPU, 8 processes" in page.text
    assert "No run used a GPU" not in page.text
    assert "torchrun --nproc-per-node 8 -m dualres train nano dar-block" in page.text


def test_the_papers_losses_are_called_the_papers(page: Element, suite: Path):
    part = section(page, "paper")
    assert "not reproduced here" in part.words
    [sweep] = part.all("table")  # no run is of the ablation
    header, *rows = sweep.rows()
    assert header == ["method", "the paper, 0.1b", "the paper, 0.3b", "the paper, 0.5b", "here, 2×32"]
    assert [row[0] for row in rows] == [f"{cell.name} {cell.residual}" for cell in paper.SIZE_SWEEP[:6]]
    assert rows[1][1:4] == ["3.504 −0.073", "2.803 −0.063", "2.674 −0.122"]
    ours, base = losses(suite, "dar-block"), losses(suite, "standard")
    mean = statistics.fmean(ours[seed] - base[seed] for seed in (0, 1))
    assert rows[1][4].startswith(f"{statistics.fmean(ours.values()):.4f} ± ")
    assert f"{mean:+.4f} ± ".replace("-", "−") in rows[1][4]
    assert rows[5][4] == "not run"  # mhc-4; mhc-2 is not in the paper's table
    assert "±" in rows[0][4]


def test_the_ablation_has_one_column_of_the_paper(suite: Path, tmp_path: Path):
    run = copy_run(suite / "dar-block-seed0", tmp_path / "run", residual__method="dar-selfkv")
    [table] = section(make(tmp_path / "page.html", run), "paper").all("table")
    header, *rows = table.rows()
    assert header == ["method", "the paper, 0.5b", "here, 2×32"]
    assert [row[1][:5] for row in rows] == [cell.loss for cell in paper.KV_ABLATION]
    assert [row[2] for row in rows if "selfkv" in row[0]] == [f"{losses(suite, 'dar-block')[0]:.4f}"]


def test_an_option_of_its_own_is_not_the_papers_method(suite: Path, tmp_path: Path):
    run = copy_run(suite / "dar-block-seed0", tmp_path / "run", residual__rho_bias=0)
    part = section(make(tmp_path / "page.html", run), "paper")
    assert part.text.endswith("None of these runs has a counterpart in the paper's loss tables.")


def test_configs_and_commands(page: Element, suite: Path, data: Path):
    found = section(page, "configs").all("details")
    assert [each.all("summary")[0].text for each in found] == [
        *("standard at 2×32, seeds 0, 1", "dar-block at 2×32, seeds 0, 1", "mhc-2 at 2×32, seed 0")
    ]
    command, config = (pre.text for pre in found[1].all("pre"))
    assert build(Config, yaml.safe_load(config), "") == read_config(suite / "dar-block-seed0")
    assert command.splitlines()[0] == f"dualres train nano dar-block --data {data} \\"
    sets = re.findall(r"--set (\S+)", command.replace("'", ""))
    assert load_config("nano", "dar-block", sets) == read_config(suite / "dar-block-seed0")
    assert "train.seed=1." in found[0].text


def test_where_there_is_no_command(suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(registry.METHODS, "my-method", registry.METHODS["dar-block"])
    run = copy_run(suite / "dar-block-seed0", tmp_path / "run", residual__method="my-method")
    assert "This config was not built from shipped configs" in section(make(tmp_path / "a.html", run), "configs").text
    started = copy_run(suite / "standard-seed0", tmp_path / "started")
    describe(started, start="llama")
    text = section(make(tmp_path / "b.html", started), "configs").text
    assert "Training started from the weights of llama" in text
    assert "dualres train" not in text


def test_the_router_chart(sparse: Path, suite: Path, page: Element, tmp_path: Path):
    part = section(make(tmp_path / "page.html", sparse, suite), "routers")
    assert "1.0, the dotted line" in part.text
    assert len(part.all("figure")) == 1
    assert not page.all("h2", id="routers")


def test_what_users_write_is_text(suite: Path, tmp_path: Path):
    """Folders, config values, data: on a page that was parsed, none of it is an element."""
    run = copy_run(suite / "standard-seed0", tmp_path / EVIL, train__dataset=EVIL)
    other = copy_run(
        suite / "standard-seed1", tmp_path / f"{EVIL}<!--<script>", train__dataset=r"</script><b>$\nothing$"
    )
    (other / SUMMARY).unlink()
    for folder in (run, other):
        described = json.loads((folder / CONFIG).read_text())
        describe(folder, data={**described["data"], "folder": f"data/{EVIL}"})
    page = make(tmp_path / "page.html", run, other)
    assert [image.attributes["src"][:5] for image in page.all("img")] == ["data:"]
    assert not page.all("b")
    assert not [e for e in (*page.all("img"), *page.all("p")) if "onerror" in e.attributes]
    assert len(page.all("script")) == 3
    assert EVIL in page.all("p", class_="lead")[0].text
    assert f"{EVIL}<!--<script> (" in page.text
    assert f'train.dataset="{EVIL}"' in section(page, "configs").text
    [data] = page.all("script", id="charts")
    assert "<" not in data.text
    names = [series["name"] for series in json.loads(data.text)[0]["series"]]
    assert names == [f'standard, dataset="{EVIL}"', r'standard, dataset="</script><b>$\\nothing$", unfinished']


def test_a_folder_whose_name_is_no_text(suite: Path, tmp_path: Path):
    run = copy_run(suite / "standard-seed0", tmp_path / os.fsdecode(b"run-\xff"), train__dataset="\ud800")
    (run / SUMMARY).unlink()
    assert "run-? (3,072 of 3,072 tokens)" in make(tmp_path / "page.html", run).text


def test_it_can_load_nothing(page: Element):
    [policy] = [m.attributes["content"] for m in page.all("meta") if "http-equiv" in m.attributes]
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-")
    digest = base64.b64encode(hashlib.sha256(page.all("script")[-1].text.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in policy
    assert page.all("script")[-1].text == SCRIPT
    loads = [e.attributes[key] for name, key in (("img", "src"), ("link", "href")) for e in page.all(name)]
    assert loads
    assert all(url.startswith("data:") for url in loads)
    assert "url(" not in re.sub(r"url\(#", "", page.all("style")[0].text)


def test_the_same_runs_give_the_same_page(suite: Path, tmp_path: Path):
    out = tmp_path / "page.html"
    make(out, suite)
    before = out.read_bytes()
    make(out, suite)
    assert out.read_bytes() == before


def test_without_matplotlib(
    full_page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The scripts draw the curves; figures are left out, and the page says so."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "dualres.analyze.figures", raising=False)
    out = tmp_path / "report.html"
    assert main(["report", str(full_page.parent / "suite"), "-o", str(out)]) == 0
    assert "needs the package matplotlib (extra plots)" in capsys.readouterr().err
    text = out.read_text()
    assert "This page has no figures: drawing them needs the package matplotlib" in text
    assert "<noscript>" in text
    assert "data:image/svg" not in text


def test_a_page_is_whole_or_not_there(suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "new" / "page.html"
    make(out, suite)
    before = out.read_bytes()

    def full(file: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dualres.util.atomic_files.flush", full)
    assert main(["report", str(suite / "mhc-2-seed0"), "-o", str(out)]) == 1
    assert out.read_bytes() == before
    assert list(out.parent.iterdir()) == [out]


def test_data_for_a_csv_file(page: Element, suite: Path, sparse: Path, tmp_path: Path):
    [data] = page.all("script", id="rows")
    standard, dar, mhc = json.loads(data.text)
    ours, base = losses(suite, "dar-block"), losses(suite, "standard")
    assert dar["validation_loss"] == statistics.fmean(ours.values())
    assert dar["minus_standard"] == pytest.approx(statistics.fmean(ours[seed] - base[seed] for seed in (0, 1)))
    assert (dar["setting"], dar["method"], dar["options"], dar["seeds"]) == ("2×32", "dar-block", "", 2)
    assert mhc["validation_loss_ci95"] is None
    assert (standard["minus_standard"], standard["parameters"]) == (0, standard["active_parameters"])
    summary = json.loads((suite / "mhc-2-seed0" / SUMMARY).read_text())
    assert [mhc[key] for key in ("tokens_per_second", "peak_memory_bytes")] == [
        *(summary["tokens_per_second"], summary["peak_memory"])
    ]
    [moe] = json.loads(make(tmp_path / "page.html", sparse).all("script", id="rows")[0].text)
    assert moe["active_parameters"] < moe["parameters"]

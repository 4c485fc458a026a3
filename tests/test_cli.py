"""The command line as a user meets it."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs import cli_page
from dualres.cli import main, make_parser
from dualres.config.loading import names


@pytest.mark.parametrize("residual", ["standard", "mhc-4", "attnres-vproj-96", "dar-fixedkv"])
def test_describe(residual: str, capsys: pytest.CaptureFixture[str]):
    assert main(["describe", "nano", residual]) == 0
    text = capsys.readouterr().out
    for part in ("block", "readout", "flops per token", "residual state", "parameters"):
        assert part in text


def test_describe_json(capsys: pytest.CaptureFixture[str]):
    assert main(["describe", "moe-7b", "dar-block", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["parameters"]["active"] == 1_404_541_056
    assert [block["sees"] for block in described["blocks"]] == [[0, b] for b in range(8)]
    assert described["residual"]["branches_per_block"] == 6
    # H_0 … H_8 of two streams, width 2048, two bytes.
    assert described["residual_state_bytes_per_token"]["history"] == 9 * 2 * 2048 * 2


D = 96  # the width of nano
SET = 12 * D + 8  # parameters of a DAR set
MHC = 2 * (2 * D * 8 + 8 + 3)  # of an mHC-2 block: two branches
STRUCTURE = {  # of each of nano's blocks: branches, states it sees, parameter sets, parameters; then the readout's two
    "standard": ([([2 * b - 1, 2 * b], [b - 1, b - 1], 0, 0) for b in range(1, 9)], ([8, 8], 0)),
    "mhc-2": ([([2 * b - 1, 2 * b], [b - 1, b - 1], 0, MHC) for b in range(1, 9)], ([8, 8], 0)),
    "dar-block": ([([4 * b - 3, 4 * b], [0, b - 1], 2, 2 * SET) for b in range(1, 5)], ([0, 4], 2 * D)),
    "attnres-full": ([([b, b], [0, b - 1], 1, D if b > 1 else 0) for b in range(1, 17)], ([0, 16], D)),
}


@pytest.mark.parametrize("residual", STRUCTURE)
def test_described_structure(residual: str, capsys: pytest.CaptureFixture[str]):
    assert main(["describe", "nano", residual, "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    found = [
        (block["branches"], block["sees"], block["parameter_sets"], block["parameters"])
        for block in described["blocks"]
    ]
    readout = described["readout"]["sees"], described["readout"]["parameters"]
    assert (found, readout) == STRUCTURE[residual]
    assert described["parameters"]["residual"] == sum(block[-1] for block in found) + readout[1]


def test_describe_json_of_nested_sections(capsys: pytest.CaptureFixture[str]):
    scaling = {"kind": "linear", "factor": 2.0, "original_context": None, "low": None, "high": None}
    changed = ["--set", "model.rope_scaling={kind: linear, factor: 2}"]
    assert main(["describe", "nano", "standard", *changed, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["rope_scaling"] == scaling


def test_describe_takes_overrides(capsys: pytest.CaptureFixture[str]):
    assert main(["describe", "nano", "dar-block", "--set", "residual.branches_per_block=6", "--json"]) == 0
    blocks = json.loads(capsys.readouterr().out)["blocks"]
    assert [block["branches"] for block in blocks] == [[1, 6], [7, 12], [13, 16]]


@pytest.mark.parametrize(
    "arguments",
    [
        ["describe", "nano", "nothing"],
        ["describe", "nano", "dar-block", "--set", "residual.branches_per_block=1"],
        ["describe", "nano", "dar-block", "--set", "model.heads=7"],
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dualres: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "teaches"),
    [
        (["--help"], ["start with", "dualres describe nano dar-block", "params"]),
        (["params", "--help"], ["Exits with 1 if any differs", "--json"]),
        (
            ["describe", "--help"],
            [*names("scale"), *names("residual"), "--set residual.share_parameters=false", "example"],
        ),
        (
            ["prepare", "--help"],
            ["to resume", "python", "bpe:4096", "tekken", "OWNER/NAME", "--held-out"],
        ),
        (["train", "--help"], [*names("scale"), *names("residual"), "torchrun", "--dry-run", "--gpus", "to resume"]),
        (["evaluate", "--help"], ["hellaswag", "--perplexity", "--tasks-from", "olmo", "repeat the command to resume"]),
        (["export", "--help"], ["--form", "example", "tokenizer"]),
        (["import", "--help"], ["The inverse of export", "--from"]),
        (["convert", "--help"], [*names("residual"), "Qwen", "--set", "example"]),
        (["generate", "--help"], ["example", "--temperature", "--checkpoint"]),
        (
            ["suite", "--help"],
            ["size-sweep", "kv-ablation", "--seeds 0,1,2", "--learning-rates", "--table", "paired by"],
        ),
        (["--version"], ["dualres "]),
    ],
    ids=str,
)
def test_help(arguments: list[str], teaches: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert [part for part in teaches if part not in shown] == []


@pytest.mark.parametrize(("name", "command"), make_parser()[1].items())
def test_help_names_nothing_that_is_not_there(name: str, command: argparse.ArgumentParser):
    shown = command.format_help()
    assert "docs/" not in shown, "an installed package has no docs"
    assert "dualres[" not in shown, "dualres is on no package index"


def test_the_reference_page_is_current():
    committed = cli_page.PAGE.read_text(encoding="utf-8")
    assert committed == cli_page.page(), "run python docs/cli_page.py"


LIGHT = """
import contextlib, io, sys
from dualres import cli
HEAVY = {"torch", "numpy", "transformers", "tokenizers", "matplotlib", "numba", "jinja2", "safetensors"}

def ends(arguments, code, shows, modules):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            cli.main(arguments)
        except SystemExit as ended:
            assert ended.code == code, (arguments, text.getvalue())
    assert shows in text.getvalue(), (arguments, text.getvalue())
    assert not HEAVY & set(sys.modules), (arguments, HEAVY & set(sys.modules))
    loaded = {name for name in cli.COMMANDS if f"dualres.commands.{cli.COMMANDS[name]}" in sys.modules}
    assert loaded <= modules, (arguments, loaded)

ends(["--version"], 0, "dualres ", set())
ends([], 2, "required: COMMAND", set())
ends(["trian"], 2, "did you mean train?", set())
seen = {"prepare", "train"}  # train may prepare data, and suite trains
for name in cli.COMMANDS:
    seen.add(name)
    ends([name, "--help"], 0, f"usage: dualres {name}", seen)
    ends(["-q", name, "a", "b", "c", "--no-such-flag"], 2, f"usage: dualres {name}", seen)
ends(["--help"], 0, "start with", seen)
ends(["--no-such-flag", "describe", "a", "b"], 2, "unrecognized arguments: --no-such-flag", seen)
"""


def test_no_help_and_no_typo_imports_torch():
    """Nor anything else that takes long, nor other commands."""
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian", "nano", "dar-block"], ["usage: dualres [-h]", "unknown command trian; did you mean train?"]),
        (["xyzzy"], ["unknown command xyzzy\n"]),
        (["--plugin", "mine", "describe", "nano", "mine"], ["--plugin goes after the command"]),
        (["describe", "nano", "mine", "--plugin"], ["usage: dualres describe", "--plugin: expected one argument"]),
        (["describe", "nano", "dar-block", "--jsn"], ["usage: dualres describe", "--jsn; did you mean --json?"]),
        (["generate", "run", "x", "--temprature=1"], ["usage: dualres generate", "did you mean --temperature?"]),
        (["train", "nano"], ["usage: dualres train", "required: RESIDUAL"]),
        (
            ["export", "run", "x", "--checkpoint", "lst"],
            ["usage: dualres export", "use last, best; did you mean last?"],
        ),
        (["evaluate", "run", "--dtype", "bflot16"], ["usage: dualres evaluate", "did you mean bfloat16?"]),
        (["describe", "nano", "dar-block", "-q", "-v"], ["usage: dualres describe", "not allowed with"]),
    ],
    ids=str,
)
def test_the_nearest_word_is_proposed(arguments: list[str], says: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert [part for part in says if part not in shown] == []


MISTYPED = {
    "scale": (["describe", "nanno", "dar-block"], "did you mean nano?"),
    "residual": (["describe", "nano", "dar-blok"], "did you mean dar-block?"),
    "method": (["describe", "nano", "dar-block", "--set", "residual.method=dar-blok"], "did you mean dar-block?"),
    "option": (["describe", "nano", "dar-block", "--set", "residual.branch_per_block=2"], "branches_per_block?"),
    "section": (["describe", "nano", "dar-block", "--set", "modle.layers=2"], "did you mean model?"),
    "key": (
        ["describe", "nano", "dar-block", "--set", "train.parallel.tensr=2"],
        "did you mean train.parallel.tensor?",
    ),
    "value": (["describe", "nano", "dar-block", "--set", "train.engine=fdsp2"], "did you mean fsdp2?"),
    "residuals": (["suite", "nano", "--residuals", "standard,dar-blok"], "did you mean dar-block?"),
    "preset": (["suite", "size-swep"], "did you mean size-sweep?"),
    "at": (["suite", "size-sweep", "--at", "nanno"], "did you mean nano?"),
    "source": (["prepare", "pyton", "out"], "did you mean python?"),
    "tokenizer": (["prepare", "python", "out", "--tokenizer", "teken"], "did you mean tekken?"),
    "task": (["evaluate", "run", "--zero-shot", "piqa,helaswag"], "did you mean hellaswag?"),
    "data": (["evaluate", "run", "--validation", "data/pyton"], "did you mean data/python?"),
    "run": (["generate", "runs/nano-dar-blok", "x"], "did you mean runs/nano-dar-block?"),
}


@pytest.mark.parametrize("what", MISTYPED)
def test_the_nearest_name_is_proposed(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/nano-dar-block").mkdir(parents=True)
    (tmp_path / "data/python").mkdir(parents=True)
    arguments, proposal = MISTYPED[what]
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert proposal in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize("arguments", [["-v", "describe", "nano", "x"], ["describe", "nano", "x", "--verbose"]])
def test_verbose_shows_where_an_error_was_raised(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.splitlines()[-1].startswith("dualres: no residual 'x'")


@pytest.mark.parametrize(
    ("arguments", "shown"), [([], True), (["-q"], False), (["--quiet"], False)], ids=["normal", "quiet", "long"]
)
@pytest.mark.parametrize("before", [True, False], ids=["before the command", "after it"])
def test_quiet_prints_only_results(
    arguments: list[str], shown: bool, before: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "text.txt").write_text("some text\n\n" * 50)
    command = ["prepare", str(tmp_path / "text.txt"), str(tmp_path / "out"), "--tokenizer", "bytes", "--held-out", "0"]
    assert main([*arguments, *command] if before else [*command, *arguments]) == 0
    out, err = capsys.readouterr()
    assert "wrote" in out
    assert ("tokenizing" in err) == shown


@pytest.mark.parametrize("module", ["dualres", "torch"])
def test_an_interrupted_import_is_one_line(module: str, tmp_path: Path):
    """Ctrl-C where an exception would be ignored, as in a weak reference's callback, and a traceback printed."""
    (tmp_path / f"{module}.py").write_text(
        "import signal, weakref\n"
        "class Thing: pass\n"
        "thing = Thing()\n"
        "reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))\n"
        "del thing\n"
    )
    program = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored if the tests run in the background
        "from dualres import __main__\n"
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        f"sys.modules.pop({module!r}, None)\n"
        "sys.argv[1:] = ['describe', 'nano', 'dar-block']\n"
        "__main__.run()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "dualres: interrupted\n")


def test_an_interrupted_start_is_one_line(tmp_path: Path):
    """Ctrl-C while torch is being imported."""
    (tmp_path / "torch.py").write_text(
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored if the tests run in the background
        "signal.raise_signal(signal.SIGINT)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    done = subprocess.run(
        [sys.executable, "-m", "dualres", "describe", "nano", "dar-block"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (done.returncode, done.stderr) == (130, "dualres: interrupted\n")


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m dualres suite --help | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_streams_are_no_error():
    command = f"{sys.executable} -m dualres --version >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], check=False).returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["suite", "--help"], ["params"]], ids=" ".join)
def test_a_full_disk_is_named(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    disk = open("/dev/full", "w")  # noqa: SIM115, closing it would raise
    monkeypatch.setattr(sys, "stdout", disk)
    assert main(arguments) == 1
    assert "cannot read or write" in (said := capsys.readouterr().err)
    assert "free some space" in said
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), disk.fileno())  # takes what is left in the buffer
    disk.close()


def test_a_terminal_without_greek():
    done = subprocess.run(
        [sys.executable, "-m", "dualres", "plan", "--help"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0
    assert "train.parallel.? it chooses" in done.stdout


def test_a_readout_without_history_sees_the_last_state(capsys: pytest.CaptureFixture[str]):
    assert main(["describe", "nano", "standard", "--set", "residual.branches_per_block=16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["readout"]["sees"] == [1, 1]

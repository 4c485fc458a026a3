"""Completion of a command line: what is proposed, and by a real shell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dualres.cli import COMMANDS, main, make_parser
from dualres.commands.completion import SCRIPTS, completions
from dualres.config.loading import load_config, names

LINES = {
    "": [*COMMANDS],
    "tr": ["train"],
    "--ver": ["--version", "--verbose"],
    "-q tr": ["train"],
    "train nano-": ["nano-moe"],
    "train nano ": names("residual"),
    "train nano dar-block ": [],
    "train nano dar-block --da": ["--data"],
    "train nano dar-block --data ": [],
    "train --device cpu nan": ["nano", "nano-moe"],
    "train --device ": ["cpu", "cuda"],
    "train --dry-run nan": ["nano", "nano-moe"],
    "train nano dar-block --set train.micro": ["train.micro_batch="],
    "train nano dar-block --set model.rope_scaling.k": ["model.rope_scaling.kind="],
    "suite size": ["size-sweep"],
    "suite nano --residuals standard,dar-b": ["standard,dar-block"],
    "suite kv-ablation --at mi": ["micro"],
    "convert a b --residual attnres-b": ["attnres-block"],
    "evaluate run --zero-shot piqa,hel": ["piqa,hellaswag"],
    "evaluate run --zero-shot = hel": ["hellaswag"],  # as bash splits the words
    "export run out --checkpoint =": ["last", "best"],
    "analyze a b ": [],
    "nothing ": [],
}


@pytest.mark.parametrize("line", LINES)
def test_what_completes_a_line(line: str):
    assert completions(*make_parser(), line.split(" ")) == LINES[line]


def test_every_key_of_a_config_is_proposed():
    keys = completions(*make_parser(), ["describe", "nano", "dar-block", "--set", ""])
    simple = {key for key in keys if key.startswith(("train.", "analyze.")) and "parallel" not in key}
    assert {"model.layers=", "model.moe.experts=", "residual.branches_per_block=", "analyze.every="} <= {*keys}
    config = load_config("nano", "dar-block")
    assert simple == {
        f"{section}.{name}="
        for section in ("train", "analyze")
        for name in vars(getattr(config, section))
        if name != "parallel"
    }


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script(shell: str, capsys: pytest.CaptureFixture[str]):
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == SCRIPTS[shell]


def test_in_bash(tmp_path: Path):
    """Every line is completed by the function that the script registers."""
    program = tmp_path / "dualres"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dualres "$@"\n')
    program.chmod(0o755)
    script = """
    eval "$(dualres completion bash)"
    complete -p dualres
    for line in "dualres tr" "dualres train nano dar-b" "dualres generate " "dualres train -- --se"; do
      IFS=' ' read -r -a COMP_WORDS <<< "$line"
      [[ $line == *" " ]] && COMP_WORDS+=("")
      COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
      _dualres dualres
      echo "$line: ${COMPREPLY[*]}"
    done
    """
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "complete -o default -F _dualres dualres",
        "dualres tr: train",
        "dualres train nano dar-b: dar-block",
        "dualres generate : ",
        "dualres train -- --se: --set",
    ]

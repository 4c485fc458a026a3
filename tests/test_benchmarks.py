"""What `benchmarks/step.py` compares computes the same, and a run of it ends in a table."""

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dualres.config.loading import load_config
from dualres.train.process_group import World
from tests.plugin import forgotten_afterwards

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """`contenders` and `step`, as the script imports them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    with forgotten_afterwards():
        yield importlib.import_module("contenders"), importlib.import_module("step")
    for name in ("contenders", "step"):
        sys.modules.pop(name)


def built(contenders: Any, name: str, **model: Any) -> Any:
    config = load_config("nano", contenders.residual_of(name))
    size = {"vocab_size": 64, "context": 12, "layers": 5, "width": 32, "ffn_width": 48, **model}
    train = dataclasses.replace(config.train, micro_batch=2, global_batch=2, warmup_steps=1, engine="single")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **size), train=train)
    return contenders.contender(name, config, World(0, 1, torch.device("cpu"), None, None))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_llama_has_the_weights_loss_and_optimizer_of_standard(benchmarks, tied):
    contenders, _ = benchmarks
    ours, llama = (built(contenders, name, tied_embeddings=tied) for name in ("standard", "llama"))
    prompts = ours.random_tokens(3, 4)
    for _ in range(3):
        assert llama.loss().item() == pytest.approx(ours.loss().item(), rel=1e-5)
        assert torch.equal(llama.generate(prompts, 5), ours.generate(prompts, 5))
        ours.step()
        llama.step()
    shapes = [{name: p.shape for name, p in model.parameters().items()} for model in (ours, llama)]
    assert shapes[0] == shapes[1]


def test_contenders_share_the_weights_of_their_branches(benchmarks):
    contenders, _ = benchmarks
    ours, dual, llama = (built(contenders, name) for name in ("standard", "dar-block", "llama"))
    wanted = dual.loss().item()
    for other in (dual, llama):
        other.share_weights(ours)
    assert dual.loss().item() == pytest.approx(wanted, rel=1e-6)
    for name, weight in ours.parameters().items():
        assert dual.parameters()[name].data_ptr() == llama.parameters()[name].data_ptr() == weight.data_ptr()
    ours.step()
    assert llama.loss().item() == pytest.approx(ours.loss().item(), rel=1e-5)


def test_plain_attnres_is_attnres(benchmarks):
    contenders, _ = benchmarks
    ours, plain = (built(contenders, name) for name in ("attnres-block", "attnres-block-plain"))
    start = ours.loss().item()
    for _ in range(5):
        assert plain.loss().item() == pytest.approx(ours.loss().item(), rel=1e-5)
        ours.step()
        plain.step()
    assert ours.loss().item() < start - 0.1
    queries = [block.pathway.queries for block in plain.engine.decoder.stack]
    assert all(query.abs().max() > 1e-3 for query in queries[1:])
    assert plain.memory().kept > ours.memory().kept


def test_mhc_of_the_package_learns(benchmarks):
    pytest.importorskip("hyper_connections")
    contenders, _ = benchmarks
    package = built(contenders, "mhc-4-package")
    fresh = package.engine.decoder.stack.blocks[1].pathway.make[1]().state_dict()
    for name, tensor in package.engine.decoder.stack.blocks[1].pathway.connections[1].state_dict().items():
        assert torch.equal(tensor, fresh[name]), name
    start = package.loss().item()
    for _ in range(5):
        package.step()
    assert package.loss().item() < start - 0.1


def test_a_missing_package_says_how_to_install_it(benchmarks, monkeypatch):
    contenders, _ = benchmarks
    monkeypatch.setitem(sys.modules, "hyper_connections", None)
    with pytest.raises(SystemExit, match=r"mhc-4-package needs a package: pip install .*hyper-connections"):
        contenders.residual_of("mhc-4-package")


def test_a_run(benchmarks, monkeypatch, capsys):
    _, step = benchmarks
    threads = torch.get_num_threads()
    size = "--scale nano --tokens 8 --rounds 2 --new-tokens 2 --threads 1"
    names = "--residuals dar-block --alternatives llama --json"
    monkeypatch.setattr(sys, "argv", ["step.py", *size.split(), *names.split()])
    try:
        step.main()
    finally:
        torch.set_num_threads(threads)
    result = json.loads(capsys.readouterr().out)
    assert (result["batch"], result["tokens"], result["vocabulary"]) == (8, 8, 4096)
    assert list(result["found"]) == ["standard", "dar-block", "llama"]
    assert all(len(row[what]) == 2 for row in result["found"].values() for what in ("step", "token_1", "token_16"))
    rows = step.comparison_table(result["found"], compiled=False).splitlines()
    assert [row.split()[0] for row in rows[2:]] == ["standard", "dar-block", "llama"]

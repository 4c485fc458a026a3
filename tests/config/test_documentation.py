"""The configuration page: current, complete, and with the options of a method that is one file and one row."""

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from docs import configuration_page
from dualres.cli import main
from dualres.config.documentation import documentation
from dualres.config.loading import load_config
from dualres.config.schema import Config, ConfigError, MoEConfig, ParallelConfig, ResidualConfig, RopeScaling
from dualres.model.decoder import build_decoder
from dualres.residual import registry
from tests.plugin import EXAMPLE, python_blocks
from tests.small import next_token_loss, random_tokens

SECTIONS = [*configuration_page.SECTIONS.values(), MoEConfig, RopeScaling, ParallelConfig]
OPTIONS = list(dict.fromkeys(row.options for row in registry.METHODS.values()))


def test_the_page_is_current():
    committed = configuration_page.PAGE.read_text(encoding="utf-8")
    assert committed == configuration_page.page(), "run python docs/configuration_page.py"


@pytest.mark.parametrize("section", [*SECTIONS, *OPTIONS], ids=lambda section: section.__name__)
def test_every_field_is_documented(section: type):
    fields = {field.name for field in dataclasses.fields(section)}
    documented = documentation(section)
    assert fields - documented.keys() == ({"options"} if section is ResidualConfig else set())
    assert all(text and len(text) < 120 and "\n" not in text and "|" not in text for text in documented.values())


def test_every_key_of_an_experiment_has_a_row():
    config = load_config("nano-moe", "dar-block", ["model.rope_scaling={kind: linear, factor: 2}"])
    page = configuration_page.page()

    def check(section: dict[str, object], prefix: str) -> None:
        for key, value in section.items():
            assert f"| `{prefix}{key}` |" in page, prefix + key
            if isinstance(value, dict):
                check(value, f"{prefix}{key}.")

    config = dataclasses.replace(config, residual=registry.explicit(config.residual, 16))
    for section in config.to_dict().values():
        check(section, "")


@pytest.fixture
def highway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All that docs/adding-a-residual.md says to write in dualres itself: a file, its import, a row."""
    plugin, _, imports, imported, row = python_blocks(EXAMPLE)
    statement = r"^from dualres import ops\nfrom dualres.residual import \(.*?^\)\n"
    file = re.sub(statement, imports, plugin, flags=re.MULTILINE | re.DOTALL)
    assert imports in file
    file = file[: file.index("register_method(")]
    name = "dualres.residual.highway"
    (tmp_path / "highway.py").write_text(file)
    spec = importlib.util.spec_from_file_location(name, tmp_path / "highway.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    names = dict(vars(registry))
    exec(imported, names)
    for method, added in eval(f"{{{row}}}", names).items():
        monkeypatch.setitem(registry.METHODS, method, added)


@pytest.mark.usefixtures("highway")
def test_a_method_with_a_new_option_is_one_file_and_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    residual = tmp_path / "carry.yaml"
    residual.write_text("method: highway\ngate_bias: -1\n")
    assert main(["describe", "nano", str(residual), "--set", "residual.gate_bias=-15e-1"]) == 0
    assert "highway: 1 stream, 2 branches per block; gate_scale 1.0, gate_bias -1.5" in capsys.readouterr().out

    config = load_config("nano", str(residual), ["residual.gate_scale=5e-1"])
    assert Config(**config.to_dict()) == config
    decoder, tokens = build_decoder(config.model, config.residual), random_tokens(2, 7)
    assert decoder.get_parameter("stack.blocks.0.pathway.gates.0.bias").item() == -1
    optimizer = torch.optim.AdamW(decoder.parameters())
    next_token_loss(decoder(tokens), tokens).backward()
    before = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
    optimizer.step()
    assert not [name for name, parameter in decoder.named_parameters() if torch.equal(parameter, before[name])]

    page = configuration_page.page()
    assert "### Options of `highway`" in page
    assert "| `gate_bias` | number | 0.0 | initial bias of the gate; negative values keep more of the stream |" in page
    with pytest.raises(ConfigError, match=r"residual\.gate_bias='wide' is not a finite number"):
        registry.resolve(ResidualConfig("highway", gate_bias="wide"))
    with pytest.raises(ConfigError, match=r"highway \(its options: gate_scale, gate_bias\): did you mean .*gate_bias"):
        registry.resolve(ResidualConfig("highway", gate_bia=1))


@pytest.mark.slow
@pytest.mark.usefixtures("highway")
def test_the_example_compiles_and_rounds_as_the_docs_say():
    config = load_config("nano", "standard", ["residual.method=highway"])
    decoder, tokens = build_decoder(config.model, config.residual), torch.arange(7)[None]
    wanted = torch.compile(decoder, backend="eager", fullgraph=True)(tokens).detach()
    # Each write halves what was there, so few branches count and their rounding is not averaged: 1.1 to 3.2 percent of
    # the logits over six seeds (the methods that ship: 0.7 to 1.0).
    assert (decoder.bfloat16()(tokens).float() - wanted).norm() < 0.05 * wanted.norm()

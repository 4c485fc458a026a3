"""Taps: watching changes no bit and leaves no trace, an intervention does what it says."""

import copy
import io
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from dualres.analyze.cka import StreamStates
from dualres.analyze.experts import RouterChoices
from dualres.analyze.gates import WriteGates
from dualres.analyze.norms import Norms
from dualres.analyze.retrieval import DepthWeights
from dualres.analyze.taps import eager, replacing, watching
from dualres.model.attention import RouterReport
from dualres.model.block import compile_blocks
from dualres.model.decoder import Decoder
from tests.small import FEEDFORWARDS, RESIDUALS, gradients, model_config, next_token_loss, random_tokens, stirred

TOKENS = random_tokens(2, 11)


def outcome(decoder: Decoder) -> dict[str, Tensor]:
    """Logits and gradients."""
    decoder.zero_grad()
    logits = decoder(TOKENS)
    next_token_loss(logits, TOKENS).backward()
    return {"logits": logits.detach(), **gradients(decoder)}


def everything() -> list[StreamStates | WriteGates | DepthWeights | Norms]:
    return [StreamStates(4), WriteGates(4), DepthWeights(), Norms()]


def structure(decoder: Decoder) -> list[tuple[str, int, int]]:
    """Every module with its identity and its hooks."""
    return [(name, id(module), len(module._forward_pre_hooks)) for name, module in decoder.named_modules()]


@pytest.mark.parametrize("feedforward", FEEDFORWARDS)
@pytest.mark.parametrize("name", RESIDUALS)
def test_watching_changes_no_bit(name: str, feedforward: str):
    decoder = stirred(model_config(feedforward), RESIDUALS[name], noise=0.1)
    wanted, before, names = outcome(decoder), structure(decoder), decoder.state_dict().keys()
    watchers = everything()
    with watching(decoder.stack, *watchers, RouterChoices()):
        watched = outcome(decoder)
        assert decoder.state_dict().keys() == names
    states, norms = watchers[0], watchers[3]
    assert isinstance(states, StreamStates)
    assert isinstance(norms, Norms)
    assert len(states.states()) == len(norms.arrays()["stream_rms"]) == 5  # it did see every layer
    assert watched.keys() == wanted.keys()
    assert all(torch.equal(watched[key], wanted[key]) for key in wanted)
    assert structure(decoder) == before
    again = outcome(decoder)
    assert all(torch.equal(again[key], wanted[key]) for key in wanted)


def pickled(decoder: Decoder) -> Decoder:
    file = io.BytesIO()
    torch.save(decoder, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_is_not_tapped(copied: Callable[[Decoder], Decoder]):
    """What is copied while an analysis runs is the model, not the analysis."""
    decoder = stirred(model_config("moe"), RESIDUALS["dar-block"], noise=0.1)
    wanted, norms, routers = outcome(decoder), Norms(), RouterChoices()
    with (
        replacing(next(iter(decoder.stack)), 1, torch.zeros_like),
        watching(decoder.stack, norms, routers),
        watching(decoder.stack, DepthWeights()),
    ):
        other = copied(decoder)
        found = outcome(other)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert other.state_dict().keys() == decoder.state_dict().keys()
    assert not norms.streams
    assert routers.arrays() == {}
    with watching(other.stack, norms):
        outcome(other)
    assert len(norms.arrays()["stream_rms"]) == 5


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(), torch._functorch.config.patch():  # what compile_blocks changes
        yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_blocks():
    """They are refused by name; run by their plain code they can be watched, and are compiled as before afterwards."""
    model = model_config(layers=2, width=16, heads=2, kv_heads=1)
    decoder = stirred(model, RESIDUALS["dar-full"])
    with torch.no_grad():
        plain = decoder(TOKENS)
        compile_blocks(decoder.stack)
        compiled, runs = decoder(TOKENS), [block.compiled_run for block in decoder.stack]
        for refused in (watching(decoder.stack), replacing(next(iter(decoder.stack)), 1, torch.zeros_like)):
            with pytest.raises(ValueError, match=r"without torch\.compile"):
                refused.__enter__()
        watcher = StreamStates(4)
        with eager(decoder.stack), watching(decoder.stack, watcher):
            assert torch.equal(decoder(TOKENS), plain)
        assert len(watcher.states()) == 2
        assert [block.compiled_run for block in decoder.stack] == runs
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(decoder(TOKENS), compiled)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_decoder():
    """`torch.compile` around the whole model meets the tap, and says what to do."""
    decoder = stirred(model_config(layers=2, width=16, heads=2, kv_heads=1), RESIDUALS["dar-full"])
    compiled = torch.compile(decoder, backend="eager", fullgraph=True)
    with torch.no_grad():
        wanted = compiled(TOKENS)
        with (
            pytest.raises(Exception, match=r"without torch\.compile"),
            watching(decoder.stack, StreamStates(4)),
        ):
            compiled(TOKENS)
        assert torch.equal(compiled(TOKENS), wanted)


@pytest.mark.parametrize("name", ["mhc-2", "dar-block", "dar-full"])
def test_an_intervention(name: str):
    """It changes what comes after it and nothing before, in its own `with` alone, also where the pass fails."""
    decoder = stirred(model_config(), RESIDUALS[name], noise=0.1)
    block, before = list(decoder.stack)[1], structure(decoder)
    given = []

    def doubled(streams: Tensor) -> Tensor:
        given.append(streams.clone())
        return 2 * streams

    with torch.no_grad():
        wanted = decoder(TOKENS)
        with replacing(block, 1, doubled):
            changed = decoder(TOKENS)
        assert len(given) == 1
        watcher = StreamStates(TOKENS.shape[1])
        with watching(decoder.stack, watcher):
            assert torch.equal(decoder(TOKENS), wanted)
        layer = sum(len(b.branches) for b in list(decoder.stack)[:1]) // 2
        assert torch.equal(given[0].flatten(1, 2), watcher.states()[layer])
        assert not torch.allclose(changed, wanted)
        with pytest.raises(ZeroDivisionError), replacing(block, 1, lambda streams: streams / (1 // 0)):
            decoder(TOKENS)
        assert structure(decoder) == before
        assert torch.equal(decoder(TOKENS), wanted)


def test_what_routers_choose():
    """The watcher's balance is what the model itself reports, and loads count every assignment."""
    decoder = stirred(model_config("moe"), RESIDUALS["dar-block"])
    report, router = RouterReport(), RouterChoices()
    with torch.no_grad(), watching(decoder.stack, router):
        decoder(TOKENS, report=report)
    found = router.arrays()
    load = found["expert_load"]
    reported = torch.stack([report.losses[layer] for layer in range(5)]).double()
    torch.testing.assert_close(found["auxiliary"], reported, rtol=1e-6, atol=0)
    torch.testing.assert_close(load.sum(1), torch.ones(5, dtype=torch.float64))
    assert load.min() < 1 / 6 < load.max()


@pytest.mark.parametrize("name", ["standard", "mhc-2", "attnres-block", "dar-block"])
def test_taps_around_taps(name: str):
    """Watchers in either order around an intervention, and interventions around each other."""
    decoder = stirred(model_config(), RESIDUALS[name], noise=0.1)
    block, before = list(decoder.stack)[1], structure(decoder)

    def halved(streams: Tensor) -> Tensor:
        return streams / 2

    layer = (len(next(iter(decoder.stack)).branches) + 1) // 2
    with torch.no_grad():
        clean = decoder(TOKENS)
        with replacing(block, 1, halved):
            wanted = decoder(TOKENS)
        inside, outside = everything(), everything()
        with watching(decoder.stack, *inside), replacing(block, 1, halved), watching(decoder.stack, *outside):
            assert torch.equal(decoder(TOKENS), wanted)
        for watchers in (inside, outside):
            states, gates, depth, norms = watchers
            assert isinstance(states, StreamStates)
            assert isinstance(gates, WriteGates)
            assert isinstance(depth, DepthWeights)
            assert isinstance(norms, Norms)
            assert len(states.states()) == len(norms.arrays()["stream_rms"]) == 5
            assert len(gates.arrays().get("write_gates", range(10))) == 10
            assert len(depth.arrays().get("retrieval", range(10))) == 10
        seen = [watchers[0].states()[layer] for watchers in (inside, outside) if isinstance(watchers[0], StreamStates)]
        assert torch.equal(seen[0] / 2, seen[1])
        with replacing(block, 1, halved), replacing(block, 1, lambda streams: 2 * streams):
            torch.testing.assert_close(decoder(TOKENS), clean)
        with replacing(block, 0, halved), replacing(block, 1, halved):
            assert not torch.allclose(decoder(TOKENS), wanted)
    assert structure(decoder) == before


def test_an_intervention_that_cannot_be():
    decoder = stirred(model_config(), RESIDUALS["dar-block"])
    block = next(iter(decoder.stack))
    for i in (-1, 4):
        with pytest.raises(ValueError, match=f"no branch {i}: use 0 to 3"), replacing(block, i, torch.zeros_like):
            pass
    with (
        torch.no_grad(),
        replacing(block, 1, lambda streams: streams[:1]),
        pytest.raises(ValueError, match="must return the same shape"),
    ):
        decoder(TOKENS)

"""One of the processes that run Megatron beside our decoder: `python -m tests.hub.megatron.shim … RANK FOLDER LAYOUT`.

Rank 0 writes FOLDER/results.json after every case: what went wrong in it, or nothing. The pytest side is
test_megatron.py.
"""

import dataclasses
import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, _get_param_groups, get_standard_config_overrides
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import nn

from dualres.hub.megatron import decay_overrides, export_weights, gpt_options, import_weights, with_vocabulary
from dualres.model.decoder import build_decoder
from dualres.train.optimizer import optimizer_groups
from tests.hub.megatron.compare import (
    BATCH,
    EXACT,
    LENGTH,
    METHODS,
    VOCABULARY,
    changed,
    differences,
    equal,
    future,
    gpt_models,
    megatron,
    small,
    stirred_decoder,
    their_logits,
)
from tests.hub.megatron.layouts import LAYOUTS, Layout
from tests.small import gradients, next_token_loss, random_tokens, relative_error

MAIN = ("standard", "attnres-block", "attnres-full", "dar-block", "dar-full")

Case = Callable[[Layout, Path], list[str]]  # -> what went wrong


def of_pathways(names: Any) -> set[str]:
    return {name for name in names if "pathway" in name or "readout" in name}


def method(residual: str, feedforward: str, dtype: torch.dtype, layout: Layout, folder: Path) -> list[str]:
    return equal(stirred_decoder(residual, small(feedforward, layout), dtype), layout)


def every_option(layout: Layout, folder: Path) -> list[str]:
    """All that a decoder may have and Megatron has too."""
    own = {"attention_bias": "qkv", "query_key_norm": True, "head_size": 12, "tied_embeddings": False}
    return equal(stirred_decoder("dar-block", small("dense", layout, **own)), layout)


def recomputed(feedforward: str, modules: list[str], layout: Layout, folder: Path) -> list[str]:
    """Megatron's selective recomputation, which lies within the branches."""
    decoder = stirred_decoder("dar-block", small(feedforward, layout))
    return equal(decoder, layout, recompute_granularity="selective", recompute_modules=modules)


def unmarked(layout: Layout, folder: Path) -> list[str]:
    """Without the mark `sequence_parallel`, the gradients of all parameters of a pathway are wrong, and no others."""
    decoder = stirred_decoder("dar-block", small("dense", layout))
    gpt = megatron(decoder, layout)
    for name, parameter in gpt.named_parameters():
        if of_pathways([name]):
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
    wrong = {name for name, error in differences(decoder, gpt, layout).items() if not error < EXACT}
    return [
        f"{name} should {'' if name in wrong else 'not '}be right"
        for name in wrong ^ {f"the gradient of {name}" for name in of_pathways(gradients(decoder))}
    ]


def fresh(layout: Layout, folder: Path) -> list[str]:
    """A pathway starts as in a decoder of ours, and two models of one spec share nothing."""
    decoder = build_decoder(small("dense", layout), METHODS["dar-block"], seed=7)
    first, second = gpt_models(2, decoder, layout, seed=7)
    state, started = decoder.state_dict(), export_weights(first)
    shared = {p.data_ptr() for p in first.parameters()} & {p.data_ptr() for p in second.parameters()}
    lost = changed({n: state[n] for n in of_pathways(state)}, {n: started[n] for n in of_pathways(started)})
    return lost + [f"two models share {len(shared)} tensors"] * bool(shared)


def hooks(residual: str, layout: Layout, folder: Path) -> list[str]:
    """Megatron waits for gathered parameters in the hooks before `forward` of the modules that have them."""
    seen: set[tuple[nn.Module, int]] = set()  # and with how many arguments
    gpt = megatron(build_decoder(small("moe", layout), METHODS[residual]), layout)
    for module in gpt.modules():
        for named in (False, True):
            module.register_forward_pre_hook(lambda module, *given: seen.add((module, len(given))), with_kwargs=named)
    their_logits(gpt, random_tokens(BATCH, LENGTH, VOCABULARY))
    owners = {name: module for name, module in gpt.named_modules() if list(module.parameters(recurse=False))}
    return [
        f"the hooks of {name} with {count} arguments were not called"
        for name, module in owners.items()
        for count in (1, 2)
        if (module, count) not in seen
    ]


def decay(residual: str, feedforward: str, layout: Layout, folder: Path) -> list[str]:
    """Under Megatron's optimizer those parameters decay that do under ours."""
    own = {"attention_bias": "qkv", "query_key_norm": True, "tied_embeddings": False}
    decoder = build_decoder(small(feedforward, layout, **own), METHODS[residual])
    gpt, settings = megatron(decoder, layout), OptimizerConfig(optimizer="adam", lr=1.0, weight_decay=1.0)
    overrides = {**get_standard_config_overrides(settings), **decay_overrides()}
    theirs = {p: g["wd_mult"] for g in _get_param_groups([gpt], settings, overrides) for p in g["params"]}
    ours = {p: g["weight_decay"] for g in optimizer_groups(decoder, weight_decay=1.0) for p in g["params"]}
    found = export_weights(gpt, lambda parameter: torch.full_like(parameter, theirs[parameter]))  # by our names
    return [
        f"{name} should {'' if ours[parameter] else 'not '}decay"
        for name, parameter in decoder.named_parameters()
        if not (found[name] == ours[parameter]).all()
    ]


def bfloat16(layout: Layout, folder: Path) -> list[str]:
    """As near to float32 as our decoder in bfloat16: the two round in other places, so they are not equal."""
    found, tokens = [], random_tokens(BATCH, LENGTH, VOCABULARY)
    for residual in ("standard", "mhc-2", "dar-block"):
        whole, ours = (stirred_decoder(residual, small("dense", layout), d) for d in (torch.float32, torch.bfloat16))
        whole.load_state_dict(ours.state_dict())
        gpt = megatron(ours, layout)
        logits = {"float32": whole(tokens), "ours": ours(tokens), "theirs": their_logits(gpt, tokens)}
        for each in logits.values():
            next_token_loss(each.float(), tokens).backward()
        moves = {"float32": gradients(whole), "ours": gradients(ours)}
        moves["theirs"] = export_weights(gpt, lambda p: p.main_grad)  # type: ignore[attr-defined]
        joined = {who: torch.cat([of[n].float().flatten() for n in moves["ours"]]) for who, of in moves.items()}
        for name, of in (("logits", logits), ("gradients", joined)):
            error, limit = (relative_error(of[who], of["float32"]) for who in ("theirs", "ours"))
            found += [f"{name} of {residual} are off by {error:.1e}, ours by {limit:.1e}"] * (not error < 1.5 * limit)
    return found


def cached(layout: Layout, folder: Path) -> list[str]:
    """A token after others that Megatron has in its cache of keys and values."""
    decoder = stirred_decoder("dar-block", small("dense", layout))
    gpt = megatron(decoder, layout).eval()
    tokens, known = random_tokens(BATCH, LENGTH, VOCABULARY), LENGTH - 1
    context, positions = StaticInferenceContext(BATCH, LENGTH), torch.arange(LENGTH).expand(BATCH, -1)
    with torch.no_grad():
        predict = partial(gpt, inference_context=context, runtime_gather_output=True)
        predict(tokens[:, :known], positions[:, :known], future(known))
        context.increment_sequence_len_offset(known)
        logits = predict(tokens[:, known:], positions[:, known:], None)
        error = relative_error(logits[:, -1], decoder(tokens)[:, -1])
    return [f"the logits are off by {error:.1e}"] * (not error < EXACT)


def padded(layout: Layout, folder: Path) -> list[str]:
    """A vocabulary that Megatron pads: the logits of our tokens are ours, and so are the weights that come back."""
    decoder = stirred_decoder("dar-block", small("dense", layout, tied_embeddings=False))
    larger = build_decoder(dataclasses.replace(decoder.config, vocab_size=128), METHODS["dar-block"]).double()
    gpt, tokens = megatron(larger, layout), random_tokens(BATCH, LENGTH, VOCABULARY)
    import_weights(gpt, with_vocabulary(decoder.state_dict(), 128))
    error = relative_error(their_logits(gpt, tokens)[..., :VOCABULARY], decoder(tokens))
    lost = changed(decoder.state_dict(), with_vocabulary(export_weights(gpt), VOCABULARY))
    return lost + [f"the logits are off by {error:.1e}"] * (not error < EXACT)


def saved(layout: Layout, folder: Path) -> list[str]:
    """Megatron's distributed checkpoint of a model, read by another."""
    decoder, checkpoint = stirred_decoder("dar-block", small("dense", layout)), folder / "checkpoint"
    first, second = gpt_models(2, decoder, layout)
    import_weights(first, decoder.state_dict())
    if dist.get_rank() == 0:
        checkpoint.mkdir()
    dist.barrier()
    dist_checkpointing.save(first.sharded_state_dict(), str(checkpoint))
    second.load_state_dict(dist_checkpointing.load(second.sharded_state_dict(), str(checkpoint)))
    return changed(decoder.state_dict(), export_weights(second))


def other_weights(layout: Layout, folder: Path) -> list[str]:
    """Weights of another model are refused by the name of a tensor."""
    decoder = stirred_decoder("dar-block", small("dense", layout))
    (gpt,) = gpt_models(1, decoder, layout)
    state, found = decoder.state_dict(), []
    lacking = {name: tensor for name, tensor in state.items() if name != "norm.weight"}
    misshapen = {**state, "norm.weight": torch.ones(8)}
    headless = GPTModel(gpt.config, gpt.transformer_layer_spec, **gpt_options(decoder.config), pre_process=False)
    sparse = stirred_decoder("dar-block", small("moe", layout))
    (experts,) = gpt_models(1, sparse, layout)
    fewer = {name: tensor[:-1] if tensor.dim() == 3 else tensor for name, tensor in sparse.state_dict().items()}
    for name, model, given, words in (
        ("lacking", gpt, lacking, "norm.weight is missing from the state dict"),
        ("foreign", gpt, {**state, "norm.bias": torch.ones(8)}, "norm.bias is missing from the Megatron model"),
        ("misshapen", gpt, misshapen, "decoder.final_layernorm.weight is (32,) in the Megatron model and (8,) in"),
        ("padded", gpt, with_vocabulary(state, 128), "import `with_vocabulary(state, 96)`"),
        ("headless", headless, state, "pre_process=False omits"),
        ("fewer", experts, fewer, "is 6 in the Megatron model and 5 in the state dict"),
    ):
        try:
            import_weights(model, given)
            found.append(f"{name} weights were taken")
        except ValueError as error:
            found += [f"{name}: {error}"] * (words not in str(error))
    return found


def cases(name: str) -> dict[str, Case]:
    """Megatron itself refuses to train experts on ranks that share tensors and not tokens."""
    found: dict[str, Case] = {}
    feedforwards = {"tp2": ["dense"], "ep2": ["moe"], "tp2-sp-ep2": ["moe"]}.get(name, ["dense", "moe"])
    for feedforward in feedforwards:
        for residual in METHODS if name == "tp1" and feedforward == "dense" else MAIN:
            found[f"{residual}-{feedforward}"] = partial(method, residual, feedforward, torch.float64)
        for residual in ("attnres-block", "dar-block"):
            found[f"{residual}-{feedforward}-float32"] = partial(method, residual, feedforward, torch.float32)
    if name == "tp1":
        found |= {"fresh": fresh, "bfloat16": bfloat16, "cached": cached, "other weights": other_weights}
        found |= {f"hooks-{residual}": partial(hooks, residual) for residual in METHODS}
        found |= {f"decay-{residual}": partial(decay, residual, "dense") for residual in METHODS}
        found["decay-moe"] = partial(decay, "dar-block", "moe")
    if name == "tp2-sp":
        found |= {"every option": every_option, "unmarked": unmarked, "saved": saved, "padded": padded}
        found["recomputed-dense"] = partial(recomputed, "dense", ["core_attn", "layernorm", "mlp"])
        found["recomputed-moe"] = partial(recomputed, "moe", ["core_attn", "layernorm", "moe"])
    return found


def main(rank: int, folder: Path, name: str) -> None:
    layout = LAYOUTS[name]
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"  # no port to choose, none to collide
    dist.init_process_group("gloo", rendezvous, timedelta(seconds=300), world_size=layout.ranks, rank=rank)
    parallel_state.initialize_model_parallel(**layout.sizes())
    model_parallel_cuda_manual_seed(1)
    results = {case: ["did not run"] for case in cases(name)}
    for case, check in cases(name).items():
        try:
            results[case] = check(layout, folder)
        except Exception:
            results[case] = [traceback.format_exc()]
        if rank == 0:
            (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()  # without it a process may leave while the other still talks to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])

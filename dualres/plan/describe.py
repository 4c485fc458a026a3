"""One model on one page: its blocks, and its cost in parameters, flops and residual state."""

from dataclasses import asdict
from itertools import accumulate
from typing import Any

from dualres.config.schema import Config
from dualres.model import accounting
from dualres.model.decoder import Decoder, build_decoder
from dualres.residual import registry
from dualres.util.progress import plural, short
from dualres.util.tables import table

BFLOAT16 = 2  # bytes
H800_BANDWIDTH = 3.35e12  # bytes per second, from its data sheet


def describe(config: Config) -> dict[str, Any]:
    """Everything that `dualres describe` shows, as plain data."""
    decoder = build_decoder(config.model, config.residual, device="meta")
    places = registry.places(2 * config.model.layers, config.residual)
    options = registry.resolve(config.residual)
    keeps_history = next(iter(decoder.stack)).pathway.keeps_history
    ends = [0, *accumulate(place.branches for place in places)]
    blocks = [
        {
            "block": b,
            "branches": [ends[b - 1] + 1, ends[b]],
            "sees": [0 if keeps_history else b - 1, b - 1],
            "parameter_sets": len(set(place.set_of_branch)) if "share_parameters" in options else 0,
            "parameters": sum(p.numel() for p in block.pathway.parameters()),
        }
        for b, (place, block) in enumerate(zip(places, decoder.stack, strict=True), start=1)
    ]
    return {
        "model": asdict(config.model),
        "residual": {
            "method": config.residual.method,
            "streams": decoder.stack.streams,
            "branches_per_block": places[0].branches,
            **options,
        },
        "blocks": blocks,
        "readout": {
            "sees": [0 if keeps_history else len(places), len(places)],
            "parameters": sum(p.numel() for p in decoder.stack.readout.parameters()),
        },
        **counts(decoder),
        "residual_state_bytes_per_token": {
            **accounting.state_bytes_per_token(decoder)._asdict(),
            "dtype": "bfloat16",
        },
        "residual_traffic": _traffic(config, accounting.residual_traffic(decoder)),
    }


def counts(decoder: Decoder) -> dict[str, dict[str, int]]:
    count, flops = accounting.parameters(decoder), accounting.flops_per_token(decoder)
    return {
        "parameters": {**count._asdict(), "excluding_vocabulary": count.total - count.vocabulary},
        "flops_per_token": {**flops._asdict(), "forward": flops.total, "training": 3 * flops.total},
    }


def parameter_lines(count: dict[str, int]) -> list[str]:
    return [
        f"parameters            {count['total']:,} with vocabulary, {count['excluding_vocabulary']:,} without",
        f"  active per token    {count['active']:,}",
        f"  residual pathway    {count['residual']:,} ({count['residual'] / count['excluding_vocabulary']:.3%})",
    ]


def _traffic(config: Config, traffic: accounting.Traffic) -> dict[str, float]:
    """Stream elements moved by the fused operators, and a lower bound of the time that takes on an H800."""
    branches, row = 2 * config.model.layers, BFLOAT16 * config.model.width
    forward, backward = traffic.forward, traffic.backward
    return {
        "forward_d_per_branch": forward / branches,
        "backward_d_per_branch": backward / branches,
        "forward_bytes_per_token": row * forward,
        "backward_bytes_per_token": row * backward,
        "h800_microseconds_per_token": 1e6 * row * (forward + backward) / H800_BANDWIDTH,
    }


def as_text(description: dict[str, Any], title: str) -> str:
    """The page for a terminal."""
    model, residual, moe = description["model"], description["residual"], description["model"]["moe"]
    options = ", ".join(f"{k} {v}" for k, v in residual.items() if k not in ("method", "streams", "branches_per_block"))
    feedforward = (
        f"{moe['experts']} experts of width {moe['expert_width']}, {moe['active']} active"
        if moe
        else f"feed-forward width {model['ffn_width']}"
    )
    lines = [
        title,
        f"  decoder    {model['layers']} layers, width {model['width']}, heads {model['heads']} / {model['kv_heads']}, "
        f"{feedforward}, vocabulary {model['vocab_size']:,} {'tied' if model['tied_embeddings'] else 'untied'}",
        f"  residual   {residual['method']}: {plural(residual['streams'], 'stream')}, "
        f"{plural(residual['branches_per_block'], 'branch', 'es')} per block{'; ' if options else ''}{options}",
        "",
    ]
    rows = []
    for block in description["blocks"]:
        branches, states = "{}–{}".format(*block["branches"]), _states(*block["sees"])
        rows.append([block["block"], branches, states, block["parameter_sets"] or "", block["parameters"]])
    readout = description["readout"]
    rows.append(["readout", "", _states(*readout["sees"]), "", readout["parameters"]])
    lines += [table(["block", "branches", "sees", "parameter sets", "residual parameters"], rows), ""]

    count, flops = description["parameters"], description["flops_per_token"]
    state, traffic = description["residual_state_bytes_per_token"], description["residual_traffic"]
    lines += [
        *parameter_lines(count),
        f"flops per token       {_flops(flops['forward'])} forward, about {_flops(flops['training'])} in training",
        f"  branches            {_flops(flops['branches'])}",
        f"  attention           {_flops(flops['attention'])} averaged over a context of {model['context']}",
        f"  vocabulary          {_flops(flops['vocabulary'])}",
        f"  residual pathway    {_flops(flops['residual'])} ({flops['residual'] / flops['forward']:.3%})",
        f"residual state        {state['history']:,} bytes per token in bfloat16, {state['live']:,} of them live",
        f"residual traffic      {traffic['forward_d_per_branch']:.1f}d per token and branch forward, "
        f"{traffic['backward_d_per_branch']:.1f}d backward",
        f"  in bfloat16         {traffic['forward_bytes_per_token'] / 1e3:,.0f} kB per token forward, "
        f"{traffic['backward_bytes_per_token'] / 1e3:,.0f} kB backward",
        f"  on an H800          {traffic['h800_microseconds_per_token']:.3f} µs per token at 3.35 TB/s: "
        "an estimate from bytes moved, not measured on a GPU",
    ]
    return "\n".join(lines)


def _states(first: int, last: int) -> str:
    return f"H{first}" if first == last else f"H{first} … H{last}"


def _flops(n: int) -> str:
    return short(n).replace("B", "G")

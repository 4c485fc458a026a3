"""One model on one page: its blocks, and its cost in parameters, flops and residual state."""

from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from dualres.config.schema import Config
from dualres.model import accounting
from dualres.model.decoder import Decoder, build_decoder
from dualres.residual import registry
from dualres.util.progress import plural, short
from dualres.util.tables import table
from dualres.util.templates import environment

TEMPLATES = Path(__file__).parent / "templates"
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
    rows: list[list[Any]] = []
    for block in description["blocks"]:
        branches, states = "{}–{}".format(*block["branches"]), _states(*block["sees"])
        rows.append([block["block"], branches, states, block["parameter_sets"] or "", block["parameters"]])
    readout = description["readout"]
    rows.append(["readout", "", _states(*readout["sees"]), "", readout["parameters"]])
    blocks = table(["block", "branches", "sees", "parameter sets", "residual parameters"], rows)
    return page("describe.txt", **{**description, "blocks": blocks}, title=title)


def _states(first: int, last: int) -> str:
    return f"H{first}" if first == last else f"H{first} … H{last}"


def page(template: str, **values: Any) -> str:
    """A text for a terminal: a template, filled in. The filter `spec` is Python's `format`."""
    pages = environment(TEMPLATES, escape=str)
    pages.filters |= {"spec": format, "short": short, "plural": plural}
    return pages.get_template(template).render(values).removesuffix("\n")

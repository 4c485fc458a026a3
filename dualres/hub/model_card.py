"""Model cards: architecture, training data, measurements, and how to load the model."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from dualres.model.accounting import parameters
from dualres.model.decoder import Decoder
from dualres.util.optional_dependencies import install
from dualres.util.version import VERSION


def card(
    title: str,
    decoder: Decoder,
    origin: Sequence[str],
    measurements: Mapping[str, Any],
    folder: str,
    form: str = "dualres",
) -> str:
    """Markdown with the front matter for the Hub. `origin`: paragraphs about where the weights come from."""
    model, residual, count = decoder.config, decoder.residual_config, parameters(decoder)
    front = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["dualres", residual.method]}
    options = ", ".join(f"{name} {value}" for name, value in residual.options)
    block = "" if residual.branches_per_block is None else f", {residual.branches_per_block} branches per block"
    feedforward = (
        f"feed-forward {model.ffn_width}"
        if model.moe is None
        else f"{model.moe.experts} experts of width {model.moe.expert_width}, {model.moe.active} active"
    )
    rows = {
        "residual pathway": f"`{residual.method}`{block}" + (f"; {options}" if options else ""),
        "decoder": f"{model.layers} layers, width {model.width}, heads {model.heads} / {model.kv_heads}, {feedforward}",
        "vocabulary": f"{model.vocab_size:,}, {'tied' if model.tied_embeddings else 'untied'}",
        "context": f"{model.context:,} tokens",
        "parameters": f"{count.total:,}, {count.total - count.vocabulary:,} without vocabulary",
    }
    if model.moe is not None:
        rows["active per token"] = f"{count.active:,}"
    sections = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# {title}",
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]),
        *origin,
    ]
    if measurements:
        table = "\n".join(
            ["| measured | |", "|---|---|", *(f"| {name} | {value} |" for name, value in measurements.items())]
        )
        sections.append(f"## Measured\n\n{table}")
    imports, remark = LOADING[form]
    sections.append(HOW_TO_LOAD.format(folder=folder, imports=imports, remark=remark, version=VERSION))
    return "\n\n".join(sections) + "\n"


LOADING = {
    "dualres": (
        f"import dualres.hub  # registers the model with transformers; {install('hub')} in a clone of dualres\n",
        "Without dualres installed, pass `trust_remote_code=True`: the `.py` files in this folder are the same code\n"
        "without the fused operators. ",
    ),
    "llama": ("", ""),  # transformers has the code
}
HOW_TO_LOAD = """## How to load it

```python
{imports}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
prompt = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=40)[0]))
```

{remark}Written by dualres {version}."""

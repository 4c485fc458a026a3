"""Convert a pretrained Llama-family checkpoint to any residual pathway, with unchanged outputs at initialization.

With queries and gate scales at 0, every method reads the standard residual's state divided by a number c, which a norm
with eps / c² cancels exactly. The eps of all reads are stored in the config.
"""
# B batch  T tokens

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import nn

from dualres.config.loading import load_residual
from dualres.config.schema import ConfigError, ModelConfig, ResidualConfig
from dualres.hub import llama, model_card, model_folder, register
from dualres.hub.open_model import open_model
from dualres.model.decoder import Decoder, build_decoder, part_generator, reset_part
from dualres.residual import registry
from dualres.residual.gate import Gate
from dualres.util.atomic_files import new_folder
from dualres.util.errors import ModelError
from dualres.util.optional_dependencies import need
from dualres.util.progress import Show, silent

transformers = need("transformers", "hub", "the conversion of a checkpoint")

TOLERANCE = 1e-4  # relative difference of logits in float32
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CHECKED = (2, 64)  # sequences and tokens on which source and result are compared
ALLOWED_OVERRIDES = ("residual.", "model.context=")
GENERATION = "generation_config.json"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


class Source(NamedTuple):
    """A checkpoint and its config, as `transformers` and as dualres describe it."""

    folder: Path
    config: Any  # transformers'
    model: ModelConfig
    tensors: dict[str, model_folder.Stored]  # by Llama's names


class Converted(NamedTuple):
    """The converted model and its difference from the source."""

    model: Any  # DualResForCausalLM
    difference: float | None  # relative, of the logits; None if not measured


def convert(
    source: str,
    out: Path,
    residual: str,
    overrides: Sequence[str] = (),
    *,
    seed: int = 42,
    check: bool = True,
    show: Show = silent,
) -> Converted:
    """Convert the checkpoint `source` to a dualres model with the pathway `residual`, and write it to `out`.

    `check` compares the logits of both models, in memory and in float32, and raises if they differ.
    """
    model_folder.check_new(out)
    register()
    from dualres.hub.hf_model import DualResForCausalLM

    checkpoint = read_source(model_folder.local_folder(source))
    model, pathway = target(checkpoint, residual, overrides)
    decoder = load_decoder(checkpoint, model, pathway, seed, show)
    tokens = {name: value for name in TOKENS if (value := getattr(checkpoint.config, name, None)) is not None}
    converted = DualResForCausalLM.of(decoder, **tokens).eval()
    if (checkpoint.folder / GENERATION).is_file():
        converted.generation_config = _generation_config(checkpoint.folder / GENERATION)
    difference, measurements = None, {}
    if check:
        show("comparing with the source")
        difference = relative_difference(checkpoint, converted)
        measurements["relative difference of logits from the source, float32"] = f"{difference:.1e}"
        if not difference <= TOLERANCE:
            raise ModelError(
                f"the converted model's logits differ from those of {source} by {difference:.1e}, more than "
                f"{TOLERANCE:g}: nothing was written. This is a bug in dualres: please report the model"
            )
    name = (Path(source).resolve() if Path(source).is_dir() else Path(source)).name
    origin = (
        f"Converted from `{name}` ({checkpoint.config.model_type}). Its weights are unchanged; the residual pathway is "
        "initialized to compute the same as the standard residual, and is not trained yet."
    )
    text = model_card.card(f"{name} with {pathway.method}", decoder, [origin], measurements, out.name)
    show(f"writing {out}")
    with new_folder(out) as folder:
        model_folder.write_model(converted, model_folder.load_tokenizer(checkpoint.folder), text, folder)
    return Converted(converted, difference)


def _generation_config(path: Path) -> Any:
    """The source's generation config. Old ones set a temperature without sampling, which can no longer be saved."""
    with model_folder.read_by_transformers(path):
        config = transformers.GenerationConfig.from_pretrained(path.parent)
        try:
            config.validate(strict=True)
        except ValueError:
            config.do_sample = True
            config.validate(strict=True)
    return config


def read_source(folder: Path) -> Source:
    """Check a Llama-family checkpoint, or a dualres model with the standard residual, without loading its weights."""
    saved = model_folder.read_saved(folder)
    kind = saved.config.get("model_type")
    if kind != model_folder.MODEL_TYPE and str(kind) not in llama.ARCHITECTURES:
        raise ModelError(f"{folder} is a {kind} model: dualres can convert {', '.join(llama.ARCHITECTURES)}")
    with model_folder.read_by_transformers(folder / model_folder.CONFIG):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if kind == model_folder.MODEL_TYPE:
            return Source(folder, config, *_read_dualres(saved))
        try:
            model = llama.model_config(config, str(folder))
        except ConfigError as error:
            raise ModelError(f"{folder} is not supported by the dualres decoder: {error}") from None
    repeated = {"lm_head.weight"} if model.tied_embeddings else set()  # a copy of the embedding table
    tensors = {k: v for k, v in saved.tensors.items() if k not in repeated and not k.endswith(model_folder.NOT_LEARNED)}
    return Source(folder, config, model, tensors)


def _read_dualres(saved: model_folder.Saved) -> tuple[ModelConfig, dict[str, model_folder.Stored]]:
    """Config and tensors of a dualres model, the tensors by Llama's names."""
    decoder = model_folder.empty_decoder(saved)
    model, method = decoder.config, decoder.residual_config.method
    for problem, is_present in (
        (f"the residual {method}", method != "standard"),
        ("experts", model.moe is not None),
        ("a factorized vocabulary (model.embedding_width)", model.embedding_width not in (None, model.width)),
    ):
        if is_present:
            raise ModelError(f"{saved.folder} has {problem}: only dense `standard` models can be converted")
    names = {f"{model_folder.PREFIX}{ours}": theirs for ours, theirs in llama.tensor_names(decoder).items()}
    return model, {names.get(name, name): stored for name, stored in saved.tensors.items()}


def target(source: Source, residual: str, overrides: Sequence[str] = ()) -> tuple[ModelConfig, ResidualConfig]:
    """The configs of the converted model, with gate scale 0 and the eps that make every read exact."""
    for override in overrides:
        if override.startswith("residual.method="):
            raise ConfigError(f"--set {override}: choose the pathway with --residual")
        if not override.startswith(ALLOWED_OVERRIDES):
            raise ConfigError(f"--set {override} would change the source model: set only residual.… or model.context")
    model, pathway = load_residual(residual, source.model, overrides)
    window = llama.attention_window(source.config)
    if window is not None and window < model.context:
        raise ModelError(
            f"{source.folder} has sliding_window={window} and a context of {model.context}, but dualres has no sliding "
            f"window: use --set model.context={window}, up to which both are the same"
        )
    if "gate_scale" in registry.resolve(pathway):
        if gate_scale := dict(pathway.options).get("gate_scale"):
            raise ConfigError(
                f"residual.gate_scale={gate_scale}: outputs are equal only with gate scale 0, from which the gates "
                "learn: remove it"
            )
        pathway = ResidualConfig(**{**pathway.to_dict(), "gate_scale": 0.0})
    pathway = registry.explicit(pathway, 2 * model.layers)
    try:
        divisors = build_decoder(model, pathway, device="meta").stack.start_divisors()
    except NotImplementedError:
        raise ConfigError(
            f"the residual method {pathway.method} has no start_divisor, so its outputs cannot be those of the source: "
            "define it in the pathway, or train from new weights"
        ) from None
    if any(c != 1 for c in divisors):
        model = dataclasses.replace(model, read_eps=tuple(model.eps_of_read(i) / c**2 for i, c in enumerate(divisors)))
    return model, pathway


def load_decoder(
    source: Source, model: ModelConfig, pathway: ResidualConfig, seed: int, show: Show = silent
) -> Decoder:
    """A decoder with the source's weights, in the source's dtype, and newly initialized pathway weights."""
    decoder = build_decoder(model, pathway, device="meta")
    names = llama.tensor_names(decoder)
    shapes = {names[name]: tuple(p.shape) for name, p in decoder.named_parameters() if name in names}
    model_folder.check_tensors(source.tensors, shapes, source.folder)
    dtypes = {source.tensors[name].dtype for name in shapes}
    if dtypes - DTYPES.keys():
        raise ModelError(f"{source.folder} has {', '.join(sorted(dtypes))} weights: use float32, bfloat16 or float16")
    decoder.to(DTYPES[dtypes.pop()] if len(dtypes) == 1 else torch.float32).to_empty(device="cpu")
    branches = {id(branch) for block in decoder.stack for branch in block.branches}
    for part, name in decoder.parts():
        if id(part) not in branches and part is not decoder.vocabulary and part is not decoder.norm:
            reset_part(part, name, model.init_std, seed)
            _init_gates(part, name, seed)
    parameters = {source.tensors[names[name]].name: p.data for name, p in decoder.named_parameters() if name in names}
    files = model_folder.weight_files(source.folder)
    for number, file in enumerate(files):
        show(f"reading {file.name}", number / len(files))
        for name, tensor in load_file(file).items():
            if name in parameters:
                parameters[name].copy_(tensor)
    return decoder


def _init_gates(part: nn.Module, name: str, seed: int) -> None:
    """Initialize gate weights with N(0, 1/(J·D)), so that logits move as much as their scale does, at any width.

    The scale is 0 and learns first; with the usual N(0, 0.02) the streams of a narrow model diverge slowly.
    """
    generator = part_generator(part, name, seed)
    for gate in (module for module in part.modules() if isinstance(module, Gate)):
        nn.init.normal_(gate.weight, std=gate.weight[0].numel() ** -0.5, generator=generator)


@torch.no_grad()
def relative_difference(source: Source, converted: Any) -> float:
    """The RMS of the logits' difference divided by the RMS of the source's logits, both computed in float32."""
    original = open_model(source.folder, dtype="float32", architectures="any")
    ours = converted if converted.dtype == torch.float32 else copy.deepcopy(converted).float()
    rows, length = CHECKED
    shape = rows, min(length, converted.config.max_position_embeddings)
    tokens = torch.randint(converted.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    logits = original.logits(tokens)
    if not logits.isfinite().all():
        raise ModelError(f"{source.folder} itself has logits that are not finite: restore its weights")
    return float((ours(tokens).logits - logits).square().mean().sqrt() / logits.square().mean().sqrt())

"""Convert a pretrained checkpoint of Llama's family to any residual pathway, with equal outputs at the start.

At the zero start (queries and gate scales 0) every method reads the standard residual's state over a number c, which a
norm with eps / c² removes exactly. The eps of all reads are stored in the config.
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
from dualres.hub import llama, model_card, model_folder, register, safetensors_files
from dualres.hub.open_model import open_model
from dualres.model.decoder import Decoder, build_decoder, part_generator, reset_part
from dualres.residual import registry
from dualres.residual.gates import Gate
from dualres.util.atomic_files import new_folder
from dualres.util.errors import ModelError
from dualres.util.optional_dependencies import need
from dualres.util.progress import Show, silent

transformers = need("transformers", "hub", "the conversion of a checkpoint")

TOLERANCE = 1e-4  # relative difference of logits in float32
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CHECKED = (2, 64)  # sequences and tokens that source and result are compared on
MAY_SET = ("residual.", "model.context=")
GENERATION = "generation_config.json"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


class Source(NamedTuple):
    """A checkpoint, and what its decoder is in our terms."""

    folder: Path
    config: Any  # transformers'
    model: ModelConfig
    tensors: dict[str, safetensors_files.Stored]  # under Llama's names


class Converted(NamedTuple):
    """The converted model, and how far it is from its source."""

    model: Any  # DualResForCausalLM
    difference: float | None  # relative, of the logits; None where it was not measured


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
    """Write the checkpoint `source` to `out` as a dualres model on the pathway `residual`, ready for further training.

    `check` compares the logits of both in float32 and refuses a difference; it holds both models in memory.
    """
    from dualres.hub.hf_model import DualResForCausalLM

    model_folder.check_new(out)
    register()
    given = read_source(model_folder.local_folder(source))
    model, pathway = target(given, residual, overrides)
    decoder = decoder_of(given, model, pathway, seed, show)
    tokens = {name: value for name in TOKENS if (value := getattr(given.config, name, None)) is not None}
    made = DualResForCausalLM.of(decoder, **tokens).eval()
    if (given.folder / GENERATION).is_file():
        made.generation_config = _generation(given.folder / GENERATION)
    difference, measured = None, {}
    if check:
        show("comparing with the source")
        difference = relative_difference(given, made)
        measured["relative difference of logits from the source, float32"] = f"{difference:.1e}"
        if not difference <= TOLERANCE:
            raise ModelError(
                f"the converted model's logits differ from those of {source} by {difference:.1e}, more than "
                f"{TOLERANCE:g}: nothing was written. This is a bug in dualres: please report the model"
            )
    name = (Path(source).resolve() if Path(source).is_dir() else Path(source)).name
    origin = (
        f"Converted from `{name}` ({given.config.model_type}). Its weights are unchanged; the residual pathway starts "
        "where it computes what the standard residual computes, and is not trained yet."
    )
    text = model_card.card(f"{name} on {pathway.method}", decoder, [origin], measured, out.name)
    show(f"writing {out}")
    with new_folder(out) as folder:
        model_folder.write_model(made, model_folder.load_tokenizer(given.folder), text, folder)
    return Converted(made, difference)


def _generation(path: Path) -> Any:
    """The source's generation settings. Old ones set a temperature without sampling, which can no longer be saved."""
    with model_folder.read_by_transformers(path):
        settings = transformers.GenerationConfig.from_pretrained(path.parent)
        try:
            settings.validate(strict=True)
        except ValueError:
            settings.do_sample = True
            settings.validate(strict=True)
    return settings


def read_source(folder: Path) -> Source:
    """A checkpoint of Llama's family, or a dualres model with the standard residual, checked and not loaded."""
    saved = model_folder.read_saved(folder)
    kind = saved.config.get("model_type")
    if kind != model_folder.MODEL_TYPE and str(kind) not in llama.ARCHITECTURES:
        raise ModelError(f"{folder} is a {kind} model: dualres converts {', '.join(llama.ARCHITECTURES)}")
    with model_folder.read_by_transformers(folder / model_folder.CONFIG):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if kind == model_folder.MODEL_TYPE:
            return Source(folder, config, *_ours(saved))
        try:
            model = llama.model_config(config, str(folder))
        except ConfigError as error:
            raise ModelError(f"{folder} does not fit our decoder: {error}") from None
    repeated = {"lm_head.weight"} if model.tied_embeddings else set()  # stored beside the table that it is
    tensors = {k: v for k, v in saved.tensors.items() if k not in repeated and not k.endswith(model_folder.NOT_LEARNED)}
    return Source(folder, config, model, tensors)


def _ours(saved: model_folder.Saved) -> tuple[ModelConfig, dict[str, safetensors_files.Stored]]:
    """Config and tensors of a dualres model, the tensors under Llama's names."""
    decoder = model_folder.empty_decoder(saved)
    model, method = decoder.config, decoder.residual_config.method
    for problem, wrong in (
        (f"the residual {method}", method != "standard"),
        ("experts", model.moe is not None),
        ("a factorized vocabulary (model.embedding_width)", model.embedding_width not in (None, model.width)),
    ):
        if wrong:
            raise ModelError(f"{saved.folder} has {problem}: only dense models with the standard residual convert")
    names = {f"{model_folder.PREFIX}{ours}": theirs for ours, theirs in llama.tensor_names(decoder).items()}
    return model, {names.get(name, name): stored for name, stored in saved.tensors.items()}


def target(source: Source, residual: str, overrides: Sequence[str] = ()) -> tuple[ModelConfig, ResidualConfig]:
    """The configs of the converted model: gates closed, and the eps that make every read exact."""
    for override in overrides:
        if override.startswith("residual.method="):
            raise ConfigError(f"--set {override}: name the pathway with --residual")
        if not override.startswith(MAY_SET):
            raise ConfigError(
                f"--set {override}: a converted model is what its source is; set residual.… or model.context"
            )
    model, pathway = load_residual(residual, source.model, overrides)
    window = llama.window_of_attention(source.config)
    if window is not None and window < model.context:
        raise ModelError(
            f"{source.folder} looks back {window} tokens (sliding_window) and has a context of {model.context}: "
            f"our attention looks back all the way, which is the same up to there: use --set model.context={window}"
        )
    if "gate_scale" in registry.resolve(pathway):
        if given := dict(pathway.options).get("gate_scale"):
            raise ConfigError(
                f"residual.gate_scale={given}: outputs are equal at the start with gate scale 0 only; "
                "leave it out. The gates learn from there"
            )
        pathway = ResidualConfig(**{**pathway.to_dict(), "gate_scale": 0.0})
    pathway = registry.explicit(pathway, 2 * model.layers)
    divisors = build_decoder(model, pathway, device="meta").stack.start_divisors()
    if any(c != 1 for c in divisors):
        model = dataclasses.replace(model, read_eps=tuple(model.eps_of_read(i) / c**2 for i, c in enumerate(divisors)))
    return model, pathway


def decoder_of(source: Source, model: ModelConfig, pathway: ResidualConfig, seed: int, show: Show = silent) -> Decoder:
    """The source's weights in a decoder on another pathway, in the source's dtype; the pathway's own are drawn."""
    decoder = build_decoder(model, pathway, device="meta")
    names = llama.tensor_names(decoder)
    wanted = {names[name]: tuple(p.shape) for name, p in decoder.named_parameters() if name in names}
    safetensors_files.check(source.tensors, wanted, source.folder)
    kept = {source.tensors[name].dtype for name in wanted}
    if kept - DTYPES.keys():
        raise ModelError(f"{source.folder} has weights in {', '.join(sorted(kept))}: use float32, bfloat16 or float16")
    decoder.to(DTYPES[kept.pop()] if len(kept) == 1 else torch.float32).to_empty(device="cpu")
    branches = {id(branch) for block in decoder.stack for branch in block.branches}
    for part, name in decoder.parts():
        if id(part) not in branches and part is not decoder.vocabulary and part is not decoder.norm:
            reset_part(part, name, model.init_std, seed)
            _open_to_learning(part, name, seed)
    filled = {source.tensors[names[name]].name: p.data for name, p in decoder.named_parameters() if name in names}
    for file in safetensors_files.files(source.folder):
        show(f"reading {file.name}")
        for name, tensor in load_file(file).items():
            if name in filled:
                filled[name].copy_(tensor)
    return decoder


def _open_to_learning(part: nn.Module, name: str, seed: int) -> None:
    """Gate weights N(0, 1/(J·D)), so that logits move by as much as their scale does, at any width.

    The scale is 0 and learns first; from the usual N(0, 0.02) the streams of a narrow model part slowly.
    """
    generator = part_generator(part, name, seed)
    for gate in (module for module in part.modules() if isinstance(module, Gate)):
        nn.init.normal_(gate.weight, std=gate.weight[0].numel() ** -0.5, generator=generator)


@torch.no_grad()
def relative_difference(source: Source, made: Any) -> float:
    """Root mean square of the logits' difference over that of the source's, both computed in float32."""
    theirs = open_model(source.folder, dtype="float32", architectures="any")
    ours = made if made.dtype == torch.float32 else copy.deepcopy(made).float()
    rows, length = CHECKED
    shape = rows, min(length, made.config.max_position_embeddings)
    tokens = torch.randint(made.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    wanted = theirs.logits(tokens)
    if not wanted.isfinite().all():
        raise ModelError(f"{source.folder} itself gives logits that are not finite: restore its weights")
    return float((ours(tokens).logits - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())

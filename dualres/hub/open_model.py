"""Open a trained model: a run of `dualres train`, an exported folder, or any Hugging Face causal LM."""
# B batch  T tokens  V vocabulary

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tokenizers
import torch
from torch import Tensor

from dualres.data import shards
from dualres.data import tokenizer as our_tokenizers
from dualres.data.tokenizer import Tokenizer, same_tokens
from dualres.hub import model_folder, register
from dualres.model.decoder import Decoder, build_decoder
from dualres.model.generation import generate
from dualres.train import checkpoint as checkpoints
from dualres.train import run_folder
from dualres.train.device import pick_device
from dualres.util.amx import avoid_hidden_tiles
from dualres.util.errors import DataError, ModelError, TrainError
from dualres.util.optional_dependencies import need

IDENTIFYING = (".json", ".txt", ".model", ".jinja")  # configs and tokenizers; the weights are added
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")  # in the configs of transformers
READ_BYTES = 2**24


@dataclass(frozen=True)
class TrainedModel:
    """A causal LM in eval mode with its tokenizer, opened from a run or a saved model."""

    name: str  # in tables and model cards; by default, the folder's name
    folder: Path
    network: Any  # a run's Decoder, or the PreTrainedModel of a saved model
    tokenizer: Any  # a run's Tokenizer, the PreTrainedTokenizerBase of a saved model, or None
    context: int  # maximum sequence length
    checkpoint: Path | None = None  # of a run

    @property
    def decoder(self) -> Decoder:
        """The network as a dualres decoder; raises for another architecture."""
        if isinstance(self.network, Decoder):
            return self.network
        if isinstance(decoder := getattr(self.network, "decoder", None), Decoder):
            return decoder
        raise model_folder.foreign_model(self.folder, self.network.config.model_type)

    @cached_property
    def hf_model(self) -> Any:
        """The network as a `PreTrainedModel`, which shares the weights of a run's decoder."""
        if not isinstance(self.network, Decoder):
            return self.network
        register()
        from dualres.hub.hf_model import DualResForCausalLM

        end = self.require_tokenizer().end_of_text
        return DualResForCausalLM.of(self.network, eos_token_id=end, pad_token_id=end).eval()

    @cached_property
    def hf_tokenizer(self) -> Any:
        """The tokenizer as a `PreTrainedTokenizerBase`; None if there is none."""
        return (
            as_transformers(self.tokenizer, self.context) if isinstance(self.tokenizer, Tokenizer) else self.tokenizer
        )

    @property
    def backend(self) -> tokenizers.Tokenizer | None:
        """The tokenizer of the `tokenizers` package; None if there is none, or only one written in Python."""
        if isinstance(self.tokenizer, Tokenizer):
            return self.tokenizer.backend
        if self.tokenizer is None and (self.folder / shards.TOKENIZER).is_file():  # opened without weights
            return our_tokenizers.read_backend(self.folder / shards.TOKENIZER)
        return getattr(self.tokenizer, "backend_tokenizer", None)

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.network.parameters()).dtype

    @property
    def vocab_size(self) -> int:
        """Vocabulary size: the smallest of embedding, output and config."""
        if isinstance(self.network, Decoder):
            return self.network.config.vocab_size
        sizes = [getattr(self.network.config, "vocab_size", None)]
        for module in (self.network.get_input_embeddings(), self.network.get_output_embeddings()):
            weight = getattr(module, "weight", None)
            sizes.append(None if weight is None else weight.shape[0])
        return min(size for size in sizes if size is not None)

    def logits(self, tokens: Tensor) -> Tensor:
        """(B,T) -> (B,T,V)"""
        if isinstance(self.network, Decoder):
            return self.network(tokens)
        return self.network(tokens, use_cache=False).logits

    @property
    def prefix(self) -> int:
        """The token that starts a document: BOS, or EOS if there is none."""
        if isinstance(tokenizer := self.require_tokenizer(), Tokenizer):
            return tokenizer.end_of_text
        for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        missing = f"the tokenizer of {self.folder} has neither a BOS nor an EOS token to start a document with"
        raise ModelError(f"{missing}: set one in its tokenizer_config.json")

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end generation."""
        if isinstance(self.tokenizer, Tokenizer):
            return frozenset([self.tokenizer.end_of_text])
        end = self.hf_model.generation_config.eos_token_id
        return frozenset([end] if isinstance(end, int) else end or [])

    def encode(self, prompt: str) -> list[int]:
        """Tokenize a prompt, with the special tokens that the tokenizer adds; an empty one becomes BOS or EOS."""
        tokenizer = self.require_tokenizer()
        is_ours = isinstance(tokenizer, Tokenizer)
        tokens = tokenizer.encode(prompt) if is_ours else tokenizer(prompt)["input_ids"]
        if not tokens:
            start = None if is_ours else tokenizer.bos_token_id
            tokens = sorted(self.ends)[:1] if start is None else [start]
        if not tokens:
            raise ModelError(f"{self.folder} has neither a BOS nor an EOS token to start from: pass a prompt")
        if max(tokens) >= self.vocab_size:
            raise ModelError(
                f"the tokenizer of {self.folder} produces token {max(tokens)}, but the model's vocabulary has "
                f"{self.vocab_size} entries: use the tokenizer that it was trained with"
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Detokenize, without special tokens."""
        if isinstance(tokenizer := self.require_tokenizer(), Tokenizer):
            return tokenizer.decode(tokens)
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    def sample(self, prompt: str, tokens: int, temperature: float, seed: int) -> str:
        """The prompt with its continuation, until the text ends or `tokens` are generated; temperature 0 is greedy."""
        start = self.encode(prompt)
        generator = torch.Generator().manual_seed(seed)
        [new] = generate(self.decoder, [start], tokens, temperature=temperature, generator=generator)
        return self.decode([*start, *itertools.takewhile(lambda token: token not in self.ends, new)])

    def require_tokenizer(self) -> Any:
        """The tokenizer; raises if there is none."""
        if self.tokenizer is None:
            raise ModelError(
                f"{self.folder} has no tokenizer: add its tokenizer.json and tokenizer_config.json to the folder"
            )
        return self.tokenizer

    def check_tokens(self, data: Path) -> None:
        """Raise if the data was prepared with a different tokenizer."""
        index = shards.read_index(data)
        theirs = shards.read_tokenizer(data, index)
        if self.backend is None or not same_tokens(self.backend, theirs.backend, index.end_of_text):
            raise DataError(
                f"{data} was prepared with a different tokenizer from {self.name}'s: prepare the text with the model's "
                f"own, `dualres prepare SOURCE OUT --tokenizer {self.folder / shards.TOKENIZER}`"
            )

    @cached_property
    def identity(self) -> str:
        """Cache key: a hash of weights, config, tokenizer and dtype."""
        if self.checkpoint is not None:  # its manifest has the checksums of the weights
            files = [self.folder / run_folder.CONFIG, self.checkpoint / checkpoints.MANIFEST]
        else:
            others = [path for path in sorted(self.folder.iterdir()) if path.suffix in IDENTIFYING]
            files = [*others, *model_folder.weight_files(self.folder)]
        digest = hashlib.blake2b(str(self.dtype).encode(), digest_size=16)
        for path in files:
            with path.open("rb") as file:
                while piece := file.read(READ_BYTES):
                    digest.update(piece)
        return digest.hexdigest()


def open_model(
    folder: Path,
    *,
    checkpoint: str = "last",
    device: str = "cpu",
    dtype: str = "auto",
    architectures: Literal["dualres", "any"] = "dualres",
) -> TrainedModel:
    """Load the model of a run or of a saved model's folder, after checking its weights against its config.

    checkpoint     of a run: last or best
    device         cpu, cuda, cuda:N or auto
    dtype          float32, bfloat16 or float16; auto keeps the saved dtype
    architectures  dualres rejects other models; any opens every causal LM that `transformers` supports

    Weights are read from safetensors only, and code that comes with a model is not run. Only saved models need
    `transformers`.
    """
    avoid_hidden_tiles()
    place = pick_device(device)
    if run_folder.is_run(folder):
        model = _open_run(folder, checkpoint)
    else:
        saved = model_folder.read_saved(folder)
        if saved.config.get("model_type") != model_folder.MODEL_TYPE and architectures == "any":
            model = _open_saved(folder, dtype)
            _check_causal(model)
            model.network.to(place)
            return model
        model_folder.check_saved(saved)
        if checkpoint != "last":
            raise ModelError(f"{folder} is an exported model, not a run: --checkpoint does not apply")
        model = _open_saved(folder, "auto")
    model.network.to(place, None if dtype == "auto" else getattr(torch, dtype)).eval()
    return model


def open_start(folder: Path, data: Path) -> TrainedModel:
    """Check the saved model that training on `data` starts from; the engine loads the weights."""
    if run_folder.is_run(folder):
        raise ModelError(f"{folder} is a run: export it with `dualres export {folder} OUT`, and pass --from OUT")
    decoder = model_folder.check_saved(model_folder.read_saved(folder))
    model = TrainedModel(folder.resolve().name, folder, decoder, None, decoder.config.context)
    if others := sorted({*folder.glob("*.safetensors")} - {*model_folder.weight_files(folder)}):
        raise ModelError(
            f"{others[0]} does not belong to the model in {folder}, but training would load it: move it elsewhere"
        )
    if model.backend is not None:
        model.check_tokens(data)
    return model


def as_transformers(tokenizer: Tokenizer, context: int) -> Any:
    """A `PreTrainedTokenizerFast` with the same tokens; it pads with end-of-text on the left, for generation."""
    transformers = need("transformers", "hub", "a Hugging Face tokenizer")
    end = tokenizer.backend.id_to_token(tokenizer.end_of_text)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend,
        eos_token=end,
        pad_token=end,
        padding_side="left",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def _open_run(folder: Path, which: str) -> TrainedModel:
    """Load a run's last or best checkpoint, after verifying its checksums."""
    description, config = run_folder.read_description(folder), run_folder.read_config(folder)
    path = find_checkpoint(folder, which)
    if damage := checkpoints.damage(path):
        remedy = "Rerun the training command: it falls back to the previous checkpoint"
        raise TrainError(f"checkpoint {path} is damaged: {damage[0]}. {remedy}")
    decoder = build_decoder(config.model, config.residual)
    checkpoints.load(path, {f"model.{name}": parameter.detach() for name, parameter in decoder.named_parameters()})
    tokenizer = our_tokenizers.load(folder / shards.TOKENIZER, description["data"]["end_of_text"])
    if tokenizer.fingerprint != description["data"].get("fingerprint", tokenizer.fingerprint):
        raise TrainError(f"{folder / shards.TOKENIZER} is not the tokenizer of this run: restore it from the data")
    return TrainedModel(folder.resolve().name, folder, decoder, tokenizer, config.model.context, path)


def find_checkpoint(folder: Path, which: str) -> Path:
    """The folder of a run's last or best checkpoint."""
    available = checkpoints.complete_checkpoints(folder / run_folder.CHECKPOINTS)
    if not available:
        raise TrainError(f"{folder} has no checkpoint yet: train until train.checkpoint_every, or to the end")
    if which == "last":
        return available[-1]
    state = json.loads((available[-1] / checkpoints.STATE).read_text(encoding="utf-8"))
    best = available[-1].with_name(checkpoints.step_name(state["best_step"]))
    if best not in available:
        raise TrainError(f"{folder} has no best checkpoint yet: train until train.validate_every, or use the last")
    return best


def _open_saved(folder: Path, dtype: str) -> TrainedModel:
    """Load a saved model with `transformers`, which rounds the weights to `dtype`, but not the rotary frequencies."""
    register()
    transformers = need("transformers", "hub", "a Hugging Face model")
    with model_folder.read_by_transformers(folder):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # rejected below, by name
            output_loading_info=True,
        )
    problems = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    unexpected = sorted(name for name in info["unexpected_keys"] if not name.endswith(model_folder.NOT_LEARNED))
    problems += [f"{name} is unexpected" for name in unexpected]
    problems += [
        f"{name} is {tuple(actual)}, not {tuple(wanted)}" for name, actual, wanted in sorted(info["mismatched_keys"])
    ]
    if problems:
        mismatch = f"the weights of {folder} do not match its {model_folder.CONFIG}: {problems[0]}"
        raise ModelError(f"{mismatch}; restore both from the same source")
    tokenizer = model_folder.load_tokenizer(folder)
    lengths = [length for key in CONTEXT_KEYS if isinstance(length := getattr(model.config, key, None), int)]
    context = lengths[0] if lengths else int(min(getattr(tokenizer, "model_max_length", 2048), 2048))
    return TrainedModel(folder.resolve().name, folder, model.eval(), tokenizer, context)


@torch.no_grad()
def _check_causal(model: TrainedModel) -> None:
    """Raise if the model sees the tokens that it predicts, as BERT does."""
    first, second = model.logits(torch.tensor([[0, 1, 0, 1], [0, 1, 0, 0]]))[:, :3].float()
    if (first - second).square().mean() > 1e-6 * first.square().mean():
        reason = "its outputs depend on future tokens"
        raise ModelError(f"{model.folder} is not a causal language model ({reason}): pass a model that is causal")

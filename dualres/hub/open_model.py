"""Open a trained model: a run of `dualres train`, an exported folder, or any Hugging Face causal LM."""
# B batch  T tokens  V vocabulary

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tokenizers
import torch
from torch import Tensor

from dualres.config.schema import ConfigError
from dualres.data import shards
from dualres.data import tokenizer as our_tokenizers
from dualres.data.tokenizer import Tokenizer, same_tokens
from dualres.hub import model_folder, register, safetensors_files
from dualres.model.decoder import Decoder, build_decoder
from dualres.train import checkpoint as checkpoints
from dualres.train import run_folder
from dualres.util.amx import avoid_hidden_tiles
from dualres.util.errors import DataError, ModelError, TrainError
from dualres.util.optional_dependencies import need

IDENTIFYING = (".json", ".txt", ".model", ".jinja")  # configs and tokenizers, beside the weights
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")  # of the configs of transformers
READ_BYTES = 2**24


@dataclass(frozen=True)
class TrainedModel:
    """A causal LM in eval mode with its tokenizer, the same type whatever it was opened from."""

    name: str  # its folder's, unless replaced: what tables and model cards call it
    folder: Path
    network: Any  # a Decoder, or the PreTrainedModel of `transformers` that an exported or foreign model is
    tokenizer: Any  # a run's own Tokenizer, the PreTrainedTokenizerBase of `transformers`, or None
    context: int  # tokens that it can read at once
    checkpoint: Path | None = None  # of a run

    @property
    def decoder(self) -> Decoder:
        """The network as a dualres decoder, which a foreign architecture is not."""
        if isinstance(self.network, Decoder):
            return self.network
        if isinstance(decoder := getattr(self.network, "decoder", None), Decoder):
            return decoder
        raise model_folder.foreign_model(self.folder, self.network.config.model_type)

    @cached_property
    def hf_model(self) -> Any:
        """The network as a `PreTrainedModel`; a run's decoder is wrapped, its weights are shared."""
        if not isinstance(self.network, Decoder):
            return self.network
        need("transformers", "hub", "a Hugging Face model")
        from dualres.hub.hf_model import DualResForCausalLM

        end = self.require_tokenizer().end_of_text
        return DualResForCausalLM.of(self.network, eos_token_id=end, pad_token_id=end).eval()

    @cached_property
    def hf_tokenizer(self) -> Any:
        """The tokenizer as a `PreTrainedTokenizerBase`, None where there is none."""
        return (
            as_transformers(self.tokenizer, self.context) if isinstance(self.tokenizer, Tokenizer) else self.tokenizer
        )

    @property
    def backend(self) -> tokenizers.Tokenizer | None:
        """The tokenizer's rules, None where there is no tokenizer or one that is written in Python."""
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
        """How many token numbers the network knows: those it can read, predict, and says that it has."""
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
        """The token that a document is conditioned on: the beginning of a text, or the end of the one before."""
        if isinstance(tokenizer := self.require_tokenizer(), Tokenizer):
            return tokenizer.end_of_text
        for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise ModelError(f"the tokenizer of {self.folder} has neither a bos nor an eos token to begin a document with")

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a text in generation."""
        if isinstance(self.tokenizer, Tokenizer):
            return frozenset([self.tokenizer.end_of_text])
        end = self.hf_model.generation_config.eos_token_id
        return frozenset([end] if isinstance(end, int) else end or [])

    def encode(self, prompt: str) -> list[int]:
        """A prompt with what the tokenizer puts before a text; an empty one begins a document."""
        tokenizer = self.require_tokenizer()
        own = isinstance(tokenizer, Tokenizer)
        tokens = (tokenizer.encode(prompt) if own else tokenizer(prompt)["input_ids"]) or [self.prefix]
        if max(tokens) >= self.vocab_size:
            raise ModelError(
                f"the tokenizer of {self.folder} makes token {max(tokens)}, and the model has {self.vocab_size}: use "
                "the tokenizer that it was trained with"
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        if isinstance(tokenizer := self.require_tokenizer(), Tokenizer):
            return tokenizer.decode(tokens)
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    def require_tokenizer(self) -> Any:
        """The tokenizer, or an error that says where to put one."""
        if self.tokenizer is None:
            raise ModelError(
                f"{self.folder} has no tokenizer: put its tokenizer.json and tokenizer_config.json beside the weights"
            )
        return self.tokenizer

    def check_tokens(self, data: Path) -> None:
        """Refuse prepared data whose tokens another tokenizer made."""
        index = shards.read_index(data)
        theirs = shards.read_tokenizer(data, index)
        if self.backend is None or not same_tokens(self.backend, theirs.backend, index.end_of_text):
            raise DataError(
                f"{data} was prepared with another tokenizer than that of {self.name}, for which its tokens mean "
                "nothing: prepare the text with the model's own, "
                f"`dualres prepare SOURCE OUT --tokenizer {self.folder / shards.TOKENIZER}`"
            )

    @cached_property
    def identity(self) -> str:
        """The same for the same weights, config, tokenizer and dtype: results are cached under it."""
        if self.checkpoint is not None:  # its manifest has the checksums of the weights
            files = [self.folder / model_folder.CONFIG, self.checkpoint / checkpoints.MANIFEST]
        else:
            others = [path for path in sorted(self.folder.iterdir()) if path.suffix in IDENTIFYING]
            files = [*others, *safetensors_files.files(self.folder)]
        total = hashlib.blake2b(str(self.dtype).encode(), digest_size=16)
        for path in files:
            with path.open("rb") as file:
                while piece := file.read(READ_BYTES):
                    total.update(piece)
        return total.hexdigest()


def open_model(
    folder: Path,
    *,
    checkpoint: str = "last",
    device: str = "cpu",
    dtype: str = "auto",
    architectures: Literal["dualres", "any"] = "dualres",
) -> TrainedModel:
    """The model of a run's folder or a saved model's, checked against its config and loaded.

    checkpoint     which of a run's: last or best
    device         cpu, cuda or auto; meta checks an exported model and loads neither weights nor tokenizer
    dtype          float32, bfloat16 or float16; auto keeps what was saved
    architectures  dualres refuses other models; any opens every causal LM that `transformers` has the code of

    Weights are read from safetensors alone, and code that comes with a model is not run. Only exported and foreign
    models need `transformers`.
    """
    avoid_hidden_tiles()
    where = pick_device(device)
    if run_folder.is_run(folder):
        model = _open_run(folder, checkpoint)
    else:
        saved = model_folder.read_saved(folder)
        if saved.config.get("model_type") != model_folder.MODEL_TYPE and architectures == "any":
            model = _open_saved(folder, dtype)
            _check_causal(model)
            model.network.to(where)
            return model
        decoder = model_folder.check_saved(saved)
        if checkpoint != "last":
            raise ModelError(f"{folder} is an exported model, not a run: --checkpoint does not apply")
        if where.type == "meta":
            return TrainedModel(folder.resolve().name, folder, decoder, None, decoder.config.context)
        model = _open_saved(folder, "auto")
    model.network.to(where, None if dtype == "auto" else getattr(torch, dtype)).eval()
    return model


def open_start(folder: Path, data: Path) -> TrainedModel:
    """The saved model that training on `data` begins with, checked and not loaded: the engine reads the weights."""
    if run_folder.is_run(folder):
        raise ModelError(f"{folder} is a run: export it with `dualres export {folder} OUT`, and start from OUT")
    model = open_model(folder, device="meta")
    if others := sorted({*folder.glob("*.safetensors")} - {*safetensors_files.files(folder)}):
        raise ModelError(
            f"{others[0]} is not part of the model of {folder}, and training would read it too: move it away"
        )
    if model.backend is not None:
        model.check_tokens(data)
    return model


def as_transformers(tokenizer: Tokenizer, context: int) -> Any:
    """A `PreTrainedTokenizerFast` with the same tokens; end of text also pads, on the left, for generation."""
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


def pick_device(asked: str) -> torch.device:
    """auto: a GPU where there is one."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no GPU here; use cpu")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked)


def _open_run(folder: Path, which: str) -> TrainedModel:
    """The weights of a run's last or best checkpoint, after their checksums were compared."""
    described, config = run_folder.read_description(folder), run_folder.read_config(folder)
    path = find_checkpoint(folder, which)
    if wrong := checkpoints.damage(path):
        raise TrainError(f"checkpoint {path} is damaged: {wrong[0]}. Run the training command again: it falls back")
    decoder = build_decoder(config.model, config.residual)
    checkpoints.load(path, {f"model.{name}": parameter.detach() for name, parameter in decoder.named_parameters()})
    tokenizer = our_tokenizers.load(folder / shards.TOKENIZER, described["data"]["end_of_text"])
    if tokenizer.fingerprint != described["data"].get("fingerprint", tokenizer.fingerprint):
        raise TrainError(f"{folder / shards.TOKENIZER} is not the tokenizer of this run: restore it from the data")
    return TrainedModel(folder.resolve().name, folder, decoder, tokenizer, config.model.context, path)


def find_checkpoint(folder: Path, which: str) -> Path:
    """The folder of a run's last or best checkpoint."""
    found = checkpoints.complete_checkpoints(folder / run_folder.CHECKPOINTS)
    if not found:
        raise TrainError(f"{folder} has no checkpoint yet: train until train.checkpoint_every, or to the end")
    if which == "last":
        return found[-1]
    state = json.loads((found[-1] / checkpoints.STATE).read_text(encoding="utf-8"))
    best = found[-1].with_name(checkpoints.step_name(state["best_step"]))
    if best not in found:
        raise TrainError(f"{folder} has no best checkpoint yet: train until train.validate_every, or use the last")
    return best


def _open_saved(folder: Path, dtype: str) -> TrainedModel:
    """A model that `transformers` has the code of, or that is ours. It rounds weights to `dtype`, not positions."""
    transformers = need("transformers", "hub", "a Hugging Face model")
    register()
    with model_folder.read_by_transformers(folder):
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are refused here, by name
            output_loading_info=True,
        )
    faults = [f"{name} is missing" for name in sorted(found["missing_keys"])]
    unexpected = sorted(name for name in found["unexpected_keys"] if not name.endswith(model_folder.NOT_LEARNED))
    faults += [f"{name} is not part of it" for name in unexpected]
    faults += [
        f"{name} is {tuple(there)}, not {tuple(wanted)}" for name, there, wanted in sorted(found["mismatched_keys"])
    ]
    if faults:
        raise ModelError(
            f"the weights of {folder} do not match its {model_folder.CONFIG}: {faults[0]}. Restore both from one place"
        )
    tokenizer = model_folder.load_tokenizer(folder)
    known = [length for key in CONTEXT_KEYS if isinstance(length := getattr(model.config, key, None), int)]
    context = known[0] if known else int(min(getattr(tokenizer, "model_max_length", 2048), 2048))
    return TrainedModel(folder.resolve().name, folder, model.eval(), tokenizer, context)


@torch.no_grad()
def _check_causal(model: TrainedModel) -> None:
    """Refuse a model that sees the tokens it is to predict, as BERT does."""
    first, second = model.logits(torch.tensor([[0, 1, 0, 1], [0, 1, 0, 0]]))[:, :3].float()
    if (first - second).square().mean() > 1e-6 * first.square().mean():
        raise ModelError(f"{model.folder} looks ahead: it is not a causal language model, so its scores mean nothing")

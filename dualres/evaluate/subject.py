"""What is evaluated: a run, an exported folder or any Hugging Face causal LM, all in one form."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dualres.hub import safetensors_files
from dualres.hub.convert import NEEDLESS, local_folder
from dualres.hub.errors import ModelError, read_by_transformers
from dualres.hub.export import is_run, open_model
from dualres.hub.hf_tokenizer import load_tokenizer
from dualres.hub.model_folder import CONFIG, is_ours, read_saved
from dualres.train import checkpoint as checkpoints
from dualres.train.load import choose
from dualres.util.optional_dependencies import need

KEPT_FILES = (".json", ".txt", ".model", ".jinja")  # of a folder: configs and tokenizers, beside the weights
CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")  # what configs call it
READ = 2**24  # bytes at a time


class Subject(NamedTuple):
    """A causal LM in the form that `transformers` gives it, with what measuring it must know."""

    name: str  # in tables
    identity: str  # the same for the same weights, config, tokenizer and dtype: results are kept under it
    model: Any  # transformers.PreTrainedModel in eval mode on its device; model(input_ids).logits (B,T,V)
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    context: int  # tokens that the model can read at once
    prefix: int  # the token that a document is conditioned on: the beginning of a text, or the end of the one before


def load_subject(source: str, *, checkpoint: str = "last", device: str = "auto", dtype: str = "auto") -> Subject:
    """A run's folder, an exported folder, any saved causal LM or its name on the hub, ready to be measured.

    `dtype` float32, bfloat16 or float16; auto keeps what was saved. Weights are read from safetensors alone, and code
    that comes with a model is not run.
    """
    need("transformers", "hub", "evaluation")
    folder = local_folder(source)
    ours = is_ours(folder) or is_run(folder)
    if ours:
        opened = open_model(folder, checkpoint)
        name, model, tokenizer = opened.name, opened.model, opened.tokenizer
    else:
        name, model, tokenizer = Path(source).name, _their_model(folder, dtype), load_tokenizer(folder)
    if tokenizer is None:
        raise ModelError(
            f"{source} has no tokenizer: put its tokenizer.json and tokenizer_config.json beside the weights"
        )
    if ours and dtype != "auto":
        model = model.to(getattr(torch, dtype))
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if prefix is None:
        raise ModelError(f"the tokenizer of {source} has neither a bos nor an eos token to begin a document with")
    return Subject(
        name,
        identity(folder, checkpoint, str(model.dtype)),
        model.to(where).eval(),
        tokenizer,
        _context(model, tokenizer),
        int(prefix),
    )


def _their_model(folder: Path, dtype: str) -> Any:
    """A model that `transformers` has the code of. It rounds weights to `dtype`, and no tables of positions."""
    transformers = need("transformers", "hub", "evaluation")
    read_saved(folder)
    with read_by_transformers(folder):
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are refused here, by name
            output_loading_info=True,
        )
    faults = [f"{name} is missing" for name in sorted(found["missing_keys"])]
    faults += [f"{name} is not part of it" for name in sorted(found["unexpected_keys"]) if not name.endswith(NEEDLESS)]
    faults += [
        f"{name} is {tuple(there)}, not {tuple(wanted)}" for name, there, wanted in sorted(found["mismatched_keys"])
    ]
    if faults:
        raise ModelError(f"the weights of {folder} do not match its {CONFIG}: {faults[0]}. Restore both from one place")
    _check_causal(model.eval(), folder)
    return model


@torch.no_grad()
def _check_causal(model: Any, folder: Path) -> None:
    """Refuse a model that sees the tokens it is to predict, as BERT does."""
    tokens = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 0]])
    first, second = model(tokens).logits[:, :3].float()
    if (first - second).square().mean() > 1e-6 * first.square().mean():
        raise ModelError(f"{folder} looks ahead: it is no causal language model, and its scores would mean nothing")


def _context(model: Any, tokenizer: Any) -> int:
    for name in CONTEXTS:
        if isinstance(found := getattr(model.config, name, None), int):
            return found
    return int(min(tokenizer.model_max_length, 2048))


def identity(folder: Path, checkpoint: str, dtype: str) -> str:
    """The same for the same weights, config, tokenizer and dtype."""
    total = hashlib.blake2b(dtype.encode(), digest_size=16)
    for path in _files(folder, checkpoint):
        with path.open("rb") as file:
            while piece := file.read(READ):
                total.update(piece)
    return total.hexdigest()


def _files(folder: Path, checkpoint: str) -> list[Path]:
    """What makes a model what it is; a checkpoint's manifest has the sums of its weights."""
    if is_run(folder):
        return [folder / CONFIG, choose(folder, checkpoint) / checkpoints.MANIFEST]
    return [*(path for path in sorted(folder.iterdir()) if path.suffix in KEPT_FILES), *safetensors_files.files(folder)]

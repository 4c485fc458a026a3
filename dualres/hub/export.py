"""Export a run as a Hugging Face folder or a Llama checkpoint, and import it again."""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from dualres.config.schema import Config
from dualres.config.validation import build
from dualres.data.shards import TOKENIZER
from dualres.data.tokenizer import load as load_json_tokenizer
from dualres.hub import llama, model_card
from dualres.hub.model_folder import check_new, write_model
from dualres.hub.open_model import TrainedModel, open_model
from dualres.model.decoder import Decoder
from dualres.residual import registry
from dualres.train import checkpoint as checkpoints
from dualres.train import run_folder
from dualres.train.process_group import World
from dualres.util.atomic_files import new_folder, write_json
from dualres.util.errors import ModelError
from dualres.util.optional_dependencies import need
from dualres.util.progress import silent

Form = Literal["dualres", "llama"]
RUN_RECORD = "dualres_run.json"  # the run's description, which `import_run` restores
DESCRIPTION = ("dualres", "config", "data", "start", "plugin")
STATE = ("step", "sequences", "best_loss", "best_step", "validation_loss", "random")


def export(
    source: Path, out: Path, *, form: Form = "dualres", checkpoint: str = "last", dtype: str = "auto"
) -> TrainedModel:
    """Write a run or a saved dualres model to the folder `out`: weights, config, tokenizer, model card, code.

    `form="llama"` writes a `standard` model as a plain Llama-family checkpoint. `dtype`: float32, bfloat16, …
    """
    check_new(out)
    model = open_model(source, checkpoint=checkpoint, dtype=dtype)
    record = run_record(model)
    model.hf_model.config.dtype = model.dtype
    hf_model = model.hf_model if form == "dualres" else _as_llama(model)
    origin, measurements = _history(record)
    text = model_card.card(model.name, model.decoder, origin, measurements, out.name, form)
    with new_folder(out) as folder:
        write_model(hf_model, model.hf_tokenizer, text, folder)
        if (source / TOKENIZER).is_file():  # unchanged: transformers would add to it
            shutil.copyfile(source / TOKENIZER, folder / TOKENIZER)
        if record is not None and form == "dualres":
            write_json(folder / RUN_RECORD, record)
    return model


def _as_llama(model: TrainedModel) -> Any:
    """Turn a `standard` model into the Llama-family model of `transformers`, with the same weights."""
    transformers = need("transformers", "hub", "a Hugging Face model")
    ours, decoder = model.hf_model, model.decoder
    method = decoder.residual_config.method
    if method != "standard":
        raise ModelError(f"{model.name} uses {method}: only `standard` can be exported as Llama; use --form dualres")
    tokens = {name: getattr(ours.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    kind, fields = llama.their_config(decoder.config, model.name, **tokens)
    config = transformers.AutoConfig.for_model(kind, **fields)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    theirs.load_state_dict(llama.their_tensors(decoder), strict=False, assign=True)
    theirs.tie_weights()
    theirs.generation_config = ours.generation_config
    missing = [name for name, parameter in theirs.named_parameters() if parameter.is_meta]
    assert not missing, missing
    return theirs


def import_run(folder: Path, out: Path) -> Path:
    """The inverse of `export`: write a run folder with one checkpoint, without optimizer state."""
    check_new(out)
    model = open_model(folder)
    record = run_record(model)
    if model.checkpoint is not None or record is None:
        raise ModelError(
            f"{folder} was not exported from a run (it has no {RUN_RECORD}): continue training it with "
            f"`dualres train SCALE RESIDUAL --from {folder}`"
        )
    description, state = _description(folder, record, model.decoder)
    tensors = {f"model.{name}": p.detach().float() for name, p in model.decoder.named_parameters()}
    with new_folder(out) as partial:
        world = World(0, 1, torch.device("cpu"), None, None)
        writer = checkpoints.Checkpoints(partial / run_folder.CHECKPOINTS, world, 1, silent)
        writer.save(state["step"], tensors, {**state, "best_step": state["step"]})
        writer.wait()
        if writer.failure is not None:
            raise ModelError(writer.failure)
        shutil.copyfile(folder / TOKENIZER, partial / TOKENIZER)
        if record.get("summary"):
            write_json(partial / run_folder.SUMMARY, record["summary"])
        write_json(partial / run_folder.CONFIG, description)
    return out


def _description(folder: Path, record: Mapping[str, Any], decoder: Decoder) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run's description and the checkpoint's state from the record; raises if they do not fit the model."""
    with _written_by_export(folder / RUN_RECORD):
        description: dict[str, Any] = {key: record[key] for key in DESCRIPTION if key in record}
        state = {key: record["state"][key] for key in STATE}
        config = build(Config, description["config"], "")
        residual = registry.explicit(config.residual, 2 * config.model.layers)
        if (config.model, residual) != (decoder.config, decoder.residual_config):
            raise ValueError("its config differs from config.json")
        for key in ("step", "sequences"):
            if type(state[key]) is not int or state[key] < 0:
                raise ValueError(f"{key}={state[key]!r} is not a count")
        fingerprint, end = description["data"]["fingerprint"], description["data"]["end_of_text"]
    if not (folder / TOKENIZER).is_file() or load_json_tokenizer(folder / TOKENIZER, end).fingerprint != fingerprint:
        raise ModelError(f"{folder / TOKENIZER} is not the tokenizer that the run was trained with: restore it")
    return description, state


def run_record(model: TrainedModel) -> dict[str, Any] | None:
    """Describe the run that trained a model, without local paths; None if the model is not from a run."""
    folder = model.folder
    if model.checkpoint is None:
        if not (folder / RUN_RECORD).exists():
            return None
        with _written_by_export(folder / RUN_RECORD):
            record = dict(json.loads((folder / RUN_RECORD).read_text(encoding="utf-8")))
            _history(record)
        return record
    description = run_folder.read_description(folder)
    state = json.loads((model.checkpoint / checkpoints.STATE).read_text(encoding="utf-8"))
    summary = run_folder.read_summary(folder) if (folder / run_folder.SUMMARY).is_file() else None
    data = {**description["data"], "folder": Path(description["data"]["folder"]).name}
    return {**description, "data": data, "state": state, "summary": summary}


@contextmanager
def _written_by_export(path: Path) -> Iterator[None]:
    """Raise a `ModelError` if the record is damaged."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ModelError(
            f"{path} is not what `dualres export` writes ({error!r}): export again, or remove the file"
        ) from None


def _history(record: Mapping[str, Any] | None) -> tuple[list[str], dict[str, Any]]:
    """Paragraphs about the origin of the weights, and the measurements, for the model card."""
    if record is None:
        return [], {}
    train, state, data = record["config"]["train"], record["state"], record["data"]
    tokens = state["sequences"] * record["config"]["model"]["context"]
    start = f", starting from the weights of `{record['start']}`" if "start" in record else ""
    recipe = "\n".join(f"| {key} | {value} |" for key, value in train.items() if key not in ("parallel",))
    origin = [
        f"Trained with dualres {record['dualres']} on `{data['folder']}` (content hash `{data['content']}`; the "
        f"recipe's dataset is {train['dataset']}): {state['step']:,} steps, {tokens:,} tokens{start}.",
        f"<details><summary>Training recipe</summary>\n\n| train | |\n|---|---|\n{recipe}\n\n</details>",
    ]
    measurements = {"training steps": f"{state['step']:,}", "training tokens": f"{tokens:,}"}
    for key, name in (("validation_loss", "validation loss"), ("best_loss", "best validation loss of the run")):
        if state[key] is not None and math.isfinite(state[key]):
            measurements[name] = f"{state[key]:.4f}"
    return origin, measurements

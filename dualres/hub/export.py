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
RUN_RECORD = "dualres_run.json"  # what the run was; `import_run` restores it
RUN = ("dualres", "config", "data", "start")
STATE = ("step", "sequences", "best_loss", "best_step", "validation_loss", "random")


def export(
    source: Path, out: Path, *, form: Form = "dualres", checkpoint: str = "last", dtype: str = "auto"
) -> TrainedModel:
    """Write the model of a run or of a saved dualres model to the folder `out`: weights, config, tokenizer, card, code.

    `form="llama"` writes a `standard` model as a plain checkpoint of Llama's family. `dtype`: float32, bfloat16, …
    """
    check_new(out)
    opened = open_model(source, checkpoint=checkpoint, dtype=dtype)
    record = run_record(opened)
    opened.hf_model.config.dtype = opened.dtype
    model = opened.hf_model if form == "dualres" else _as_llama(opened)
    origin, measured = _history(record)
    text = model_card.card(opened.name, opened.decoder, origin, measured, out.name, form)
    with new_folder(out) as folder:
        write_model(model, opened.hf_tokenizer, text, folder)
        if (source / TOKENIZER).is_file():  # as it was: transformers adds to it
            shutil.copyfile(source / TOKENIZER, folder / TOKENIZER)
        if record is not None and form == "dualres":
            write_json(folder / RUN_RECORD, record)
    return opened


def _as_llama(opened: TrainedModel) -> Any:
    """A `standard` model as `transformers`' own model, with the same weights."""
    transformers = need("transformers", "hub", "a Hugging Face model")
    ours, decoder = opened.hf_model, opened.decoder
    method = decoder.residual_config.method
    if method != "standard":
        raise ModelError(f"{opened.name} is on {method}, which Llama does not have: only `standard` exports as Llama")
    tokens = {name: getattr(ours.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    kind, fields = llama.their_config(decoder.config, opened.name, **tokens)
    config = transformers.AutoConfig.for_model(kind, **fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=opened.dtype)
    model.load_state_dict(llama.their_tensors(decoder), strict=False, assign=True)
    model.tie_weights()
    model.generation_config = ours.generation_config
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not left, left
    return model


def import_run(folder: Path, out: Path) -> Path:
    """The inverse of `export`: a run's folder with one checkpoint, its weights and no optimizer state."""
    check_new(out)
    opened = open_model(folder)
    record = run_record(opened)
    if opened.checkpoint is not None or record is None:
        raise ModelError(
            f"{folder} was not exported from a run (it has no {RUN_RECORD}): continue training it with "
            f"`dualres train SCALE RESIDUAL --from {folder}`"
        )
    described, state = _described(folder, record, opened.decoder)
    tensors = {f"model.{name}": p.detach().float() for name, p in opened.decoder.named_parameters()}
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
        write_json(partial / run_folder.CONFIG, described)
    return out


def _described(folder: Path, record: Mapping[str, Any], decoder: Decoder) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run's description and its checkpoint's state, as the record has them, where they fit the model beside it."""
    with _written_by_export(folder / RUN_RECORD):
        described: dict[str, Any] = {key: record[key] for key in RUN if key in record}
        state = {key: record["state"][key] for key in STATE}
        config = build(Config, described["config"], "")
        residual = registry.explicit(config.residual, 2 * config.model.layers)
        if (config.model, residual) != (decoder.config, decoder.residual_config):
            raise ValueError("its config is of another model than config.json")
        for key in ("step", "sequences"):
            if type(state[key]) is not int or state[key] < 0:
                raise ValueError(f"{key}={state[key]!r} is not a count")
        fingerprint, end = described["data"]["fingerprint"], described["data"]["end_of_text"]
    if not (folder / TOKENIZER).is_file() or load_json_tokenizer(folder / TOKENIZER, end).fingerprint != fingerprint:
        raise ModelError(f"{folder / TOKENIZER} is not the tokenizer that the run was trained with: restore it")
    return described, state


def run_record(opened: TrainedModel) -> dict[str, Any] | None:
    """What is known of the run that trained a model, without paths of its machine; None for a model of no run."""
    folder = opened.folder
    if opened.checkpoint is None:
        if not (folder / RUN_RECORD).exists():
            return None
        with _written_by_export(folder / RUN_RECORD):
            record = dict(json.loads((folder / RUN_RECORD).read_text(encoding="utf-8")))
            _history(record)
        return record
    described = run_folder.read_description(folder)
    state = json.loads((opened.checkpoint / checkpoints.STATE).read_text(encoding="utf-8"))
    summary = run_folder.read_summary(folder) if (folder / run_folder.SUMMARY).is_file() else None
    data = {**described["data"], "folder": Path(described["data"]["folder"]).name}
    return {**described, "data": data, "state": state, "summary": summary}


@contextmanager
def _written_by_export(path: Path) -> Iterator[None]:
    """Refuse a record that is damaged."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ModelError(
            f"{path} is not what `dualres export` writes ({error!r}): export again, or remove the file"
        ) from None


def _history(record: Mapping[str, Any] | None) -> tuple[list[str], dict[str, Any]]:
    """Paragraphs on where the weights come from, and what was measured, for the card."""
    if record is None:
        return [], {}
    train, state, data = record["config"]["train"], record["state"], record["data"]
    tokens = state["sequences"] * record["config"]["model"]["context"]
    start = f", starting from the weights of `{record['start']}`" if "start" in record else ""
    recipe = "\n".join(f"| {key} | {value} |" for key, value in train.items() if key not in ("parallel",))
    origin = [
        f"Trained with dualres {record['dualres']} on `{data['folder']}` (content `{data['content']}`, the recipe "
        f"names {train['dataset']}): {state['step']:,} steps, {tokens:,} tokens{start}.",
        f"<details><summary>Training recipe</summary>\n\n| train | |\n|---|---|\n{recipe}\n\n</details>",
    ]
    measured = {"training steps": f"{state['step']:,}", "training tokens": f"{tokens:,}"}
    for key, name in (("validation_loss", "validation loss"), ("best_loss", "best validation loss of the run")):
        if state[key] is not None and math.isfinite(state[key]):
            measured[name] = f"{state[key]:.4f}"
    return origin, measured

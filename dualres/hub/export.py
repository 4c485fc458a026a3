"""From a run to a folder that others can load, and back."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from dualres.config.schema import Config
from dualres.config.validation import build
from dualres.data.shards import TOKENIZER
from dualres.data.tokenizer import load as load_json_tokenizer
from dualres.hub import llama, model_card
from dualres.hub.errors import ModelError
from dualres.hub.hf_tokenizer import as_transformers, load_tokenizer
from dualres.hub.model_folder import check_new, load_model, new_model_folder, write_model
from dualres.model.accounting import parameters
from dualres.residual import registry
from dualres.train import checkpoint, run_folder
from dualres.train.load import load_run
from dualres.train.process_group import World
from dualres.util.atomic_files import new_folder, write_json
from dualres.util.optional_dependencies import need

Form = Literal["dualres", "llama"]
RUN_RECORD = "dualres_run.json"  # what the run was; `import_run` makes one of it again
RUN = ("dualres", "config", "data", "start")
STATE = ("step", "sequences", "best_loss", "best_step", "validation_loss", "random")


class Opened(NamedTuple):
    """A model with what is known of it."""

    name: str
    model: Any  # DualResForCausalLM
    tokenizer: Any | None  # transformers'
    record: dict[str, Any] | None  # of the run that trained it


def open_model(source: Path, which: str = "last") -> Opened:
    """The model of a run, its last or best checkpoint, or of a saved dualres model's folder."""
    need("transformers", "hub", "a Hugging Face model")
    from dualres.hub.hf_model import DualResForCausalLM

    if not is_run(source):
        if which != "last":
            raise ModelError(f"{source} is no run and has one set of weights: leave --checkpoint {which} out")
        return Opened(source.resolve().name, load_model(source), load_tokenizer(source), _read_record(source))
    loaded = load_run(source, which)
    end = loaded.tokenizer.end_of_text
    model = DualResForCausalLM.of(loaded.decoder, eos_token_id=end, pad_token_id=end).eval()
    tokenizer = as_transformers(loaded.tokenizer, loaded.decoder.config.context)
    return Opened(source.resolve().name, model, tokenizer, _record(source, loaded.checkpoint))


def is_run(folder: Path) -> bool:
    """Whether a folder is one that `dualres train` writes."""
    try:
        return {"config", "data"} <= json.loads((folder / run_folder.CONFIG).read_text(encoding="utf-8")).keys()
    except (OSError, ValueError, AttributeError):
        return False


def export(source: Path, out: Path, *, form: Form = "dualres", which: str = "last", dtype: str | None = None) -> Opened:
    """Write the model of a run or of a saved dualres model to the folder `out`: weights, config, tokenizer, card, code.

    `form="llama"` writes a `standard` model as a plain checkpoint of Llama's family. `dtype`: float32, bfloat16, …
    """
    check_new(out)
    opened = open_model(source, which)
    if dtype is not None:
        opened.model.to(getattr(torch, dtype))
        opened.model.config.dtype = getattr(torch, dtype)
    decoder = opened.model.decoder
    model = opened.model if form == "dualres" else _as_llama(opened)
    origin, measured = _history(opened.record)
    text = model_card.card(
        opened.name, decoder.config, decoder.residual_config, parameters(decoder), origin, measured, out.name, form
    )
    with new_model_folder(out) as folder:
        write_model(model, opened.tokenizer, text, folder)
        if (source / TOKENIZER).is_file():  # as it was: transformers adds to it
            shutil.copyfile(source / TOKENIZER, folder / TOKENIZER)
        if opened.record is not None and form == "dualres":
            write_json(folder / RUN_RECORD, opened.record)
    return opened


def _as_llama(opened: Opened) -> Any:
    """A `standard` model as `transformers`' own model, with the same weights."""
    transformers = need("transformers", "hub", "a Hugging Face model")
    config, decoder = opened.model.config, opened.model.decoder
    method = decoder.residual_config.method
    if method != "standard":
        raise ModelError(f"{opened.name} is on {method}, which Llama has not: only `standard` exports as Llama")
    tokens = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    kind, fields = llama.their_config(decoder.config, opened.name, **tokens)
    made = transformers.AutoConfig.for_model(kind, **fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=opened.model.dtype)
    model.load_state_dict(llama.their_tensors(decoder), strict=False, assign=True)
    model.tie_weights()
    model.generation_config = opened.model.generation_config
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not left, left
    return model


def import_run(folder: Path, out: Path) -> Path:
    """The inverse of `export`: a run's folder with one checkpoint, its weights and no optimizer state."""
    opened = open_model(folder)
    if is_run(folder) or opened.record is None:
        raise ModelError(
            f"{folder} was not exported from a run (it has no {RUN_RECORD}): train on from it with "
            f"`dualres train SCALE RESIDUAL --from {folder}`"
        )
    described, state = _described(folder, opened)
    record = opened.record
    refusal = ModelError(f"{out} is there already and not empty: choose another name, or remove it")
    tensors = {f"model.{name}": p.detach().float() for name, p in opened.model.decoder.named_parameters()}
    with new_folder(out, refusal) as partial:
        world = World(0, 1, torch.device("cpu"), None, None)
        checkpoints = checkpoint.Checkpoints(partial / run_folder.CHECKPOINTS, world, 1, _refuse)
        checkpoints.save(state["step"], tensors, {**state, "best_step": state["step"]})
        checkpoints.wait()
        if checkpoints.failure is not None:
            raise ModelError(checkpoints.failure)
        shutil.copyfile(folder / TOKENIZER, partial / TOKENIZER)
        if record.get("summary"):
            write_json(partial / run_folder.SUMMARY, record["summary"])
        write_json(partial / run_folder.CONFIG, described)
    return out


def _described(folder: Path, opened: Opened) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the record says of the run and of its checkpoint, where it fits the model beside it."""
    record, decoder = opened.record or {}, opened.model.decoder
    try:
        described: dict[str, Any] = {key: record[key] for key in RUN if key in record}
        state = {key: record["state"][key] for key in STATE}
        config = build(Config, described["config"], "")
        if config.model != decoder.config or (
            registry.explicit(config.residual, 2 * config.model.layers) != decoder.residual_config
        ):
            raise ValueError("its config is of another model than config.json")
        for key in ("step", "sequences"):
            if type(state[key]) is not int or state[key] < 0:
                raise ValueError(f"{key} {state[key]!r} is no count")
        made_by, end = described["data"]["fingerprint"], described["data"]["end_of_text"]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{folder / RUN_RECORD} is not what `dualres export` writes ({error!r}): export again"
        ) from None
    if not (folder / TOKENIZER).is_file() or load_json_tokenizer(folder / TOKENIZER, end).fingerprint != made_by:
        raise ModelError(f"{folder / TOKENIZER} is not the tokenizer that the run was trained with: restore it")
    return described, state


def _refuse(text: str) -> None:
    raise ModelError(text)


def _read_record(folder: Path) -> dict[str, Any] | None:
    """What `export` wrote of the run; None where the model is of none."""
    path = folder / RUN_RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        _history(record)
        return dict(record)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ModelError(
            f"{path} is not what `dualres export` writes ({error!r}): export again, or remove the file"
        ) from None


def _record(source: Path, path: Path) -> dict[str, Any]:
    """What a run says of itself, without the places on its machine."""
    described = run_folder.read_description(source)
    state = json.loads((path / checkpoint.STATE).read_text(encoding="utf-8"))
    summary = run_folder.read_summary(source) if (source / run_folder.SUMMARY).is_file() else None
    data = {**described["data"], "folder": Path(described["data"]["folder"]).name}
    return {**described, "data": data, "state": state, "summary": summary}


def _history(record: Mapping[str, Any] | None) -> tuple[list[str], dict[str, Any]]:
    """Where the weights come from, and what was measured, for the card."""
    if record is None:
        return [], {}
    train, state, data = record["config"]["train"], record["state"], record["data"]
    tokens = state["sequences"] * record["config"]["model"]["context"]
    began = f", from the weights of `{record['start']}`" if "start" in record else ""
    recipe = "\n".join(f"| {key} | {value} |" for key, value in train.items() if key not in ("parallel",))
    origin = [
        f"Trained with dualres {record['dualres']} on `{data['folder']}` (content `{data['content']}`), meant as "
        f"{train['dataset']}: {state['step']:,} steps, {tokens:,} tokens{began}.",
        f"<details><summary>The recipe</summary>\n\n| train | |\n|---|---|\n{recipe}\n\n</details>",
    ]
    measured = {"training steps": f"{state['step']:,}", "training tokens": f"{tokens:,}"}
    for key, name in (("validation_loss", "validation loss"), ("best_loss", "best validation loss of the run")):
        if state[key] is not None and math.isfinite(state[key]):
            measured[name] = f"{state[key]:.4f}"
    return origin, measured

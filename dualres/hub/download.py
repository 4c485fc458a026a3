"""Fetch a model from the Hugging Face hub."""

from pathlib import Path

from dualres.util.errors import ModelError
from dualres.util.optional_dependencies import need

FETCHED = ["*.json", "*.jinja", "*.safetensors", "tokenizer*", "*.txt"]
NOT_FETCHED = ["consolidated*"]  # the same weights in Mistral's own form


def local_folder(source: str) -> Path:
    """A folder as it is; a name on the Hugging Face hub is fetched: config, tokenizer and safetensors, nothing else."""
    if Path(source).is_dir():
        return Path(source)
    hub = need("huggingface_hub", "hub", "a model from the Hugging Face hub")
    try:
        found = hub.snapshot_download(source, allow_patterns=FETCHED, ignore_patterns=NOT_FETCHED)
    except Exception as error:  # of the network, the name, the permission
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{source} is neither a folder nor a model that the hub gives ({reason})") from None
    return Path(found)

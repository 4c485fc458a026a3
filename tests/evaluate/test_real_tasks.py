"""On real documents of all eight tasks, a converted model scores what lm-eval's own `hf` model gives its source."""

from pathlib import Path
from typing import Any

import datasets
import lm_eval
import lm_eval.models.huggingface
import lm_eval.tasks
import pytest
import torch
import transformers

from dualres.data.tokenizer import byte_tokenizer
from dualres.evaluate.tasks import OLMO, TASKS, TaskDocuments, task_documents
from dualres.evaluate.zero_shot import score_task
from dualres.hub.convert import convert
from dualres.hub.open_model import as_transformers, open_model

CONTEXT, LIMIT, BATCH = 1024, 30, 4
SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with sharp opinions: random, and ten times larger than at a start."""
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, initializer_range=0.2, eos_token_id=256, bos_token_id=None)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    as_transformers(byte_tokenizer(), CONTEXT).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["standard", "dar-block"])
def test_scores_are_those_of_the_source_to_the_last_digit(residual: str, source: Path, tmp_path: Path):
    convert(str(source), tmp_path / "ours", residual)
    model = open_model(tmp_path / "ours", architectures="any")
    assert model.network.decoder.residual_config.method == residual
    theirs = lm_eval.models.huggingface.HFLM(pretrained=str(source), batch_size=BATCH, max_length=CONTEXT, device="cpu")
    for documents in task_documents(TASKS, OLMO):
        ours = score_task(model, documents, batch=BATCH, limit=LIMIT)
        wanted = _by_the_harness(theirs, documents)
        found = {name: accuracy.value for name, accuracy in ours.accuracies.items()}
        assert ours.documents == LIMIT
        for metric, value in wanted.items():
            assert found[metric] == value, (documents.task.name, metric)


def _by_the_harness(model: Any, documents: TaskDocuments) -> dict[str, float]:
    """The stock task, loaded by lm-eval itself, which reads the same documents."""
    split = datasets.DatasetDict({documents.split: datasets.Dataset.from_list(list(documents.rows or ()))})
    splits = {f"{name}_split": name if name == documents.split else None for name in ("validation", "test")}
    stock = Path(lm_eval.tasks.__file__).parent / documents.task.folder
    manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=str(stock))
    changed = {"task": documents.task.name, "custom_dataset": lambda **_: split, "training_split": None, **splits}
    found = lm_eval.simple_evaluate(
        model, tasks=[{"group": "real", "task": [changed]}], task_manager=manager, limit=LIMIT, num_fewshot=0
    )
    results = found["results"][documents.task.name]
    return {metric: results[f"{metric},none"] for metric in ("acc", "acc_norm") if f"{metric},none" in results}

"""Zero-shot scores: those of the harness to the last digit, those of a plain computation, and the model unchanged."""

import copy
import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import pytest
import torch
import yaml
from lm_eval.api.task import tqdm
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from dualres.config.schema import ConfigError
from dualres.evaluate.batch_size import Batch
from dualres.evaluate.tasks import TASKS, TaskDocuments, ZeroShotTask, task_documents
from dualres.evaluate.zero_shot import Accuracy, average, from_data, score_task
from dualres.hub.open_model import TrainedModel
from dualres.util.errors import DataError
from tests.evaluate.task_files import FILES, write_files
from tests.evaluate.tiny import bpe_tokenizer, tiny_model

CONTEXT, BATCH = 128, 3


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def documents(files: Path) -> dict[str, TaskDocuments]:
    return {found.task.name: found for found in task_documents(TASKS, str(files))}


@pytest.fixture(scope="module")
def model() -> TrainedModel:
    return tiny_model(bpe_tokenizer(), context=CONTEXT)


def harness_scores(model: TrainedModel, task: ZeroShotTask, file: Path, folder: Path) -> dict[str, Any]:
    """The harness by itself: a YAML that includes the stock one and reads the file, run by its own evaluator."""
    stock = Path(lm_eval.tasks.__file__).parent / task.folder
    [path] = [path for path in stock.glob("*.yaml") if f"\ntask: {task.name}\n" in "\n" + path.read_text()]
    splits = {"training_split": None, "validation_split": None, "test_split": None, f"{task.split}_split": task.split}
    options = {"data_files": {task.split: str(file)}, "cache_dir": str(folder / "cache")}
    data = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": options}
    own = folder / f"{task.name}.yaml"
    own.write_text(yaml.safe_dump({"include": str(path), "task": task.name, **data, **splits}))
    adapter = HFLM(
        pretrained=model.network, tokenizer=copy.deepcopy(model.tokenizer), batch_size=BATCH, max_length=CONTEXT
    )
    found = lm_eval.simple_evaluate(
        adapter, tasks=[str(own)], task_manager=TaskManager(include_defaults=False, include_path=folder)
    )
    assert found is not None
    scores: dict[str, Any] = found["results"][task.name]
    return scores


def test_a_model_of_nans_has_no_score(documents: dict[str, TaskDocuments]):
    broken = tiny_model(bpe_tokenizer(), context=CONTEXT)
    with torch.no_grad():
        broken.network.lm_head.weight.fill_(torch.nan)
    with pytest.raises(DataError, match="tiny assigns an answer of piqa a log-likelihood of nan"):
        score_task(broken, documents["piqa"], batch=BATCH)


def test_a_tokenizer_beyond_the_model_is_refused(documents: dict[str, TaskDocuments]):
    with pytest.raises(DataError, match="has 270 entries"):
        score_task(tiny_model(bpe_tokenizer(), context=CONTEXT, vocab_size=270), documents["piqa"], batch=BATCH)


@pytest.mark.parametrize("memory", [10_000, 100])
@pytest.mark.parametrize("tokens", [1, 120, 10_000])
def test_a_batch_of_tokens_gives_the_same_scores(
    tokens: int, memory: int, model: TrainedModel, documents: dict[str, TaskDocuments]
):
    """As many rows as the longest prompt allows, halved where they do not fit, and never none."""
    asked: list[torch.Size] = []

    def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows = args[0] if args else kwargs["input_ids"]
        asked.append(rows.shape)
        if rows.numel() > memory and len(rows) > 1:
            raise torch.OutOfMemoryError(f"{rows.numel()} tokens")

    wanted = score_task(model, documents["piqa"], batch=BATCH).accuracies
    hook = model.network.register_forward_pre_hook(look, with_kwargs=True)
    batch = Batch(1, tokens)
    found = score_task(model, documents["piqa"], batch=batch).accuracies
    hook.remove()
    assert found == wanted
    assert batch.tokens == tokens  # one task's prompts say nothing of the next one's
    most = max(shape[0] for shape in asked)
    longest = max(shape[1] for shape in asked)
    assert most == 1 if tokens == 1 else 1 < most <= tokens // longest
    assert asked[-1].numel() <= max(memory, longest)


def test_a_shorter_context_is_what_the_model_reads(model: TrainedModel, documents: dict[str, TaskDocuments]):
    widths: list[int] = []
    hook = model.network.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append((args[0] if args else kwargs["input_ids"]).shape[1]),
        with_kwargs=True,
    )
    found = score_task(dataclasses.replace(model, context=40), documents["piqa"], batch=BATCH)
    hook.remove()
    assert max(widths) == 40
    assert found.cut > 0


@pytest.mark.parametrize(("task", "file"), [*zip(TASKS, FILES, strict=True)], ids=[task.name for task in TASKS])
def test_scores_are_those_of_the_harness(
    task: ZeroShotTask,
    file: str,
    model: TrainedModel,
    documents: dict[str, TaskDocuments],
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    seen: list[Any] = []
    answer = HFLM.loglikelihood

    def overheard(self: HFLM, requests: Any, **options: Any) -> Any:
        answers = answer(self, requests, **options)
        seen.append([(request.args, found) for request, found in zip(requests, answers, strict=True)])
        return answers

    monkeypatch.setattr(HFLM, "loglikelihood", overheard)
    ours = score_task(model, documents[task.name], batch=BATCH)
    theirs = harness_scores(model, task, files / file, tmp_path)
    assert seen[0] == seen[1]  # prompts, answers and log-likelihoods
    assert {metric for metric in ("acc", "acc_norm") if f"{metric},none" in theirs} >= {"acc"}
    for metric, accuracy in ours.accuracies.items():
        if (task.name, metric) != ("social_iqa", "acc_norm"):  # which is added
            assert accuracy == Accuracy(theirs[f"{metric},none"], theirs[f"{metric}_stderr,none"])
    assert ours.documents == theirs["sample_len"] == len(FILES[file])
    assert (ours.task, ours.metric, ours.harness) == (task.name, task.metric, lm_eval.__version__)


@torch.no_grad()
def log_likelihood(model: TrainedModel, prompt: str, answer: str) -> float:
    """Σ_t log p(answer_t | prompt, answer_<t), with the space that separates them in the answer."""
    whole = model.tokenizer(prompt + answer)["input_ids"]
    start = len(model.tokenizer(prompt)["input_ids"])
    scores = model.network(torch.tensor([whole[:-1]])).logits[0].double().log_softmax(-1)
    return sum(scores[at - 1, whole[at]].item() for at in range(start, len(whole)))


def test_acc_and_acc_norm_by_a_plain_computation(documents: dict[str, TaskDocuments]):
    model = tiny_model(context=CONTEXT)
    found = score_task(model, documents["social_iqa"], batch=BATCH)
    likeliest, likeliest_by_length = [], []
    for row in FILES["social_iqa_validation.jsonl"]:
        answers = [row["answerA"], row["answerB"], row["answerC"]]
        prompt = f"Q: {row['context']} {row['question']}\nA:"
        scores = [log_likelihood(model, prompt, f" {answer}") for answer in answers]
        by_length = [score / len(answer) for score, answer in zip(scores, answers, strict=True)]
        likeliest.append(scores.index(max(scores)) == int(row["label"]) - 1)
        likeliest_by_length.append(by_length.index(max(by_length)) == int(row["label"]) - 1)
    assert found.accuracies["acc"].value == sum(likeliest) / 3
    assert found.accuracies["acc_norm"].value == sum(likeliest_by_length) / 3
    # All three rows have the same text and different labels: any model has one right, so look at which one too.
    for label, right, right_by_length in zip("123", likeliest, likeliest_by_length, strict=True):
        one = documents["social_iqa"]._replace(
            rows=tuple(row for row in documents["social_iqa"].rows or () if row["label"] == label)
        )
        alone = score_task(model, one, batch=BATCH)
        assert [alone.accuracies[metric].value for metric in ("acc", "acc_norm")] == [right, right_by_length]
        assert alone.printed == Accuracy(right_by_length, None)  # one document has no standard error
    assert likeliest != likeliest_by_length


def test_a_limit_takes_the_first_documents(model: TrainedModel, documents: dict[str, TaskDocuments]):
    whole = documents["hellaswag"]
    limited = score_task(model, whole, batch=BATCH, limit=2)
    first = score_task(model, whole._replace(rows=(whole.rows or ())[:2]), batch=BATCH)
    assert limited.documents == 2
    assert limited.accuracies == first.accuracies


def test_prompts_that_are_cut_are_counted(documents: dict[str, TaskDocuments]):
    model = tiny_model(context=CONTEXT)  # a token is a byte
    rows = FILES["boolq_validation.jsonl"]
    lengths = [len(f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:") for row in rows]
    long = {**rows[0], "passage": rows[0]["passage"] + "x" * (CONTEXT - 2 - lengths[0])}
    # With " no" the last prompt reads all of the context, with " yes" it is cut.
    found = documents["boolq"]._replace(rows=(*rows[:2], long))
    assert score_task(model, found, batch=BATCH).cut == 1
    assert score_task(dataclasses.replace(model, context=40), found, batch=BATCH).cut == sum(
        length + len(answer) > 41 for length in (*lengths[:2], CONTEXT - 2) for answer in (" no", " yes")
    )


def test_an_answer_longer_than_the_context_is_refused(documents: dict[str, TaskDocuments]):
    with pytest.raises(ConfigError, match="hellaswag has an answer of 30 tokens, but the context is 16"):
        score_task(tiny_model(context=16), documents["hellaswag"], batch=BATCH)


def test_the_hub_out_of_reach_is_said_with_what_else_there_is(model: TrainedModel, monkeypatch: pytest.MonkeyPatch):
    def unreachable(*given: object, **options: object) -> None:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    [found] = task_documents(TASKS[:1], "hub")
    with pytest.raises(DataError, match=r"hellaswag.*Rowan/hellaswag.*--tasks-from olmo.*no route to the hub"):
        score_task(model, found, batch=BATCH)


def test_the_hubs_documents_are_the_stock_tasks(
    model: TrainedModel, documents: dict[str, TaskDocuments], monkeypatch: pytest.MonkeyPatch
):
    """The stock task asks `datasets` for its dataset, of which there may be more splits than are evaluated."""
    asked = []

    def load(path: str, name: str | None = None, **options: Any) -> Any:
        asked.append((path, name))
        rows = [*(documents["arc_easy"].rows or ())]
        return datasets.DatasetDict(
            {
                split: datasets.Dataset.from_list(rows[:number])
                for number, split in ((1, "train"), (2, "validation"), (3, "test"))
            }
        )

    monkeypatch.setattr("datasets.load_dataset", load)
    [found] = task_documents([task for task in TASKS if task.name == "arc_easy"], "hub")
    score = score_task(model, found, batch=BATCH)
    assert asked == [("allenai/ai2_arc", "ARC-Easy")]
    assert score.documents == 3
    assert score_task(model, found, batch=BATCH, limit=2).documents == 2
    assert score.accuracies == score_task(model, documents["arc_easy"], batch=BATCH).accuracies


def test_the_subject_is_left_as_it_was(documents: dict[str, TaskDocuments]):
    model = tiny_model(context=CONTEXT)
    tokenizer = model.tokenizer
    tokenizer.pad_token = tokenizer.eos_token = None  # the harness adds a token then
    before = len(tokenizer), {name: value.clone() for name, value in model.network.state_dict().items()}
    score_task(model, documents["piqa"], batch=BATCH)
    assert (len(tokenizer), tokenizer.pad_token) == (before[0], None)
    assert all(torch.equal(value, before[1][name]) for name, value in model.network.state_dict().items())


def test_it_is_quiet_but_for_our_progress(
    model: TrainedModel, documents: dict[str, TaskDocuments], capfd: pytest.CaptureFixture[str]
):
    begin, level = tqdm.__init__, logging.root.manager.disable
    shown: list[tuple[str, float | None]] = []
    score_task(model, documents["boolq"], batch=BATCH, show=lambda text, done=None: shown.append((text, done)))
    assert capfd.readouterr() == ("", "")
    assert shown == [(f"boolq  {number}/6 answers", number / 6) for number in range(1, 7)]
    assert (tqdm.__init__, logging.root.manager.disable) == (begin, level)


def test_a_batch_too_large_for_the_memory_is_halved(model: TrainedModel, documents: dict[str, TaskDocuments]):
    tried: list[int] = []

    def crowded(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tried.append(len(args[0] if args else kwargs["input_ids"]))
        if tried[-1] > 2:
            raise torch.OutOfMemoryError

    hook = model.network.register_forward_pre_hook(crowded, with_kwargs=True)
    found = score_task(model, documents["boolq"], batch=16)
    hook.remove()
    assert found.documents == 3
    assert tried[:2] == [6, 6]  # all answers, with 16 and with 8 rows
    assert tried[2:] == [4, 2, 2, 2]


def test_scores_survive_json(model: TrainedModel, documents: dict[str, TaskDocuments]):
    score = score_task(model, documents["boolq"], batch=BATCH)
    assert from_data(json.loads(json.dumps(score._asdict()))) == score


def test_the_average_is_unweighted(model: TrainedModel, documents: dict[str, TaskDocuments]):
    score = score_task(model, documents["boolq"], batch=BATCH)
    scores = [
        score._replace(accuracies={"acc": Accuracy(value, 0.1)}, documents=count)
        for value, count in ((0.5, 1), (0.8, 99))
    ]
    assert average(scores) == 0.65

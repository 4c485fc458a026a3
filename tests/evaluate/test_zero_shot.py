"""Zero-shot scores: those of the harness to the last digit, those of a plain computation, and the subject unchanged."""

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
from dualres.evaluate import zero_shot
from dualres.evaluate.batch_size import Batch
from dualres.evaluate.task_documents import TaskDocuments, task_documents
from dualres.evaluate.tasks import TASKS, Task
from dualres.evaluate.zero_shot import Accuracy, TaskScore, as_data, average, from_data, score_task
from dualres.hub.open_model import TrainedModel
from dualres.util.errors import DataError
from tests.evaluate.task_files import FILES, write_files
from tests.evaluate.tiny import bpe_tokenizer, tiny_subject

CONTEXT, BATCH = 128, 3


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def documents(files: Path) -> dict[str, TaskDocuments]:
    return {found.task.name: found for found in task_documents(TASKS, str(files))}


@pytest.fixture(scope="module")
def subject() -> TrainedModel:
    return tiny_subject(bpe_tokenizer(), context=CONTEXT)


def harness_scores(subject: TrainedModel, task: Task, file: Path, folder: Path) -> dict[str, Any]:
    """The harness by itself: a YAML that includes the stock one and reads the file, run by its own evaluator."""
    stock = Path(lm_eval.tasks.__file__).parent / task.folder
    [path] = [path for path in stock.glob("*.yaml") if f"\ntask: {task.name}\n" in "\n" + path.read_text()]
    splits = {"training_split": None, "validation_split": None, "test_split": None, f"{task.split}_split": task.split}
    options = {"data_files": {task.split: str(file)}, "cache_dir": str(folder / "cache")}
    data = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": options}
    own = folder / f"{task.name}.yaml"
    own.write_text(yaml.safe_dump({"include": str(path), "task": task.name, **data, **splits}))
    model = HFLM(
        pretrained=subject.network, tokenizer=copy.deepcopy(subject.tokenizer), batch_size=BATCH, max_length=CONTEXT
    )
    found = lm_eval.simple_evaluate(
        model, tasks=[str(own)], task_manager=TaskManager(include_defaults=False, include_path=folder)
    )
    assert found is not None
    scores: dict[str, Any] = found["results"][task.name]
    return scores


def test_a_model_of_nans_has_no_score(documents: dict[str, TaskDocuments]):
    broken = tiny_subject(bpe_tokenizer(), context=CONTEXT)
    with torch.no_grad():
        broken.network.lm_head.weight.fill_(torch.nan)
    with pytest.raises(DataError, match="tiny gives an answer of piqa a log-likelihood of nan"):
        score_task(broken, documents["piqa"], batch=BATCH)


def test_a_tokenizer_beyond_the_model_is_refused(documents: dict[str, TaskDocuments]):
    with pytest.raises(DataError, match="has only 270 entries"):
        score_task(tiny_subject(bpe_tokenizer(), context=CONTEXT, vocab_size=270), documents["piqa"], batch=BATCH)


@pytest.mark.parametrize("memory", [10_000, 100])
@pytest.mark.parametrize("tokens", [1, 120, 10_000])
def test_a_batch_of_tokens_gives_the_same_scores(
    tokens: int, memory: int, subject: TrainedModel, documents: dict[str, TaskDocuments]
):
    """As many rows as the longest prompt allows, halved where they do not fit, and never none."""
    asked: list[torch.Size] = []

    def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows = args[0] if args else kwargs["input_ids"]
        asked.append(rows.shape)
        if rows.numel() > memory and len(rows) > 1:
            raise torch.OutOfMemoryError(f"{rows.numel()} tokens")

    wanted = score_task(subject, documents["piqa"], batch=BATCH).accuracies
    hook = subject.network.register_forward_pre_hook(look, with_kwargs=True)
    batch = Batch(1, tokens)
    found = score_task(subject, documents["piqa"], batch=batch).accuracies
    hook.remove()
    assert found == wanted
    assert batch.tokens == tokens  # one task's prompts say nothing of the next one's
    most = max(shape[0] for shape in asked)
    longest = max(shape[1] for shape in asked)
    assert most == 1 if tokens == 1 else 1 < most <= tokens // longest
    assert asked[-1].numel() <= max(memory, longest)


def test_a_shorter_context_is_what_the_model_reads(subject: TrainedModel, documents: dict[str, TaskDocuments]):
    widths: list[int] = []
    hook = subject.network.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append((args[0] if args else kwargs["input_ids"]).shape[1]),
        with_kwargs=True,
    )
    found = score_task(dataclasses.replace(subject, context=40), documents["piqa"], batch=BATCH)
    hook.remove()
    assert max(widths) == 40
    assert found.cut > 0


@pytest.mark.parametrize(("task", "file"), [*zip(TASKS, FILES, strict=True)], ids=[task.name for task in TASKS])
def test_scores_are_those_of_the_harness(
    task: Task,
    file: str,
    subject: TrainedModel,
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
    ours = score_task(subject, documents[task.name], batch=BATCH)
    theirs = harness_scores(subject, task, files / file, tmp_path)
    assert seen[0] == seen[1]  # prompts, answers and log-likelihoods
    assert {metric for metric in ("acc", "acc_norm") if f"{metric},none" in theirs} >= {"acc"}
    for metric, accuracy in ours.accuracies.items():
        if (task.name, metric) != ("social_iqa", "acc_norm"):  # which is added
            assert accuracy == Accuracy(theirs[f"{metric},none"], theirs[f"{metric}_stderr,none"])
    assert ours.documents == theirs["sample_len"] == len(FILES[file])
    assert (ours.metric, ours.split, ours.origin, ours.harness) == (task.metric, task.split, file, lm_eval.__version__)


@torch.no_grad()
def log_likelihood(subject: TrainedModel, prompt: str, answer: str) -> float:
    """Σ_t log p(answer_t | prompt, answer_<t), with the space that separates them in the answer."""
    whole = subject.tokenizer(prompt + answer)["input_ids"]
    start = len(subject.tokenizer(prompt)["input_ids"])
    scores = subject.network(torch.tensor([whole[:-1]])).logits[0].double().log_softmax(-1)
    return sum(scores[at - 1, whole[at]].item() for at in range(start, len(whole)))


def test_acc_and_acc_norm_by_a_plain_computation(documents: dict[str, TaskDocuments]):
    subject = tiny_subject(context=CONTEXT)
    found = score_task(subject, documents["social_iqa"], batch=BATCH)
    likeliest, likeliest_by_length = [], []
    for row in FILES["social_iqa_validation.jsonl"]:
        answers = [row["answerA"], row["answerB"], row["answerC"]]
        prompt = f"Q: {row['context']} {row['question']}\nA:"
        scores = [log_likelihood(subject, prompt, f" {answer}") for answer in answers]
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
        alone = score_task(subject, one, batch=BATCH)
        assert [alone.accuracies[metric].value for metric in ("acc", "acc_norm")] == [right, right_by_length]
        assert alone.printed == Accuracy(right_by_length, None)  # one document has no standard error
    assert likeliest != likeliest_by_length


def test_a_limit_takes_the_first_documents(subject: TrainedModel, documents: dict[str, TaskDocuments]):
    whole = documents["hellaswag"]
    limited = score_task(subject, whole, batch=BATCH, limit=2)
    first = score_task(subject, whole._replace(rows=(whole.rows or ())[:2]), batch=BATCH)
    assert (limited.documents, limited.limit) == (2, 2)
    assert limited.accuracies == first.accuracies


def test_prompts_that_are_cut_are_counted(documents: dict[str, TaskDocuments]):
    subject = tiny_subject(context=CONTEXT)  # a token is a byte
    rows = FILES["boolq_validation.jsonl"]
    lengths = [len(f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:") for row in rows]
    long = {**rows[0], "passage": rows[0]["passage"] + "x" * (CONTEXT - 2 - lengths[0])}
    # With " no" the last prompt reads all of the context, with " yes" it is cut.
    found = documents["boolq"]._replace(rows=(*rows[:2], long))
    assert score_task(subject, found, batch=BATCH).cut == 1
    assert score_task(dataclasses.replace(subject, context=40), found, batch=BATCH).cut == sum(
        length + len(answer) > 41 for length in (*lengths[:2], CONTEXT - 2) for answer in (" no", " yes")
    )


def test_an_answer_longer_than_the_context_is_refused(documents: dict[str, TaskDocuments]):
    with pytest.raises(ConfigError, match="hellaswag has an answer of 30 tokens and the context is 16"):
        score_task(tiny_subject(context=16), documents["hellaswag"], batch=BATCH)


def test_the_hub_out_of_reach_is_said_with_what_else_there_is(subject: TrainedModel, monkeypatch: pytest.MonkeyPatch):
    def unreachable(*given: object, **options: object) -> None:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    [found] = task_documents(TASKS[:1], "hub")
    with pytest.raises(DataError, match=r"hellaswag.*Rowan/hellaswag.*--tasks-from olmo.*no route to the hub"):
        score_task(subject, found, batch=BATCH)


def test_the_hubs_documents_are_the_stock_tasks(
    subject: TrainedModel, documents: dict[str, TaskDocuments], monkeypatch: pytest.MonkeyPatch
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
    score = score_task(subject, found, batch=BATCH)
    assert asked == [("allenai/ai2_arc", "ARC-Easy")]
    assert score.documents == 3
    assert score_task(subject, found, batch=BATCH, limit=2).documents == 2
    assert score.accuracies == score_task(subject, documents["arc_easy"], batch=BATCH).accuracies


def test_the_subject_is_left_as_it_was(documents: dict[str, TaskDocuments]):
    subject = tiny_subject(context=CONTEXT)
    tokenizer = subject.tokenizer
    tokenizer.pad_token = tokenizer.eos_token = None  # the harness adds a token then
    before = len(tokenizer), {name: value.clone() for name, value in subject.network.state_dict().items()}
    score_task(subject, documents["piqa"], batch=BATCH)
    assert (len(tokenizer), tokenizer.pad_token) == (before[0], None)
    assert all(torch.equal(value, before[1][name]) for name, value in subject.network.state_dict().items())


def test_it_is_quiet_but_for_our_progress(
    subject: TrainedModel, documents: dict[str, TaskDocuments], capfd: pytest.CaptureFixture[str]
):
    begin, level = tqdm.__init__, logging.getLogger("lm_eval").level
    shown: list[str] = []
    score_task(subject, documents["boolq"], batch=BATCH, show=shown.append)
    assert capfd.readouterr() == ("", "")
    assert shown == [f"boolq  {number}/6 answers" for number in range(1, 7)]
    assert (tqdm.__init__, logging.getLogger("lm_eval").level) == (begin, level)


def test_a_batch_too_large_for_the_memory_is_halved(
    subject: TrainedModel, documents: dict[str, TaskDocuments], monkeypatch: pytest.MonkeyPatch
):
    tried: list[int] = []
    score = zero_shot._score_task

    def crowded(subject: TrainedModel, documents: TaskDocuments, watch: Any, limit: int | None) -> TaskScore:
        tried.append(watch.rows)
        if watch.rows > 4:
            raise torch.OutOfMemoryError
        return score(subject, documents, watch, limit)

    monkeypatch.setattr(zero_shot, "_score_task", crowded)
    assert score_task(subject, documents["boolq"], batch=16).documents == 3
    assert tried == [16, 8, 4]


def test_scores_survive_json(subject: TrainedModel, documents: dict[str, TaskDocuments]):
    score = score_task(subject, documents["boolq"], batch=BATCH)
    assert from_data(json.loads(json.dumps(as_data(score)))) == score
    with pytest.raises(ValueError, match="not a number"):
        from_data({**as_data(score), "accuracies": {"acc": {"value": None, "error": None}}})


def test_the_average_is_unweighted(subject: TrainedModel, documents: dict[str, TaskDocuments]):
    score = score_task(subject, documents["boolq"], batch=BATCH)
    scores = [
        score._replace(accuracies={"acc": Accuracy(value, 0.1)}, documents=count)
        for value, count in ((0.5, 1), (0.8, 99))
    ]
    assert average(scores) == 0.65

"""What stands beneath a table: how its numbers were measured, and what they cannot be compared with."""

from collections.abc import Iterable, Sequence

from dualres.evaluate.documents import PALOMA
from dualres.evaluate.evaluation import Asked, ModelResult
from dualres.evaluate.tasks import TASKS
from dualres.evaluate.zero_shot import harness_version

BEST = "Bold: the best of the models measured here, by the printed digits; the paper's rows take no part."
FIRST_TOKEN = {
    "scored": "the first token scored too, predicted from the token that begins a text or ends the one before",
    "skipped": "the first token of each window skipped",
}
PAPER_TOKENS = "Per token, the paper's numbers are of its own tokenizer, which it does not name: compare with care."
PAPER_POOL = (
    "The paper's pooled token PPL lies below every one of its sixteen sources, which its equation cannot give: do not "
    "measure ours by it."
)


def is_paloma(asked: Asked) -> bool:
    """Whether the sources are, by their names, Paloma's sixteen."""
    return {source.name for source in asked.sources} == set(PALOMA)


def one_tokenizer(models: Sequence[ModelResult]) -> bool:
    """Whether what is counted per token can be compared."""
    return len({model.tokenizer for model in models}) == 1


def per_byte(models: Sequence[ModelResult], asked: Asked) -> bool:
    """Whether what is counted per byte can be compared: where first tokens are skipped, only at equal windows."""
    return asked.first_token == "scored" or (one_tokenizer(models) and len({model.context for model in models}) == 1)


def sources(asked: Asked) -> str:
    """The documents, in a title."""
    if is_paloma(asked):
        return f"Paloma, its sixteen sources as in {asked.documents}"
    count = len(asked.sources)
    return f"{count} {'source' if count == 1 else 'sources'} of {asked.documents}, which are not Paloma"


def fit(models: Sequence[ModelResult], asked: Asked) -> tuple[str, ...]:
    """Of validation loss and pooled perplexity."""
    notes = []
    if asked.validation is not None:
        tokens = _each(models, [None if m.validation is None else f"{m.validation.tokens:,} tokens" for m in models])
        notes.append(
            f"Val. loss: nats per token on {tokens} of {asked.validation.name}, in {_windows(models)}, packed as in "
            "training; the paper's is of FineWeb-Edu."
        )
    if asked.sources:
        notes.append(_perplexity(models, asked))
        notes.append(
            "Pooled: over all tokens or bytes of all sources. Macro: the mean over sources, each counting the same."
        )
        notes.append(f"The paper's PPL and BPB are of Paloma. {PAPER_POOL}")
    if not per_byte(models, asked):
        notes.append(
            "Tokens that are skipped are not predicted, and their bytes still count: between models of other windows "
            "or tokenizers nothing per byte is bold."
        )
    return (*notes, PAPER_TOKENS, f"Lower is better. {BEST}", *_tokenizers(models))


def by_source(models: Sequence[ModelResult], asked: Asked) -> tuple[str, ...]:
    """Of perplexity by source."""
    names = [source.name for source in asked.sources]
    known = sum(name in PALOMA for name in names)
    notes = [_perplexity(models, asked)]
    if known > 0:
        notes.append(f"The paper's columns are of its 1B models on Paloma, not reproduced here. {PAPER_TOKENS}")
    if known > 0 and not is_paloma(asked):
        notes.append(
            f"By their names, {known} of Paloma's sixteen sources are here; the documents need not be Paloma's own."
        )
    return (*notes, f"Lower is better. {BEST}", *_tokenizers(models), "Per byte, every source is in report.json.")


def zero_shot(models: Sequence[ModelResult], asked: Asked) -> tuple[str, ...]:
    """Of zero-shot accuracy."""
    title = {task.name: task.title for task in TASKS}
    scores = [score for model in models for score in model.tasks]
    by_acc = [title[d.task.name] for d in asked.tasks if d.task.metric == "acc"]
    normed = [title[d.task.name] for d in asked.tasks if d.task.metric == "acc_norm"]
    metrics = "; ".join(
        f"{metric} of {', '.join(names)}" for metric, names in (("acc_norm", normed), ("acc", by_acc)) if names
    )
    harness = ", ".join(dict.fromkeys(score.harness for score in scores)) or harness_version()
    context = _each(models, [f"{model.context:,} tokens" for model in models])
    notes = [
        f"lm-evaluation-harness {harness}, its default formulations without examples, in at most {context} of context: "
        f"{metrics}; ± standard error over documents."
    ]
    if asked.limit:
        notes.append(f"Only the first {asked.limit:,} documents of each task: a trial, not a result.")
    places: dict[str, list[str]] = {}
    counts = {score.task: f" {score.documents:,}" for score in scores}
    for d in asked.tasks:
        text = f"{title[d.task.name]}{counts.get(d.task.name, '')}" + (f" ({d.note})" if d.note else "")
        places.setdefault(f"{d.split} of {d.origin}", []).append(text)
    notes.append("Documents: " + "; ".join(f"{place}: {', '.join(texts)}" for place, texts in places.items()) + ".")
    if other := [title[d.task.name] for d in asked.tasks if d.split != d.task.split]:
        splits = {d.task.split for d in asked.tasks if d.split != d.task.split}
        notes.append(
            f"The harness's default split of {', '.join(other)} is {' or '.join(sorted(splits))}, which was not there: "
            "their numbers are of another split, and not to be held against the paper's."
        )
    if "social_iqa" in {d.task.name for d in asked.tasks}:
        notes.append("The harness's SocialIQA has only acc, the last column; acc_norm is added, and is in the average.")
    cuts = {d.task.name: [_cut(model, d.task.name) for model in models] for d in asked.tasks}
    if cut := [f"{title[name]} {_each(models, texts)}" for name, texts in cuts.items() if {*texts} - {None, "0"}]:
        notes.append(f"Answers whose prompt lost its beginning, being longer than the context: {'; '.join(cut)}.")
    return (*notes, f"Higher is better; Avg. is the unweighted mean over tasks. {BEST}")


def _cut(model: ModelResult, task: str) -> str | None:
    return next((f"{score.cut:,}" for score in model.tasks if score.task == task), None)


def _perplexity(models: Sequence[ModelResult], asked: Asked) -> str:
    documents, size = (sum(getattr(source, name) for source in asked.sources) for name in ("documents", "bytes"))
    return (
        f"Perplexity: {documents:,} documents of {size:,} bytes, each by itself in {_windows(models)}, "
        f"{FIRST_TOKEN[asked.first_token]}."
    )


def _tokenizers(models: Sequence[ModelResult]) -> Iterable[str]:
    if not one_tokenizer(models):
        yield (
            "The models have different tokenizers: loss and perplexity per token cannot be compared between them, and "
            "nothing of them is bold. Compare per byte."
        )


def _windows(models: Sequence[ModelResult]) -> str:
    return f"windows of {_each(models, [f'{model.context:,} tokens' for model in models])}"


def _each(models: Sequence[ModelResult], texts: Sequence[str | None]) -> str:
    """One text where it is the same for all models, or that of each."""
    there = [(model.name, text) for model, text in zip(models, texts, strict=True) if text is not None]
    if len({text for _, text in there}) <= 1:
        return there[0][1] if there else "no tokens"
    return ", ".join(f"{text} ({name})" for name, text in there)

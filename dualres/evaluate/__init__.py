"""Measure trained models side by side, as `dualres evaluate` does.

validation    loss on the held-out tokens of a prepared folder, in the windows that training validates on
perplexity    log-likelihood of documents, per token and per byte; `documents` lists them by source
zero_shot     accuracy with lm-evaluation-harness; `tasks` reads the eight tasks (tasks.yaml) and their documents
evaluation    all measurements of a model, each cached on disk as soon as it is finished
tables        the paper's tables with our models; `formats` writes them as Markdown, LaTeX and JSON (`templates/`)
batch_size    evaluation batch size, chosen from free memory
"""

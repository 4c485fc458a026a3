# Everything a newcomer needs: `make test` and `make demo`. Both create .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: install test test-slow lint format demo clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("dualres needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 …" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

test: install lint ## lint, types and all tests but the slow ones
	$(BIN)/pytest -q -n 2 -m 'not slow'

test-slow: install ## the slow tests
	$(BIN)/pytest -q -n 2 -m slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: install ## the paper's parameter tables, then a forward and backward pass of every method
	$(BIN)/dualres params
	$(BIN)/python examples/every_method.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist

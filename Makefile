# Two commands do everything: `make run` and `make test`. Both rest on `make setup`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: setup run test lint unit fuzz test-slow bench-quick gpu-check wheel clean

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info[:2] >= (3, 11) else "Headrace needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "could not make $(VENV); on Debian: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $(STAMP)

run: setup
	$(BIN)/headrace serve

test: setup lint unit

lint: setup
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: setup
	$(BIN)/python -m pytest -m "not slow and not gpu"

# The property tests with examples drawn anew; a failure prints how to repeat it.
fuzz: setup
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: setup
	$(BIN)/python -m pytest -m slow

gpu-check: setup
	$(BIN)/python -m headrace.bench.gpu_check

wheel: setup
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

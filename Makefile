# setup, demo and test need nothing but Python 3.11 and make. PYTHON chooses the interpreter that builds .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test test-slow lint smollm2 clean

setup: $(STAMP)

$(STAMP): requirements-cpu.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("rlite needs Python 3.11 or newer: make PYTHON=python3.11 setup") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-cpu.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest tests -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest tests -m slow

lint: $(STAMP)
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks

models/smollm2-135m/config.json: $(STAMP)
	$(BIN)/python -m rlite.data.smollm2 models/smollm2-135m

smollm2: models/smollm2-135m/config.json

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache

# The only developer commands. `make demo` and `make test` make their own virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check bench clean

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shardyard needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/ready  ## the main job: simulate a real model on a real cluster, leave a report to open
	$(BIN)/shardyard simulate examples/llama-3.1-70b.yaml --report out/llama-3.1-70b
	$(BIN)/shardyard compare examples/llama-3.1-70b.yaml examples/llama-3.1-70b-zero3.yaml

test: check  ## style, types and tests
	$(BIN)/python -m pytest -n 2

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/ready  ## speed; takes a minute
	$(BIN)/python -m pytest tests/benchmarks -m benchmark -s

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks

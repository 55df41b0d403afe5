# Everything sets itself up on first use; a machine with Python 3.11 or newer, make and a package index is enough.
#
#   make demo    train a small model from nothing on this machine and print how it went
#   make test    the whole test suite, with leak checks
#   make test-fast  the tests that start no run, in under two minutes
#   make check   ruff, pyright, import-linter
#   make docs    the documentation as a site in build/site, with the API from docstrings; no word of it from elsewhere
#   make package  sdist and wheel in dist/, with twine's checks and hadolint's of the Dockerfile
#   make soak    long runs with random kills
#   make fuzz    200,000 broken frames and hostile peers against a living node (some minutes)
#   make sglang-cpu  the engine contract on a real SGLang server, on the CPU (pinned, 1.5 GB, some minutes);
#                    SGLANG=0.5.17 takes another version of those that tests/engines/sglang_cpu pins
#   make clean   remove what these targets made (not runs/)
#
# PYTHON=/path/to/python3.x chooses the interpreter. pip's own variables apply; with an index of CPU builds
# in PIP_EXTRA_INDEX_URL the install is some gigabytes smaller.

IS_NEW := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14 python; do \
  "$$p" -c '$(IS_NEW)' 2>/dev/null && { echo "$$p"; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.demo-installed
DOCS_STAMP := $(VENV)/.docs-installed
RELEASE_STAMP := $(VENV)/.release-installed
EXTRAS := cpu,math,megatron,parquet,tensorboard,dev
DEMO_EXTRAS := cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# PYTHON's own pip, if there is one, brings uv: to make another takes longer than all that uv installs.
FIRST_PIP := $(PYTHON) -m pip --disable-pip-version-check --no-input
# Bytecode of what the tests import, on all cores: each of their processes would compile it by itself.
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/(transformers/models|tests|testing|pip|networkx)/' $(VENV)/lib; \
  $(BIN)/python -m compileall -qq -j 0 -x '/test_' core transport memory algos actors launch tests
TESTS ?= tests
SGLANG ?= 0.5.23
SGLANG_VENV := .sglang-venv-$(SGLANG)
SGLANG_STAMP := $(SGLANG_VENV)/.installed
SGLANG_PINS := tests/engines/sglang_cpu/$(SGLANG).txt

export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-fast check docs package soak fuzz sglang-cpu clean setup
.DELETE_ON_ERROR:

# Bytecode is kept: each of its processes imports torch.
demo: $(DEMO_STAMP)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/myxa demo

# More workers than cores: most tests wait for processes most of the time. The longest files begin first, and beside
# them those that only compute.
WORKERS ?= 6
test: $(STAMP)
	@$(BIN)/python -m pytest --workers $(WORKERS) $(TESTS)

# Folders whose tests start no run.
FAST := $(addprefix tests/,config core algos models data actors report reference)
test-fast: $(STAMP)
	@$(BIN)/python -m pytest --workers $(WORKERS) $(FAST)

soak: $(STAMP)
	@$(BIN)/python -m pytest $(TESTS) -m soak --timeout=1800 -o faulthandler_timeout=7200

fuzz: $(STAMP)
	@$(BIN)/python -m pytest tests/fuzz -m soak -s -o faulthandler_timeout=7200

# Its own environment: SGLang pins versions of its own. Says so loudly, and ends well, where SGLang cannot be imported.
sglang-cpu: $(STAMP) $(SGLANG_STAMP)
	@$(BIN)/python tests/engines/run_sglang.py --python $(SGLANG_VENV)/bin/python -- --disable-overlap-schedule
	@$(BIN)/python tests/engines/run_sglang.py --python $(SGLANG_VENV)/bin/python -- --incremental-streaming-output --skip-tokenizer-init --stream-interval 32
	@$(BIN)/python tests/engines/run_sglang.py --python $(SGLANG_VENV)/bin/python --only contract_sampling
	@$(BIN)/python tests/engines/run_paired.py --python $(SGLANG_VENV)/bin/python

$(SGLANG_PINS):
	@echo "make: no pins for SGLang $(SGLANG) at $@; there are: $(notdir $(basename $(wildcard $(dir $@)[0-9]*.txt)))" >&2; exit 2

$(SGLANG_STAMP): $(SGLANG_PINS) $(dir $(SGLANG_PINS))common.txt
	@$(PYTHON) -m venv --clear $(SGLANG_VENV)
	@echo "make: installing SGLang into $(SGLANG_VENV); the first time takes some minutes"
	@$(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check --no-input install -q -c constraints.txt torch
	@$(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check --no-input install -q --no-deps -r $(SGLANG_PINS)
	@touch $@

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# Ten seconds, packages included: no torch. Warnings are errors: dead links and anchors, names that the API has not.
docs: $(DOCS_STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo build/site/index.html

# DL3008: images take the newest packages of their distribution.
package: $(RELEASE_STAMP)
	@rm -rf dist
	@$(BIN)/uv build -q --no-build-isolation --python $(BIN)/python
	@$(BIN)/twine --no-color check --strict dist/*.whl dist/*.tar.gz
	@$(BIN)/hadolint --ignore DL3008 Dockerfile

setup: $(STAMP)

# uv takes a fifth of pip's time. It reads none of pip's configuration, so it gets the indexes that pip knows.
UV = conf=$$($(FIRST_PIP) config list 2>/dev/null || $(PIP) config list); \
  of() { printf '%s' "$$conf" | sed -n "s/^[^=]*\.$$1='\(.*\)'$$/\1/p" | sed 's/\\n/ /g' | tail -n 1; }; \
  UV_DEFAULT_INDEX=$$(of index-url) UV_INDEX=$$(of extra-index-url) UV_FIND_LINKS=$$(of find-links | tr ' ' ',') \
  SSL_CERT_FILE=$$(of cert) VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install -q --index-strategy unsafe-best-match

define install
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; install one or say make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c '$(IS_NEW)' 2>/dev/null || { echo "make: $(PYTHON) is not Python 3.11 or newer" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: $(PYTHON) cannot make virtual environments (its ensurepip is missing)." >&2; \
	  echo "make: install it (Debian, Ubuntu: the package python3-venv) or say make PYTHON=/path/to/another/python" >&2; exit 2; }
	@$(BIN)/python -c '$(IS_NEW)' 2>/dev/null || $(PYTHON) -m venv --without-pip --clear $(VENV)
	@echo "make: installing into $(VENV); the first time downloads $(if $(findstring cpu,$(1)),torch,packages)"
	@$(FIRST_PIP) --python $(BIN)/python install -q -c constraints.txt uv 2>/dev/null || \
	  { $(BIN)/python -m ensurepip >/dev/null && $(PIP) install -q -c constraints.txt uv; }; \
	$(UV) -c constraints.txt -e ".[$(1)]" pip || { echo "make: uv failed; trying pip" >&2; \
	  $(BIN)/python -m ensurepip >/dev/null && $(PIP) install -q -c constraints.txt -e ".[$(1)]"; }
endef

# The demo needs less than the tests do.
$(DEMO_STAMP): pyproject.toml constraints.txt
	$(call install,$(DEMO_EXTRAS))
	@touch $@

$(DOCS_STAMP): pyproject.toml constraints.txt
	$(call install,docs)
	@touch $@

$(RELEASE_STAMP): pyproject.toml constraints.txt
	$(call install,release)
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	$(call install,$(EXTRAS))
	@$(COMPILE) || true  # some packages bring files that are no Python of this version
	@touch $(DEMO_STAMP) $@

clean:
	rm -rf $(VENV) .sglang-venv* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

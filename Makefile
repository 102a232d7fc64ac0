# `make demo` and `make test` do everything on a fresh machine: environment, installation, models.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

TORCH_VERSION ?= 2.13.0
TORCH_CPU     := https://download.pytorch.org/whl/cpu
WORKERS       ?= 2

DEMO_ARGS   ?=
PYTEST_ARGS ?=
PYTEST      := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

.PHONY: help install target demo test test-all lint format docs build clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(VENV)/installed  ## make the virtual environment and install the package in it

# torch comes first and pinned: an open range would fetch gigabytes of CUDA libraries where there is no GPU.
# Its CPU build is taken from where pip already looks, else from PyTorch's own index; other systems have only one.
$(VENV)/torch:
	$(PYTHON) -m venv $(VENV)
	@set -e; pip="$(BIN)/python -m pip install -qq"; \
	if [ "$$(uname -s)" != Linux ] || command -v nvidia-smi > /dev/null; then \
	    $$pip "torch==$(TORCH_VERSION)"; \
	else \
	    $$pip "torch==$(TORCH_VERSION)+cpu" 2> /dev/null \
	    || $$pip "torch==$(TORCH_VERSION)+cpu" --extra-index-url $(TORCH_CPU) \
	    || $$pip "torch==$(TORCH_VERSION)"; \
	fi
	@touch $@

# The demo needs little; the tests need everything.
$(VENV)/demo: $(VENV)/torch pyproject.toml
	$(BIN)/python -m pip install -qq -e ".[demo]"
	@touch $@

$(VENV)/installed: $(VENV)/demo
	$(BIN)/python -m pip install -qq -e ".[dev]"
	@touch $@

target: $(VENV)/target  ## fetch the small target model once, into the user's cache

$(VENV)/target: $(VENV)/demo
	$(BIN)/python -c "from hf_dspark.hub import embedded_target; print('target:', embedded_target())"
	@touch $@

demo: $(VENV)/target  ## decode a few prompts side by side, plain and with the drafter (options: DEMO_ARGS="--prompts 1")
	$(BIN)/hf-dspark demo $(DEMO_ARGS)

test: $(VENV)/installed $(VENV)/target  ## the fast tests
	$(PYTEST) -m "not slow"

test-all: $(VENV)/installed $(VENV)/target  ## all tests
	$(PYTEST)

lint: $(VENV)/installed  ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed  ## fix style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/installed  ## build the documentation into build/site/
	$(BIN)/python -m pip install -qq -e ".[docs]"
	$(BIN)/mkdocs build --strict

build: $(VENV)/installed  ## build the wheel and the source archive into dist/
	$(BIN)/python -m build

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis

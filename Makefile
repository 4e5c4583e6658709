# lenspipe: every chore has one name. `make` alone lists them.

PYTHON ?= python3
BIN := .venv/bin
ENV := .venv/.made
DEMO := data/recipes/demo.toml

# Nothing here asks a hub or reports to anybody: weights come from the package index, runs are local.
export HF_HUB_OFFLINE ?= 1
export DO_NOT_TRACK ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help env model demo test check fmt fmt-check lint types layers docs families chaos bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(ENV) ## make .venv with the pinned packages; redone when pyproject.toml or constraints.txt change
	@:

# -qq leaves pip's errors and drops its warnings.
$(ENV): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: there is no $(PYTHON): say which Python 3.11 or newer to use, as in 'make env PYTHON=python3.12'" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit("lenspipe needs Python 3.11 or newer and $(PYTHON) is %d.%d: say which to use, as in: make env PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "== env: .venv with $$($(PYTHON) --version), the packages of constraints.txt (some minutes)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --no-input -c constraints.txt -e '.[dev]'
	@touch $@

model: env
	@$(BIN)/python scripts/fetch_demo_model.py

demo: env model ## fetch a small model, run the demo recipe, show its dataset, draw demo.png
	@echo "== demo: lenspipe run $(DEMO)"
	@out="$$($(BIN)/lenspipe run $(DEMO))" && dataset="$$(printf '%s\n' "$$out" | tail -n 1)" && \
	echo "== demo: lenspipe show $$dataset" && $(BIN)/lenspipe show "$$dataset" && \
	echo "== demo: lenspipe plot $$dataset --output demo.png" && $(BIN)/lenspipe plot "$$dataset" --output demo.png

test: env model ## run the tests; `make test ARGS='-k readout'` passes arguments to pytest
	@echo "== test: pytest"
	@$(BIN)/python -m pytest $(ARGS)

check: fmt-check lint types layers test docs ## all that must pass before a change goes in
	@echo "== check: all passed"

fmt: env ## format the code and sort its imports
	@$(BIN)/ruff check --quiet --select I --fix .
	@$(BIN)/ruff format .

fmt-check: env
	@echo "== fmt: ruff format --check"
	@$(BIN)/ruff format --check .

lint: env ## look for mistakes and bad habits
	@echo "== lint: ruff check"
	@$(BIN)/ruff check .

types: env ## check the types, strictly
	@echo "== types: mypy --strict"
	@$(BIN)/mypy

layers: env ## check which part imports which
	@echo "== layers: import-linter"
	@$(BIN)/lint-imports --no-cache --no-logo

docs: env ## check that generated pages and the examples in README and docs are true
	@echo "== docs: scripts/docs.py --check"
	@$(BIN)/python scripts/docs.py --check

families: env ## read every model type of the installed transformers, and write docs/families.md
	@$(BIN)/python -m tests.families.sweep $(ARGS)

chaos: env ## kill a small run 300 times and damage its store 1,000 times, half an hour
	@$(BIN)/python -m tests.chaos.kills --kills 300
	@$(BIN)/python -m tests.chaos.damage --rounds 1000

bench: env model ## measure speed and memory, half an hour on a quiet machine; peers too where the extra `bench` is installed
	@for one in readout pipeline rerun memory peers; do $(BIN)/python -m benchmarks.$$one || exit 1; done

clean: ## remove .venv and what the tools left; results and weights stay
	@rm -rf .venv dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

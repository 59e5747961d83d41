# Each target makes the environment .venv from nothing, and adds to it what it needs.
PYTHON ?= python3
BIN := .venv/bin
# Python compiles what is imported, once if it may keep the result.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt
# KaTeX's files alone; see docs/typeset.py.
KATEX := $(INSTALL) --no-deps djangocms-katex
DEMO := .venv/.for-demo
TESTS := .venv/.for-tests
DOCS := .venv/.for-docs
PARALLEL := -n auto --maxprocesses 4 --dist worksteal

.PHONY: help demo test test-slow test-lowest lint docs bench clean
help:           ## Show the targets
	@grep -E '^[a-z-]+: .*##|^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(BIN)/python:
	$(PYTHON) -m venv .venv

$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e .
	touch $@

$(TESTS): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[dev,dp,flower]'
	$(KATEX)
	touch $@

$(DOCS): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[docs]'
	$(KATEX)
	touch $@

demo: $(DEMO)   ## Train three methods on the same federated digits and write a report
	$(BIN)/atoll demo

test: $(TESTS)  ## Format, lint, types, the fast tests and the examples
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest $(PARALLEL)

test-slow: $(TESTS)  ## The tests that take minutes
	$(BIN)/pytest -m slow

test-lowest: $(TESTS) ## The fast tests with the lowest versions of libraries that pyproject.toml allows
	$(PYTHON) -m venv --clear .venv-lowest
	$(BIN)/uv pip install -q --python .venv-lowest/bin/python --resolution lowest-direct -e '.[dev,dp,flower]'
	.venv-lowest/bin/pytest $(PARALLEL)

lint: $(TESTS)  ## Format, lint and check types
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy

docs: $(DOCS)   ## Build the documentation into site/
	$(BIN)/mkdocs build --strict

bench: $(TESTS) ## Measure speed, as ratios in one run
	for script in aggregation engine no_work start streaming views; do $(BIN)/python benchmarks/$$script.py || exit 1; done

clean:          ## Remove the environment and what was built
	rm -rf .venv .venv-lowest build dist site

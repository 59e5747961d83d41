# Each target makes its own environment, .venv, from nothing.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help demo test test-slow lint docs bench clean
help:           ## Show the targets
	@grep -E '^[a-z-]+: .*##|^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)  ## Train three methods on the same federated digits and write a report
	$(BIN)/atoll demo

test: $(STAMP)  ## Lint, types and the fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest

test-slow: $(STAMP)  ## The tests that take minutes
	$(BIN)/pytest -m slow

lint: $(STAMP)  ## Format, lint and check types
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy

docs: $(STAMP)  ## Build the documentation into site/
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

bench: $(STAMP) ## Run the benchmarks
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

clean:          ## Remove the environment and what was built
	rm -rf .venv build dist site

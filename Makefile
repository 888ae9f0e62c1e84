# Every target makes the environment that it needs in .venv: nothing to install by hand.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
DOCS_STAMP := $(VENV)/.installed-docs
RELEASE_STAMP := $(VENV)/.installed-release
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help native demo live test check format stress bench docs wheels clean

help: ## Show the targets.
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 10

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "setfold needs Python 3.11 or later; say which: make PYTHON=python3.12 ..."; exit 1; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# torch comes first and by itself, so that nothing pulls in another build of it.
$(RUN_STAMP): pyproject.toml hatch_build.py constraints.txt | $(VENV)/bin/python
	@echo "installing setfold into $(VENV) (the first time takes a few minutes)"
	@$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	@$(INSTALL) --editable '.[experiments,serve]'
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	@echo "installing what tests, checks and benchmarks need"
	@$(INSTALL) --editable '.[dev]'
	@touch $@

$(DOCS_STAMP): $(DEV_STAMP)
	@echo "installing what the documentation needs"
	@$(INSTALL) --editable '.[docs]'
	@touch $@

native: $(RUN_STAMP) ## Compile the kernels, if there is a C compiler and the sources have changed.
	@$(BIN)/python -P setfold/native/build.py

$(RELEASE_STAMP): $(DEV_STAMP)
	@echo "installing what wheels need, a cross compiler among it"
	@$(INSTALL) --editable '.[release]'
	@touch $@

demo: $(RUN_STAMP) native ## Complete digits as their pixels arrive, fold ten million elements: a page shows both.
	@$(BIN)/python -m demo

live: $(RUN_STAMP) native ## Reveal sets element by element on a page, split and merge them (trains for two minutes, once).
	@$(BIN)/python -m demo.live

test: $(DEV_STAMP) native ## Run all tests, the examples in docstrings among them.
	@$(BIN)/python -m pytest -n auto --dist worksteal

check: $(DEV_STAMP) ## Format, lint, types, import layers.
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(DEV_STAMP) ## Format and fix what can be fixed.
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

stress: $(DEV_STAMP) native ## Encode large files, kill it, fill the disk; damage files, compare encoders (an hour or two).
	@$(INSTALL) --editable '.[spark]'
	@SETFOLD_STRESS=1 $(BIN)/python -m pytest -s tests/files/test_stress.py tests/files/test_partials.py \
	  tests/learning/test_stress.py tests/live/test_kills.py tests/live/test_machine.py tests/live/test_clusters.py \
	  tests/test_differential.py tests/exporting/test_gallery.py tests/fuzz tests/native/test_sanitizers.py tests/native/test_aarch64.py tests/kernels/test_triton_sums.py
	@for isa in 0 $$($(BIN)/python -c 'from setfold.native.library import available; print(*available())'); do \
	  echo "with SETFOLD_NATIVE=$$isa"; \
	  SETFOLD_NATIVE=$$isa $(BIN)/python -m pytest tests/kernels tests/encoders tests/laws || exit 1; done

bench: $(DEV_STAMP) native ## Measure speed and memory beside the peers (about half an hour).
	@$(BIN)/python -m bench

docs: $(DOCS_STAMP) native ## Run the examples of every page, then build the pages into out/docs.
	@$(BIN)/python -m pytest tests/test_docs.py tests/test_readme.py tests/test_tutorial.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheels: $(RELEASE_STAMP) ## Build wheels for every platform into dist and check them (zig's first run takes minutes).
	@$(BIN)/python -m release

clean: ## Remove the environment and everything that was made.
	rm -rf $(VENV) out dist setfold/native/lib .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

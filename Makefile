# Two commands for a newcomer: `make demo` and `make test`. Each does all of its own set-up in .venv.
# `make help` lists the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup java demo test test-truth simulate lint site format docs bench golden corpus clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "stateformat needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Say make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing stateformat and its extras into $(VENV) (once; a few minutes) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat --editable '.[dev]'
	@touch $@

setup: $(READY) ## the virtual environment with everything in it

java:
	@version=$$("$${JAVA_HOME:+$$JAVA_HOME/bin/}java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1); \
	if [ -z "$$version" ]; then echo "Spark needs Java 17 or newer and no java was found; install one (Debian: apt install openjdk-17-jre-headless) or set JAVA_HOME." >&2; exit 1; \
	elif [ "$$version" -lt 17 ]; then echo "Spark needs Java 17 or newer; the java found is version $$version. Install one or set JAVA_HOME." >&2; exit 1; fi

demo: java $(READY) ## real data: state on Spark; dataflows that are killed and resumed, one in a loop; a stream on Spark
	@$(BIN)/python examples/flights_demo.py
	@$(BIN)/python examples/flights_local.py --kills 2
	@$(BIN)/python examples/hops.py
	@$(BIN)/python examples/flights_stream.py

test: java $(READY) ## every test but those of test-truth
	@$(BIN)/python -m tests.side_by_side fast

test-truth: java $(READY) ## what takes longer: crashes, races, corruption, a real S3 server; prints what was tried
	@$(BIN)/python -m tests.side_by_side truth

SEEDS ?= 2000
FIRST ?= 0
simulate: $(READY) ## random dataflows under random faults: SEEDS=2000 FIRST=0; prints the seeds that fail
	@$(BIN)/python -m tests.simulation --seeds $(SEEDS) --first $(FIRST)

lint: $(READY) ## style, types, and the docs site, built strictly
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mkdocs build --strict --quiet

site: $(READY) ## the docs as a site in build/site, with the reference of every public name
	@$(BIN)/mkdocs build --strict --quiet
	@echo "The site is in build/site; $(BIN)/mkdocs serve shows it."

format: $(READY) ## rewrite the code in the house's format
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

docs: $(READY) ## regenerate what docs/ takes from the code
	@$(BIN)/python -m stateformat.tools.ckpt.docs
	@$(BIN)/python -m stateformat.backends.dataflow.task.states > docs/task-life.md

bench: java $(READY) ## the budgets as ratios, and the tables for the README; ONLY="segments spark" runs a part
	@$(BIN)/python -m benchmarks $(ONLY)

corpus: $(READY) ## write the corpus for other implementers of the format anew
	@$(BIN)/python tests/corpus/make_corpus.py

golden: $(READY) ## write the golden checkpoints of the current version anew
	@$(BIN)/python tests/golden/make_golden.py

clean: ## remove the virtual environment and caches
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

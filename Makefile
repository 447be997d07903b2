# Two commands for a newcomer: `make demo` and `make test`. Each does all of its own set-up in .venv.
# `make help` lists the rest.

SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo

.DEFAULT_GOAL := help
.PHONY: help setup java python demo demo-all test test-truth test-engines mutations matrix simulate soak lint site format docs bench golden corpus fixtures clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

python:
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "stateformat needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Say make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)

# One line for each package: pip alone says nothing for minutes, or too much.
INSTALL = $(BIN)/python -u -m pip install --disable-pip-version-check --no-color --progress-bar off \
  --config-settings editable_mode=compat --editable

$(READY): pyproject.toml | python
	@echo "Installing stateformat and what its tests need into $(VENV) (once; a few minutes) ..."
	@$(INSTALL) '.[dev]' | sed -nu 's/^Collecting \([^ ;(<>=]*\).*/  \1/p; s/^Successfully installed.*/Installed./p'
	@touch $@ $(DEMO)

$(DEMO): pyproject.toml | python
	@echo "Installing stateformat with Spark and the demo's data into $(VENV) (once; about a minute) ..."
	@$(INSTALL) '.[demo]' | sed -nu 's/^Collecting \([^ ;(<>=]*\).*/  \1/p; s/^Successfully installed.*/Installed./p'
	@touch $@

setup: $(READY) ## the virtual environment with everything in it

java:
	@version=$$("$${JAVA_HOME:+$$JAVA_HOME/bin/}java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1); \
	if [ -z "$$version" ]; then echo "Spark needs Java 17 or newer and no java was found; install one (Debian: apt install openjdk-17-jre-headless) or set JAVA_HOME." >&2; exit 1; \
	elif [ "$$version" -lt 17 ]; then echo "Spark needs Java 17 or newer; the java found is version $$version. Install one or set JAVA_HOME." >&2; exit 1; fi

demo: java $(DEMO) ## real data on Spark: state written, rescaled, rewritten; a job killed and resumed; a minute or two
	@test ! -e demo-store -a ! -e demo-local || { echo "Replacing demo-store and demo-local, the stores of the last demo"; rm -rf demo-store demo-local; }
	@$(BIN)/python examples/flights_local.py --kills 2 --store demo-local
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python examples/flights_demo.py --store demo-store
	@printf '%s\n' "" "What stays (open the pages in a browser):" "" \
	  "  demo-store        the checkpoint that was rescaled and rewritten   report.html" \
	  "  demo-local/store  the job that was killed and resumed              demo-local/report.html" "" \
	  "ckpt is $(BIN)/ckpt; 'make demo-all' shows a loop and a stream on Spark, too."

demo-all: java $(DEMO) ## the demo, a loop, and a stream on Spark whose driver dies
	@$(MAKE) --no-print-directory demo
	@$(BIN)/python examples/hops.py
	@$(BIN)/python examples/flights_stream.py

# A process that has nothing left takes half of what waits for another, so all end at the same time.
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=25 --durations-min=5

test: java $(READY) ## every test but those of test-truth
	@$(PYTEST) -m "not truth"

test-truth: java $(READY) ## what takes longer: crashes, races, corruption, a real S3 server; prints what was tried
	@$(PYTEST) -m "truth and not engines"

test-engines: java $(READY) ## every query of Spark, edited in each store, and gone on with; test-truth runs a part of it
	@$(PYTEST) -m engines

mutations: $(READY) ## mistakes planted in every room, each of which the tests must find; ONLY="name name" tries some
	@$(BIN)/python -m tests.mutations $(ONLY)

PYTHONS ?= python3.11 python3.12 python3.13
matrix: ## the library's fast tests on each Python: PYTHONS="python3.11 /opt/python3.13/bin/python"
	@tried=; for python in $(PYTHONS); do \
	  $$python -c '' 2>/dev/null || { echo "$$python is not installed here: not tried"; continue; }; \
	  version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])') && place=build/matrix/$$version && \
	  echo "Python $$version" && { test -x $$place/bin/pytest || { $$python -m venv $$place && \
	  $$place/bin/python -m pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat --editable '.[dev]'; }; } && \
	  $$place/bin/python -m pytest -q -p no:cacheprovider -m "not truth and not spark" $(LIBRARY) || exit; \
	  tried="$$tried $$version"; \
	done; echo "Passed on Python:$${tried:- none of $(PYTHONS) is installed}"; test -n "$$tried"

LIBRARY := $(addprefix tests/,stateformat redistribution state dataflow connectors local ckpt)

SEEDS ?= 2000
FIRST ?= 0
simulate: $(READY) ## random dataflows under random faults: SEEDS=2000 FIRST=0; prints the seeds that fail
	@$(BIN)/python -m tests.simulation --seeds $(SEEDS) --first $(FIRST)

MINUTES ?= 60
soak: java $(READY) ## a job with every operator on both executors, killed once a minute for an hour: MINUTES=60
	@$(BIN)/python -m tests.soak --minutes $(MINUTES)

lint: $(READY) ## style, types, and the docs site, built strictly
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

site: $(READY) ## the docs as a site in build/site, with the reference of every public name
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The site is in build/site; $(BIN)/mkdocs serve shows it."

format: $(READY) ## rewrite the code in the house's format
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

docs: $(READY) ## regenerate what docs/ takes from the code
	@$(BIN)/python -m stateformat.tools.ckpt.docs
	@$(BIN)/python -c 'from stateformat.backends.dataflow.task_states import page; print(page(), end="")' > docs/task-life.md

bench: java $(READY) ## the budgets as ratios, and the tables of docs/benchmarks.md; ONLY="segments spark" runs a part
	@$(BIN)/python -m benchmarks $(ONLY)

corpus: $(READY) ## write the corpus for other implementers of the format anew
	@$(BIN)/python tests/corpus/make_corpus.py

golden: $(READY) ## write the golden checkpoints of the current version anew
	@$(BIN)/python tests/golden/make_golden.py

fixtures: java $(READY) ## make the savepoints and checkpoints of Flink and Spark in tests/foreign/fixtures anew
	@for program in tests/foreign/making/make_*.py; do $(BIN)/python $$program || exit; done

clean: ## remove the virtual environment and caches
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Two commands matter: `make demo` and `make test`. Each sets up all it needs in .venv first.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# The demo and the documentation need a part of it only.
DEMO := $(if $(wildcard $(INSTALLED)),$(INSTALLED),.venv/.demo)
DOCS := $(if $(wildcard $(INSTALLED)),$(INSTALLED),.venv/.docs)

.DEFAULT_GOAL := help
.PHONY: help install demo test conformance replicas soak clusters docs docs-serve lint types format clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1|\2/' | column -t -s '|'

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) scripts/environment.py .venv dev,demo
	@touch $@

.venv/.demo: pyproject.toml constraints.txt
	@$(PYTHON) scripts/environment.py .venv demo
	@touch $@

.venv/.docs: pyproject.toml constraints.txt
	@$(PYTHON) scripts/environment.py .venv docs
	@touch $@

# It contains the other one, so one installation is enough for both.
.venv/.demo-llm: pyproject.toml constraints.txt
	@$(PYTHON) scripts/environment.py .venv demo-llm
	@touch .venv/.demo $@

install: $(INSTALLED) ## Set up .venv with everything pinned

JUDGE ?= rules

# The package is not compiled when it is installed: only the modules that are used are, once.
demo: export PYTHONDONTWRITEBYTECODE :=
# A package of the questions warns while it is compiled.
demo: export PYTHONWARNINGS := ignore::SyntaxWarning
demo: $(if $(filter llm,$(JUDGE)),.venv/.demo-llm,$(DEMO)) ## Train a tiny model with verl on the CPU, rewarded by two judge servers; JUDGE=llm: by a language model
	@$(BIN)/python recipes/verl/cpu/demo.py --judge $(JUDGE)

# More than the two processors of continuous integration, because a third of the time of the tests is waiting. With four
# it takes as long. One of the processes runs all files that start Ray (tests/conftest.py).
JOBS ?= 3

# Where the environment forbids it, each of the many subprocesses of the tests would compile the package anew.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(INSTALLED) lint types ## Lint, type-check and test everything, in JOBS processes
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

conformance: $(INSTALLED) ## Play our scenarios on real verl; QREWARD_SLIME_SRC=/path/to/slime: on slime, QREWARD_RAY_DEATHS=1: on a dying Ray
	QREWARD_VERL=1 $(BIN)/python -m pytest tests/conformance/verl tests/conformance/slime tests/conformance/sharing

replicas: ## Start real replicas on the CPU (vLLM, vLLM on Ray, llama.cpp), kill some under load, stop them (makes an environment of 3 GB first)
	PYTHON=$(PYTHON) tests/conformance/vllm/environment.sh -k test_replicas

SEEDS ?= 100000

soak: $(INSTALLED) ## Play SEEDS random trials of the whole engine in virtual time, on all cores (about 30 ms each)
	$(BIN)/python -m qreward_plugins.simulation --seeds 0:$(SEEDS)

clusters: $(INSTALLED) ## Play SEEDS random clusters of workers that share limits, on all cores (about 1 s each)
	$(BIN)/python -m qreward_plugins.simulation --cluster --seeds 0:$(SEEDS)

# Material announces its successor with every build.
docs docs-serve: export NO_MKDOCS_2_WARNING := 1

docs: $(DOCS) ## Build the documentation into site/
	$(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html, or run: make docs-serve"

docs-serve: $(DOCS) ## Serve the documentation at http://127.0.0.1:8008 and rebuild it as you write
	$(BIN)/python -m mkdocs serve --dev-addr 127.0.0.1:8008 --watch qreward_plugins

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

format: $(INSTALLED) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the virtual environment and what the demo wrote
	rm -rf .venv demo site

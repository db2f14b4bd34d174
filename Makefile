# Two commands for a fresh clone: `make demo` and `make test`. Both make their own virtual
# environment in .venv; nothing is installed outside it.

PYTHON ?= python3
VENV ?= .venv
# Given to pip, e.g. an index that has CPU builds of torch.
PIP_FLAGS ?=
PYTEST_FLAGS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt
DEMO_STORE := stores/quickstart
TEST_EXTRAS := dev,pyg,s3,parquet,plot,triton
INPUTS := pyproject.toml constraints.txt

.PHONY: demo test chaos check install clean
.DEFAULT_GOAL := help

.PHONY: help
help:
	@echo "make demo   train a small generated graph with 4 workers, installation included"
	@echo "make test   run the tests"
	@echo "make chaos  whole jobs under torchrun with faults: every scenario, and a soak"
	@echo "make check  lint, formatting and types"
	@echo "make clean  remove the virtual environment and everything generated"

demo: $(VENV)/.installed $(DEMO_STORE)/meta.json
	$(BIN)/dtrain run configs/quickstart.yaml --nproc-per-node=4

$(DEMO_STORE)/meta.json: | $(VENV)/.installed
	$(BIN)/dtrain data synth --nodes 20000 --avg-degree 12 --classes 8 --features 32 \
	    --homophily 0.7 --seed 0 --partitions 4 --out $(DEMO_STORE)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

# Whole jobs under torchrun with faults, hosts as network namespaces among them: minutes.
chaos: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m chaos
	$(BIN)/dtrain chaos --all --matrix --folder runs/chaos
	$(BIN)/dtrain chaos --soak 10 --seed 1 --folder runs/chaos

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p dtrain

install: $(VENV)/.installed-dev

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "error: dtrain needs Python 3.11 or newer; set PYTHON=... to one" >&2; exit 1; }
	@echo "Making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { \
	    echo "error: Python's venv module is missing; install it (Debian: python3-venv)" >&2; \
	    rm -rf $(VENV); exit 1; }

# The virtual environment of the tests serves the demo too.
$(VENV)/.installed: $(INPUTS) | $(BIN)/python
	@echo "Installing dtrain and its dependencies (torch is the large one)"
	@test -e $(VENV)/.installed-dev || $(INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(INPUTS) | $(BIN)/python
	@echo "Installing dtrain, its dependencies and the tools for tests and checks"
	@$(INSTALL) -e '.[$(TEST_EXTRAS)]'
	@touch $@

clean:
	rm -rf $(VENV) $(DEMO_STORE) build dist dtrain.egg-info .pytest_cache .mypy_cache .ruff_cache \
	    .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

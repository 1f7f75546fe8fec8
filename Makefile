# The commands of README.md and of CI. Everything is installed into .venv, from PyPI only.

EXTRAS := hf,text,megatron,resilience,mx,demo,test
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?=
ARGS ?=

# nvidia-resiliency-ext depends on the old pynvml package, about which every import of torch warns.
export PYTHONWARNINGS := ignore:The pynvml package:FutureWarning

.DEFAULT_GOAL := help
.PHONY: help setup sanity test test-slow test-gpu check format clean

help:  ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Create .venv and install the project with every extra that works on a CPU.

# A file that depends on the metadata, so that a second call does nothing.
$(STAMP): pyproject.toml setup.py | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@

# A pyenv shim exists for versions that are not installed: only a run shows whether it is Python 3.12.
$(BIN)/python:
	@for candidate in $(PYTHON) python3.12 python3 python; do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then \
	        echo "Creating $(VENV) with $$(command -v $$candidate)"; exec "$$candidate" -m venv $(VENV); \
	    fi; \
	done; \
	echo "make setup: no Python 3.12 found (tried: $(PYTHON) python3.12 python3 python)." >&2; \
	echo "Install it (with pyenv: pyenv install 3.12), or set PYTHON=/path/to/python3.12." >&2; exit 1

sanity: setup  ## Train L0_sanity on two CPU ranks; ARGS="key=value ..." is passed on.
	$(BIN)/torchrun --nproc_per_node=2 train_fsdp2_ep.py --config-name L0_sanity $(ARGS)

test: setup  ## Run the unit, distributed and short end-to-end tests (GPU tests are skipped without one).
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: setup  ## Run the long tests.
	$(BIN)/python -m pytest -m slow $(ARGS)

test-gpu: setup  ## Run the tests that need a CUDA device.
	$(BIN)/python -m pytest -m gpu $(ARGS)

check: setup  ## Lint, formatting, spelling and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/pyright

format: setup  ## Format the code and apply the linter's safe fixes.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove caches and build products; .venv and runs/ stay.
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -path ./runs -prune -o -name __pycache__ -type d -exec rm -rf {} +

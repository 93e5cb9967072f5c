# make setup | quickstart | test | lint | configs
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup quickstart test lint configs

setup: $(STAMP)

# A machine whose Python already has torch (a GPU node's image) keeps it; any other gets the pinned builds.
$(STAMP): pyproject.toml constraints.txt
	@if $(PYTHON) -c 'import torch' 2>/dev/null; then \
	  echo "Using the torch that $(PYTHON) has."; \
	  $(PYTHON) -m venv --system-site-packages .venv; \
	  grep -v '^torch==' constraints.txt > .venv/constraints.txt; \
	  $(BIN)/python -c 'import torch; print("torch==" + torch.__version__)' >> .venv/constraints.txt; \
	else \
	  $(PYTHON) -m venv .venv; \
	  cp constraints.txt .venv/constraints.txt; \
	fi
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --disable-pip-version-check -c .venv/constraints.txt -e '.[dev]'
	@# CUDA builds of torch bring the triton they need; beside the CPU build it compiles and interprets kernels in tests.
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/pip install --quiet --disable-pip-version-check triton==3.6.0
	@touch $@

quickstart: setup
	@PATH="$$PWD/$(BIN):$$PATH" sh launchers/quickstart.sh

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup  # much of it waits, so two workers pay even on two cores; tests.conftest has the groups
	$(BIN)/pytest -q -n 2 --dist loadgroup --no-loadscope-reorder

# The files of configs/paper, from the table of the paper's runs.
configs: setup
	$(BIN)/python -m mesatron.config.paper configs/paper

# Two commands do everything: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two busy OpenMP processes on two cores slow each other tenfold: one thread each, and no spinning.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
# Files of tests run beside each other, each in one process: `make test JOBS=1` runs them in order.
JOBS ?= 2
PYTEST = $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile
.PHONY: demo test test-all test-gpu lint env system clean

# make demo MODEL=ORG/NAME asks a checkpoint of the hub
demo: env
	$(BIN)/python -m vlm.cli.demo $(MODEL)

test: env lint
	$(PYTEST) -m "not slow"

test-all: env lint
	$(PYTEST)

# What needs a CUDA device: tests, then a table of figures.
test-gpu: env
	$(BIN)/python -m pytest -m gpu
	$(BIN)/vlm bench gpu

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

env: system
	@$(PYTHON) scripts/setup_env.py $(VENV)

# Compiler, image headers, fonts, redis-server and chromium, where apt-get is at hand and one is missing.
system:
	@$(PYTHON) scripts/setup_system.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

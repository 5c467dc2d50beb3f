# Two commands do everything: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two busy OpenMP processes on two cores slow each other tenfold: one thread each, and no spinning.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
DEBIAN_PACKAGES := gcc g++ libc6-dev python3-dev python3-venv libjpeg-dev zlib1g-dev libwebp-dev libtiff-dev libfreetype-dev \
	fonts-dejavu-core fonts-wqy-microhei redis-server chromium

.PHONY: demo test test-all lint env system clean

# make demo MODEL=ORG/NAME asks a checkpoint of the hub
demo: env
	$(BIN)/python -m vlm.demo $(MODEL)

test: env lint
	$(BIN)/python -m pytest -m "not slow"

test-all: env lint
	$(BIN)/python -m pytest

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

env: system
	@$(PYTHON) scripts/setup_env.py $(VENV)

# Compiler, image headers, fonts and redis-server, where apt-get is at hand and something is missing.
system:
	@if command -v apt-get >/dev/null && ! { command -v cc && command -v redis-server && command -v chromium && \
		test -e /usr/include/tiff.h -o -e /usr/include/$$(uname -m)-linux-gnu/tiff.h && \
		$(PYTHON) -c 'import venv, ensurepip' && test -e /usr/include/webp/decode.h; } >/dev/null 2>&1; then \
		echo "setup: installing Debian packages: $(DEBIAN_PACKAGES)"; \
		$(SUDO) apt-get update -qq && DEBIAN_FRONTEND=noninteractive $(SUDO) apt-get install -y -qq $(DEBIAN_PACKAGES) >/dev/null; \
	fi

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

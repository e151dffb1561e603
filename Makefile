# Each target sets up all that it needs on a fresh Debian or Ubuntu machine with Python 3.10 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -q
# Tests run in this many processes; one that starts a training run or a server starts processes of its own beside it.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# What libbeast, the C++ part of PolyBeast, is built with on Debian and Ubuntu; MonoBeast needs none of it.
PACKAGES := g++ pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc python3-dev
HAS_PACKAGES = { pkg-config --exists grpc++ protobuf && command -v g++ && command -v protoc && \
	$(PYTHON) -c 'import os, sysconfig; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")'; } >/dev/null 2>&1
INSTALL_PACKAGES = { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && apt-get install -qy $(PACKAGES); }
TELL_PACKAGES = echo "PolyBeast needs gRPC's C++ library. On Debian or Ubuntu: sudo apt-get install $(PACKAGES)"

.PHONY: help train train-poly test test-all test-on-demand test-mutants test-native lint plot bench docs libbeast libatari clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

train: $(VENV)/.train  ## train Pong from pixels; run it again to resume
	$(BIN)/python monobeast.py --env PongNoFrameskip-v4 --num_actors 2 --name pong

train-poly: $(VENV)/.train libbeast  ## the same with PolyBeast, whose environments may be on other hosts
	$(BIN)/python polybeast.py --env PongNoFrameskip-v4 --name pong-poly

test: $(VENV)/.test lint $(VENV)/.libbeast  ## lint and all tests but the long ones; PolyBeast's are skipped without gRPC
	$(BIN)/python -m pytest -q tests/test_gpu.py  # by itself: other tests see no GPU
	$(PYTEST) -m "not long and not on_demand"

test-all: $(VENV)/.test lint $(VENV)/.libbeast  ## the same with the long ones: whole learning runs, compilers, soaks, benchmarks
	$(BIN)/python -m pytest -q tests/test_gpu.py  # by itself: other tests see no GPU
	$(PYTEST) -m "not on_demand"

TESTS ?= tests
test-on-demand: $(VENV)/.test $(VENV)/.libbeast  ## those that take minutes to hours (cut links, Ray clusters, all games), of TESTS=tests/test_ranks.py say
	$(BIN)/python -m pytest -m on_demand $(TESTS)

test-mutants: $(VENV)/.test  ## break the agent in one place after the other: a fast test must fail each time
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants.py

test-native: PACKAGES += libgtest-dev
test-native: $(VENV)/.test  ## libbeast's C++ tests: plain, under AddressSanitizer with UBSan, under ThreadSanitizer
	@{ $(HAS_PACKAGES) && pkg-config --exists gtest_main; } || $(INSTALL_PACKAGES) || { $(TELL_PACKAGES); exit 1; }
	$(MAKE) -C csrc test PYTHON=$(abspath $(BIN)/python)

lint: $(VENV)/.test  ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

plot: $(VENV)/.train  ## draw the learning curve of `make train` to pong.png
	$(BIN)/python plot.py runs/pong --out pong.png

bench: $(VENV)/.test  ## measure this machine: steps/s by stage
	$(BIN)/python benchmarks/throughput.py

docs: $(VENV)/.test  ## write docs/flags.md, docs/results.md and README.md's tables, and build the site into site/
	$(BIN)/python docs/generate.py
	$(BIN)/python -m mkdocs build --strict

libbeast: $(VENV)/.libbeast  ## build PolyBeast's C++ part in place

libatari: $(VENV)/.libatari  ## build the Atari emulator in place, which needs g++ and python3-dev

clean:  ## remove the virtual environment; runs stay
	rm -rf $(VENV)

# A stamp is newer than what it was made from exactly when the installation is complete.
$(VENV)/.train: requirements.txt constraints.txt | $(BIN)/python
	@echo "installing what requirements.txt names, which takes some minutes"
	$(PIP_INSTALL) -r requirements.txt
	@touch $@

$(VENV)/.test: $(wildcard requirements*.txt) constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -r requirements-test.txt
	@touch $@ $(VENV)/.train

$(VENV)/.libbeast: requirements-poly.txt constraints.txt setup.py $(wildcard csrc/*.cc csrc/*.h csrc/*.proto csrc/atari/*) | $(BIN)/python
	@if $(HAS_PACKAGES) || $(INSTALL_PACKAGES); then \
		echo "building libbeast: some minutes of C++"; \
		$(PIP_INSTALL) -r requirements-poly.txt && \
		$(BIN)/python setup.py -q build_ext --inplace && touch $@; \
	else $(TELL_PACKAGES); $(if $(filter test test-all test-mutants,$(MAKECMDGOALS)),$(MAKE) libatari || true,exit 1); fi

$(VENV)/.libatari: requirements.txt constraints.txt setup.py $(wildcard csrc/atari/*) | $(BIN)/python
	$(PIP_INSTALL) -r requirements.txt pybind11 setuptools
	$(BIN)/python setup.py -q build_ext --inplace --without-libbeast
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Beast needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && apt-get install -qy python3-venv; } || \
		{ echo "$(PYTHON) cannot make virtual environments. On Debian or Ubuntu: sudo apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

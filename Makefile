# Each target sets up all that it needs on a fresh Debian or Ubuntu machine with Python 3.10 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help train test lint plot bench clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

train: $(VENV)/.train  ## train Pong from pixels; run it again to resume
	$(BIN)/python monobeast.py --env PongNoFrameskip-v4 --name pong

test: $(VENV)/.test lint  ## run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: $(VENV)/.test  ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

plot: $(VENV)/.test  ## draw the learning curve of `make train` to pong.png
	$(BIN)/python plot.py runs/pong --out pong.png

bench: $(VENV)/.test  ## measure this machine: steps/s by stage
	$(BIN)/python benchmarks/throughput.py

clean:  ## remove the virtual environment; runs stay
	rm -rf $(VENV)

# A stamp is newer than what it was made from exactly when the installation is complete.
$(VENV)/.train: requirements.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements.txt
	@touch $@

$(VENV)/.test: requirements.txt requirements-test.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements-test.txt
	@touch $@ $(VENV)/.train

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Beast needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && apt-get install -qy python3-venv; } || \
		{ echo "$(PYTHON) cannot make virtual environments. On Debian or Ubuntu: sudo apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One name per developer action. `make train` and `make test` do all set-up themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0

.PHONY: help setup build test train lint stress sanitize bench clean

help:
	@echo "make test      set up, build and run the tests"
	@echo "make train     set up, make data, train the 3D U-Net (quick preset), compare loaders"
	@echo "make bench     loader benchmarks against torch (needs a quiet machine)"
	@echo "make stress    long stress, kill and fuzz runs;  make sanitize: ASan, UBSan, TSan"
	@echo "make lint      structure and style checks;  make clean: remove what was built"

$(VENV)/.ready:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check "setuptools>=68" wheel "numpy>=2.0"
	$(BIN)/pip install -q --disable-pip-version-check $(TORCH)
	touch $@

setup: $(VENV)/.ready
	@$(BIN)/python -c "import pytest, hypothesis, mypy, psutil, scipy, nibabel, matplotlib, tqdm, PIL" \
	  2>/dev/null || $(BIN)/pip install -q --disable-pip-version-check \
	  pytest hypothesis mypy psutil scipy nibabel matplotlib tqdm pillow

build: setup
	MINATO_WERROR=1 $(BIN)/pip install -q --disable-pip-version-check --no-build-isolation -e .

test: build
	$(BIN)/pytest -q tests

QUICK := --preset quick --data data/quick
train: build
	$(BIN)/python -m unet3d.phantom --out data/phantom --cases 12 --scale 0.4
	$(BIN)/python -m unet3d.preprocess --source data/phantom --out data/quick --min-shape 32 32 32
	$(BIN)/python -m unet3d.train --loader minato $(QUICK) --out runs/quick
	@echo "== comparison 1 of 2: steps train on this CPU, which is the limit for every loader"
	$(BIN)/python -m unet3d.compare $(QUICK) --out runs/compare --epochs 2 --repeats 2
	@echo "== comparison 2 of 2: pauses of 4 ms in place of steps, as on a fast accelerator"
	$(BIN)/python -m unet3d.compare $(QUICK) --out runs/loading --epochs 4 --repeats 2 -- \
	  --step-ms 4 --repeat 16

lint: build
	$(BIN)/pytest -q tests/test_lint.py

bench: build
	$(BIN)/python benchmarks/loader.py --peers
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/balance.py
	$(BIN)/python benchmarks/workers.py

stress: build
	$(BIN)/pytest -q tests/attack
	MINATO_STRESS_SECONDS=60 $(BIN)/pytest -q tests -k "stress or kill or fuzz"

sanitize: build
	MINATO_STRESS_SECONDS=30 $(BIN)/pytest -q tests -k "sanitizer or tsan or asan"

clean:
	rm -rf build $(VENV) minato/*.so minato.egg-info data runs

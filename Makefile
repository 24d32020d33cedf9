# One name per developer action. `make train` and `make test` do all set-up themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0

.PHONY: help setup build test train lint bench clean
.PHONY: stress sanitize nightly mutants fuzz libraries reference

help:
	@echo "make test      set up, build and run the tests"
	@echo "make train     set up, make data, train the 3D U-Net (quick preset), compare loaders"
	@echo "make bench     loader benchmarks against torch (needs a quiet machine)"
	@echo "make stress    kills, races and exits for longer;  make sanitize: ASan, UBSan, TSan"
	@echo "make nightly   all of these, broken sources, fresh random examples, other libraries"
	@echo "make lint      structure and style checks;  make clean: remove what was built"

$(VENV)/.ready:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check "setuptools>=68" wheel "numpy>=2.0"
	$(BIN)/pip install -q --disable-pip-version-check $(TORCH)
	touch $@

setup: $(VENV)/.ready
	@$(BIN)/python -c "import pytest, xdist, hypothesis, mypy, psutil, scipy, nibabel, matplotlib, tqdm, PIL" \
	  2>/dev/null || $(BIN)/pip install -q --disable-pip-version-check \
	  pytest pytest-xdist hypothesis mypy psutil scipy nibabel matplotlib tqdm pillow

build: setup
	MINATO_WERROR=1 $(BIN)/pip install -q --disable-pip-version-check --no-build-isolation -e .

# Each of JOBS processes takes file after file, the longest first (tests/housekeeping.py).
JOBS ?= 2
test: build
	$(BIN)/pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder tests

QUICK := --preset quick --data data/quick
train: build
	$(BIN)/python -m unet3d.phantom --out data/phantom --cases 12 --scale 0.4
	$(BIN)/python -m unet3d.preprocess --source data/phantom --out data/quick --min-shape 32 32 32
	$(BIN)/python -m unet3d.train --loader minato $(QUICK) --out runs/quick
	@echo "== comparison 1 of 2: steps train on this CPU, which is the limit for every loader"
	$(BIN)/python -m unet3d.bench.compare $(QUICK) --out runs/compare --epochs 2 --repeats 2
	@echo "== comparison 2 of 2: pauses of 4 ms in place of steps, as on a fast accelerator"
	$(BIN)/python -m unet3d.bench.compare $(QUICK) --out runs/loading --epochs 4 --repeats 2 -- \
	  --step-ms 4 --repeat 16

lint: build
	$(BIN)/pytest -q tests/test_lint.py

bench: build
	$(BIN)/python benchmarks/loader.py --peers
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/balance.py
	$(BIN)/python benchmarks/workers.py

# From 30 seconds on, tests/attack also runs every way to exit with every kind of loader.
stress: build
	MINATO_STRESS_SECONDS=30 $(BIN)/pytest -q tests/attack tests/contract/test_exit.py \
	  tests/contract/test_worker_death.py
	MINATO_STRESS_SECONDS=5 $(BIN)/pytest -q tests/test_c_primitives.py tests/ops

sanitize: build
	MINATO_STRESS_SECONDS=5 $(BIN)/pytest -q -k sanitizer \
	  tests/test_c_primitives.py tests/ops/test_sanitizers.py
	MINATO_TEST_SANITIZED=1 $(BIN)/pytest -q tests/test_sanitized.py

# Hours. What can be drawn is drawn from SEED, which is printed; each part runs even if
# another has failed. Programs are also built with clang, where there is one.
SEED ?= $(shell date +%s)
nightly: build
	@echo "SEED=$(SEED)"
	$(MAKE) -k SEED=$(SEED) MINATO_TEST_SEED=$(SEED) mutants fuzz stress sanitize reference libraries

# What the contract tests expect of torch's own class, which changes only with torch.
reference: build
	MINATO_TEST_LOADERS=torch $(BIN)/pytest -q tests/contract

# Breaks the sources in known ways, and expects the tests to notice.
mutants: build
	MINATO_TEST_MUTANTS=1 $(BIN)/pytest -q -k "broken or mutants" tests/test_c_primitives.py \
	  tests/test_sanitized.py

FUZZ_SECONDS ?= 300
fuzz: build
	@echo "make fuzz SEED=$(SEED)"
	MINATO_FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/pytest -q --hypothesis-seed=$(SEED) \
	  tests/contract/test_differential.py
	MINATO_FUZZ_SECONDS=1 $(BIN)/pytest -q --hypothesis-seed=$(SEED) tests/policy tests/ops \
	  tests/device/test_kernels.py \
	  tests/test_loader_properties.py tests/test_resume_orders.py tests/seeding/test_same_data.py

# In an environment of their own, beside the torch that is there, and one by one: not all are there
# for every Python. Those that stand ALONE ask for torchvision, which has no build for every torch,
# and for old versions of what the others need; the few packages that they use here are named.
LIBRARIES ?= accelerate datasets h5py ipython lightning lmdb monai pytorch-ignite ray[train] rich \
  skorch torch_geometric torchdata transformers webdataset \
  boto3 brotli catalogue matplotlib python-snappy requests xxhash zstd
ALONE ?= litdata mosaicml-streaming
LIBRARIES_VENV ?= .venv-libraries
PIP_LIBRARIES := $(LIBRARIES_VENV)/bin/pip install -q --disable-pip-version-check
libraries:
	$(MAKE) VENV=$(LIBRARIES_VENV) build
	@for name in $(LIBRARIES); do \
	  $(PIP_LIBRARIES) $(TORCH) $$name || echo "left out, does not install: $$name"; \
	done
	@for name in $(ALONE); do \
	  $(PIP_LIBRARIES) --no-deps $$name || echo "left out, does not install: $$name"; \
	done
	$(LIBRARIES_VENV)/bin/pytest -q -rs tests/integrations tests/test_habits.py

clean:
	rm -rf build $(VENV) $(LIBRARIES_VENV) minato/*.so minato/device/*.fatbin minato.egg-info \
	  data runs

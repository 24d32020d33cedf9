# One target per developer action. `make train` and `make test` do all set-up themselves.
PYTHON ?= python3
VENV ?= .venv
# Start programs as modules and quote absolute paths: the folder's name may have spaces, which the
# first line of a script such as .venv/bin/pip cannot have.
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0

.PHONY: help setup build test slow fits train gpu lint measures bench clean
.PHONY: stress soak sanitize nightly mutants fuzz libraries reference aarch64
.PHONY: wheels installed try-wheel torches docs pinned reproduced
.PHONY: stress-loader stress-programs stress-resume stress-cache sanitize-programs sanitize-extension
.PHONY: fuzz-differential fuzz-properties fuzz-inputs

help:
	@echo "make test      set up, build and run the tests"
	@echo "make slow      the long tests that make test leaves out"
	@echo "make fits      only its tests of common libraries: Lightning, transformers, ..."
	@echo "make train     set up, make data, train and evaluate the 3D U-Net, compare loaders (10 minutes)"
	@echo "make gpu       measure how many cores a GPU needs, by loader (12 minutes, needs a GPU)"
	@echo "make bench     benchmarks against torch's loader (needs an idle machine)"
	@echo "make stress    long tests of kills, races and exits;  make sanitize: ASan, UBSan, TSan"
	@echo "make soak      several loaders with kills and little memory, for an hour"
	@echo "make nightly   all of these, mutants, new random examples, other libraries"
	@echo "make torches   test wheels with each installed Python and several versions of torch"
	@echo "make wheels    build an sdist and wheels for this Python;  make docs: the web site in site/"
	@echo "make pinned    update requirements/;  make reproduced: build wheels twice and compare"
	@echo "make lint      check structure and style;  make measures: count lines, files and circles"
	@echo "make clean     remove build outputs"

# Only files with the hashes in requirements/ are installed, except torch. The first import of
# a module writes its bytecode: compiling all modules takes as long as installing them.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := install -q --disable-pip-version-check --no-compile
PINNED := $(INSTALL) --require-hashes -r
$(VENV)/.ready: requirements/test.txt
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip $(PINNED) requirements/test.txt
	$(BIN)/python -m pip $(INSTALL) $(TORCH)
	touch $@

setup: $(VENV)/.ready

build: setup
	MINATO_WERROR=1 $(BIN)/python -m pip install -q --disable-pip-version-check \
	  --no-build-isolation -e .

# Common libraries, in an environment that also sees the packages of the first one. All other tests
# run without them. If they cannot be installed, a message says so, and their tests are left out.
MOST_USED ?= lightning==2.6.6 accelerate==1.15.0 transformers==5.23.0 datasets==5.2.0 \
  pytorch-ignite==0.5.5
MOST_USED_VENV ?= .venv-most-used
PURELIB := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
FITS := $(addprefix tests/integrations/test_,accelerate.py checkpoints.py data_libraries.py fits.py ranks.py)
RUN_FITS = test ! -e $(MOST_USED_VENV)/.ready || $(MOST_USED_VENV)/bin/python -m pytest -q -r fE \
  --disable-warnings $(BY_TEST) --without-slow $(FITS)
WITHOUT_FITS = $$(test ! -e $(MOST_USED_VENV)/.ready || echo $(addprefix --ignore=,$(FITS)))
$(MOST_USED_VENV)/.ready: $(VENV)/.ready
	@"$(PYTHON)" -m venv --clear --without-pip $(MOST_USED_VENV)
	@$(BIN)/python $(PURELIB) > "$$($(MOST_USED_VENV)/bin/python $(PURELIB))/shared.pth"
	@timeout 300 $(BIN)/python -m pip --python $(MOST_USED_VENV)/bin/python $(INSTALL) --retries 1 \
	  --timeout 15 $(TORCH) $(MOST_USED) && touch $@ || \
	  echo "left out, do not install: $(MOST_USED)"

# Tests mostly wait: two processes kept two cores busy for 40% of the time.
# Each of JOBS processes runs file after file, the longest first (tests/housekeeping.py), or test
# after test in files with one program per test. They start hundreds of programs, which share
# compiled bytecode. tests/test_sanitized.py is run differently: AddressSanitizer does not support
# forks next to other threads, and on a busy machine one of them is likely to hang.
JOBS ?= 3
BY_FILE := -n $(JOBS) --dist loadfile --no-loadscope-reorder
BY_TEST := -n $(JOBS) --dist worksteal
test:
	@$(MAKE) --no-print-directory -j2 build $(MOST_USED_VENV)/.ready
	@failed=0; $(RUN_FITS) || failed=1; \
	$(BIN)/python -m pytest -q $(BY_FILE) --without-slow tests \
	  $(WITHOUT_FITS) || failed=1; \
	exit $$failed

# What `make test` leaves out: tests/slow.py.
slow: build
	$(BIN)/python -m pytest -q $(BY_TEST) --only-slow tests

fits: build $(MOST_USED_VENV)/.ready
	@$(RUN_FITS)

QUICK := --preset quick --data data/quick
FEW := --loaders minato,pytorch,synthetic
train: build
	$(BIN)/python -m unet3d.phantom --out data/phantom --cases 20 --scale 0.4
	$(BIN)/python -m unet3d.preprocess --source data/phantom --out data/quick --min-shape 32 32 32
	$(BIN)/python -m unet3d.train --loader minato $(QUICK) --out runs/quick
	$(BIN)/python -m unet3d.evaluate --data data/quick --checkpoint runs/quick/checkpoint.pt
	@echo "== comparison 1 of 2: steps train on this CPU, which is the limit for every loader"
	$(BIN)/python -m unet3d.bench.compare $(QUICK) --out runs/compare $(FEW) --repeats 2
	@echo "== comparison 2 of 2: pauses of 4 ms in place of steps, as on a fast accelerator"
	$(BIN)/python -m unet3d.bench.compare $(QUICK) --out runs/loading --epochs 4 --repeats 2 -- \
	  --step-ms 4 --repeat 10

# Continues after an interruption, and with a larger budget: GPU_OPTIONS="--budget 2h". Set-up is
# not counted. DALI is not built for every machine; its rows then say so.
GPU_OPTIONS ?= --budget 12m
gpu: build
	$(BIN)/python -m pip install -q --disable-pip-version-check nvidia-ml-py
	$(BIN)/python -m pip install -q --disable-pip-version-check nvidia-dali-cuda120 || \
	  echo "left out, does not install: DALI"
	$(BIN)/python -m unet3d.bench.gpu $(GPU_OPTIONS)

# Builds wheels for this Python and any torch, so without the extension that is compiled against one
# torch. They are repaired to name the systems they run on. Also builds the wheel for other systems
# and the sdist. Their bytes depend only on the sources, the compiler and requirements/wheels.txt.
WHEELS_VENV ?= .venv-wheels
WHEELS_PYTHON := "$(abspath $(WHEELS_VENV))/bin/python"
wheels reproduced: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)
# call pack,SOURCE FOLDER,OUTPUT FOLDER
define pack
$(WHEELS_PYTHON) -m build -q --no-isolation --sdist --outdir $(2) $(1)
MINATO_TORCH=0 $(WHEELS_PYTHON) -m build -q --no-isolation --wheel --outdir $(2)/plain $(1)
PATH="$(abspath $(WHEELS_VENV))/bin:$$PATH" $(WHEELS_PYTHON) -m auditwheel repair \
  --wheel-dir $(2) $(2)/plain/*.whl
rm -rf $(2)/plain $(1)/build
MINATO_PURE=1 $(WHEELS_PYTHON) -m build -q --no-isolation --wheel --outdir $(2) $(1)
endef
wheels:
	"$(PYTHON)" -m venv $(WHEELS_VENV)
	$(WHEELS_PYTHON) -m pip $(PINNED) requirements/wheels.txt
	rm -rf dist build
	$(call pack,.,dist)
	@ls -l dist

# Repeats the build in another folder from the sdist, without its setup.cfg, which is written during
# packing.
AGAIN := dist/again
reproduced: wheels
	mkdir -p $(AGAIN)
	tar -xzf dist/minato_loader-*.tar.gz --strip-components 1 -C $(AGAIN) --exclude '*/setup.cfg'
	$(call pack,$(AGAIN),$(AGAIN)/dist)
	cd dist && sha256sum *.whl *.tar.gz >again/dist/sums
	cd $(AGAIN)/dist && sha256sum --check sums
	rm -rf $(AGAIN)

# Updates all pinned versions, for every Python and system for which there are files.
pinned: setup
	$(BIN)/python -m pip install -q --disable-pip-version-check uv
	for name in test wheels; do \
	  $(BIN)/python -m uv pip compile -q --upgrade --universal --python-version 3.10 \
	    --generate-hashes --no-annotate --no-header -o requirements/$$name.txt \
	    requirements/$$name.in || exit; \
	done

# Runs the contract tests on the wheel, in an environment without the sources.
INSTALLED_VENV ?= .venv-installed
installed: wheels
	$(MAKE) try-wheel
try-wheel:
	"$(PYTHON)" -m venv --clear $(INSTALLED_VENV)
	$(INSTALLED_VENV)/bin/python -m pip install -q --disable-pip-version-check $(TORCH) "numpy>=1.23" \
	  pytest pytest-xdist hypothesis psutil dist/minato_loader-*-manylinux*.whl
	cd dist && "$(abspath $(INSTALLED_VENV))/bin/python" -m pytest -q $(BY_FILE) ../tests/contract

# Does the same for minato's loaders with each installed Python and the torches that install there:
# the oldest supported one, the newest, and some in between. SELF: make -n runs lines that name MAKE.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13 python3.14 python3.14t
TORCHES ?= torch==2.6.0 torch==2.9.1 torch==2.12.0 torch
SELF := $(MAKE)
torches:
	@failed=; for python in $(PYTHONS); do \
	  $$python -c "" 2>/dev/null || { echo "left out, is not here: $$python"; continue; }; \
	  rm -rf .venv-wheels-torches; \
	  $(SELF) wheels PYTHON=$$python WHEELS_VENV=.venv-wheels-torches || exit 1; \
	  for torch in $(TORCHES); do \
	    echo "== $$python, $$torch"; \
	    .venv-wheels-torches/bin/python -m pip install -q --dry-run --no-deps $$torch 2>/dev/null || \
	      { echo "left out, does not install: $$torch"; continue; }; \
	    MINATO_TEST_LOADERS=minato,minato-static $(SELF) try-wheel PYTHON=$$python TORCH=$$torch \
	      INSTALLED_VENV=.venv-torches || failed="$$failed $$python,$$torch"; \
	  done; rm -rf .venv-wheels-torches .venv-torches; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

lint: build
	$(BIN)/python -m pytest -q tests/test_lint.py

# The size of the source tree and its circles. FROM is another checkout to measure.
measures:
	@"$(PYTHON)" tests/measures.py $(FROM)

bench: build
	$(BIN)/python benchmarks/loader.py --peers
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/balance.py
	$(BIN)/python benchmarks/workers.py
	$(BIN)/python benchmarks/many_workers.py

# From 30 seconds on, tests/attack also runs every kind of exit with every kind of loader.
STRESS_SECONDS ?= 30
stress: stress-loader stress-programs stress-resume stress-cache
# Also makes every call of the extensions fail, which takes another half hour.
stress-loader: build
	MINATO_STRESS_SECONDS=$(STRESS_SECONDS) $(BIN)/python -m pytest -q $(BY_FILE) tests/attack \
	  tests/contract/test_exit.py tests/contract/test_worker_death.py
stress-programs: build
	MINATO_STRESS_SECONDS=5 $(BIN)/python -m pytest -q $(BY_TEST) tests/test_c_primitives.py tests/ops
stress-resume: build
	$(BIN)/python benchmarks/resume.py --every 10 --seed $(SEED)

# Two jobs on one cache, in memory and on a disk, whose processes are killed at random.
KILLS ?= 500
stress-cache: build
	$(BIN)/python tests/cache/kills.py --kills $(KILLS) --seed $(SEED)
	$(BIN)/python tests/cache/kills.py --kills $(KILLS) --seed $(SEED) --directory data/cache

SOAK_SECONDS ?= 3600
soak: build
	MINATO_STRESS_SECONDS=$(SOAK_SECONDS) $(BIN)/python -m pytest -q -s tests/attack/test_soak.py

sanitize: sanitize-programs sanitize-extension
sanitize-programs: build
	MINATO_STRESS_SECONDS=5 $(BIN)/python -m pytest -q $(BY_TEST) -k "sanitizer or valgrind" \
	  tests/test_c_primitives.py tests/ops/test_sanitizers.py
sanitize-extension: build
	MINATO_TEST_SANITIZED=1 $(BIN)/python -m pytest -q tests/test_sanitized.py

# Takes hours. All random choices are drawn from SEED, which is printed. Each part runs even if
# another has failed. Programs are also built with clang if it is installed.
SEED := $(or $(SEED),$(shell date +%s))
nightly: build
	@echo "SEED=$(SEED)"
	$(MAKE) -k SEED=$(SEED) MINATO_TEST_SEED=$(SEED) SOAK_SECONDS=120 \
	  slow mutants fuzz stress soak sanitize reference reproduced installed torches aarch64 libraries

# Needs a cross compiler and an emulator: Debian's gcc-aarch64-linux-gnu and qemu-user-static.
aarch64: build
	MINATO_TEST_AARCH64=1 $(BIN)/python -m pytest -q $(BY_TEST) -rs -k "emulator or processor" \
	  tests/test_c_primitives.py tests/ops/test_sanitizers.py

# Runs the contract tests on torch's own class, whose behaviour changes only with torch.
reference: build
	MINATO_TEST_LOADERS=torch $(BIN)/python -m pytest -q $(BY_FILE) tests/contract

# Builds with planted faults, one at a time, and expects the tests to fail.
mutants: build
	MINATO_TEST_MUTANTS=1 $(BIN)/python -m pytest -q tests/test_mutants.py tests/attack/test_planted.py

FUZZ_SECONDS ?= 300
fuzz: fuzz-differential fuzz-properties fuzz-inputs
fuzz-differential: build
	@echo "make fuzz SEED=$(SEED)"
	MINATO_FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m pytest -q --hypothesis-seed=$(SEED) \
	  tests/contract/test_differential.py
fuzz-properties: build
	MINATO_FUZZ_SECONDS=1 $(BIN)/python -m pytest -q $(BY_FILE) --hypothesis-seed=$(SEED) \
	  tests/policy tests/ops tests/device/test_kernels.py \
	  tests/test_loader_properties.py tests/test_resume_orders.py tests/seeding/test_same_data.py
# Is guided by coverage if a clang with libFuzzer (Debian: clang, libclang-rt-dev) and, for Python
# code, atheris (pip) are installed.
fuzz-inputs: build
	MINATO_FUZZ_SECONDS=$(FUZZ_SECONDS) MINATO_TEST_SEED=$(SEED) \
	  $(BIN)/python -m pytest -q -rs tests/fuzz

# Installed in a separate environment with the existing torch, one by one, because not all are
# available for every Python. Packages in ALONE require torchvision, which has no build for every
# torch, and old versions of other packages; they are installed without dependencies, and the few
# that are used are listed. torchvision is installed in its own folder, for tests that also work
# with a build for GPUs.
LIBRARIES ?= accelerate av datasets h5py ipython lightning lmdb monai pytorch-ignite ray[train] rich soundfile \
  prometheus-client skorch torch_geometric torchdata transformers webdataset \
  boto3 brotli catalogue matplotlib python-snappy requests xxhash zstd \
  beartype importlib-metadata mosaicml-cli opencv-python-headless pandas py-cpuinfo scikit-learn \
  tabulate
ALONE ?= litdata mosaicml-streaming timm ultralytics ultralytics-thop \
  mosaicml coolname torch_optimizer \
  fastai fastcore fastdownload "fastprogress<1.1" fasttransform "plum-dispatch<2.10"
TORCHVISION ?= torchvision==0.28.0
LIBRARIES_VENV ?= .venv-libraries
PIP_LIBRARIES := $(LIBRARIES_VENV)/bin/python -m pip install -q --disable-pip-version-check
libraries:
	$(MAKE) VENV=$(LIBRARIES_VENV) build
	@for name in $(LIBRARIES); do \
	  $(PIP_LIBRARIES) $(TORCH) $$name || echo "left out, does not install: $$name"; \
	done
	@for name in $(ALONE); do \
	  $(PIP_LIBRARIES) --no-deps $$name || echo "left out, does not install: $$name"; \
	done
	@$(PIP_LIBRARIES) --no-deps --target $(LIBRARIES_VENV)/torchvision $(TORCHVISION) || \
	  echo "left out, does not install: $(TORCHVISION)"
	$(LIBRARIES_VENV)/bin/python -m pytest -q -rs tests/integrations tests/test_habits.py \
	  tests/test_examples.py tests/test_docs.py

# Built in a separate environment, without building or importing minato. A warning is an error.
DOCS_VENV ?= .venv-docs
DOCS_NEED := "mkdocs>=1.6,<2" "mkdocs-material>=9.5,<10" "mkdocstrings[python]>=0.27" "ruff"
docs:
	"$(PYTHON)" -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install -q --disable-pip-version-check $(DOCS_NEED)
	SOURCE_URL="$$(sed -n 's/^Source = "\(.*\)"/\1/p' pyproject.toml)" NO_MKDOCS_2_WARNING=1 \
	  $(DOCS_VENV)/bin/python -m mkdocs build --strict

clean:
	rm -rf build dist site $(VENV) $(LIBRARIES_VENV) $(DOCS_VENV) $(WHEELS_VENV) $(INSTALLED_VENV) \
	  $(MOST_USED_VENV) minato/*.so minato/device/*.fatbin minato_loader.egg-info data runs

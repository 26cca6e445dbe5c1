# make demo    set up .venv, in which every command of these pages runs, and train a lean ViT, κ included
# make test    set up .venv and run what a change is likely to break: six minutes on two cores
# make test-all  that, and the rest, which its last line names
# make test-op K=softcap  run every test that matches on every backend: CPU, interpreter, compiled, a GPU rehearsed
# make peers   put the tests of PyTorch, FlashAttention and timm to ours, all of them
# make bench   run the benchmarks; without a GPU an overview of two minutes (BENCH_ARGS="-k NAME" selects rows)
# make lint    ruff and pyright
# make faults  kill, fill and damage training runs (about 10 minutes on two quiet cores)
# make docs    build the documentation's site in build/site
# make wheels  build and check in dist/: the sdist, the pure wheel, the manylinux wheel with CUDA code
# make clean   remove environments, builds and caches; results under runs/ stay
#
# PYTHON names the interpreter that the environments are made from, WORKERS the processes that test. What else may be
# chosen is named in the scripts of .ci.

PYTHON ?= python3
BENCH_ARGS ?=
DEMO := --heads 16 --depth 7
export WORKERS ?= 2

# Environments are installed without compiled modules, and many processes import the same: the first one compiles.
export PYTHONDONTWRITEBYTECODE :=

NEWEST := .venv
OLDEST := .venv-oldest
DOCS := .venv-docs
WHEELS := .venv-wheels

# An environment is whole when its mark lies in it. An install is repeated when what it installs has changed.
TEST_READY := $(NEWEST)/.test-ready
OLDEST_READY := $(OLDEST)/.test-ready
DOCS_READY := $(DOCS)/.ready
WHEELS_READY := $(WHEELS)/.ready
INSTALL_INPUTS := pyproject.toml CMakeLists.txt $(wildcard leaner_kernels/csrc/*.cu* leaner_kernels/csrc/*.h)

# Of the CPU: long tests first, so that the processes that share them end together.
FIRST := tests/train tests/kappa tests/bench
APART := tests/interpreter tests/compiled tests/aot tests/faults tests/fuzz tests/peers tests/security
FOLDERS := $(patsubst %/,%,$(wildcard tests/*/))
MAIN := $(FIRST) $(filter-out $(FIRST) $(APART) %/__pycache__,$(FOLDERS)) $(wildcard tests/test_*.py)
MARKED ?= not slow and not nightly
BY_FILE := --dist loadfile --no-loadscope-reorder

# What .ci/run has left to do after `make test`, in this order. Past UNTIL, seconds since 1970, no further part begins.
REST := fuzz peers security main-slow aot interpreter-slow oldest faults compiled gpu-bodies
UNTIL ?= 9999999999

PYTEST = $(NEWEST)/bin/pytest -n $(WORKERS)
heading = @printf '\n== %s\n' "$(1)"

.NOTPARALLEL:
.PHONY: help demo demo-plan test test-all test-rest test-main test-main-slow test-interpreter test-interpreter-slow \
	test-gpu-bodies test-compiled test-op test-nightly test-nightly-aot test-fuzz test-faults test-security \
	test-peers test-aot test-oldest faults peers bench lint docs wheels clean

help:
	@sed -n '/^# make/s/^# //p' Makefile

demo: demo-plan $(TEST_READY)
	$(call heading,training)
	$(NEWEST)/bin/torchrun --standalone train/vit.py $(DEMO)

# First of all, so that nobody waits for a download without knowing of it.
demo-plan:
	@test -e $(TEST_READY) || printf '%s\n' \
	    '== make demo: install $(NEWEST), train a lean ViT on 1,433 images of digits, and show κ of its layers' \
	    '   Downloads 3.4 GB (3.0 of them PyTorch with CUDA and Triton) and needs 6.6 GB of disk, but no GPU.' \
	    '   Took two to four minutes on two cores with the files at hand, one of them to train.' \
	    '   A network of 100 Mbit/s adds five minutes.'

# Installed first, so that the time of the tests is their own.
test: $(TEST_READY)
	@.ci/parts main interpreter
	@printf '== make test-all also runs: %s\n' "$(REST)"

test-all: test test-rest

test-rest: $(TEST_READY)
	@.ci/parts --until $(UNTIL) $(REST)

# One thread per process: several processes share the cores. Inductor would start more of them.
test-%: export OMP_NUM_THREADS := 1
test-%: export TORCHINDUCTOR_COMPILE_THREADS := 1

test-main: $(TEST_READY)
	$(call heading,tests: newest torch)
	$(PYTEST) $(MAIN) $(BY_FILE) -m "$(MARKED)"

test-main-slow: $(TEST_READY)
	$(call heading,tests that start many processes: newest torch)
	$(PYTEST) $(MAIN) $(BY_FILE) -m "slow and not nightly"

test-interpreter: $(TEST_READY)
	$(call heading,kernels in the interpreter: newest torch and Triton)
	$(PYTEST) --backend interpreter -m "not slow and not nightly"

# No result may hang on the routine that a BLAS picks for the processor: of two parts one takes Haswell's.
test-interpreter-slow: $(TEST_READY)
	$(call heading,kernels in the interpreter: the rest of bfloat16 and some in float16 by OpenBLAS for Haswell)
	OPENBLAS_CORETYPE=Haswell $(PYTEST) --backend interpreter -m slow

test-gpu-bodies: $(TEST_READY)
	$(call heading,one case of each test of a GPU on a GPU that is not there)
	$(PYTEST) --backend gpu --rehearse bodies -k "not large_tensors"

test-compiled: $(TEST_READY)
	$(call heading,compiled kernels executed in software)
	$(PYTEST) --backend executed -m "not nightly"

test-op: $(TEST_READY)
	@MAIN="$(MAIN)" .ci/everywhere "$(K)"

test-nightly: $(TEST_READY)
	.ci/nightly

test-nightly-aot: $(TEST_READY)
	$(PYTEST) tests/aot -m nightly

test-fuzz: $(TEST_READY)
	$(call heading,fuzzing)
	$(PYTEST) tests/fuzz

test-faults: $(TEST_READY)
	$(call heading,faults in short)
	$(PYTEST) tests/faults --kills 2 $(BY_FILE)

test-security: $(TEST_READY)
	$(call heading,hostile files and folders)
	$(PYTEST) tests/security

# PyTorch's own tests freeze torch.backends when they are imported: in a process of their own.
test-peers: $(TEST_READY)
	$(call heading,tests of others in short)
	$(PYTEST) tests/peers -m "not nightly"

# Skipped where no Chromium is installed, unless LEANER_CHROMIUM=required.
test-aot: $(TEST_READY)
	$(call heading,kernels compiled ahead of time: newest torch and Triton)
	$(PYTEST) tests/aot -m "not nightly"

test-oldest: $(OLDEST_READY)
	$(call heading,import and kernels: oldest torch and Triton)
	.ci/oldest

# Processes are killed at steps that a busy machine passes late: one test at a time.
faults: $(TEST_READY)
	$(call heading,fault injection)
	OMP_NUM_THREADS=1 $(NEWEST)/bin/pytest tests/faults

peers: $(TEST_READY)
	$(call heading,tests of others)
	OMP_NUM_THREADS=1 $(PYTEST) tests/peers -rs

bench: $(TEST_READY)
	$(NEWEST)/bin/pytest bench --benchmark-only $(BENCH_ARGS)

lint: $(TEST_READY)
	$(NEWEST)/bin/ruff check
	$(NEWEST)/bin/ruff format --check
	$(NEWEST)/bin/pyright --pythonpath $(NEWEST)/bin/python leaner_kernels

docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

wheels: $(WHEELS_READY)
	.ci/wheels

clean:
	rm -rf $(NEWEST) $(OLDEST) $(DOCS) $(WHEELS) build dist .benchmarks .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

TOO_OLD := make PYTHON=... must name Python 3.11 or newer, $(PYTHON) is

$(foreach environment,$(NEWEST) $(OLDEST) $(DOCS) $(WHEELS),$(environment)/bin/python):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(TOO_OLD) " + sys.version)'
	$(PYTHON) -m venv $(@:/bin/python=) || { rm -rf $(@:/bin/python=); exit 1; }

# One environment for the demo, the benchmarks, the studies, the examples and the tests.
$(TEST_READY): $(NEWEST)/bin/python $(INSTALL_INPUTS)
	@.ci/install $(NEWEST) dev -e .
	@touch $@

$(OLDEST_READY): $(OLDEST)/bin/python $(INSTALL_INPUTS)
	@.ci/install $(OLDEST) oldest -C wheel.cmake=false -e .
	@touch $@

# The documentation is read, not imported: it needs neither torch nor this package.
$(DOCS_READY): $(DOCS)/bin/python pyproject.toml
	@.ci/install $(DOCS) docs
	@touch $@

$(WHEELS_READY): $(WHEELS)/bin/python pyproject.toml
	@.ci/install $(WHEELS) wheels
	@touch $@

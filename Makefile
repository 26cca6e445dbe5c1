# make demo    set up .venv, for every command of README and docs, and train a lean ViT on real data, κ included
# make test    set up .venv and run what a change is likely to break: six minutes on two cores
# make test-all  that, and all that make test leaves out: see its last line
# make test-op K=softcap  run every test that matches on every backend: CPU, interpreter, compiled, ahead of time
# make peers   put the tests of PyTorch, FlashAttention and timm to ours, all of them
# make bench   run the benchmarks; without a GPU an overview of two minutes (BENCH_ARGS="-k NAME" selects rows)
# make lint    ruff and pyright
# make faults  kill, fill and damage training runs (about 10 minutes on two quiet cores)
# make docs    build the documentation's site in build/site
# make wheels  build and check in dist/: the sdist, the pure wheel, the manylinux wheel with CUDA code
# make clean   remove environments, builds and caches; results under runs/ stay
#
# PYTHON names the interpreter that the environments are made from, WORKERS the processes that test,
# PLATFORM the tag that the manylinux wheel must reach: auto takes the best that this machine allows.
# OLDEST_AOT selects what the oldest Triton compiles ahead of time (every night all), for the OLDEST_GPUS: 80,90, or all that
# tiles are tuned for; OLDEST_CASES= runs every case of a kernel on it, not the first of each test alone.
# UNTIL is when test-rest begins no further part, in seconds since 1970; what is left out is named.

PYTHON ?= python3
BENCH_ARGS ?=
PLATFORM ?= auto
OLDEST_GPUS ?= 90
OLDEST_CASES ?= --first-case
OLDEST_AOT ?= cached or products
UNTIL ?= 9999999999

# Environments are installed without compiled modules, and many processes import the same: the first one compiles.
export PYTHONDONTWRITEBYTECODE :=

NEWEST := .venv
OLDEST := .venv-oldest
DOCS := .venv-docs
WHEELS := .venv-wheels
DEMO := --heads 16 --depth 7

# $(call install,ENVIRONMENT,GROUP,THIS CHECKOUT): a dependency group of pyproject.toml. Groups need pip 25.1; the
# environment may be older than they are.
install = $(1)/bin/python -m pip install -q --upgrade pip && $(1)/bin/python -m pip install -q --no-compile --group $(2) $(3)

# An install is repeated when what it installs or compiles has changed.
INSTALL_INPUTS := pyproject.toml CMakeLists.txt $(wildcard leaner_kernels/csrc/*.cu* leaner_kernels/csrc/*.h)
DEMO_READY := $(NEWEST)/.demo-ready
TEST_READY := $(NEWEST)/.test-ready
OLDEST_READY := $(OLDEST)/.test-ready
DOCS_READY := $(DOCS)/.ready
WHEELS_READY := $(WHEELS)/.ready

# Tiles chosen for GPUs, offsets and guard pages do not depend on Triton's version.
OLDEST_KERNELS := not float32 and not gpu_runs and not test_large_offsets and not test_guard_pages
# Long tests first, so that the processes that share them end together.
FIRST := tests/train tests/kappa tests/bench
APART := tests/interpreter tests/compiled tests/aot tests/faults tests/fuzz tests/peers tests/security
OTHERS := $(filter-out $(FIRST) $(APART) %/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))
MAIN_TESTS := $(FIRST) $(OTHERS) $(wildcard tests/test_*.py)
# One thread per process: several processes share the cores. Inductor would start more of them.
PARALLEL := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
WORKERS ?= 2
heading = @printf '\n== %s\n' "$(1)"

.NOTPARALLEL:
.PHONY: help demo test test-all test-rest test-main test-main-slow test-interpreter test-interpreter-slow \
	test-gpu-bodies test-compiled test-op test-nightly test-nightly-aot test-fuzz test-faults test-security test-peers test-aot test-oldest faults peers bench lint docs wheels clean

help:
	@sed -n '/^# make/s/^# //p' Makefile

demo: $(DEMO_READY)
	$(NEWEST)/bin/torchrun --standalone train/vit.py $(DEMO)

# What is installed is installed first, so that the time of the tests is their own.
test: $(TEST_READY)
	@start=$$(date +%s) && $(MAKE) --no-print-directory test-main test-interpreter && \
	printf '\n== make test passed in %d s, installation apart. make test-all also runs: %s\n' \
	$$(($$(date +%s) - start)) "$(BESIDE)"

test-all: test test-rest

# What .ci/run has left to do after `make test`, in this order.
REST := test-fuzz test-peers test-security test-main-slow test-aot test-interpreter-slow test-oldest test-faults test-compiled test-gpu-bodies

test-rest: $(TEST_READY)
	@late=; for part in $(REST); do \
	if [ $$(date +%s) -gt $(UNTIL) ]; then late="$$late $$part"; else $(MAKE) --no-print-directory $$part || exit; fi; done; \
	test -z "$$late" || printf '\n== NOT RUN, for lack of time:%s\n' "$$late"

BESIDE := training in several processes, kernels in half precision, on another BLAS routine, the bodies of the GPU's tests, compiled \
kernels executed, fuzzing, faults in short, hostile files, tests of others in short, ahead-of-time compiles, and the oldest \
torch and Triton

# Interpreter tests and ahead-of-time compiles cannot share a process: Triton reads
# TRITON_INTERPRET when it is imported.
INTERPRET := TRITON_INTERPRET=1 $(PARALLEL)
HASWELL := OPENBLAS_CORETYPE=Haswell
MAIN := $(PARALLEL) $(NEWEST)/bin/pytest $(MAIN_TESTS) -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-main: $(TEST_READY)
	$(call heading,tests: newest torch)
	$(MAIN) -m "not slow and not nightly"

test-main-slow: $(TEST_READY)
	$(call heading,tests that start many processes: newest torch)
	$(MAIN) -m "slow and not nightly"

test-interpreter: $(TEST_READY)
	$(call heading,kernels in the interpreter: newest torch and Triton)
	$(INTERPRET) $(NEWEST)/bin/pytest tests/interpreter -n $(WORKERS) -m "not slow and not nightly"

# No result may hang on the routine that a BLAS picks for the processor: of two parts one takes Haswell's.
test-interpreter-slow: $(TEST_READY)
	$(call heading,kernels in the interpreter: the rest of bfloat16, some in float16; OpenBLAS's routines for Haswell)
	$(HASWELL) $(INTERPRET) $(NEWEST)/bin/pytest tests/interpreter -n $(WORKERS) -m slow

test-gpu-bodies: $(TEST_READY)
	$(call heading,one case of each test of tests/gpu on a GPU that is not there)
	$(INTERPRET) $(NEWEST)/bin/pytest tests/gpu --rehearse bodies -n $(WORKERS) -k "not large_tensors"

EXECUTE := LEANER_EXECUTE=1 $(PARALLEL)

test-compiled: $(TEST_READY)
	$(call heading,compiled kernels executed in software)
	$(EXECUTE) $(NEWEST)/bin/pytest tests/compiled -n $(WORKERS) -m "not nightly"

# Each backend is a process of its own; one without a test that matches (status 5) does not count.
test-op: $(TEST_READY)
	@test -n "$(K)" || { echo 'give an expression of pytest: make test-op K=softcap'; exit 2; }
	@ran=; run() { "$$@" -m "not nightly" -k "$(K)" -n $(WORKERS); s=$$?; \
	test $$s -eq 5 || ran=1; test $$s -eq 0 || test $$s -eq 5 || exit $$s; }; \
	run env $(PARALLEL) $(NEWEST)/bin/pytest $(MAIN_TESTS); \
	run env $(INTERPRET) $(NEWEST)/bin/pytest tests/interpreter; \
	run env $(EXECUTE) $(NEWEST)/bin/pytest tests/compiled; \
	run env $(PARALLEL) $(NEWEST)/bin/pytest tests/aot; \
	run env $(INTERPRET) $(NEWEST)/bin/pytest tests/gpu --rehearse bodies; \
	test -n "$$ran" || { echo 'no test matches K=$(K)'; exit 5; }

# What takes long and finds little beside the rest.
test-nightly: $(TEST_READY)
	$(MAIN) -m nightly
	$(HASWELL) $(INTERPRET) $(NEWEST)/bin/pytest tests/interpreter -n $(WORKERS) -m "not slow and not nightly"
	$(INTERPRET) $(NEWEST)/bin/pytest tests/interpreter -n $(WORKERS) -m "slow or nightly"
	$(INTERPRET) $(NEWEST)/bin/pytest tests/gpu --rehearse bodies -n $(WORKERS) -k large_tensors
	$(EXECUTE) $(NEWEST)/bin/pytest tests/compiled -n $(WORKERS) -m nightly

test-nightly-aot: $(TEST_READY)
	$(PARALLEL) $(NEWEST)/bin/pytest tests/aot -n $(WORKERS) -m nightly

test-fuzz: $(TEST_READY)
	$(call heading,fuzzing)
	$(PARALLEL) $(NEWEST)/bin/pytest tests/fuzz -n $(WORKERS)

test-faults: $(TEST_READY)
	$(call heading,faults in short)
	$(PARALLEL) $(NEWEST)/bin/pytest tests/faults --kills 2 -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-security: $(TEST_READY)
	$(call heading,hostile files and folders)
	$(PARALLEL) $(NEWEST)/bin/pytest tests/security -n $(WORKERS)

# PyTorch's own tests freeze torch.backends when they are imported: in a process of their own.
test-peers: $(TEST_READY)
	$(call heading,tests of others in short)
	$(PARALLEL) $(NEWEST)/bin/pytest tests/peers -n $(WORKERS) -m "not nightly"

# Skipped where no Chromium is installed, unless LEANER_CHROMIUM=required.
test-aot: $(TEST_READY)
	$(call heading,kernels compiled ahead of time: newest torch and Triton)
	$(PARALLEL) $(NEWEST)/bin/pytest tests/aot -n $(WORKERS) -m "not nightly"

test-oldest: $(OLDEST_READY)
	$(call heading,import: oldest torch and Triton)
	$(OLDEST)/bin/pytest tests/test_import.py
	$(call heading,kernels in the interpreter: oldest torch and Triton)
	$(INTERPRET) $(OLDEST)/bin/pytest tests/interpreter -n $(WORKERS) $(OLDEST_CASES) -k "$(OLDEST_KERNELS)" -m "not nightly"
	$(call heading,compiled kernels in Gluon executed in software: oldest torch and Triton)
	$(EXECUTE) $(OLDEST)/bin/pytest tests/compiled/test_gluon.py -n $(WORKERS) $(OLDEST_CASES) -m "not nightly"
	$(call heading,kernels compiled ahead of time: oldest torch and Triton)
	$(PARALLEL) $(OLDEST)/bin/pytest tests/aot -n $(WORKERS) -k "$(OLDEST_AOT)" --gpus $(OLDEST_GPUS)

# Processes are killed at steps that a busy machine passes late: one test at a time.
faults: $(TEST_READY)
	$(call heading,fault injection)
	$(PARALLEL) $(NEWEST)/bin/pytest tests/faults

peers: $(TEST_READY)
	$(call heading,tests of others)
	$(PARALLEL) $(NEWEST)/bin/pytest tests/peers -n $(WORKERS) -rs

bench: $(TEST_READY)
	$(NEWEST)/bin/pytest bench --benchmark-only $(BENCH_ARGS)

lint: $(TEST_READY)
	$(NEWEST)/bin/ruff check
	$(NEWEST)/bin/ruff format --check
	$(NEWEST)/bin/pyright --pythonpath $(NEWEST)/bin/python leaner_kernels

docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

# Both wheels come from the sdist, which shows that it is whole. pip's CUDA keeps its libraries where
# nvcc does not look.
wheels: $(WHEELS_READY)
	rm -rf dist build/wheels
	$(WHEELS)/bin/python -m build --no-isolation --outdir dist -C wheel.cmake=false
	cuda=$$(echo $(CURDIR)/$(WHEELS)/lib/python3*/site-packages/nvidia/cu13); \
	CUDACXX=$$cuda/bin/nvcc LIBRARY_PATH=$$cuda/lib \
	$(WHEELS)/bin/python -m pip wheel -q --no-deps --no-build-isolation --wheel-dir build/wheels dist/*.tar.gz
	PATH=$(CURDIR)/$(WHEELS)/bin:$$PATH auditwheel repair --plat $(PLATFORM) --wheel-dir dist build/wheels/*.whl
	$(WHEELS)/bin/twine check --strict dist/*
	$(WHEELS)/bin/auditwheel show dist/*manylinux*.whl

clean:
	rm -rf $(NEWEST) $(OLDEST) $(DOCS) $(WHEELS) build dist .benchmarks .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(foreach environment,$(NEWEST) $(OLDEST) $(DOCS) $(WHEELS),$(environment)/bin/python):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, $(PYTHON) is {sys.version.split()[0]}: make PYTHON=...")'
	$(PYTHON) -m venv $(@:/bin/python=) || { rm -rf $(@:/bin/python=); exit 1; }

$(DEMO_READY): $(NEWEST)/bin/python $(INSTALL_INPUTS)
	$(call heading,installing into $(NEWEST))
	$(call install,$(NEWEST),demo,-e .)
	@touch $@

# The test environment holds everything the demo needs. Of its thousands of files Python compiles
# those that the tests import, when they do.
$(TEST_READY): $(NEWEST)/bin/python $(INSTALL_INPUTS)
	$(call heading,installing into $(NEWEST))
	$(call install,$(NEWEST),dev,-e .)
	@touch $@ $(DEMO_READY)

$(OLDEST_READY): $(OLDEST)/bin/python $(INSTALL_INPUTS)
	$(call heading,installing into $(OLDEST))
	$(call install,$(OLDEST),oldest,-C wheel.cmake=false -e .)
	@touch $@

# The documentation is read, not imported: it needs neither torch nor this package.
$(DOCS_READY): $(DOCS)/bin/python pyproject.toml
	$(call heading,installing into $(DOCS))
	$(call install,$(DOCS),docs)
	@touch $@

$(WHEELS_READY): $(WHEELS)/bin/python pyproject.toml
	$(call heading,installing into $(WHEELS))
	$(call install,$(WHEELS),wheels)
	@touch $@

# make demo    set up .venv and train a lean ViT on real data, κ included
# make test    set up both environments and run every test process
# make bench   run the benchmarks (BENCH_ARGS adds pytest arguments)
# make lint    ruff and pyright
# make clean   remove environments, builds and caches; results under runs/ stay
#
# PYTHON names the interpreter that the environments are made from, WORKERS the processes that test.

PYTHON ?= python3
BENCH_ARGS ?=

NEWEST := .venv
OLDEST := .venv-oldest
# Triton 3.6's interpreter makes scalars of one-element arrays, which NumPy 2.4 no longer does.
OLDEST_TORCH := torch==2.11.0 torchvision==0.26.0 'numpy<2.4'
DEMO := --heads 16 --depth 7

# An install is repeated when what it installs or compiles has changed.
INSTALL_INPUTS := pyproject.toml CMakeLists.txt $(wildcard leaner_kernels/csrc/*.cu* leaner_kernels/csrc/*.h)
DEMO_READY := $(NEWEST)/.demo-ready
TEST_READY := $(NEWEST)/.test-ready
OLDEST_READY := $(OLDEST)/.test-ready

# One thread per process: several processes share the cores.
PARALLEL := OMP_NUM_THREADS=1
WORKERS ?= 2
heading = @printf '\n== %s\n' "$(1)"

.NOTPARALLEL:
.PHONY: help demo test test-main test-interpreter test-aot test-oldest bench lint clean

help:
	@sed -n '/^# make/s/^# //p' Makefile

demo: $(DEMO_READY)
	$(NEWEST)/bin/torchrun --standalone train/vit.py $(DEMO)

# Interpreter tests and ahead-of-time compiles cannot share a process: Triton reads
# TRITON_INTERPRET when it is imported.
test: test-main test-interpreter test-aot test-oldest

test-main: $(TEST_READY)
	$(call heading,tests: newest torch)
	$(PARALLEL) $(NEWEST)/bin/pytest tests --ignore=tests/interpreter --ignore=tests/aot -n $(WORKERS) --dist loadfile

test-interpreter: $(TEST_READY)
	$(call heading,kernels in the interpreter: newest torch and Triton)
	$(PARALLEL) TRITON_INTERPRET=1 $(NEWEST)/bin/pytest tests/interpreter -n $(WORKERS)

test-aot: $(TEST_READY)
	$(call heading,kernels compiled ahead of time: newest torch and Triton)
	$(PARALLEL) $(NEWEST)/bin/pytest tests/aot -n $(WORKERS)

test-oldest: $(OLDEST_READY)
	$(call heading,import: oldest torch and Triton)
	$(OLDEST)/bin/pytest tests/test_import.py
	$(call heading,kernels in the interpreter: oldest torch and Triton)
	$(PARALLEL) TRITON_INTERPRET=1 $(OLDEST)/bin/pytest tests/interpreter -n $(WORKERS) -k "not float32"
	$(call heading,kernels compiled ahead of time: oldest torch and Triton)
	$(PARALLEL) $(OLDEST)/bin/pytest tests/aot -n $(WORKERS) -k "not benchmark and not native_library" --cards 80,90

bench: $(TEST_READY)
	$(NEWEST)/bin/pytest bench --benchmark-only $(BENCH_ARGS)

lint: $(TEST_READY)
	$(NEWEST)/bin/ruff check
	$(NEWEST)/bin/ruff format --check
	$(NEWEST)/bin/pyright --pythonpath $(NEWEST)/bin/python leaner_kernels

clean:
	rm -rf $(NEWEST) $(OLDEST) build dist .benchmarks .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(NEWEST)/bin/python $(OLDEST)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, $(PYTHON) is {sys.version.split()[0]}: make PYTHON=...")'
	$(PYTHON) -m venv $(@:/bin/python=) || { rm -rf $(@:/bin/python=); exit 1; }

$(DEMO_READY): $(NEWEST)/bin/python $(INSTALL_INPUTS)
	$(call heading,installing into $(NEWEST))
	$(NEWEST)/bin/python -m pip install -q -e '.[train]'
	@touch $@

# The test environment holds everything the demo needs.
$(TEST_READY): $(NEWEST)/bin/python $(INSTALL_INPUTS)
	$(call heading,installing into $(NEWEST))
	$(NEWEST)/bin/python -m pip install -q -e '.[dev,train,bench,timm]'
	@touch $@ $(DEMO_READY)

$(OLDEST_READY): $(OLDEST)/bin/python $(INSTALL_INPUTS)
	$(call heading,installing into $(OLDEST))
	$(OLDEST)/bin/python -m pip install -q -C wheel.cmake=false -e '.[dev]' $(OLDEST_TORCH)
	@touch $@

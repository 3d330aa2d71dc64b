PYTHON ?= python3
PYTEST_ARGS ?=
PROMPT ?= Pitomlo runs for 2 hours at 6 km per hour. After that he walks for 8 hours at 5 km per hour. Then he drives for \
	8 hours at 3 km per hour. Then he sails for 3 hours at 5 km per hour. What is the whole distance?

VENV := .venv
BIN := $(VENV)/bin
# An editable install follows the Python sources by itself; a change in these needs another install.
INSTALLED := pyproject.toml $(wildcard cpp_plugins/CMakeLists.txt cpp_plugins/cmake/host.cmake cpp_plugins/host/* cpp_plugins/include/ddtree/*) \
	$(shell find triton_repo -type f -not -path '*/__pycache__/*' 2>/dev/null)

CPP_FILES = $(shell find cpp_plugins -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

# Triton has an environment of its own: its Python backend needs NumPy 1, and the models run in this environment. The
# wheel carries a whole server (2.51.0); its dependencies are for another way to use it.
TRITON_VENV := .venv-triton
TRITON_BIN := $(TRITON_VENV)/bin
TRITON_CLIENT := 'tritonclient[grpc,http]==2.51.0' 'pytest>=8.2' 'pytest-asyncio>=1.0' 'pytest-timeout>=2.3' 'hypothesis>=6.100' 'filelock>=3.12' kubernetes-validate
TRITON_SERVER := nvidia-pytriton==0.7.0
PARALLEL := -n auto --dist worksteal

.PHONY: demo test test-slow test-package test-triton test-trt check fmt docs bench plugins plugins-test clean

demo: $(VENV)/.stamp-run
	$(BIN)/ddtree-trt build --target tiny --output engines/tiny --force
	$(BIN)/ddtree-trt run engines/tiny --compare --prompt "$(PROMPT)"

# A process per core, as far as memory reaches, each of one thread. `PYTEST_ARGS=-n0` runs the tests in one process.
test: $(VENV)/.stamp-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow and not package" $(PARALLEL) $(PYTEST_ARGS)

# The long versions of the same tests: every method on every prompt, every draw made anew.
test-slow: $(VENV)/.stamp-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow $(PARALLEL) $(PYTEST_ARGS)

# The source distribution, the wheel made from it, and its life in an environment of its own, whose packages come from
# the index or pip's cache.
test-package: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -q -m package tests/package $(PYTEST_ARGS)

# A real server on loopback; see tools/triton_server.py.
test-triton: $(TRITON_VENV)/.stamp
	$(TRITON_BIN)/pytest -q tests/triton/server $(PYTEST_ARGS)

# On a machine with an NVIDIA GPU and `pip install '.[tensorrt]'` in $(VENV): builds engines, runs them, compares them
# with ONNX Runtime. Elsewhere every test says why it is skipped.
test-trt: $(VENV)/.stamp-dev plugins
	$(BIN)/python -m pytest -q -rs tests/gpu $(PYTEST_ARGS)

check: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

fmt: $(VENV)/.stamp-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP_FILES)

# The parts of the documents that are made of tables in the sources, and the site in build/site. Any warning ends it.
docs: $(VENV)/.stamp-docs
	$(BIN)/python tools/documents/parameter_table.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

bench: $(VENV)/.stamp-dev
	$(BIN)/python -m workbench host

# What this machine can build of the CUDA kernels, the TensorRT plugins and the torch operators.
plugins: | $(VENV)/bin/python
	PYTHON=$(BIN)/python cpp_plugins/build_plugins.sh

# Everything about them that can be checked without a GPU, what was left out and why.
plugins-test: $(VENV)/.stamp-dev plugins
	DDTREE_TEST_TORCH=1 $(BIN)/python -m pytest -q -rs tests/native tests/engines/torch $(PYTEST_ARGS)

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis $(VENV)/.stamp-* $(TRITON_VENV)/.stamp
	find . -name __pycache__ -not -path './$(VENV)/*' -not -path './$(TRITON_VENV)/*' -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Installed as users install it, not editable.
$(TRITON_VENV)/.stamp: $(INSTALLED) $(shell find ddtree_trt -type f -not -path '*/__pycache__/*' -not -name '*.so')
	test -x $(TRITON_BIN)/python || $(PYTHON) -m venv $(TRITON_VENV)
	$(TRITON_BIN)/python -m pip install --quiet . 'numpy<2' $(TRITON_CLIENT)
	$(TRITON_BIN)/python -m pip install --quiet --no-deps $(TRITON_SERVER)
	touch $@

# Three levels, so that the demo and the documents do not pull torch and the test tools.
$(VENV)/.stamp-run: $(INSTALLED) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.stamp-docs: $(INSTALLED) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $(VENV)/.stamp-run $@

$(VENV)/.stamp-dev: $(INSTALLED) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(VENV)/.stamp-run $(VENV)/.stamp-docs $@

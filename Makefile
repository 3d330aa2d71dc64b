PYTHON ?= python3
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# An editable install follows the Python sources by itself; a change in these needs another install.
INSTALLED := pyproject.toml $(wildcard cpp_plugins/CMakeLists.txt cpp_plugins/host/* cpp_plugins/include/ddtree/*) \
	$(shell find triton_repo -type f -not -path '*/__pycache__/*' 2>/dev/null)

.PHONY: demo test check fmt bench clean

demo: $(VENV)/.stamp-run
	$(BIN)/ddtree-trt build --target tiny --output engines/tiny --force
	$(BIN)/ddtree-trt run engines/tiny --compare --prompt "def fib(n):" --max-tokens 64

test: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -q $(PYTEST_ARGS)

check: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy ddtree_trt

fmt: $(VENV)/.stamp-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.stamp-dev
	$(BIN)/python tools/bench_host.py

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis $(VENV)/.stamp-*
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Two levels, so that the demo does not pull torch and the test tools.
$(VENV)/.stamp-run: $(INSTALLED) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.stamp-dev: $(INSTALLED) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(VENV)/.stamp-run $@

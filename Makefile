# Every target sets up what it needs: a virtual environment in $(VENV) with this package in it.
#   make test PYTHON=/path/to/python   use that Python (3.11 or newer)
#   make test PYTEST_ARGS="-k plates"  pass arguments on to pytest
#   make demo DEMO_ARGS="--steps 300"  and to the demonstration

VENV ?= .venv
PYTHON ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=
WORKERS ?= 2
FUZZ_FILES ?= 10000
FUZZED := tests/data/test_fuzzing.py tests/benchmarks/readers/test_fuzzing.py

CANDIDATES := $(if $(PYTHON),"$(PYTHON)",python3 python3.14 python3.13 python3.12 python3.11)
IN_VENV := $(VENV)/bin/python
PYTEST := $(IN_VENV) -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow fuzz lint format types docs doctest clean

help:
	@echo "make demo      run the demonstration, examples/demo.py"
	@echo "make test      run all tests but those of the documentation and the slow ones"
	@echo "make test-slow run whole fits and studies that take long, and the benchmarks with --quick"
	@echo "make fuzz      read many damaged files: 10,000 for each reader, or FUZZ_FILES=100000"
	@echo "make lint      check style and layers; make format mends what can be mended"
	@echo "make types     check types"
	@echo "make docs      build the documentation into docs/_build/html"
	@echo "make doctest   test the documentation: examples in docstrings, README and docs"
	@echo "make clean     remove everything these commands have made"

demo: $(VENV)/.installed
	$(IN_VENV) examples/demo.py $(DEMO_ARGS)

test: $(VENV)/.installed-dev
	$(PYTEST) -n $(WORKERS) --dist worksteal --ignore tests/test_docs.py -m "not slow" $(PYTEST_ARGS)

test-slow: $(VENV)/.installed-dev
	$(PYTEST) -n $(WORKERS) --dist worksteal --ignore tests/test_docs.py -m slow $(PYTEST_ARGS)

fuzz: $(VENV)/.installed-dev
	FUZZ_FILES=$(FUZZ_FILES) $(PYTEST) -n $(WORKERS) -k damaged $(FUZZED) $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(IN_VENV) -m ruff check
	$(IN_VENV) -m ruff format --check
	$(VENV)/bin/lint-imports --no-cache --no-logo

format: $(VENV)/.installed-dev
	$(IN_VENV) -m ruff check --fix
	$(IN_VENV) -m ruff format

types: $(VENV)/.installed-dev
	$(IN_VENV) -m mypy

docs: $(VENV)/.installed-dev
	$(IN_VENV) -m sphinx -W --keep-going --fresh-env --quiet -b html docs docs/_build/html
	@echo "The documentation is in docs/_build/html/index.html"

doctest: $(VENV)/.installed-dev
	$(PYTEST) -n $(WORKERS) --doctest-modules --pyargs numpyro_largecat tests/test_docs.py $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build dist docs/_build docs/auto_gallery docs/sg_execution_times.rst .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@for python in $(CANDIDATES); do \
	    if "$$python" -c "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))" \
	        >/dev/null 2>&1; then \
	        echo "Making $(VENV) with $$python"; \
	        "$$python" -m venv --clear "$(VENV)" && touch $@; \
	        exit; \
	    fi; \
	done; \
	echo "error: found no Python 3.11 or newer that has the venv module; tried:" $(CANDIDATES) >&2; \
	echo "Name one with \`make PYTHON=/path/to/python ...\`;" \
	    "on Debian and Ubuntu, python3-venv holds the module." >&2; \
	exit 1

$(VENV)/.installed: $(VENV)/.made pyproject.toml
	@echo "Installing numpyro_largecat into $(VENV)"
	@$(IN_VENV) -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.made pyproject.toml
	@echo "Installing numpyro_largecat and its development tools into $(VENV)"
	@$(IN_VENV) -m pip install --quiet --disable-pip-version-check --editable ".[dev,docs]"
	@touch $@ $(VENV)/.installed

# Two commands, each with all its own set-up:
#   make bench   the quick suite on the GPU if there is one, else on the CPU; ends in tables and a report
#   make test    lint, types and tests
# PYTHON picks another interpreter, VENV another place for the virtual environment.

PYTHON ?= python3
VENV ?= .venv
READY := $(VENV)/.ready

.PHONY: bench test clean

bench: $(READY)
	$(VENV)/bin/warploom bench --suite quick

test: $(READY)
	$(VENV)/bin/ruff check src tests examples
	$(VENV)/bin/ruff format --check src tests examples
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest -n auto

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "warploom needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

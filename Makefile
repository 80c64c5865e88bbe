# Two commands, each with all its own set-up:
#   make bench   the quick suite on the GPU if there is one, else on the CPU; ends in tables and a report
#   make test    lint, types and tests; a sample of the cases of each test, every day another
# and
#   make test-all  the same with every case
#   make test-gpu  the tests on one GPU, with a line about the run in LOG; PART=1/3, 2/3 and 3/3 are three runs of it
#   make docs      the documentation as a site, in site/
#   make test-install   the wheel with each extra in empty environments: what README names for it runs
#   make test-newest    tests of what lies inside PyTorch, Triton and transformers, with the newest of each
# PYTHON picks another interpreter, VENV another place for the virtual environment, TRITONS versions of Triton with
# which a part of the tests runs as well: `make test-all TRITONS="3.6.0 3.9.0"`, the oldest and the newest supported.

PYTHON ?= python3
VENV ?= .venv
TRITONS ?=
PART ?= 1/1
LOG ?= results/tests.jsonl
READY := $(VENV)/.ready
NEWEST := $(addprefix tests/test_,$(addsuffix .py,backend entry examples hub pytorch runtime sdpa tracing transformers transforms))

# Every program that a test starts would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: bench lint test test-all test-gpu test-install test-newest docs clean

bench: $(READY)
	@$(VENV)/bin/warploom bench --suite quick

test: lint
	$(VENV)/bin/python -m pytest -n auto

test-all: lint $(TRITONS:%=$(VENV)/triton-%/.ready)
	$(VENV)/bin/python -m pytest -n auto --all
	set -e; for version in $(TRITONS); do \
		echo "with Triton $$version:"; \
		PYTHONPATH=$(VENV)/triton-$$version $(VENV)/bin/python -m pytest -n auto --all -m stack; \
	done

test-gpu: $(READY)
	$(VENV)/bin/python -m pytest -n auto --part $(PART) --log $(LOG)

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy --num-workers 2

# The wheel in empty environments, one for each extra, with the commands and examples that README names for it.
test-install: $(READY)
	$(VENV)/bin/python -m pytest --all -m install --timeout 3000 tests/test_install.py

# Whatever an installation takes today, and the tests of what lies inside PyTorch, Triton and transformers.
test-newest:
	$(PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/python -m pip install --quiet --upgrade --editable ".[dev]"
	$(VENV)-newest/bin/python -m pytest -n auto -m stack
	$(VENV)-newest/bin/python -m pytest -n auto --all $(NEWEST)

docs: $(READY)
	$(VENV)/bin/python -m mkdocs build --strict --quiet

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else \
		"warploom needs Python 3.11 or newer: name one, as in make PYTHON=python3.12")'
	@echo "Installing into $(VENV), which takes minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable ".[dev]" \
		|| { echo "The installation failed, as said above: it needs the package index and space. Then run make again." >&2; exit 2; }
	touch $(READY)

# A version of Triton beside the installed one: it is imported where its folder comes first in PYTHONPATH.
$(VENV)/triton-%/.ready: $(READY)
	$(VENV)/bin/python -m pip install --quiet --no-deps --upgrade --target $(@D) triton==$*
	touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One line per chore: `make setup | demo | test | check | bench`. Everything lands in .venv and data/.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo test check bench clean
.DELETE_ON_ERROR:

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("penstock needs Python 3.11 or later, this is " + sys.version.split()[0] + "; say make PYTHON=python3.12 or the like")'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev,examples]"
	@touch $@

demo: $(READY)
	$(BIN)/python examples/make_digits.py
	$(BIN)/penstock run examples/train_digits.py

test: $(READY)
	$(BIN)/python -m pytest $(TESTS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m benchmarks.feed $(BENCH)

clean:
	rm -rf .venv data build dist run.json .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

# One line per chore: `make setup | demo | quick | test | thorough | check | bench | browser`. Everything lands in .venv and data/.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo quick test thorough check bench browser clean
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

# What only computes: a test is skipped where it starts a process or opens a port.
quick: $(READY)
	HYPOTHESIS_PROFILE=quick OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quick -q -r fE -n 2 --dist worksteal \
		-p no:unraisableexception -p no:threadexception -W ignore::ResourceWarning -m "not alone and not slow and not ray and not cuda" $(or $(TESTS),tests)

# Three processes, on two cores too: tests wait for other processes a good part of their time.
test: $(READY) browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not alone" $(TESTS) || [ $$? = 5 ]
	$(BIN)/python -m pytest -m alone $(or $(TESTS),tests) || [ $$? = 5 ]

# The same with many more of hypothesis' examples, for a nightly run.
thorough:
	HYPOTHESIS_PROFILE=thorough $(MAKE) test

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The report is tested in a real browser: installed where apt-get and its rights are there, else those tests are skipped.
browser:
	@if command -v chromedriver >/dev/null && { command -v chromium || command -v google-chrome; } >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; } >/dev/null || \
		echo "chromium could not be installed: the tests of report.html in a browser will be skipped"; \
	else echo "no chromium with chromedriver: the tests of report.html in a browser will be skipped"; fi

bench: $(READY)
	$(BIN)/python -m benchmarks.loader $(BENCH)

clean:
	rm -rf .venv data build dist run.json report.html .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

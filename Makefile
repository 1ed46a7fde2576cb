# One line per chore: `make setup | demo | quick | test | thorough | check | package | docs | links | bench | browser | recipes | newest | standin | gpu | lock`.
# Everything lands in .venv (recipes: .venv-recipes; newest: .venv-newest), build, dist and data/. `make demo` and `make docs` install what they need alone; the others install all.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEMO_READY := .venv/.demo-ready
DOCS_READY := .venv/.docs-ready
RECIPES_READY := .venv-recipes/.ready
NEWEST_READY := .venv-newest/.ready
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: setup demo quick test thorough check package docs links bench browser recipes newest standin gpu lock clean
.DELETE_ON_ERROR:

# Tests start many processes: let the first one that imports a module keep its bytecode for the others.
unexport PYTHONDONTWRITEBYTECODE

setup: $(READY)

define NEW_VENV
@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("penstock needs Python 3.11 or later, this is " + sys.version.split()[0] + "; say make PYTHON=python3.12 or the like")'
$(PYTHON) -m venv --clear .venv
endef

$(READY): pyproject.toml constraints.txt
	$(NEW_VENV)
	$(INSTALL) -e ".[dev]"
	@touch $@ $(DEMO_READY)

# Bytecode is written for what the demo imports, not for all of torch: that is a third of an installation's time.
$(DEMO_READY): pyproject.toml constraints.txt
	$(NEW_VENV)
	$(INSTALL) --no-compile -e ".[examples]"
	@touch $@

demo: $(DEMO_READY)
	$(BIN)/python examples/make_digits.py
	$(BIN)/penstock run examples/train_digits.py --epochs 3

# What only computes: a test is skipped where it starts a process or opens a port.
quick: $(READY)
	HYPOTHESIS_PROFILE=quick OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quick -q -r fE -n 2 --dist worksteal \
		-p no:unraisableexception -p no:threadexception -W ignore::ResourceWarning -m "not slow and not ray and not cuda" $(or $(TESTS),tests)

# Three processes, on two cores too: tests wait for other processes a good part of their time.
test: $(READY) browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(TESTS)

GPU_PAGES := $(shell grep -rl "benchmarks/results/gpu " README.md CHANGELOG.md docs)

# What needs a GPU, in benchmarks/results/gpu, and the pages' tables of it: call it again for what six minutes were too short for.
gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu --out benchmarks/results/gpu; status=$$?; \
	$(BIN)/python -m benchmarks.table --page $(GPU_PAGES) && $(BIN)/python -m benchmarks.chart && exit $$status

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

# The wheel and the source distribution, in dist/, as they would be published.
package: $(READY)
	rm -rf dist build/package
	mkdir -p build/package
	cp -r pyproject.toml README.md LICENSE CHANGELOG.md CITATION.cff src docs examples build/package
	$(BIN)/python .ci/absolute_links.py build/package/README.md
	$(BIN)/python -m build --no-isolation --outdir dist build/package
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

# The site, in build/site; a warning is an error, as is a link inside of it that leads nowhere.
docs: $(DOCS_READY)
	$(BIN)/python -m sphinx -q -W --keep-going -b html -d build/doctrees docs build/site

# The site's links to other sites.
links: $(DOCS_READY)
	$(BIN)/python -m sphinx -q --keep-going -b linkcheck -d build/doctrees docs build/links

# The site needs little of what the tests need; an environment that has that gets the rest.
$(DOCS_READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e ".[docs]"
	@touch $@

# The recipes of the site with the packages that they are for: gigabytes to download. What cannot be installed is skipped.
recipes: $(RECIPES_READY)
	OMP_NUM_THREADS=1 .venv-recipes/bin/python -m pytest --noconftest -o addopts=-ra tests/recipes.py

RECIPES := accelerate datasets lightning litdata monai mosaicml-streaming timm torch_geometric torchtitan transformers ultralytics

# The newest of everything, as a user would get it: torchvision needs the torch that it was built for.
$(RECIPES_READY): pyproject.toml
	$(PYTHON) -m venv --clear .venv-recipes
	.venv-recipes/bin/python -m pip install -q --disable-pip-version-check torch torchvision pytest -e .
	@for package in $(RECIPES); do \
		.venv-recipes/bin/python -m pip install -q --disable-pip-version-check "$$package" || \
		echo "$$package could not be installed: its recipe will be skipped"; \
	done
	@touch $@

# The suite with the newest torch and the newest of everything else, as somebody would get them without the pinned versions.
newest: $(NEWEST_READY) browser
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(TESTS)

$(NEWEST_READY): pyproject.toml
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install -q --disable-pip-version-check -e ".[dev]"
	@touch $@

ON_STANDIN := env PYTHONPATH=src:.standin/site LD_LIBRARY_PATH=.standin OMP_NUM_THREADS=1 \
	LD_PRELOAD="$(CURDIR)/.standin/libfakeblas.so $(CURDIR)/.standin/libfakeblaslt.so"

# Order, lifetimes and captures under torch's own CUDA build, without a GPU: 2.5 GB to download (tests/cuda/standin).
standin: $(READY)
	@tests/cuda/standin/setup.sh .standin >/dev/null
	$(ON_STANDIN) FAKE_GPUS=2 $(BIN)/python -m pytest tests/cuda
	$(ON_STANDIN) $(BIN)/python -m benchmarks.gpu --tiny --minutes 15 --out build/standin

# What CI installs, with hashes: after each change of constraints.txt or of the extras. Needs uv.
lock: $(READY)
	$(BIN)/python .ci/lock.py

bench: $(READY)
	$(BIN)/python -m benchmarks.loader $(BENCH)

clean:
	rm -rf .venv .venv-newest .venv-recipes data build dist penstock-runs .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

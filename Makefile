# make demo    set up what it needs, train on real digits, and write a report and a comparison
# make quick   the laws and the fast tests, in under two minutes
# make test    set everything up, check lint and types, and run the tests
# make nightly the same with every case of every test
# make gpu     every test that needs a GPU, with the installed python3 (nothing is set up)
# make check   formatting, lint and types
# make docs    build the documentation site into build/site; its tutorials run
# make pins    write the newest version of each library into constraints.txt
# make oldest  the demo with the lowest allowed version of each library, in .venv-oldest
# make rooms   files, lines, circles, and small files with one importer
# make clean   remove what the others made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
USABLE := $(VENV)/.usable
# To compile all libraries takes minutes, and most of their files are never imported.
PIP := --quiet --disable-pip-version-check --no-compile

.PHONY: demo quick test nightly gpu check docs pins oldest rooms clean

# Without bytecode every process that a test starts would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE

# Tests of one file go to one worker, so that what they share is made once.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

demo: $(USABLE)
	$(BIN)/shoal demo

quick: $(READY)
	$(PYTEST) -m "not slow and not kill and not browser and not full and not nightly"

test: $(READY)
	$(BIN)/ruff check shoal studies tests docs/site
	$(BIN)/pyright
	$(PYTEST) -m "not nightly"

nightly: $(READY)
	$(BIN)/ruff check shoal studies tests docs/site
	$(BIN)/pyright
	$(PYTEST)

gpu:
	$(PYTHON) tests/gpu_tests.py

check: $(READY)
	$(BIN)/ruff format --check shoal studies tests docs/site
	$(BIN)/ruff check shoal studies tests docs/site
	$(BIN)/pyright

docs: $(READY)
	rm -rf build/tutorials
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# torch is installed first and pinned, so that no looser requirement can pull another build.
$(USABLE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP) -c constraints.txt torch
	$(BIN)/pip install $(PIP) -c constraints.txt -e '.[report]'
	touch $@

$(READY): $(USABLE)
	$(BIN)/pip install $(PIP) -c constraints.txt -e '.[dev]'
	touch $@

# All versions are pinned, so that a release of another library cannot change what the tests say.
pins:
	$(PYTHON) -m venv --clear $(VENV)-newest
	$(VENV)-newest/bin/pip install $(PIP) "$$(grep '^torch==' constraints.txt)"
	$(VENV)-newest/bin/pip install $(PIP) -e '.[dev]'
	echo '# The versions with which the tests run; `make pins` renews them.' > constraints.txt
	$(VENV)-newest/bin/pip freeze --exclude-editable | sed 's/+cpu$$//' >> constraints.txt

oldest:
	$(PYTHON) -m venv --clear $(VENV)-oldest
	$(VENV)-oldest/bin/pip install $(PIP) -c constraints.txt torch
	$(VENV)-oldest/bin/pip install $(PIP) --only-binary :all: \
	  -c constraints-oldest.txt '.[report,frames,evidence,cluster]'
	$(VENV)-oldest/bin/shoal doctor --try
	$(VENV)-oldest/bin/shoal demo --seeds 1 --out $(VENV)-oldest/demo

rooms: $(READY)
	$(BIN)/python tests/import_graph.py

clean:
	rm -rf $(VENV) $(VENV)-newest $(VENV)-oldest .pytest_cache .ruff_cache .hypothesis build runs

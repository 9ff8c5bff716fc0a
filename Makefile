# make demo    train three ensembles on real digits and write one page about them
# make test    set everything up and run all tests
# make check   formatting, lint and types
# make clean   remove what the others made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check clean

demo: $(READY)
	$(BIN)/shoal demo

test: $(READY)
	$(BIN)/ruff check shoal tests
	$(BIN)/pyright
	$(BIN)/pytest -n 2

check: $(READY)
	$(BIN)/ruff format --check shoal tests
	$(BIN)/ruff check shoal tests
	$(BIN)/pyright

# torch is installed first and pinned, so that no looser requirement can pull another build.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis runs

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OUT ?= demo

.PHONY: demo test lint bench docs clean

demo: $(READY)  ## both studies of the paper on embedded data; prints a table and where the figures are
	$(BIN)/dif demo --out $(OUT)

test: $(READY)  ## everything but slow and gpu
	$(BIN)/python -m pytest -n auto

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: $(READY)  ## the documentation, into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: $(READY)  ## side by side with a CVXPY QP per sample, ratios printed
	$(BIN)/python benchmarks/regression.py

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(OUT) dist site

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.demo
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
OUT ?= demo

.PHONY: demo test coverage lint audit bench docs clean

demo: $(DEMO_READY)  ## a model with its report, then the studies that take minutes; prints tables and where the files are
	$(BIN)/dif demo --out $(OUT)
	$(BIN)/python -m studies demo --out $(OUT)/studies
	@echo "Report: $(abspath $(OUT))/report.html"

test: $(READY)  ## everything but slow and gpu
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

coverage: $(READY)  ## the same, and which lines of src/dif it runs; fails under 95 %
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal --cov --cov-report=term:skip-covered

audit: $(READY)  ## known vulnerabilities of the pinned versions; needs the advisory database of the package index
	$(BIN)/pip-audit --no-deps --disable-pip -r constraints.txt

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: $(READY)  ## the documentation, into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: $(READY) benchmarks/.peers/.ready benchmarks/.layers/.ready  ## side by side with others; writes benchmarks/RESULTS.md
	$(BIN)/python benchmarks/all.py

# What others need stays in environments of their own. kronfluence asks for torchvision, which it never imports.
benchmarks/.%/.ready: benchmarks/%.txt
	test -x benchmarks/.$*/bin/python || $(PYTHON) -m venv benchmarks/.$*
	benchmarks/.$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(DEMO_READY): pyproject.toml constraints.txt | $(BIN)/python  ## what the demo needs
	$(INSTALL) -e ".[studies]"
	touch $@

$(READY): pyproject.toml constraints.txt | $(BIN)/python  ## and what the tests and the documentation need
	$(INSTALL) -e ".[dev]"
	touch $@ $(DEMO_READY)

clean:
	rm -rf $(VENV) $(OUT) dist site benchmarks/.peers benchmarks/.layers

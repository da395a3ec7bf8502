# `make demo` and `make test` set everything up themselves; they need Python 3.11 or later.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: demo test fuzz chaos format

demo: .venv/ready
	$(BIN)/gradshare compare --dataset glyphs --method maml --inner-lr 0.4 --filters 16 \
	    --epochs 8 --iterations 30 --val-tasks 200 --test-tasks 200 \
	    --arms original --arms shared --arms half-rate --jobs 3 --threads 1 --out runs/demo

test: .venv/ready
	$(BIN)/ruff format --check src tests examples benchmarks results
	$(BIN)/ruff check src tests examples benchmarks results
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal

fuzz: .venv/ready
	FUZZ_CASES=12000 OMP_NUM_THREADS=1 $(BIN)/pytest tests/stress/test_fuzz.py

chaos: .venv/ready
	$(BIN)/python -m tests.stress.chaos --kills 1000 --damaged 3000 --minutes 45

format: .venv/ready
	$(BIN)/ruff check --fix src tests examples benchmarks results
	$(BIN)/ruff format src tests examples benchmarks results

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gradshare needs Python 3.11 or later")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

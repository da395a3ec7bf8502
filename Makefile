# Every target sets up .venv by itself. Needs Python 3.11 or later.
PYTHON ?= python3
BIN = .venv/bin
CODE = src tests docs examples benchmarks results

# OpenMP threads of two test processes would fight for two cores.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal --durations 15

.PHONY: demo docs test stress fuzz chaos format

demo: .venv/ready
	$(BIN)/gradshare compare --dataset glyphs --method maml --inner-lr 0.4 --filters 16 \
	    --epochs 8 --iterations 30 --val-tasks 200 --test-tasks 200 \
	    --arms original --arms shared --arms half-rate --arms quarter-rate --jobs 2 --threads 1 --out runs/demo

# The site, docs/_build/html/index.html: offline, warnings are errors. It runs the notebooks, once until they change.
docs: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build --quiet --fail-on-warning --keep-going \
	    -d docs/_build/doctrees docs docs/_build/html

# What every change must pass: 5 minutes on two cores. The quick checks come first.
test: .venv/ready
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	$(PYTEST) --ignore tests/stress

# What is slow: chaos for 5 minutes, bad input, GPU kernels in Triton's interpreter, Ray, a browser, the site with its
# notebooks, the wheel in an empty environment. 25 minutes.
stress: .venv/ready
	$(PYTEST) tests/stress

# 12,000 new cases of bad input.
fuzz: .venv/ready
	FUZZ_CASES=12000 OMP_NUM_THREADS=1 $(BIN)/pytest tests/stress/test_fuzz.py

# 1,000 kills, 3,000 damaged files and more: docs/reliability.md. 10 to 45 minutes.
chaos: .venv/ready
	$(BIN)/python -m tests.stress.chaos --kills 1000 --damaged 3000 --minutes 45

format: .venv/ready
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gradshare needs Python 3.11 or later")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

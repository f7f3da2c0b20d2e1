# On a machine with Python, pip and make: `make quickstart` or `make test`, each makes its own .venv first.
SHELL := /bin/sh
PYTHON ?= $(shell command -v python3 || command -v python)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := $(VENV)/.demo
WORKERS ?= 3

# What is typed goes to the command as it is: quotes and dollar signs included.
override TEXT := $(value TEXT)
export TEXT

# One thread a worker: workers with two threads each would fight over two cores. A third one works while others wait.
# Nothing in the tests may ask the hub.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-all test-ends dist lint format docs notebooks results studies clean distclean bench bench-whole check-gpu bench-adapterhub-env

help:
	@echo "make quickstart [TEXT=\"…\"] [SEED=N]   tune the packaged model on the packaged data; show a prediction for TEXT"
	@echo "make install                 .venv with everything that the other targets need"
	@echo "make test                    lint, types and the everyday tests"
	@echo "make test-all                lint, types, all tests at full length, and mutations that the everyday tests must notice"
	@echo "make format                  let ruff rewrite the sources"
	@echo "make docs                    the documentation as a site: build/site/index.html, without a network"
	@echo "make results                 page, tables and figures of the committed results: build/results, in seconds"
	@echo "make bench                   deltune beside PEFT and AdapterHub: a table, build/bench.json; PARTS=all measures every part"
	@echo "make dist                    build the wheel and the source distribution into dist/ and check them"
	@echo "make clean                   remove caches and build outputs; make distclean: and $(VENV)"

# Not on the help page: lint, notebooks, studies, test-ends, bench-whole, bench-adapterhub-env, check-gpu, distclean.

install: $(STAMP)

# torch goes first and alone, so that no other package's range decides which build is taken.
# The stamp comes last: an installation that was interrupted is taken up again.
# The quickstart has a stamp and an extra of its own, without the tools of development.
$(DEMO): EXTRA := demo
$(STAMP): EXTRA := dev
$(DEMO) $(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no python3 on the PATH; name one: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed for the versions in constraints.txt (this is %d.%d); name another: make PYTHON=..." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRA)]' -c constraints.txt
	@touch $@

quickstart: $(or $(wildcard $(STAMP)),$(DEMO))
	@$(BIN)/deltune quickstart $${TEXT:+--text="$$TEXT"} $${SEED:+--seed $$SEED}

# Nothing is printed after pytest's summary line.
test: lint
	@$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

# Half an hour on two cores, and the mutations a quarter.
test-all: lint
	@$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
	@$(BIN)/python -m tests.mutation --workers $(WORKERS)

# The oldest torch and transformers of pyproject.toml, and the pinned ones; ENDS="python3.13@torch=2.15.0,trl=1.17.0" tries
# others; test-all tries the interpreters that are on the PATH. A torch of PyPI for Linux comes with CUDA, which is gigabytes.
ENDS ?= $(PYTHON)@torch=2.11.0,transformers=5.17.0,huggingface_hub=1.33.0 $(PYTHON)

test-ends: $(STAMP)
	@$(TEST_ENV) DELTUNE_ENDS="$(ENDS)" $(BIN)/python -m pytest tests/whole/test_distribution.py -k another -rsP

# An environment of its own builds them, so that nothing of this one slips in.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Each in an empty folder and on one thread; the site shows them as they were written.
notebooks: $(STAMP)  # NAME=study: one of them
	@$(BIN)/python docs/hooks/notebooks.py $(NAME)

docs: $(STAMP)
	@for made in figures defaults reference; do $(BIN)/python docs/hooks/$$made.py || exit 1; done
	@HF_HUB_OFFLINE=1 NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

# Nothing is run: all comes from the files in results.
STUDIES := $(patsubst results/%.jsonl.gz,%,$(wildcard results/*/*.jsonl.gz))

results: $(STAMP)
	@test -n "$(STUDIES)" || { echo "results has no study yet: make studies ROOT=... MODELS=..." >&2; exit 1; }
	@$(BIN)/deltune study report $(STUDIES) --store results --html build/results/studies.html --to build/results

# ROOT=… MODELS=…: every study at small scale, in days; stop it at any time, it goes on where it was. A worker with one
# thread for each of two cores. Every study is exported as soon as it is done, to be committed.
STORE ?= build/studies/small.jsonl
STUDY_WORKERS ?= 2

studies: $(STAMP)
	@test -n "$(ROOT)" || { echo "name the folder of data sets: make studies ROOT=... MODELS=..." >&2; exit 1; }
	@mkdir -p $(dir $(STORE))
	@HF_HUB_OFFLINE=1 nice $(BIN)/deltune study run all --scale small --data-root "$(ROOT)" $(if $(MODELS),--model-root "$(MODELS)") \
		--store $(STORE) --workers $(STUDY_WORKERS) --results results $(ARGS)

# All cores, and nothing asked of the hub; PARTS=steps,memory measures these alone, ARGS="--again" and the like goes on.
BENCH_ENV := HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error TOKENIZERS_PARALLELISM=false
ADAPTERHUB := build/adapterhub

bench: $(STAMP)
	@$(BENCH_ENV) $(BIN)/python -m benchmarks $(if $(PARTS),--only $(PARTS)) $(ARGS)

bench-whole: $(STAMP)
	@$(BENCH_ENV) $(BIN)/python -m benchmarks --only wholefull $(ARGS)

check-gpu: $(STAMP)
	@$(BENCH_ENV) $(BIN)/python -m benchmarks.gpu $(ARGS)

# torch first and alone, as above.
bench-adapterhub-env:
	@test -n "$(PYTHON)" || { echo "no python3 on the PATH; name one: make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(ADAPTERHUB)
	$(ADAPTERHUB)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' benchmarks/adapterhub-requirements.txt)"
	$(ADAPTERHUB)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/adapterhub-requirements.txt

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage
	find src tests -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

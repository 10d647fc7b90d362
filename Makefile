# mpress-plan: everything a developer runs.  Needs Python 3.11 or newer, git and make; `make help` prints this list.
.PHONY: help install demo test check format formatted lint imports types wheel bench nightly freeze
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEMO := demo-out
export OMP_NUM_THREADS ?= 1

help: ## print this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{ printf "  make %-10s %s\n", $$1, $$2 }'

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(READY)

install: $(READY) ## make .venv with everything pinned

demo: $(READY) ## plan a 15.3B GPT for 8 GPUs, then plan, run and check a tiny one on CPU processes
	@mkdir -p $(DEMO)
	$(BIN)/mpress-plan examples/gpt.py --gpus 8 --machine dgx-a100-40gb --out $(DEMO)
	@mkdir -p $(DEMO)/tiny
	$(BIN)/mpress-plan examples/gpt.py --gpus 4 --machine examples/toy.toml --precision fp32 --micro-batches 8 --out $(DEMO)/tiny \
	    $(TINY)
	$(BIN)/python examples/demo_check.py $(DEMO)/tiny $(TINY)

TINY := --model-arg layers=8 --model-arg hidden=64 --model-arg heads=4 --model-arg sequence=64 --model-arg vocabulary=256

test: $(READY) ## run all tests but the nightly ones
	$(BIN)/python -m pytest -m 'not nightly'

nightly: $(READY) ## run the slow suites
	$(BIN)/python -m pytest -m nightly

check: formatted lint imports types wheel test ## the gate: format, lint, imports, types, wheel contents, tests

format: $(READY) ## rewrite the code as ruff likes it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

formatted: $(READY)
	$(BIN)/ruff format --check .

lint: $(READY) ## ruff
	$(BIN)/ruff check .

imports: $(READY) ## the architecture: import contracts
	$(BIN)/lint-imports --no-cache

types: $(READY) ## mypy, strict
	$(BIN)/mypy

wheel: $(READY) ## build the wheel and look inside
	@rm -rf build/wheel
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel >/dev/null
	$(BIN)/check-wheel-contents build/wheel

bench: $(READY) ## time planning
	$(BIN)/python benchmarks/plan_gpt.py
	$(BIN)/python benchmarks/trace_depth.py

freeze: $(READY) ## write constraints.txt from what is installed
	@{ head -1 constraints.txt; $(BIN)/python -m pip freeze --all --exclude-editable --exclude pip | sed 's/^\(torch==[0-9.]*\)+.*/\1/'; } > constraints.new
	@mv constraints.new constraints.txt

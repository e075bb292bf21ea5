# Everything here works on a fresh clone with Python 3.11 or newer, pip and make, and sets up .venv by itself.
# `make` alone lists what there is.

# Which Python makes .venv: `make PYTHON=python3.13 test` chooses; otherwise the first of these that runs and is new enough.
PYTHON ?=
PYTHONS := python3.11 python3.12 python3.13 python3.14 python3

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet --quiet
# How many processes run tests: one more than there are processors, since many tests wait for a disk or for a process.
# `make JOBS=0 test` runs them one after the other in one process.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); [ $$n -lt 8 ] && echo $$((n + 1)) || echo 8)
# Bytecode is kept: tests start thousands of processes, and where PYTHONDONTWRITEBYTECODE is set each would compile what
# it loads for itself, which takes longer than everything else in its start.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/python -m pytest --numprocesses=$(JOBS) --dist=worksteal
SAY := @printf '\033[1m==> %s\033[0m\n'
ifneq ($(CI)$(NO_COLOR),)
SAY := @printf '==> %s\n'
endif

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
.PHONY: help demo test check static docs lint types rooms versions size bench soak format clean distclean compiled screenshots

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: .venv/.runtime compiled ## agents are killed with SIGKILL, come back, and book nothing twice; half a minute
	@$(BIN)/holdfast demo

test: .venv/.dev .venv/.machine compiled ## run all tests, the documentation's examples among them
	$(SAY) "tests"
	@$(PYTEST) -q --durations=20

check: static test versions ## all that continuous integration runs
	$(SAY) "all checks passed"

static: .venv/.dev .venv/.docs ## lint, types, rooms and docs, in the time of the longest
	@$(MAKE) types >.venv/types 2>&1 & types=$$!; $(MAKE) lint rooms docs; code=$$?; \
	wait $$types || code=1; cat .venv/types; exit $$code

lint: .venv/.dev ## style: ruff, and the formatter changes nothing
	$(SAY) "ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: .venv/.dev ## types: mypy, strict
	$(SAY) "mypy"
	@$(BIN)/mypy

rooms: .venv/.dev ## which room may import which: import-linter
	$(SAY) "import-linter"
	@$(BIN)/lint-imports --no-logo

versions: .venv/.dev .venv/.machine ## the tests of what looks into the interpreter, with other Pythons
	@.ci/versions --numprocesses=$$(($(JOBS) / 3 > 2 ? $(JOBS) / 3 : $(JOBS) ? 2 : 0)) --dist=worksteal

size: ## lines and modules of each room
	@.ci/size

docs: .venv/.docs ## the documentation as a site with search, in build/site
	$(SAY) "site"
	@$(BIN)/zensical build --clean --strict

bench: .venv/.bench ## measure against the rivals in one run; JSON and a plot
	$(SAY) "benchmarks"
	@$(BIN)/python benchmarks/commit.py
	@$(BIN)/python benchmarks/codec.py
	@$(BIN)/python benchmarks/langgraph_savers.py
	@$(BIN)/python benchmarks/steps.py
	@$(BIN)/python benchmarks/kills.py
	@$(BIN)/python benchmarks/encryption.py
	@$(BIN)/python benchmarks/retain.py
	@$(BIN)/python benchmarks/batched.py
	@$(BIN)/python benchmarks/operate.py
	@$(BIN)/python benchmarks/dump.py
	@$(BIN)/python benchmarks/when.py
	@$(BIN)/python benchmarks/freeze.py
	@$(BIN)/python benchmarks/workspace.py
	@$(BIN)/python benchmarks/fork.py
	@$(BIN)/python benchmarks/replay.py
	@$(BIN)/python benchmarks/page.py

screenshots: .venv/.dev .venv/.machine ## the pictures of the page in docs/images, with Chromium
	$(SAY) "pictures of the page"
	@$(BIN)/python -m tests.web.pictures

soak: .venv/.dev .venv/.machine compiled ## the same tests with far larger counts, then every campaign in full; takes hours
	$(SAY) "soak"
	@HOLDFAST_SOAK=1 $(PYTEST) -o faulthandler_timeout=0
	$(SAY) "campaigns"
	@$(PIP) --editable '.[fuzz]' || echo "atheris cannot be installed here: hostile files are changed at random instead"
	@$(BIN)/python -m tests.faults

format: .venv/.dev ## put the code into its one form
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

clean: ## remove caches and build results
	@rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find src tests benchmarks examples -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## remove .venv too: back to a fresh clone
	@rm -rf .venv

compiled: .venv/.created ## compile all modules once, for the processes that tests start at the same time
	@$(BIN)/python -m compileall -q src tests

# The set-up. Each stamp says that what pyproject.toml asks for is installed; a change there installs again.

.venv/.created:
	@python=; \
	for name in $(or $(PYTHON),$(PYTHONS)); do \
	  if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "Holdfast needs Python 3.11 or newer; none of these is: $(or $(PYTHON),$(PYTHONS))" >&2; exit 1; fi; \
	echo "==> making .venv with $$python ($$($$python -c 'import platform; print(platform.python_version())'))"; \
	"$$python" -m venv .venv >.venv.log 2>&1 || { \
	  rm -rf .venv; \
	  "$$python" -m venv --without-pip .venv && "$$python" -m pip --python .venv/bin/python install --quiet --quiet pip; \
	} || { cat .venv.log >&2; rm -rf .venv .venv.log; exit 1; }; \
	rm -f .venv.log; touch $@

.venv/.runtime: .venv/.created pyproject.toml
	$(SAY) "installing Holdfast and what it needs into .venv"
	@$(PIP) --editable '.[workspace]'
	@touch $@

.venv/.dev: .venv/.created pyproject.toml
	$(SAY) "installing Holdfast and the tools for working on it into .venv"
	@$(PIP) --editable '.[dev]'
	@touch .venv/.runtime $@

.venv/.docs: .venv/.created pyproject.toml
	$(SAY) "installing what builds the documentation into .venv"
	@$(PIP) --editable '.[docs]'
	@touch .venv/.runtime $@

# Tried once. What could not be installed is missing in the tests only, and they say so.
.venv/.machine: .venv/.created .ci/setup
	@.ci/setup
	@touch $@

.venv/.bench: .venv/.created pyproject.toml
	$(SAY) "installing Holdfast and its rivals into .venv"
	@$(PIP) --editable '.[bench]'
	@touch .venv/.runtime $@

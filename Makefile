# Each target sets up what it needs: .venv with exact versions, from constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train sweep test test-all test-torch check format bench round-trips docs-config docs-cli docs-api docs-choosing docs-web site clean

train: .venv/.installed
	scripts/train_debug.sh $(BIN)
	$(BIN)/dtlayout generate runs/debug --prompt "def " --max-tokens 80 --seed 1

# 28 layouts on 4 ranks of this machine's CPU, eight to ten minutes on two cores, and a report of them. Again, it goes on.
sweep: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/dtlayout sweep configs/sweeps/debug-4cpu.toml
	$(BIN)/dtlayout report sweeps/debug-4cpu --page sweeps/debug-4cpu/report.html

# Files go to the two workers in the order of their folders: by number of tests, as xdist has them, a slow one comes last.
test: .venv/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not thorough"

# And further combinations of the same: an hour and more.
test-all: .venv/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Files of other programs: 500 random jobs of each are written and read back, exactly; N=5000 takes more.
N ?= 500
round-trips: .venv/.installed-test
	ROUND_TRIPS=$(N) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -k read_back --hypothesis-show-statistics tests/programs

# What depends on torch, on another version of it, which it installs: make test-torch VERSION=2.15.0; twelve minutes.
test-torch:
	PYTHON=$(PYTHON) scripts/test_torch.sh $(VERSION)

check: .venv/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# One benchmark, as benchmarks/README.md lists them: make bench NAME=peaks ARGS="--seed 3", or with TABLES="FILE …".
# Those that print their page have it written when they are through; gpu needs torch and numpy alone, in any Python.
PAGES := beside_torchtitan bubbles calibration context dryrun finetune halving host_time open_questions peaks recompute saving schedules speed traced two_hosts
bench: $(if $(filter gpu,$(NAME)),,.venv/.installed-test)
	@test -n "$(NAME)" || { echo 'make bench NAME=…: benchmarks/README.md has the names'; exit 2; }
	@page=$$(mktemp) && trap 'rm -f $$page' EXIT && set -x && \
	    $(if $(filter gpu,$(NAME)),,OMP_NUM_THREADS=1) PYTHONPATH=. $(if $(filter gpu,$(NAME)),$(PYTHON),$(BIN)/python) \
	    -m benchmarks.$(NAME) $(TABLES) $(ARGS) $(if $(filter $(PAGES),$(NAME)),> $$page && cat $$page > benchmarks/$(NAME).md)

# What docs/reference/config.md says of each key, out of the sentences below the fields of the sections.
docs-config: .venv/.installed
	$(BIN)/dtlayout config > docs/reference/config.md

# The arguments of every command, off their parsers.
docs-cli: .venv/.installed
	PYTHONPATH=. $(BIN)/python tests/support/cli_page.py > docs/reference/cli.md

# The public names of the package, their signatures and docstrings, and the stub that type checkers read.
docs-api: .venv/.installed
	PYTHONPATH=. $(BIN)/python tests/support/api_page.py

# What README, docs/start/choosing.md and docs/guide/long-context.md show of each of their commands.
docs-choosing: .venv/.installed-test
	PYTHONPATH=. $(BIN)/python tests/support/walkthrough.py README.md docs/start/choosing.md docs/guide/long-context.md

# The pictures of docs/guide/web.md; needs a chromium.
docs-web: .venv/.installed-test
	PYTHONPATH=. $(BIN)/python tests/support/page_pictures.py

# The planner's page as static files for any host, with the planner in the browser, into build/site; npm has Pyodide.
site: .venv/.installed
	npm ci --silent --prefix scripts/site
	PYTHONPATH=. $(BIN)/python scripts/site/build.py scripts/site/node_modules/pyodide build/site

format: .venv/.installed-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-torch-* .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/.installed-test: .venv/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

# Each target sets up what it needs: .venv with exact versions, from constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train sweep test test-all test-torch check format bench bench-gpu bench-host bench-recompute bench-dryrun bench-peaks bench-validate bench-halving bench-calibrate bench-two-hosts bench-bubbles bench-findings bench-questions bench-schedules bench-convert bench-saving bench-context bench-faults bench-answers docs-config docs-choosing clean

train: .venv/.installed
	scripts/train_debug.sh $(BIN)
	$(BIN)/dtlayout generate runs/debug --prompt "def " --max-tokens 80 --seed 1

# 28 layouts on 4 ranks of this machine's CPU, eight to ten minutes on two cores, and a report of them. Again, it goes on.
sweep: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/dtlayout sweep configs/sweeps/debug-4cpu.toml
	$(BIN)/dtlayout report sweeps/debug-4cpu --page sweeps/debug-4cpu/report.html

test: .venv/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not thorough"

# And further combinations of the same: an hour and more.
test-all: .venv/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# What depends on torch, on another version of it, which it installs: make test-torch VERSION=2.15.0; twelve minutes.
test-torch:
	PYTHON=$(PYTHON) scripts/test_torch.sh $(VERSION)

check: .venv/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# A step of the trainer beside one of a plain loop around transformers, on this CPU: forty minutes of nothing else.
bench: .venv/.installed-test
	PYTHONPATH=. $(BIN)/python -m benchmarks.speed > benchmarks/speed.md

# On a machine with a GPU and torch, which needs nothing to be installed: nine minutes of it, and again, it goes on.
bench-gpu:
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu $(ARGS)

# The host's time for a layer under tp, with a fake process group: five minutes.
bench-host: .venv/.installed
	PYTHONPATH=. $(BIN)/python -m benchmarks.host_time > benchmarks/host_time.md

# What each kind of recomputation saves and costs, on the CPU: two minutes.
bench-recompute: .venv/.installed
	PYTHONPATH=. $(BIN)/python -m benchmarks.recompute > benchmarks/recompute.md

# The formulas against dry runs of every stage of eight layouts, the largest of 16,384 GPUs: seven minutes.
bench-dryrun: .venv/.installed
	PYTHONPATH=. $(BIN)/python -m benchmarks.dryrun > benchmarks/dryrun.md

# Formulas of peaks against dry runs of random layouts: make bench-peaks ARGS="--seed 3 --layouts 60", five minutes.
bench-peaks: .venv/.installed
	PYTHONPATH=. $(BIN)/python -m benchmarks.peaks $(ARGS) > benchmarks/peaks.md

# Predictions against tables of measured runs: make bench-validate TABLES=FOLDER; without a folder it skips. A few
# minutes, and some more with ARGS=--ablate; ARGS="--errors dtlayout/constants/errors.toml" writes the intervals too.
bench-validate: .venv/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m benchmarks.validate $(TABLES) $(ARGS)

# Calibrate this machine's CPU, then sweep a model that it has not seen: twenty minutes with nothing else to do.
bench-calibrate: .venv/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m benchmarks.calibration --out benchmarks/calibration.md

# Bubbles of every schedule on four ranks whose stages sleep, measured beside predicted: twelve minutes of nothing else.
bench-bubbles: .venv/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m benchmarks.bubbles > benchmarks/bubbles.md

# Two hosts on one machine, as root: tp across the slow link and inside a host, and what `recommend` says beforehand.
bench-two-hosts: .venv/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m benchmarks.two_hosts --out benchmarks/two_hosts.md

# What tables of measured runs say of each choice: make bench-findings TABLES="FILE …"; without one it skips.
bench-findings: .venv/.installed
	test -z "$(TABLES)" || for table in $(TABLES); do $(BIN)/dtlayout report $$table; done > benchmarks/findings.md

# What such tables say to the questions that the study leaves open: make bench-questions TABLES="FILE …".
bench-questions: .venv/.installed
	test -z "$(TABLES)" || PYTHONPATH=. $(BIN)/python -m benchmarks.open_questions $(TABLES) > benchmarks/open_questions.md

# Schedules that such tables have of one layout, measured beside predicted: make bench-schedules TABLES="FILE …".
bench-schedules: .venv/.installed
	test -z "$(TABLES)" || PYTHONPATH=. $(BIN)/python -m benchmarks.schedules $(TABLES) > benchmarks/schedules.md

# Successive halving replayed on such tables: make bench-halving TABLES="FILE …"; without one it skips.
bench-halving: .venv/.installed
	PYTHONPATH=. $(BIN)/python -m benchmarks.halving $(TABLES) --out benchmarks/halving.md

# Memory of dtlayout convert both ways, with the shapes of Llama 70B and files that are holes: a quarter of an hour.
bench-convert: .venv/.installed
	PYTHONPATH=. $(BIN)/python -m benchmarks.convert $(ARGS)

# What checkpoints cost a run on this CPU: ten minutes of nothing else.
bench-saving: .venv/.installed
	PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.saving > benchmarks/saving.md

# Ring, gather and all-to-all on 4 CPU ranks, 2k to 32k tokens, after a calibration: ten minutes of nothing else.
bench-context: .venv/.installed
	PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.context --out benchmarks/context.md

# Kills, changed bytes, failing writes, a full disk, signals: an hour of nothing else, and again, it goes on.
bench-faults: .venv/.installed-test
	PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.faults --page benchmarks/faults.md $(ARGS)

# What random questions are answered, kept and compared: make bench-answers ARGS="keep FILE", then "compare FILE".
bench-answers: .venv/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m benchmarks.answers $(ARGS)

# What docs/config.md says of each key, out of the sentences below the fields of the sections.
docs-config: .venv/.installed
	$(BIN)/dtlayout config > docs/config.md

# What docs/choosing.md shows of each of its commands.
docs-choosing: .venv/.installed-test
	PYTHONPATH=. $(BIN)/python tests/support/walkthrough.py docs/choosing.md docs/long-context.md

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

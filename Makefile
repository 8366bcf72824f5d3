# Everything a fresh machine needs: Python >= 3.11, git, make.
PYTHON ?= python3
BIN := .venv/bin
SWEEP ?= kl_mix

.PHONY: setup sweep test lint slow check lock task clean

setup: .venv/installed

.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(BIN)/python scripts/compile_kernels.py
	touch $@

sweep: setup
	$(BIN)/python -m sweep.launch --space $(SWEEP)
	$(BIN)/python -m sweep.pick
	@echo
	@echo "Look at the trials:  $(BIN)/python -m sweep.ui   then open http://127.0.0.1:5000"

test: setup
	$(BIN)/python -m pytest

check: lint test slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slow: setup
	$(BIN)/python -m pytest -m "slow or chaos"

# Write the lock file again from pyproject.toml, with exact versions of everything.
lock:
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet torch==2.13.0 setuptools wheel
	.venv-lock/bin/python -m pip install --quiet '.[dev]'
	{ echo "# Exact versions; written by \`make lock\`. torch 2.13.0: newer ones pull several GB of GPU libraries."; \
	  .venv-lock/bin/python -m pip freeze --all --exclude rlhf-sweep --exclude pip | sed 's/+cpu//'; } > requirements.lock
	rm -rf .venv-lock

# Build the default task again, exactly as it was built.
task: setup
	rm -rf rlhf/task
	$(BIN)/python scripts/build_task.py --seed 14 --out rlhf/task --truth tests/data/default_task_truth.json

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# make demo: watch a tiny model learn.   make check: style, types and the pure tests.   make test: all tests.
# make lint: style and types alone.
# make test-all: the same with every combination where make test runs a pairwise cover.
# make test-slurm: jobs under a real Slurm on this machine (as root: it installs Debian's slurm-wlm and munge).
# Each makes .venv first when it is missing.
export OMP_NUM_THREADS ?= 1
python := .venv/bin/python
# Three processes for two cores, each with whole files: most tests wait for other processes, or keep one core busy.
# The order is that of testpaths, with the long files first.
pytest := $(python) -m pytest -n 3 --dist loadfile --no-loadscope-reorder
# The rooms whose unit tests start neither Ray, vLLM nor Megatron.
pure := algorithms balance config convert data environments layout loop observe planning verifiers

.PHONY: setup demo lint check test test-all test-slurm
setup:
	@tools/setup.sh

demo: setup
	@$(python) -m megatron_rl demo

lint: setup
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .
	@$(python) -m mypy

check: lint
	@$(pytest) tests/house $(pure:%=tests/unit/%)

test: setup
	@$(pytest)

test-all: setup
	@$(pytest) --all

test-slurm: setup .venv-nemo/installed
	@$(python) -m pytest tests/slurm

# NeMo-Run's own environment.
.venv-nemo/installed: requirements/nemo.txt
	@echo "setup: installing NeMo-Run into .venv-nemo (once; a minute)"
	@rm -rf .venv-nemo && $${PYTHON:-python3} -m venv .venv-nemo
	@.venv-nemo/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/nemo.txt
	@touch $@

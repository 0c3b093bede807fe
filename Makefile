# make demo: watch a tiny model learn.   make demo-real: watch a real one learn (a download of 93 MB).
# make demo-gpu: the real one on one GPU, with the packages of make gpu-env.
# make road: SFT, preferences and GRPO on the demo, and SFT and GRPO without preferences. SEEDS="0 1 2" are its seeds.
# make docs: the documentation as a site, in site/.   make docs-serve: shows it, and follows changes.
# make check: style, types and the pure tests.
# make test: these and the essentials of every room: real processes, the real engine, the real loop with kills.
# make test-deep: everything else that a change can break.   make test-touched: as much of it as a change touches.
# make test-due: the part of the deep tier, or of the jobs under Slurm, that has not run for the longest time; it writes
# what it saw into tests/deep.json, which a change brings with it.
# make test-all: both, with every combination where the others run a pairwise cover.
# make gpu-env: installs the GPU packages into .venv-gpu, 10 GB.   make test-gpu-set: tests them, without a GPU.
# make test-trl: scripts of TRL with the objects of TRL and PEFT, which it installs into .venv-trl.
# make test-slurm: jobs under a real Slurm on this machine (as root: it installs Debian's slurm-wlm and munge).
# Each makes .venv first when it is missing. ARGS are for pytest, or for touched.py: make test ARGS="-k resume".
# Without files of bytecode each of the tests' processes compiles the project again, about a second.
unexport PYTHONDONTWRITEBYTECODE
python := .venv/bin/python
# Three processes for two cores, each with whole files: most tests wait for other processes, or keep one core busy.
# The order is that of testpaths, with the long files first.
pytest := $(python) -m pytest -n 3 --dist loadfile --no-loadscope-reorder
# The rooms whose unit tests start neither Ray, vLLM nor Megatron.
pure := algorithms balance config convert data environments explain layout loop models observe planning verifiers
ARGS ?=
# One thread a process, because several tests run at a time.
check pure test test-deep test-due test-touched test-all test-slurm test-trl: export OMP_NUM_THREADS ?= 1

.PHONY: setup demo demo-real demo-gpu road docs docs-serve lint types check test test-deep test-due test-touched test-all test-slurm
setup:
	@tools/setup.sh

demo: setup
	@$(python) -m megatron_rl demo

demo-real: setup
	@$(python) -m megatron_rl demo-real

demo-gpu: gpu-env
	@.venv-gpu/bin/python -m megatron_rl demo-real --gpu

road: setup
	@PYTHON=$(python) recipes/tiny/road.sh $(SEEDS)

docs docs-serve: export NO_MKDOCS_2_WARNING := 1
docs: setup
	@$(python) -m mkdocs build --strict

docs-serve: setup
	@$(python) -m mkdocs serve

lint: setup
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .
	@$(python) -m mypy

# Types are checked on one core while the tests have the other one.
check: setup
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .
	@$(MAKE) --no-print-directory -j 2 types pure

types: setup
	@$(python) -m mypy

# Without the files that start long processes: the suite itself, the site, sandboxes and pools of verifiers.
processes := tests/house/test_suite.py tests/house/test_site.py $(patsubst %,tests/unit/verifiers/test_verifiers_%.py,code sandbox pool)
.PHONY: pure
pure: setup
	@$(python) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not deep" tests/house $(pure:%=tests/unit/%) \
		$(processes:%=--ignore=%) $(ARGS)

test: setup
	@$(pytest) -m "not deep" $(ARGS)

test-deep: setup
	@$(pytest) -m deep $(ARGS)

test-due: setup
	@$(pytest) -m deep --due 11 --results tests/deep.json $(addprefix tests/,nodes e2e ranks unit house slurm) $(ARGS)

test-touched: setup
	@$(python) tools/bench/touched.py $(ARGS)

test-all: setup
	@$(pytest) --all $(ARGS)

test-slurm: setup
	@$(python) -m pytest -m deep tests/slurm $(ARGS)

.PHONY: gpu-env test-gpu-set
gpu-env:
	@tools/gpu_env.sh

test-gpu-set:
	@if test -x .venv-gpu/bin/python; then .venv-gpu/bin/python -m pytest tests/gpu_set $(ARGS); \
	else echo "skipped: there is no .venv-gpu; make gpu-env installs it (10 GB)"; fi

# NeMo-Run's own environment, for one of the jobs under Slurm.
.venv-nemo/installed: requirements/nemo.txt
	@echo "setup: installing NeMo-Run into .venv-nemo (once; a minute)"
	@rm -rf .venv-nemo && $${PYTHON:-python3} -m venv .venv-nemo
	@.venv-nemo/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/nemo.txt
	@touch $@

# TRL, PEFT and datasets in a folder of their own, for the tests of TRL's door. torch and the others are .venv's.
.venv-trl/installed: requirements/trl.txt | setup
	@echo "setup: installing TRL, PEFT and datasets into .venv-trl (once; half a minute)"
	@rm -rf .venv-trl
	@$(python) -m pip install --quiet --disable-pip-version-check --no-deps --target .venv-trl -r requirements/trl.txt
	@touch $@

.PHONY: test-trl
test-trl: export PYTHONPATH := .venv-trl
test-trl: .venv-trl/installed
	@$(python) -m pytest -n 2 --dist loadfile tests/doors $(ARGS)

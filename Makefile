# make demo: watch a tiny model learn.   make test: the whole test suite.   Both make .venv first when it is missing.
export OMP_NUM_THREADS ?= 1
python := .venv/bin/python

.PHONY: setup demo test
setup:
	@tools/setup.sh

demo: setup
	@$(python) -m megatron_rl demo

test: setup
	@$(python) -m pytest

# make demo: watch a tiny model learn.   make check: style, types and the pure tests, in a minute or so.
# make test: the whole test suite.   Each makes .venv first when it is missing.
export OMP_NUM_THREADS ?= 1
python := .venv/bin/python
# The rooms whose unit tests start neither Ray, vLLM nor Megatron.
pure := algorithms balance config convert data layout loop observe verifiers

.PHONY: setup demo check test
setup:
	@tools/setup.sh

demo: setup
	@$(python) -m megatron_rl demo

check: setup
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .
	@$(python) -m mypy
	@$(python) -m pytest tests/house $(pure:%=tests/unit/%)

test: setup
	@$(python) -m pytest

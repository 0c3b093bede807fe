"""Imported first by tests that need the packages of requirements/trl.txt: without them they are skipped."""

import pytest

for package in ("trl", "peft", "datasets"):
    pytest.importorskip(package, reason="TRL, PEFT and datasets are not installed; `make test-trl` installs them")

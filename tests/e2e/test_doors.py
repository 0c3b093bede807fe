"""tests/doors, whose packages are not among the others', in the turns of the deep tier."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.deep
@pytest.mark.deadline(900)
def test_scripts_of_trl_with_the_real_objects():
    """`make test-trl` but for most runs of public scripts, and without a look at what .venv is: the environment of
    this test may be another one."""
    installed = ROOT / ".venv-trl" / "installed"
    if not installed.exists():
        done = subprocess.run(["make", ".venv-trl/installed"], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"requirements/trl.txt cannot be installed: {done.stderr[-300:]}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(installed.parent)])}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not deep", "tests/doors"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]

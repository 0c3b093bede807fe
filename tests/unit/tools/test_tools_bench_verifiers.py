"""tools/bench_verifiers.py gets the verdicts that it expects, of every kind and with every number of workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import deadline

from megatron_rl.tools import bench_verifiers
from megatron_rl.types import Verdict

ROOT = Path(__file__).parents[3]


@pytest.mark.deep
def test_every_kind_is_judged_with_each_number_of_workers():
    command = [sys.executable, "tools/bench_verifiers.py", "--quick", "--json", "--workers", "2", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=deadline(180))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["workers"] == [1, 2]
    numbers = {kind: found["verdicts"] for kind, found in report["kinds"].items()}
    assert numbers == {
        "GSM8K": 12,
        "LaTeX": 10,
        "instructions": 50,
        "programs": 2,
        "nothing": 100,
        "long answers": 16,
    }
    for found in report["kinds"].values():
        assert found["ratio"] == found["seconds"]["1"] / found["seconds"]["2"]
        for number in "12":
            assert found["verdicts_per_s"][number] == found["verdicts"] / found["seconds"][number]
    assert report["overhead_s"] == report["kinds"]["nothing"]["seconds"]["1"] / 100


def test_a_verdict_that_is_not_the_expected_one_ends_the_tool():
    items = [("GSM8K", ("#### 72", "72")), ("GSM8K", ("#### 71", "72"))]
    bench_verifiers.check(items, [1.0, 0.0], [bench_verifiers.Judge([])(item) for item in items])
    for verdict in (Verdict(1.0), Verdict(None, "no verdict within 60 s", failed=True)):
        with pytest.raises(ValueError, match="GSM8K.*71.*the score must be 0.0"):
            bench_verifiers.check(items, [1.0, 0.0], [Verdict(1.0), verdict])

"""Both steps of tools/bench/step.py train alike, so that their times and memory compare."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cover
import pytest
from patience import deadline

from megatron_rl.tools.bench import step

ROOT = Path(__file__).parents[3]


@pytest.mark.deep
@pytest.mark.parametrize("processes", [1, 2] if cover.everything else [2])
def test_both_steps_compute_the_same_losses_and_gradient_norms(processes):
    sizes = ["--tokens", "512", "--length", "32", "--vocabulary", "8192", "--processes", str(processes)]
    command = [sys.executable, "tools/bench/step.py", "--json", "--rounds", "3", "--threads", "1", *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=deadline(180))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["tokens"], report["vocabulary"], report["processes"]) == (512, 8192, processes)
    # Sums of 8192 terms in fp32 in another order. After the first step the weights are those that each way has updated.
    assert report["ours_losses"] == pytest.approx(report["plain_losses"], rel=1e-5)
    assert report["ours_grad_norms"] == pytest.approx(report["plain_grad_norms"], rel=1e-5)
    first, second, third = report["ours_losses"]
    assert first - second > 1e-3 and second - third > 1e-3, "the steps train, by more than the tolerance"
    logits_bytes = 512 // processes * 8192 * 4
    assert report["plain_peak_bytes"] >= 2 * logits_bytes, "logits and log-probs at once"
    assert report["memory_ratio"] == report["ours_peak_bytes"] / report["plain_peak_bytes"]
    assert report["time_ratio"] == report["ours_time_s"] / report["plain_time_s"]
    assert report["cpu_ratio"] == report["ours_cpu_s"] / report["plain_cpu_s"]


def test_rows_that_no_rank_can_hold_whole_are_refused(capsys):
    with pytest.raises(SystemExit):
        step.main(["--tokens", "96", "--length", "32", "--processes", "2"])
    assert "--tokens 96 is not a multiple of --length x --processes = 64" in capsys.readouterr().err

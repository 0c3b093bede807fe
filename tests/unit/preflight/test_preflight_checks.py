"""A whole run folder has no fault, all faults are told together, and what does not fit is named."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console
from run_home import GOOD, faults, grpo, rows, truncate

from megatron_rl.preflight.checks import check_before_start, preflight


def test_a_run_without_fault_passes_and_leaves_nothing_behind(home):
    before = sorted(home.rglob("*"))
    notes = []
    assert preflight(grpo(), notes.append) == [] and notes == []
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout__max_response_tokens": 57}, "max_response_tokens (57) = 65 exceeds the 64 positions"),
        (
            {"policy": {"parallel": {"tensor": 8}}},
            "4 attention heads, which policy.parallel.tensor=8 does not divide; it may be 1, 2 or 4",
        ),
        (
            {"rollout__parallel": {"tensor": 3}},
            "with rollout.parallel.tensor=3 the engines cannot split it: it may be 1, 2 or 4",
        ),
        ({"policy": {"routing_replay": True}}, "policy.routing_replay is True, but the model has no experts"),
        ({"rollout__delimiter": "</thought>"}, "rollout.delimiter '</thought>' is not in the vocabulary"),
        (
            {"rollout__thinking": {"thought_tokens": 12, "response_tokens": 7}, "rollout__delimiter": "end"},
            "the closing's 3 tokens + response_tokens = 22; raise it",
        ),
        ({"run__name": "x" * 300}, "run.name has a part of 300 bytes"),
        ({"run__name": ""}, "run.name '' names no folder"),
        ({"run__name": "."}, "run.name '.' names no folder below run.folder"),
        ({"run__name": "../../x"}, "run.name '../../x' names no folder below run.folder"),
        ({"run__name": "a/../../x"}, "names no folder below run.folder"),
        ({"run__folder": "train.jsonl"}, "train.jsonl: Not a directory)"),
        ({"run__folder": "/proc/runs"}, "cannot be written (/proc: "),
    ],
)
def test_what_does_not_fit(home, changes, message):
    [fault] = faults(grpo(**changes))
    assert message in fault


def test_all_faults_are_raised_together(home):
    (home / "train.jsonl").unlink()
    truncate(home)
    screen = io.StringIO()
    with pytest.raises(ValueError) as caught:
        check_before_start(grpo(run__name="x" * 300), Console(file=screen), resume=None)
    head, *told = str(caught.value).splitlines()
    assert head == "3 faults would stop this run:" and all(line.startswith("  - ") for line in told) and len(told) == 3


def test_a_plan_for_another_machine_says_what_was_not_checked(home):
    config = grpo(model__path="models/Qwen3-32B")
    notes = []
    assert preflight(config, notes.append, planning=True) == []
    assert notes[0].startswith("not checked, because the folder models/Qwen3-32B is not there: weights, tokenizer")
    [fault] = faults(config)
    assert "models/Qwen3-32B has no config.json" in fault


def test_a_dry_run_prints_the_plan_and_then_the_faults(home):
    (home / "run.yaml").write_text(json.dumps(json.loads(grpo().model_dump_json(exclude={"algorithm", "bridge"}))))
    rows("train.jsonl", GOOD, "{")
    command = [sys.executable, "-m", "megatron_rl", "grpo", "run.yaml", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=home)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.index("parameters") < done.stdout.index("data.train: train.jsonl:2: the row is not JSON")


def test_nothing_heavy_is_imported(home):
    code = (
        "import sys, megatron_rl.preflight.checks\n"
        "print(*sorted({'torch', 'transformers', 'vllm', 'ray', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []

"""The real loop, Ray, Megatron, vLLM and the bridge: a killed run that resumes repeats the unbroken one."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil

ALGORITHM = [
    "algorithm.kl={coefficient: {kind: adaptive, target: 1.0e-3, horizon: 100}}",
    "algorithm.entropy={coefficient: {kind: adaptive, target: 9.0}}",
    "algorithm.loss={kind: clip_cov, share: 0.05, cov_low: 0.0}",
    "algorithm.shaping=[{kind: repetition, ngram_size: 2}]",
    "algorithm.adv_estimator.kind=reinforce_plus_plus",
]
"""State of its own (coefficients), a reference policy, statistics of the mini-batch."""
NOT_COMPARED = ("time/", "rollout/tokens_per_s")
DEADLINE_S = 240


def arguments(task: Path, name: str) -> list[str]:
    return [
        "recipes/grpo.py",
        "configs/run/tiny_grpo.yaml",
        f"run.name={name}",
        "run.steps=2",
        f"model.path={task}/model",
        f"data.train={task}/train.jsonl",
        f"data.eval={task}/eval.jsonl",
        "rollout.prompts_per_step=8",
        "rollout.samples_per_prompt=4",
        "rollout.max_response_tokens=24",
        "rewards=[{kind: function, path: 'rewards:share_of_digits'}]",
        "eval.num_prompts=8",
        "eval.every=0",
        "checkpoint.every=1",
        *ALGORITHM,
    ]


def lines(folder: Path) -> list[dict]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if not k.startswith(NOT_COMPARED)} for record in records]


def wait_for(path: Path, process) -> None:
    end = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert process.poll() is None, (path.parents[3] / "out.txt").read_text()
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.1)


def works(process: psutil.Process) -> bool:
    """Is it one that would hold memory or a GPU? Ray's own agents end by themselves a minute after their driver."""
    try:
        alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return alive and not process.name().endswith("Agent")
    except psutil.NoSuchProcess:
        return False


def test_a_killed_run_resumes_as_if_nothing_had_happened(recipe, task):
    whole = recipe.run(*arguments(task, "whole"))
    assert whole.returncode == 0, whole.stdout + whole.stderr
    runs = recipe.folder / "runs"
    expected = lines(runs / "whole")
    assert [record["step"] for record in expected] == [0, 1, 2]
    assert expected[0]["loss"] != expected[1]["loss"] and expected[0]["grad_norm"] > 0
    assert max(record.get("mismatch/mean_abs", 0) for record in expected) < 1e-4
    assert expected[0]["on_policy/ratio_error"] == 0, "one mini-batch at lag 0: the ratio is 1"
    assert expected[0]["ppo_kl"] == 0
    assert expected[0]["kl"] == 0 and expected[1]["kl"] > 0, "the reference stays what the run began with"
    assert expected[0]["coefficient/kl"] != expected[1]["coefficient/kl"]

    # The evaluation before step 0 is the verifier's first call, step 0 the second: the gate would hold that one too.
    (recipe.folder / "gate").touch()
    broken = recipe.start(*arguments(task, "broken"), "data.eval=null")
    wait_for(runs / "broken" / "checkpoints" / "step_000001", broken)
    family = psutil.Process(broken.pid).children(recursive=True)
    os.kill(broken.pid, signal.SIGKILL)
    broken.wait()
    (recipe.folder / "gate").unlink()
    end = time.monotonic() + DEADLINE_S
    while left := [p for p in family if works(p)]:
        assert time.monotonic() < end, f"left behind: {left}"
        time.sleep(0.1)

    refused = recipe.run(*arguments(task, "broken"), "data.eval=null")
    assert refused.returncode == 1 and "--resume auto" in refused.stdout

    resumed = recipe.run(*arguments(task, "broken"), "data.eval=null", "--resume", "auto")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    without_evaluation = [{k: v for k, v in r.items() if not k.startswith("eval/")} for r in expected]
    assert lines(runs / "broken") == without_evaluation

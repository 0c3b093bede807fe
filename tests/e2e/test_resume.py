"""The real loop, Ray, Megatron, vLLM and the bridge: whatever is killed, and however the run is stopped, the numbers
are those of the undisturbed run, and nothing is left behind."""

from __future__ import annotations

import filecmp
import json
import os
import re
import signal
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from megatron_rl.processes import descendants

ALGORITHM = [
    "algorithm.kl={coefficient: {kind: adaptive, target: 1.0e-3, horizon: 100}}",
    "algorithm.entropy={coefficient: {kind: adaptive, target: 9.0}}",
    "algorithm.loss={kind: clip_cov, share: 0.05, cov_low: 0.0}",
    "algorithm.shaping=[{kind: repetition, ngram_size: 2}]",
    "algorithm.adv_estimator.kind=reinforce_plus_plus",
]
"""State of its own (coefficients), a reference policy, statistics of the mini-batch."""
NOT_COMPARED = re.compile(
    r"time/.*|perf/.*|memory/.*|rollout/tokens_per_s|reward/.*/seconds|verifier/restarts|slowest_rank/.*|sync/re.*|mirror/.*|eval/.*"
)
"""What depends on the machine or on what happened to the run; the broken runs make no evaluation."""


def arguments(task: Path, name: str) -> list[str]:
    return [
        "recipes/grpo.py",
        "configs/run/tiny_grpo.yaml",
        f"run.name={name}",
        "run.steps=4",
        f"model.path={task}/model",
        f"data.train={task}/train.jsonl",
        f"data.eval={task}/eval.jsonl",
        "rollout.prompts_per_step=8",
        "rollout.samples_per_prompt=4",
        "rollout.max_response_tokens=24",
        "rewards=[{kind: function, path: 'rewards:share_of_digits'}]",
        "eval.num_prompts=8",
        "eval.every=0",
        *ALGORITHM,
    ]


def lines(folder: Path) -> list[dict]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if not NOT_COMPARED.fullmatch(k)} for record in records]


def works(process: psutil.Process) -> bool:
    """Is it one that would hold memory or a GPU? Ray's own agents end by themselves a minute after their driver."""
    try:
        alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return alive and not process.name().endswith("Agent")
    except psutil.NoSuchProcess:
        return False


def test_kills_and_stops_change_no_number_and_leave_nothing(recipe, task):
    whole = recipe.run(*arguments(task, "whole"))
    assert whole.returncode == 0, whole.stdout + whole.stderr
    runs = recipe.folder / "runs"
    expected = lines(runs / "whole")
    assert [record["step"] for record in expected] == [0, 1, 2, 3, 4]
    assert expected[0]["loss"] != expected[1]["loss"] and expected[0]["grad_norm"] > 0
    assert max(record.get("mismatch/mean_abs", 0) for record in expected) < 1e-4
    assert expected[0]["on_policy/ratio_error"] == 0, "one mini-batch at lag 0: the ratio is 1"
    assert expected[0]["ppo_kl"] == 0
    assert expected[0]["kl"] == 0 and expected[1]["kl"] > 0, "the reference stays what the run began with"
    assert expected[0]["coefficient/kl"] != expected[1]["coefficient/kl"]

    exported = recipe.run("tools/export_checkpoint.py", "runs/whole", "exported")
    assert exported.returncode == 0, exported.stdout + exported.stderr
    same = filecmp.dircmp(runs / "whole" / "hf", recipe.folder / "exported")
    assert not same.left_only and same.right_only == ["manifest.json"] and same.common_files
    # The order of the tensors in the file is another one.
    others = [name for name in same.common_files if name != "model.safetensors"]
    assert filecmp.cmpfiles(same.left, same.right, others, shallow=False)[1:] == ([], [])
    of_ranks, exported_tensors = (load_file(Path(side) / "model.safetensors") for side in (same.left, same.right))
    assert of_ranks.keys() == exported_tensors.keys()
    assert all(torch.equal(tensor, exported_tensors[name]) for name, tensor in of_ranks.items())

    stop_after_three_deaths(recipe, task, runs / "broken")
    kill_a_resumed_run(recipe, task, runs / "broken")
    (recipe.folder / "gate").unlink()
    resumed = recipe.run(*arguments(task, "broken"), "data.eval=null", "checkpoint.every=1", "--resume", "auto")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert lines(runs / "broken") == expected


def stop_after_three_deaths(recipe, task, folder: Path) -> None:
    """The verifier and a trainer rank die in step 1, and the engine in the generation of step 2; SIGTERM comes while
    step 2 is verified. No checkpoint has been written when the trainer rank dies: its state comes from a mirror."""
    (recipe.folder / "gate").touch()
    run = recipe.start(*arguments(task, "broken"), "data.eval=null", "cluster.mirror=true")
    recipe.wait_until(run, (recipe.folder / "waiting").exists)
    recipe.process(run, "ray::VerifierRank").kill()
    recipe.process(run, "ray::TrainerRank").kill()
    (recipe.folder / "waiting").unlink()
    # A verifier's first call does not wait at the gate: the second attempt at step 1 is one.
    engine = folder / "logs" / "engine_0.log"
    rank = recipe.process(run, "ray::EngineRank")
    recipe.wait_until(run, lambda: "version 2: answering" in engine.read_text())
    rank.kill()
    recipe.wait_until(run, (recipe.folder / "waiting").exists)
    family = descendants(psutil.Process(run.pid))
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait(recipe.deadline_s) == 128 + signal.SIGTERM
    recipe.wait_until(None, lambda: not any(works(process) for process in family))
    said = (recipe.folder / "out.txt").read_text()
    assert "Stopped after step 2 of 4" in said and "--resume auto" in said and "Traceback" not in said
    assert (folder / "report.html").exists()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_000002"]
    log = (folder / "logs" / "driver.log").read_text()
    assert "verifier" in log and "died" in log and "version 2: engine 0" in log
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["verifier/restarts"] for record in records] == [0, 1]
    assert "time/recover_s" in records[1] and [record["mirror/copies"] for record in records] == [1, 1]
    warnings = (folder / "logs" / "warnings.log").read_text()
    assert re.search(
        r"the trainer was started anew and continues with step 1, because trainer rank \d .*died", warnings
    )


def kill_a_resumed_run(recipe, task, folder: Path) -> None:
    (recipe.folder / "waiting").unlink()
    command = [*arguments(task, "broken"), "data.eval=null", "checkpoint.every=1"]
    run = recipe.start(*command, "--resume", "auto")
    recipe.wait_until(run, (recipe.folder / "waiting").exists)
    recipe.wait_until(run, (folder / "checkpoints" / "step_000003").is_dir)  # it is written beside the next step
    second = recipe.run(*command, "--resume", "auto")
    assert second.returncode == 1 and f"runs/broken: process {run.pid} on" in second.stdout
    family = descendants(psutil.Process(run.pid))
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    recipe.wait_until(None, lambda: not any(works(process) for process in family))
    assert "changed since the checkpoint: checkpoint.every: 20 -> 1" in (recipe.folder / "out.txt").read_text()

    refused = recipe.run(*command)
    assert refused.returncode == 1 and "--resume auto" in refused.stdout
    other = recipe.run(*command, "run.seed=1", "--resume", "auto")
    assert other.returncode == 1 and "run.seed: 0 -> 1" in other.stdout, other.stdout

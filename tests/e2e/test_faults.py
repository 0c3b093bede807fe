"""The real loop when processes die, hang or refuse: what can be replaced is, and what ends the run is told with its
name and its cause."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import psutil

from megatron_rl.processes import command_line, descendants


def arguments(task, *more: str) -> list[str]:
    return [
        "recipes/grpo.py",
        "configs/run/tiny_grpo.yaml",
        "run.name=faults",
        "run.steps=2",
        f"model.path={task}/model",
        f"data.train={task}/train.jsonl",
        "data.eval=null",
        "rollout.prompts_per_step=8",
        "rollout.samples_per_prompt=4",
        "rollout.max_response_tokens=24",
        "rewards=[{kind: function, path: 'rewards:share_of_digits'}]",
        "checkpoint.every=0",
        *more,
    ]


def start_at_the_gate(recipe, arguments: list[str]):
    """Start a run and return it while it waits for the rewards of step 1."""
    (recipe.folder / "gate").touch()
    run = recipe.start(*arguments)
    recipe.wait_until(run, (recipe.folder / "waiting").exists)
    return run


def let_go(recipe, run) -> tuple[int, str]:
    """The exit status of the run, and what it said."""
    (recipe.folder / "gate").unlink()
    return run.wait(recipe.deadline_s), (recipe.folder / "out.txt").read_text()


def test_an_engine_that_died_is_replaced_and_a_reward_that_hangs_abstains(recipe, task):
    """Two engines, one fed by the other; the run goes on and says what happened."""
    (recipe.folder / "hang").touch()
    rewards = "{kind: function, path: 'rewards:share_of_digits'}, {kind: function, path: 'rewards:hangs', timeout_s: 8}"
    engines = ["rollout.num_engines=2", "bridge.chains=1", f"rewards=[{rewards}]"]
    run = start_at_the_gate(recipe, arguments(task, *engines))
    recipe.process(run, "ray::EngineRank").kill()
    status, text = let_go(recipe, run)
    assert status == 0, text
    folder = recipe.folder / "runs" / "faults"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2]
    assert [record["sync/replaced_engines"] for record in records] == [0, 0, 1]
    assert max(record.get("mismatch/mean_abs", 0) for record in records) < 1e-4
    assert re.match(r"version 2: engine \d .*died", (folder / "logs" / "bridge.log").read_text())

    assert [record["reward/hangs/abstained"] for record in records[:2]] == [0, 1]
    assert [record["reward/share_of_digits/abstained"] for record in records[:2]] == [0, 0]
    assert [record["verifier/restarts"] for record in records[:2]] == [0, 1]
    assert "reward hangs scored none of 32 answers" in text
    failures = [json.loads(line) for line in (folder / "logs" / "rewards.log").read_text().splitlines()]
    assert len(failures) == 32 and failures[0]["reward"] == "hangs" and failures[0]["row"].startswith("train.jsonl:")
    assert "to score with hangs for 8 s" in failures[0]["error"]
    assert "in hangs" in (folder / "logs" / "verifier.log").read_text(), "its stack"


def shared_memory(run) -> set[Path]:
    """The files in /dev/shm that an engine and its workers have mapped, whether they still have a name or not."""
    family = descendants(psutil.Process(run.pid))
    engine = [process for process in family if re.search("VLLM|EngineRank", command_line(process))]
    maps = "".join(Path(f"/proc/{process.pid}/maps").read_text() for process in engine)
    return {Path(name) for name in re.findall(r"(/dev/shm/(?:psm_|\S*cpushm_)\S*)", maps)}


def test_a_trainer_rank_that_is_stopped_ends_the_run_at_its_deadline_and_leaves_nothing(recipe, task):
    """The engine has two ranks, which share memory: no end of the run could leave it, since it has no name any more."""
    run = start_at_the_gate(
        recipe, arguments(task, "rollout.tensor=2", "cluster.step_timeout_s=10", "cluster.restarts_per_hour=0")
    )
    shared = shared_memory(run)
    assert len(shared) >= 2 and not any(path.exists() for path in shared)
    family = descendants(psutil.Process(run.pid))
    stopped = recipe.process(run, "ray::TrainerRank")
    stopped.send_signal(signal.SIGSTOP)
    status, text = let_go(recipe, run)
    assert status == 1, text
    text = " ".join(text.split())
    assert re.search(r"the driver has waited for trainer rank \d.* to compute log-probs for 10 s, since", text), text
    assert f"process {stopped.pid} is stopped (SIGSTOP)" in text
    assert "Traceback" not in text and (recipe.folder / "runs" / "faults" / "report.html").exists()
    assert not any(process.is_running() for process in family), "every process is gone when the run has ended"

"""The real loop when processes die, hang or refuse: what can be replaced is, and what ends the run is told with its
name and its cause."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.processes import command_line, descendants
from megatron_rl.recipes.tiny.gsm8k import write_model


def arguments(task, *more: str) -> list[str]:
    return [
        "grpo",
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


@pytest.mark.deep
def test_real_rows_flow_though_an_engine_dies_and_a_reward_hangs(recipe):
    """Two engines, one fed by the other. The run goes on and says what happened."""
    write_model(recipe.folder / "runs" / "gsm8k_tiny")
    for name in ("gate", "hang"):
        (recipe.folder / name).touch()
    rewards = [
        "{kind: exact_answer, answer: last_number, require_stop: false}",
        "{kind: function, path: 'rewards:share_of_digits'}",
        "{kind: function, path: 'rewards:hangs', timeout_s: 8}",
    ]
    run = recipe.start(
        "grpo",
        "configs/run/gsm8k_tiny_cpu.yaml",
        "policy.parallel.tensor=1",
        "rollout.num_engines=2",
        "bridge.chains=1",
        f"rewards=[{', '.join(rewards)}]",
    )
    recipe.wait_until(run, (recipe.folder / "waiting").exists)  # in step 0, because the evaluation was the first call
    recipe.process(run, "ray::EngineRank").kill()
    status, text = let_go(recipe, run)
    assert status == 0, text
    folder = recipe.folder / "runs" / "gsm8k_tiny" / "grpo"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert [record["sync/replaced_engines"] for record in records] == [0, 1, 0, 0]
    assert re.match(r"version 1: engine \d .*died", (folder / "logs" / "bridge.log").read_text())
    for record in records[:3]:
        assert record["mismatch/mean_abs"] < 1e-4 and record["on_policy/ratio_error"] < 1e-6
        assert record["grad_norm"] > 0 and 0 < record["length/thought_cut"] <= 1
        assert record["length/response_max"] <= 48 + 1 + 32 and record["length/thought_mean"] <= 48

    assert [record["reward/hangs/abstained"] for record in records[:3]] == [1, 0, 0]
    assert [record["reward/share_of_digits/abstained"] for record in records[:3]] == [0, 0, 0]
    assert [record["verifier/restarts"] for record in records[:3]] == [1, 0, 0]
    assert "reward hangs scored none of 32 answers" in text
    failures = [json.loads(line) for line in (folder / "logs" / "rewards.log").read_text().splitlines()]
    assert len(failures) == 32 and failures[0]["reward"] == "hangs"
    assert failures[0]["row"].startswith("gsm8k_train_sample.jsonl:")
    assert "to score with hangs for 8 s" in failures[0]["error"]
    assert "in hangs" in (folder / "logs" / "verifier.log").read_text(), "its stack"

    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert all("</think>" in sample["thought"] or sample["finish"] == "stop" for sample in samples)
    assert set(Counter(sample["step"] for sample in samples).values()) == {4}
    for sample in samples:
        table = sample["tokens"]
        assert sum(table["lengths"]) == len(sample["thought"] + sample["answer"])
        assert len(table["columns"]["logp_rollout"]) == sum(table["actions"]) == sample["num_tokens"]
    assert any("advantage" in sample for sample in samples)
    config = json.loads((folder / "config.json").read_text())
    thinking = config["config"]["rollout"]["thinking"]
    assert thinking["thought_tokens"] == {"kind": "fixed", "tokens": 48} and thinking["response_tokens"] == 32
    assert config["versions"]["megatron-core"] == "0.16.1"
    assert (folder / "report.html").stat().st_size > 10_000 and (folder / "curves.png").exists()
    AutoModelForCausalLM.from_pretrained(folder / "hf")
    assert AutoTokenizer.from_pretrained(folder / "hf").chat_template


def shared_memory(run) -> set[Path]:
    """The files in /dev/shm that an engine and its workers have mapped, whether they still have a name or not."""
    family = descendants(psutil.Process(run.pid))
    engine = [process for process in family if re.search("VLLM|EngineRank", command_line(process))]
    maps = "".join(Path(f"/proc/{process.pid}/maps").read_text() for process in engine)
    return {Path(name) for name in re.findall(r"(/dev/shm/(?:psm_|\S*cpushm_)\S*)", maps)}


@pytest.mark.deep
def test_a_trainer_rank_that_is_stopped_ends_the_run_at_its_deadline_and_leaves_nothing(recipe, task):
    """The engine has two ranks, which share memory: no end of the run could leave it, since it has no name any more.
    When the trainer takes its own memory back, one of them is dead. That alone ends no run, because the engine would be
    replaced."""
    deadline = ["cluster.step_timeout_s=10", "cluster.restarts_per_hour=0"]
    run = start_at_the_gate(recipe, arguments(task, "rollout.parallel.tensor=2", "cluster.colocate=true", *deadline))
    shared = shared_memory(run)
    assert len(shared) >= 2 and not any(path.exists() for path in shared)
    family = descendants(psutil.Process(run.pid))
    recipe.process(run, "VLLM::Worker").kill()
    stopped = recipe.process(run, "ray::TrainerRank")
    stopped.send_signal(signal.SIGSTOP)
    status, text = let_go(recipe, run)
    assert status == 1, text
    text = " ".join(text.split())
    waited = r"the driver has waited for trainer rank \d.* to enter the phase training for 10 s, since"
    assert re.search(waited, text), text
    assert f"process {stopped.pid} is stopped (SIGSTOP)" in text
    assert "Traceback" not in text and (recipe.folder / "runs" / "faults" / "report.html").exists()
    assert not any(process.is_running() for process in family), "every process is gone when the run has ended"

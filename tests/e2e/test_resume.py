"""The real loop, Ray, Megatron, vLLM and the bridge: whatever is killed, however the run is stopped, and whether the
trainers lend their memory to the engines or replay what they have answered, the numbers are those of the undisturbed
run, and nothing is left behind."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import held_engine
import numpy as np
import psutil
import pytest
import torch
from held_engine import Holds
from recipe_runs import Recipe
from safetensors.torch import load_file
from two_engines import of_two_engines

from megatron_rl.commands import hf_to_megatron
from megatron_rl.data.saved_rollouts import read_step
from megatron_rl.loop.checkpoints import find_checkpoints
from megatron_rl.loop.replay import OF_WORK
from megatron_rl.observe.records import METRICS, read_lines
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
    r"time/.*|perf/.*|memory/.*|rollout/tokens_per_s|rollout/idle|reward/.*/seconds|verifier/restarts|slowest_rank/.*|sync/re.*|mirror/.*|machine/.*|sync/transfer_s|eval/.*|stream/asked_again|environment/step_s"
)
"""What depends on the machine or on what happened to the run; the broken runs make no evaluation."""


def arguments(task: Path, name: str) -> list[str]:
    return [
        "grpo",
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


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory) -> Path:
    """The folder of the undisturbed run. It evaluates every second step, which the runs without evaluation show to
    change nothing."""
    recipe = Recipe(tmp_path_factory.mktemp("whole"))
    done = recipe.run(*arguments(task, "whole"), "eval.every=2", "rollout.dump=true", "checkpoint.every=2")
    assert done.returncode == 0, done.stdout + done.stderr
    return recipe.folder / "runs" / "whole"


@pytest.fixture(scope="module")
def opened(task, tmp_path_factory) -> list[str]:
    """The keys of a run that begins with Megatron's form of the same weights."""
    folder = tmp_path_factory.mktemp("opened") / "open"
    assert hf_to_megatron.main([f"{task}/model", str(folder)]) == 0
    return [f"model.path={folder}/hf", f"model.weights={folder}"]


@pytest.mark.deadline(900)
def test_the_undisturbed_run_and_its_export(recipe, run_here, whole):
    expected = lines(whole)
    assert [record["step"] for record in expected] == [0, 1, 2, 3, 4]
    assert expected[0]["loss"] != expected[1]["loss"] and expected[0]["grad_norm"] > 0
    assert max(record.get("mismatch/mean_abs", 0) for record in expected) < 1e-4
    assert expected[0]["on_policy/ratio_error"] == 0, "one mini-batch at lag 0: the ratio is 1"
    assert expected[0]["ppo_kl"] == 0
    assert expected[0]["kl"] == 0 and expected[1]["kl"] > 0, "the reference stays what the run began with"
    assert expected[0]["coefficient/kl"] != expected[1]["coefficient/kl"]

    exported = run_here("export", str(whole), "exported")
    assert exported.returncode == 0, exported.stdout + exported.stderr
    same = filecmp.dircmp(whole / "hf", recipe.folder / "exported")
    assert not same.left_only and same.right_only == ["manifest.json"] and same.common_files
    # The order of the tensors in the file is another one.
    others = [name for name in same.common_files if name != "model.safetensors"]
    assert filecmp.cmpfiles(same.left, same.right, others, shallow=False)[1:] == ([], [])
    of_ranks, exported_tensors = (load_file(Path(side) / "model.safetensors") for side in (same.left, same.right))
    assert of_ranks.keys() == exported_tensors.keys()
    assert all(torch.equal(tensor, exported_tensors[name]) for name, tensor in of_ranks.items())


@pytest.mark.deep
@pytest.mark.deadline(900)
def test_a_step_is_explained_from_the_state_before_it(recipe, whole):
    """From the checkpoint of step 2 and the answers of step 2: loss and gradient of step 3 are the run's, and what is
    named adds up to them."""
    shutil.copytree(whole, recipe.folder / "runs" / "whole")
    done = recipe.run("explain", "runs/whole", "--step", "3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told, logged = json.loads(done.stdout.splitlines()[-1]), lines(whole)[3]
    assert told["is_exact"] and "the checkpoint of step 2, trained on the step between" in told["state"]
    assert told["gradient"]["norm"] == pytest.approx(logged["grad_norm"], rel=1e-6)
    assert sum(told["gradient"]["squares"].values()) == pytest.approx(logged["grad_norm"] ** 2, rel=1e-6)
    assert sum(sum(one["tokens"]["loss"]) for one in told["samples"] if one["tokens"]) == pytest.approx(
        logged["loss"], abs=1e-4 * abs(logged["loss"]) + 32 * 24 * 1e-6
    )
    whole_part, *others = sorted(told["found"], key=lambda one: -len(one["samples"]))
    assert whole_part["norm"] == told["gradient"]["norm"]
    assert any(one["stop"] - one["start"] == 1 for one in others), "single tokens were found"
    assert (recipe.folder / "runs" / "whole" / "explained" / "step_000003.json").exists()


@pytest.mark.deadline(900)
def test_a_resumed_run_in_which_every_process_dies_has_the_same_numbers(recipe, task, whole):
    """It goes on from what the undisturbed run has left at step 2. In step 3 the verifier, the engine and a trainer
    rank die together; the state of the trainer comes from a mirror."""
    folder = recipe.folder / "runs" / "whole"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / "step_000004")
    (recipe.folder / "gate").touch()
    changes = ["data.eval=null", "cluster.mirror=true", "rollout.dump=false", "checkpoint.every=2"]
    run = recipe.start(*arguments(task, "whole"), *changes, "--resume", "auto")
    recipe.wait_until(run, (recipe.folder / "waiting").exists)  # a verifier's first call, of step 2, does not wait
    for name in ("VerifierRank", "TrainerRank", "EngineRank"):
        recipe.process(run, f"ray::{name}").kill()
    (recipe.folder / "gate").unlink()
    assert run.wait(recipe.deadline_s) == 0, (recipe.folder / "out.txt").read_text()
    assert lines(folder) == lines(whole)
    assert [record["verifier/restarts"] for record in read_lines(folder / METRICS)[:4]] == [0, 0, 0, 1]
    assert re.search(
        r"the trainer was restarted and continues with step 3, because trainer rank \d .*died",
        (folder / "logs" / "warnings.log").read_text(),
    )
    assert "is replaced" in (folder / "logs" / "driver.log").read_text()


@pytest.mark.deep
@pytest.mark.deadline(900)
def test_kills_and_stops_change_no_number_and_leave_nothing(recipe, run_here, task, whole, opened):
    """From step 2 on trainers and two engines share their memory; the driver is killed while the engines have it."""
    folder = recipe.folder / "runs" / "broken"
    broken = [*arguments(task, "broken"), *opened, "data.eval=null"]
    stop_after_three_deaths(recipe, [*broken, "cluster.mirror=true"], folder)
    broken += ["checkpoint.every=1", "cluster.colocate=true", "rollout.num_engines=2"]
    kill_a_resumed_run(recipe, run_here, broken, folder)
    (recipe.folder / "gate").unlink()
    resumed = recipe.run(*broken, "--resume", "auto")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    expected = lines(whole)
    assert lines(folder) == [*expected[:2], *of_two_engines(expected[2:])]


def stop_after_three_deaths(recipe, command: list[str], folder: Path) -> None:
    """The verifier, a trainer rank and the engine die in step 1; SIGTERM comes while step 2 is verified. No checkpoint
    has been written when the trainer rank dies: its state comes from a mirror."""
    (recipe.folder / "gate").touch()
    run = recipe.start(*command)
    recipe.wait_until(run, (recipe.folder / "waiting").exists)
    killed = [recipe.process(run, f"ray::{name}") for name in ("VerifierRank", "TrainerRank", "EngineRank")]
    for process in killed:
        process.kill()
    psutil.wait_procs(killed, timeout=recipe.deadline_s)  # until then the verifier may still leave the file
    (recipe.folder / "waiting").unlink()
    # A verifier's first call does not wait at the gate: the second attempt at step 1 is one.
    recipe.wait_until(run, (recipe.folder / "waiting").exists)
    family = descendants(psutil.Process(run.pid))
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait(recipe.deadline_s) == 128 + signal.SIGTERM
    recipe.wait_until(None, lambda: not any(works(process) for process in family))
    said = (recipe.folder / "out.txt").read_text()
    assert "Stopped after 2 of 4 steps" in said and "--resume auto" in said and "Traceback" not in said, said
    assert (folder / "report.html").exists()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_000002"]
    log = (folder / "logs" / "driver.log").read_text()
    assert "verifier" in log and "died" in log and re.search("engine 0 .* is replaced", log)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["verifier/restarts"] for record in records] == [0, 1]
    assert "time/recover_s" in records[1] and [record["mirror/copies"] for record in records] == [1, 1]
    warnings = (folder / "logs" / "warnings.log").read_text()
    assert re.search(r"the trainer was restarted and continues with step 1, because trainer rank \d .*died", warnings)


def kill_a_resumed_run(recipe, run_here, command: list[str], folder: Path) -> None:
    (recipe.folder / "waiting").unlink()
    run = recipe.start(*command, "--resume", "auto")
    recipe.wait_until(run, (recipe.folder / "waiting").exists)
    recipe.wait_until(run, (folder / "checkpoints" / "step_000003").is_dir)  # it is written beside the next step
    second = run_here(*command, "--resume", "auto")
    assert second.returncode == 1 and f"runs/broken: process {run.pid} on" in second.stdout
    family = descendants(psutil.Process(run.pid))
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    recipe.wait_until(None, lambda: not any(works(process) for process in family))
    for process in family:  # Ray's agents, which would end a minute later
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert "changed since the checkpoint: checkpoint.every: 20 -> 1" in (recipe.folder / "out.txt").read_text()

    refused = run_here(*command)
    assert refused.returncode == 1 and "--resume auto" in refused.stdout
    other = recipe.run(*command, "run.seed=1", "--resume", "auto")
    assert other.returncode == 1 and "run.seed: 0 -> 1" in other.stdout, other.stdout


@pytest.mark.deep
@pytest.mark.deadline(900)
def test_a_run_that_shares_its_memory_has_the_same_numbers_also_after_deaths(recipe, task, whole):
    """Two engines, because each trainer rank shares the memory of one."""
    shared = ["rollout.num_engines=2", "cluster.colocate=true", "eval.every=2", "checkpoint.every=1"]
    folder = recipe.folder / "runs" / "together"
    (recipe.folder / "gate").touch()
    run = recipe.start(*arguments(task, "together"), *shared)
    recipe.wait_until(run, (recipe.folder / "waiting").exists)
    recipe.process(run, "ray::TrainerRank").kill()  # while the engines have its memory
    (recipe.folder / "gate").unlink()
    engine, log = recipe.process(run, "ray::EngineRank"), folder / "logs" / "engine_0.log"
    recipe.wait_until(run, lambda: "version 2: answering" in log.read_text())
    engine.kill()
    assert run.wait(recipe.deadline_s) == 0, (recipe.folder / "out.txt").read_text()

    assert lines(folder) == of_two_engines(lines(whole))
    evaluations = [held_out(whole), held_out(folder)]
    assert len(evaluations[0]) == 3 and evaluations[0] == evaluations[1]
    driver = (folder / "logs" / "driver.log").read_text()
    assert "the trainer was restarted" in (folder / "logs" / "warnings.log").read_text()
    assert "is replaced" in driver
    order = [line.partition(": phase ")[2] for line in driver.splitlines() if ": phase " in line]
    assert order[:4] == ["weight sync", "generating", "training", "weight sync"]


@pytest.mark.deep
@pytest.mark.deadline(900)
def test_a_stop_while_engines_have_the_trainers_memory_saves_the_step_before(recipe, task, whole):
    """A run is stopped three times and resumed: while an engine is replaced, while an evaluation is answered, and while
    a step is answered. The answers end, the trainers take their memory back, and save, unless Ctrl-C comes twice."""
    folder, holds = recipe.folder / "runs" / "lent", Holds(recipe.folder)
    shutil.copy(held_engine.__file__, recipe.folder)
    shared = ["cluster.colocate=true", "rollout.num_engines=2", "rollout.backend=held_engine.py:HeldSampler"]
    command = [*arguments(task, "lent"), *shared, "eval.every=2", "--resume", "auto"]

    run = start_and_stand(recipe, command, holds, version=1)
    recipe.process(run, "ray::EngineRank").kill()
    holds.let_go()
    driver = folder / "logs" / "driver.log"
    recipe.wait_until(run, lambda: "is replaced" in driver.read_text())  # it needs seconds to start
    run.send_signal(signal.SIGUSR1)
    check_stop(recipe, run, 138, "Stopped after 1 of 4 steps", [1])

    run = start_and_stand(recipe, command, holds, version=2)
    for _ in range(2):  # a cluster may send several
        run.send_signal(signal.SIGTERM)
    check_stop(recipe, run, 143, "Stopped after 2 of 4 steps", [1, 2])

    run = start_and_stand(recipe, command, holds, version=3)
    holds.keep_memory()
    run.send_signal(signal.SIGINT)
    recipe.wait_until(run, lambda: holds.num_told("keeps") == 2)
    run.send_signal(signal.SIGINT)
    check_stop(recipe, run, 130, "Stopped at once, without a checkpoint of this step", [1, 2])

    holds.let_go()
    resumed = recipe.run(*command)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert lines(folder) == of_two_engines(lines(whole))


def start_and_stand(recipe, command: list[str], holds: Holds, version: int):
    """Start a run and return it while answers of this version, or a later one, are under way in both engines."""
    holds.let_go()
    holds.stand(version)
    run = recipe.start(*command)
    recipe.wait_until(run, lambda: holds.num_told("stands") == 2)
    return run


def check_stop(recipe, run, status: int, said: str, saved: list[int]) -> None:
    ended, text = run.wait(recipe.deadline_s), " ".join((recipe.folder / "out.txt").read_text().split())
    assert ended == status and said in text and "Traceback" not in text, text
    assert list(find_checkpoints(recipe.folder / "runs" / "lent" / "checkpoints")) == saved


def held_out(folder: Path) -> list[float]:
    """The results of the evaluations."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["eval/reward_mean"] for record in records if "eval/reward_mean" in record]


OF_ENGINES = ("sync/", "eval/")
TIMES = ("time/", "perf/", "memory/", "machine/", "slowest_rank/")


@pytest.mark.deep
@pytest.mark.deadline(900)
def test_a_replay_computes_the_same_to_the_bit(recipe, task, whole):
    """Rollouts that one run writes are trained on by another, which has no engines; and engines alone write them too,
    without trainers."""
    again = recipe.run(*arguments(task, "again"), "data.eval=null", f"rollout.replay={whole}/rollouts")
    assert again.returncode == 0, again.stdout + again.stderr
    folder = recipe.folder / "runs" / "again"
    expected, given = (
        [
            {
                name: value
                for name, value in record.items()
                if not name.startswith(OF_ENGINES + TIMES) and not OF_WORK.fullmatch(name)
            }
            for record in read_lines(run / METRICS)
        ]
        for run in (whole, folder)
    )
    assert given == expected and all(record["grad_norm"] > 0 for record in given[:4])
    models = [(run / "hf" / "model.safetensors").read_bytes() for run in (whole, folder)]
    assert models[0] == models[1]
    assert not (folder / "logs" / "engine_0.log").exists()

    alone = recipe.run("generate", *arguments(task, "alone")[1:], "--steps", "1", "--out", "generated")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    one, other = (read_step(path, 0) for path in (recipe.folder / "generated", whole / "rollouts"))
    assert [group.prompt for group in one.groups] == [group.prompt for group in other.groups]
    pairs = [
        pair
        for group, same in zip(one.groups, other.groups, strict=True)
        for pair in zip(group.payload, same.payload, strict=True)
    ]
    equal = [(tokens, others) for tokens, others in pairs if tokens.ids.tolist() == others.ids.tolist()]
    # The engine's sums depend on what else is in its batch, so that a token may fall on the other side.
    assert len(equal) > 0.9 * len(pairs)
    for tokens, others in equal:
        np.testing.assert_allclose(tokens.logp_rollout, others.logp_rollout, atol=1e-5)  # a few ulps of numbers near 6

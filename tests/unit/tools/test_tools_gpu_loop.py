"""How the parts of `gpu-day --loop` judge what they see, and what the planner says of their runs. tests/e2e has the
parts themselves."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron_rl.config.rollout import ExpectedTokens
from megatron_rl.planning.shapes import planned_shape
from megatron_rl.planning.step import step_seconds
from megatron_rl.tools.bench.gpu_day import command as gpu_day
from megatron_rl.tools.bench.gpu_day import loop as gpu_loop
from megatron_rl.tools.bench.gpu_day.answers import EngineAnswers, differing, numbers_of, problems_of
from megatron_rl.tools.bench.gpu_day.loop import (
    LOOP_PARTS,
    LoopPlace,
    differences,
    measured_numbers,
    missing_packages,
    planned,
)
from megatron_rl.tools.bench.run_process import EXCEPTION, faults_of_stop, last_error


def test_all_deadlines_together_are_below_fifteen_minutes():
    assert sum(part.limit_s for part in LOOP_PARTS.values()) < 900


def test_a_loop_needs_a_model_and_is_no_node(tmp_path, capsys):
    arguments = ["--out", str(tmp_path / "record"), "--device", "cpu", "--loop", str(tmp_path)]
    assert gpu_day.main(arguments) == 2
    assert "is no folder of a model; give one with config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert gpu_day.main([*arguments, "--parts", "bridge"]) == 2
    assert "there is no part bridge; the parts are: real model; real model, stopped" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu_day.main([*arguments, "--node", str(tmp_path)])
    assert not (tmp_path / "record").exists()


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    assert missing_packages("cpu") == ""
    monkeypatch.setattr(gpu_loop, "NEEDED", ("json", "no_such_vllm", "no_such_ray"))
    said = missing_packages("cuda")
    assert said.startswith("no_such_vllm and no_such_ray cannot be imported in ")
    assert said.endswith(
        "`make gpu-env` installs all packages into .venv-gpu, and .venv-gpu/bin/python then starts this command."
    )
    assert "`make setup`" in missing_packages("cpu")


def place(tmp_path: Path, model: str) -> LoopPlace:
    return LoopPlace("cuda", Path(model), tmp_path, math.inf)


@pytest.mark.parametrize("kind", ["sums", "long"])
def test_the_runs_fit_on_an_h100_and_the_planner_tells_a_step(kind, tmp_path):
    here = place(tmp_path, "SmolLM2-135M-Instruct" if kind == "sums" else "Qwen3-1.7B")
    config, memory = planned([*here.sums(), *(here.sizes.long if kind == "long" else ())])
    assert memory.problems == [] and memory.is_shared and memory.on_gpus
    assert config.cluster.colocate and config.model.dtype == "bfloat16" and config.rollout.num_engines == 1
    long = ExpectedTokens(mean=1000, tail=1024) if kind == "long" else ExpectedTokens(mean=10, tail=16)
    step = step_seconds(config, planned_shape(config), memory.engine, long)
    assert (step.generation > 1) == (kind == "long") and step.total > step.generation + step.training


def test_a_run_is_stopped_and_resumed_between_its_first_and_its_last_step():
    for sizes in gpu_loop.LOOP_SIZES.values():
        [steps] = [int(word.partition("=")[2]) for word in sizes.sums if word.startswith("run.steps=")]
        assert sizes.save_every <= sizes.kill_after < sizes.stop_in < steps


STEPS = [
    {"step": 0, "rollout/num_samples": 8, "loss": 1.0, "grad_norm": 2.0, "reward/mean": 0.5, "time/total_s": 9.0,
     "mismatch/mean_abs": 0.1, "mismatch/max_abs": 0.4, "eval/accuracy": 0.125, "memory/x_bytes": 5.0},
    {"step": 1, "rollout/num_samples": 8, "loss": 1.0, "grad_norm": 2.0, "reward/mean": 0.5, "time/total_s": 4.0,
     "mismatch/mean_abs": 0.3, "mismatch/max_abs": 0.2, "memory/x_bytes": 7.0},
    {"step": 2, "rollout/num_samples": 8, "loss": 3.0, "grad_norm": 2.0, "reward/mean": 0.5, "time/total_s": 1.0},
    {"step": 3, "rollout/num_samples": 8, "loss": 3.0, "grad_norm": 2.0, "reward/mean": 0.5, "time/total_s": 2.0},
    {"step": 4, "eval/accuracy": 0.5, "time/total_s": 100.0},
]  # fmt: skip


def test_the_numbers_of_a_run():
    found = measured_numbers(STEPS)
    assert found == {
        "held-out accuracy, before": 0.125,
        "held-out accuracy, after": 0.5,
        "mismatch/mean_abs, mean": pytest.approx(0.2),
        "mismatch/max_abs, largest": 0.4,
        "memory/x_bytes, largest": 7.0,
        "time/total_s, first step": 9.0,
        "time/total_s, mean of later steps": 1.5,
    }
    assert measured_numbers(STEPS[:1])["time/total_s, mean of later steps"] == 9.0


def test_the_differences_of_two_runs():
    same = differences(STEPS, STEPS)
    assert [*same.values()] == [4, 0.0] and "steps with equal loss, gradient norm and reward, of 4" in same
    other = [*STEPS[:2], {**STEPS[2], "loss": 6.0}, {**STEPS[3], "loss": None}]
    assert [*differences(STEPS, other).values()] == [2, 0.5]


def test_the_end_of_a_run_that_got_a_signal():
    prompt = "\nSIGUSR1: stopping\nnow, with a checkpoint; press Ctrl-C again to stop without one.\n"
    assert faults_of_stop(138, 2, 2, prompt) == []
    assert faults_of_stop(None, 2, 2, prompt) == ["The run did not end after SIGUSR1."]
    [wrong] = faults_of_stop(1, 2, 2, "error: answers are under way\n")
    assert wrong == "After SIGUSR1 the run ended with status 1 in place of 138: answers are under way"
    assert "the newest checkpoint is of step 1" in faults_of_stop(138, 1, 2, prompt)[0]
    assert "no answers were under way" in faults_of_stop(138, 2, 2, "SIGUSR1: stopping after this step")[0]


def test_the_error_of_a_run_is_one_line_without_a_stack():
    printed = "step 0\nerror: the configuration is refused:\n  a.b: c\n  d.e: f\ntraceback: x\nreport: y\n"
    assert last_error(printed) == "the configuration is refused: a.b: c d.e: f"
    assert last_error("one\n\n") == "one" and last_error("") == "it printed nothing"
    stack = "Traceback (most recent call last):\n  File x\nRuntimeError: a\n now\ntorch.OutOfMemoryError: b c\nINFO\n"
    assert EXCEPTION.findall(stack) == ["RuntimeError: a", "torch.OutOfMemoryError: b c"]


def engine(before: list[int], after: list[int], graphs: str = "NONE") -> EngineAnswers:
    return EngineAnswers(graphs, [before], [after])


def test_differing_tokens_are_counted_with_what_one_answer_has_more():
    assert differing([[1, 2, 3], [4]], [[1, 5], [4]]) == 2
    assert differing([[1]], [[1]]) == 0


def test_answers_on_a_cpu_must_be_equal_and_on_a_gpu_are_counted():
    ways = {"eager": engine([1, 2], [3, 4]), "graphs": engine([1, 2], [3, 5], "FULL_DECODE_ONLY")}
    assert problems_of(ways, "cuda") == []
    assert problems_of(ways, "cpu") == ["1 tokens differ after the push between two engines that run the same program."]
    found = numbers_of(ways)
    assert found["tokens that differ with graphs, before the push"] == 0
    assert found["tokens that differ with graphs, after the push"] == 1
    assert found["answers that differ with graphs, after the push, of 1"] == 1
    assert found["graphs: tokens that the push has changed"] == 2


def test_graphs_that_keep_the_old_weights_or_are_off_are_problems():
    stale = {"eager": engine([1, 2], [3, 4]), "graphs": engine([1, 2], [1, 2], "FULL_DECODE_ONLY")}
    [said] = problems_of(stale, "cuda")
    assert said.startswith("The push has changed no answer of the engine (graphs)")
    off = {"eager": engine([1], [2]), "graphs": engine([1], [2])}
    [said] = problems_of(off, "cuda")
    assert said.startswith("vLLM has switched CUDA graphs off") and problems_of(off, "cpu") == []

"""What teachers cost, by hand and against the same model as policy."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from megatron_rl.balance import forward_flops
from megatron_rl.commands.dry_run import describe_hours
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.models import read_shape
from megatron_rl.planning.engine import ENGINE_WORK_BYTES
from megatron_rl.planning.estimates import largest_work, training_seconds
from megatron_rl.planning.memory import run_memory
from megatron_rl.planning.parameters import stage_parameters
from megatron_rl.planning.rates import H100
from megatron_rl.planning.step import step_seconds
from megatron_rl.planning.teachers import pass_seconds, scoring_seconds, teacher_gpus

ROOT = Path(__file__).parents[3]
SHAPE = read_shape(ROOT / "configs" / "model" / "Qwen3-32B.json")
FILES = [ROOT / "configs" / name for name in ("model/qwen3_32b.yaml", "cluster/h100_8n8g.yaml", "run/gsm8k_32b.yaml")]
SMALL = read_shape(ROOT / "configs" / "model" / "Qwen3-8B.json")


def taught(teachers: str, form: str = "form: sampled", *more: str) -> GrpoRunConfig:
    given = [f"teachers=[{teachers}]", f"algorithm.distillation={{{form}}}", "rollout.sampling.temperature=1"]
    whole = [*map(str, FILES), "algorithm.kl=null", "rollout.active_sampling=false", *given, *more]
    return load_config(GrpoRunConfig, whole)


def rows(config: GrpoRunConfig):
    return {gpu.name: gpu.parts for gpu in run_memory(config, SHAPE).gpus}


def test_a_teacher_that_is_the_policys_model_has_the_weights_of_the_policys_engine():
    config = taught(
        "{path: models/Qwen3-32B, datasets: [a], parallel: {tensor: 4}}, {path: models/Qwen3-8B, num_engines: 3}"
    )
    found = rows(config)
    assert found["engine of teacher 0, at least"]["weights"] == found["engine"]["weights"]
    assert found["engine of teacher 1, at least"]["weights"][0] > 16e9
    assert teacher_gpus(config) == 4 + 3
    assert not run_memory(config, SHAPE).problems


@pytest.mark.parametrize("teacher", ["{server: 'http://node7:8000/v1'}", "{prompt: hinted}"])
def test_a_server_and_the_policy_itself_have_no_gpus(teacher):
    config = taught(teacher)
    assert teacher_gpus(config) == 0 and not any("teacher" in name for name in rows(config))


SHARED = ("cluster.colocate=true", "rollout.max_lag=0", "rollout.gpu_memory_utilization=0.75")


def test_teachers_on_shared_gpus_sleep_and_score_in_turn():
    given = "{path: models/Qwen3-32B, datasets: [a], parallel: {tensor: 4}}, {path: models/Qwen3-8B}"
    alone, shared, without = (
        taught(given),
        taught(given, "form: sampled", *SHARED),
        taught("{server: s}", "form: sampled", *SHARED),
    )
    memory, plain = run_memory(shared, SHAPE), run_memory(without, SHAPE)
    assert teacher_gpus(shared) == 0
    found = {gpu.name: gpu.parts for gpu in memory.gpus}
    weights = [found[f"engine of teacher {i} while it scores, at least"]["weights"][0] for i in range(2)]
    assert weights == [rows(alone)[f"engine of teacher {i}, at least"]["weights"][0] for i in range(2)]
    left = memory.trainer.totals[2] + memory.engine.gpu.totals[0]
    assert found["engine of teacher 0 while it scores, at least"]["trainers and other engines that sleep"][0] == left
    more = memory.engine.gpu.totals[2] - plain.engine.gpu.totals[2]
    assert more == 2 * ENGINE_WORK_BYTES, "two processes that sleep"
    host = memory.engine.gpu.host
    assert host["teachers that sleep"] == sum(weights)
    assert host["lent to the trainers"] == memory.engine.gpu.parts["weights"][2], "while a teacher scores"
    lengths = np.array([3000, 1000])
    by_hand = [float(forward_flops(lengths, shape).sum()) / ranks for shape, ranks in ((SHAPE, 4), (SMALL, 1))]
    moved = 2 * sum(weights) / H100.host_bytes_per_s
    assert scoring_seconds(shared, lengths, H100) == (0, pytest.approx(sum(by_hand) / (0.65 * 989e12) + moved))


def test_a_teacher_that_does_not_fit_is_refused_by_name():
    [problem] = run_memory(taught("{path: models/Qwen3-32B}"), SHAPE).problems
    assert "engine of teacher 0" in problem and "raise teachers.0.parallel.tensor" in problem
    assert "on a GPU of 80 GB" in problem


def test_engines_read_all_texts_at_the_rate_of_products():
    lengths = np.array([3000, 1000])
    config = taught(
        "{path: models/Qwen3-8B, datasets: [a], num_engines: 2}, {path: models/Qwen3-32B, parallel: {tensor: 8}}"
    )
    by_hand = [float(forward_flops(lengths, shape).sum()) / ranks for shape, ranks in ((SMALL, 2), (SHAPE, 8))]
    others, own = scoring_seconds(config, lengths, H100)
    assert others == pytest.approx(max(by_hand) / (0.65 * 989e12)) and own == 0
    others, own = scoring_seconds(taught("{prompt: hinted}"), lengths, H100)
    assert others == 0 and own == pytest.approx(float(forward_flops(lengths, SHAPE).sum()) / 32 / (0.65 * 989e12))


def test_a_pass_of_a_teacher_as_large_as_the_policy_costs_what_a_pass_of_the_policy_does():
    one, two = (taught("{path: models/Qwen3-32B}", f"by: trainer, form: {form}") for form in ("sampled", "forward"))
    work, parallel = largest_work(one), one.policy.parallel
    assert work.num_passes == 1, "logp_old, for two mini-batches"

    def seconds(passes: float) -> float:
        return training_seconds(
            replace(work, num_passes=passes), SHAPE, parallel, 4, dtype="bfloat16", recompute="none"
        )

    moved = 2 * max(one.total for one in stage_parameters(SHAPE, parallel.mesh)) / 55e9
    found = pass_seconds(one, work, parallel, 4, H100)
    assert found == pytest.approx(seconds(1) - seconds(0) + moved)
    assert pass_seconds(two, work, parallel, 4, H100) == pytest.approx(2 * found), "its tokens, and their log-probs"
    without = taught("{path: models/Qwen3-32B, parallel: {tensor: 8}}")
    assert pass_seconds(without, work, parallel, 4, H100) == 0
    steps = [step_seconds(config, SHAPE, None).training for config in (without, one, two)]
    assert steps[2] - steps[1] == pytest.approx(steps[1] - steps[0]) and steps[1] - steps[0] > moved


def test_the_hours_have_the_gpus_of_teachers():
    config = taught("{path: models/Qwen3-235B-A22B, parallel: {tensor: 8}}")
    console = Console(record=True, width=200, file=StringIO())
    memory = run_memory(config, SHAPE)
    describe_hours(config, SHAPE, memory, console)
    told = console.export_text()
    assert "8 teacher GPUs wait" in told and "teachers' engines, meanwhile" in told
    step = step_seconds(config, SHAPE, memory.engine)
    assert f"{step.total * 72 / 3600:.1f}" in told, "32 + 32 + 8 GPUs"

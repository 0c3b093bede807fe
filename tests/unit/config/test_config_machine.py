"""The GPUs and the threads of a rank, by hand."""

from __future__ import annotations

import pytest

from megatron_rl.config import machine
from megatron_rl.config.load import validate
from megatron_rl.config.machine import count_gpus, start_in_turn, threads_of_ranks
from megatron_rl.config.schema import GrpoRunConfig, SftRunConfig

SHARED = {"run": {"name": "x", "steps": 1}, "model": {"path": "m"}, "balance": {"max_tokens_per_microbatch": 16}}


def grpo(data: int = 1, engines: int = 1, max_lag: int = 0, cluster: dict | None = None) -> GrpoRunConfig:
    rollout = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_prompt_tokens": 8, "max_response_tokens": 8}
    given = {
        "data": {"train": "rows"},
        "policy": {"parallel": {"data": data}},
        "rollout": rollout | {"num_engines": engines, "max_lag": max_lag},
        "cluster": cluster or {},
    }
    return validate(GrpoRunConfig, SHARED | given)


@pytest.mark.parametrize(
    ("config", "cores", "threads"),
    [
        (grpo(), 2, 2),  # they take turns
        (grpo(max_lag=1), 2, 1),  # both compute at the same time
        (grpo(data=2), 8, 4),
        (grpo(data=2, engines=4), 8, 2),
        (grpo(data=2, engines=4, max_lag=2), 8, 1),
        (grpo(data=4), 2, 1),  # more ranks than cores
        (grpo(cluster={"gpus_per_trainer": 1, "gpus_per_engine_rank": 1}), 64, 1),
        (grpo(cluster={"ray_address": "auto"}), 64, 1),
    ],
)
def test_ranks_that_compute_at_the_same_time_share_the_cores(config, cores, threads):
    assert threads_of_ranks(config, cores) == threads


@pytest.mark.parametrize(
    ("cluster", "num_ranks", "cores", "in_turn"),
    [
        ({}, 2, 2, True),
        ({}, 2, 4, False),  # with an engine and a verifier
        ({"ray_address": "auto"}, 2, 2, False),  # they are on other machines
        ({"gpus_per_trainer": 1, "gpus_per_engine_rank": 1}, 8, 2, False),
    ],
)
def test_ranks_start_in_turn_if_cores_are_few(cluster, num_ranks, cores, in_turn):
    assert start_in_turn(grpo(cluster=cluster).cluster, num_ranks, cores) is in_turn


@pytest.mark.parametrize(
    ("visible", "number"), [(None, 2), ("", 0), ("1", 1), ("GPU-1, GPU-2", 2), ("-1", 0), ("NoDevFiles", 0)]
)
def test_gpus_are_counted_by_their_device_files_and_what_cuda_may_see(tmp_path, monkeypatch, visible, number):
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("null", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus() == 0
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidia11").touch()
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == number


@pytest.mark.parametrize(
    ("cluster", "without", "with_gpus"),
    [
        ({}, (0, 0), (1, 1)),
        ({"device": "gpu"}, (1, 1), (1, 1)),
        ({"device": "cpu"}, (0, 0), (0, 0)),
        ({"gpus_per_trainer": 0.5, "gpus_per_engine_rank": 0.5}, (0.5, 0.5), (0.5, 0.5)),
        ({"gpus_per_trainer": 0}, (0, 0), (0, 0)),
        ({"device": "gpu", "gpus_per_trainer": 0}, (0, 1), (0, 1)),
        ({"colocate": True}, (0, 0), (1, 1)),
    ],
)
def test_gpus_that_are_there_are_used_unless_keys_say_otherwise(monkeypatch, tmp_path, cluster, without, with_gpus):
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for expected in (without, with_gpus):
        found = grpo(cluster=cluster)
        assert (found.cluster.gpus_per_trainer, found.cluster.gpus_per_engine_rank) == expected
        if expected[0]:
            assert found.model.dtype == "bfloat16"
        (tmp_path / "nvidia0").touch()


def test_a_supervised_run_has_trainers_alone():
    given = {"policy": {"parallel": {"data": 2}}, "sft": {"rows": "rows", "rows_per_step": 2, "max_tokens": 8}}
    assert threads_of_ranks(validate(SftRunConfig, SHARED | given), 8) == 4

"""What watches a run: conflicts of the kinds with the rest of the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config.load import merge, read_yaml, validate
from megatron_rl.config.schema import GrpoRunConfig, SftRunConfig

ROOT = Path(__file__).parents[3]


def config_of(observe: dict, **changed: dict) -> GrpoRunConfig:
    """The demo: 60 steps, 2 trainer ranks on CPUs, 1 engine."""
    given = read_yaml(ROOT / "configs/run/tiny_grpo.yaml")
    merge(given, changed | {"observe": [observe]})
    return validate(GrpoRunConfig, given)


def test_the_kinds_and_their_defaults():
    [trace] = config_of({"kind": "trace", "steps": [3, 4]}).observe
    [profile] = config_of({"kind": "profile", "steps": [59]}).observe
    [prometheus] = config_of({"kind": "prometheus"}).observe
    assert trace.steps == (3, 4) and (profile.tool, profile.ranks) == ("torch", (0,)) and prometheus.port == 9400


@pytest.mark.parametrize(
    ("observe", "message"),
    [
        ({"kind": "trace", "steps": [3, 60, 61]}, r"trace.steps has 60, 61, but the run has the steps 0 to 59"),
        ({"kind": "profile", "steps": [60]}, r"profile.steps has 60, but the run has the steps 0 to 59"),
        (
            {"kind": "profile", "steps": [1], "ranks": [0, 2]},
            r"profile.ranks has 2, but the trainer has the ranks 0 to 1",
        ),
        (
            {"kind": "profile", "steps": [1], "tool": "nsys"},
            "profile.tool is nsys, which profiles GPUs, but trainers run on",
        ),
        (
            {"kind": "profile", "steps": [1], "memory": True},
            "profile.memory writes snapshots of CUDA's memory, but trainers",
        ),
        ({"kind": "trace", "steps": []}, "observe.0.steps: "),
        ({"kind": "trace", "steps": [-1]}, "observe.0.steps.0: "),
        ({"kind": "profile", "steps": [1], "ranks": []}, "observe.0.ranks: "),
        ({"kind": "prometheus", "port": 65536}, "observe.0.port: "),
        ({"kind": "prometheus", "port": 65535, "engines": True}, "1 engines need the ports after it"),
    ],
)
def test_conflicts(observe, message):
    with pytest.raises(ValueError, match=message):
        config_of(observe)


def test_profiles_of_gpus_are_accepted_where_there_are_gpus():
    gpus = {"device": "gpu"}
    config_of({"kind": "profile", "steps": [1], "tool": "nsys", "memory": True}, cluster=gpus)


def test_engines_of_others_and_no_engines_serve_no_metrics_of_vllm():
    observe = {"kind": "prometheus", "engines": True}
    with pytest.raises(ValueError, match="rollout.backend"):
        config_of(observe, rollout={"backend": "mine:Engine"})
    given = {"run": {"name": "x", "steps": 1}, "model": {"path": "x"}, "sft": {"rows": "x"}, "observe": [observe]}
    with pytest.raises(ValueError, match="supervised training has no engines"):
        validate(SftRunConfig, given)

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.spec import ActorSpec
from megatron_rl.algorithms.objective import SupervisedObjective
from megatron_rl.config.schema import ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.types import ModelShape


def spec(**parallel) -> ActorSpec:
    shape = ModelShape("qwen3", 4, 32, 4, 2, 16, 48, 60, 1e4, 1e-6, 128, False)
    return ActorSpec(
        shape=shape,
        model=ModelConfig(path=Path("model"), dtype="float32"),
        policy=PolicyConfig(parallel=ParallelConfig(**parallel)),
        objective=SupervisedObjective(),
        temperature=1.0,
        total_steps=1,
        seed=0,
    )


@pytest.mark.parametrize(
    "parallel, world_size, message",
    [
        (dict(tensor=2, data=2), 2, "needs 4 ranks, there are 2"),
        (dict(tensor=4), 4, "2 KV heads.*policy.parallel.tensor=4"),
        (dict(pipeline=3), 3, "4 layers.*policy.parallel.pipeline=3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_any_rank_waits(parallel, world_size, message):
    with pytest.raises(ValueError, match=message):
        MegatronActor(spec(**parallel), rank=0, world_size=world_size, init_method="tcp://127.0.0.1:1")

"""The driver sends each data-parallel rank its own samples and the groups that they belong to."""

from __future__ import annotations

import numpy as np

from megatron_rl.balance import plan_microbatches
from megatron_rl.cluster.policy import _assign
from megatron_rl.config.balance import BalanceConfig
from megatron_rl.config.schema import ParallelConfig
from megatron_rl.types import Batch, Group, ModelShape, Prompt, Sample

SHAPE = ModelShape("qwen3", 1, 8, 2, 2, 4, 8, 32, 1e4, 1e-6, 64, False)


def test_every_active_sample_goes_to_one_rank_with_its_own_tokens_and_advantage():
    rng = np.random.default_rng(0)
    groups = []
    for g in range(7):
        samples = [Sample(int(n), 2, int(n) - 2, 0, "stop") for n in rng.integers(4, 40, size=3)]
        groups.append(Group(Prompt(f"row {g}", (5, 6), ""), samples, [f"tokens {g}.{i}" for i in range(3)], version=0))
    batch = Batch.from_groups(groups, version=3)
    batch.advantages, batch.weights = np.arange(21) / 10, np.arange(21) / 100
    batch.active[3:6] = False  # the second group has no signal
    parallel = ParallelConfig(data=2)
    plan = plan_microbatches(batch, SHAPE, parallel, BalanceConfig(max_tokens_per_microbatch=64), updates=2)

    seen = {}
    for data_rank in range(2):
        assignment, payloads = _assign(batch, plan, data_rank)
        assert [len(mini) for mini in assignment] == [len(mini[data_rank]) for mini in plan.minibatches]
        used = {sample.group for mini in assignment for micro in mini for sample in micro}
        assert used == set(range(len(payloads))), "every group that a rank gets is used"
        for mini in assignment:
            for micro in mini:
                for sample in micro:
                    tokens = payloads[sample.group][sample.index_in_group]
                    assert tokens not in seen, "each sample goes to one rank once"
                    seen[tokens] = sample.numbers
    assert seen == {
        f"tokens {g}.{i}": {
            "name": f"row {g}, answer {i}",
            "advantage": (3 * g + i) / 10,
            "weight": (3 * g + i) / 100,
            "index": 3 * g + i,
            "version": 3,
        }
        for g in range(7)
        if g != 1
        for i in range(3)
    }

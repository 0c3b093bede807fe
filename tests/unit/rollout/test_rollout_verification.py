"""Which modules a push verifies, and what engines that disagree are told. Damage to weights that engines hold is in
test_rollout_quantised.py, test_rollout_routes.py and test_rollout_pipeline.py."""

from __future__ import annotations

from tiny_trainers import write_model

from megatron_rl.bridge.verification import PUSHES, disagreement, is_sampled
from megatron_rl.layout import FAMILIES, read_shape


def test_every_module_is_in_the_sample_of_one_push_in_32(tmp_path):
    names = {
        shard.local_name.rpartition(".")[0]
        for shard in FAMILIES["qwen3"].vllm_shards(read_shape(write_model(tmp_path, 0)), 1, 0)
    }
    assert all(sum(is_sampled(name, version) for version in range(PUSHES)) == 1 for name in names)


def test_a_disagreement_names_engines_rank_and_module():
    same = [{"a": "1", "b": "2"}, {"a": "3"}]
    assert disagreement({0: same, 2: same}) is None
    other = [same[0], {"a": "4"}]
    expected = "after the same push rank 1 of engine 1 and rank 1 of engine 3 hold different weights of a"
    assert disagreement({1: same, 2: same, 3: other}) == expected
    assert "weights of b" in disagreement({0: same, 1: [{"a": "1"}, {"a": "3"}]})

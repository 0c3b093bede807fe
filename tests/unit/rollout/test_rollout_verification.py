"""Which modules a push verifies, and what engines that disagree are told. Damage to weights that engines hold is in
test_rollout_quantised.py, test_rollout_routes.py and test_rollout_pipeline.py."""

from __future__ import annotations

import pytest
import torch
from tiny_trainers import write_model

from megatron_rl.bridge import model_parameters, verification
from megatron_rl.bridge.verification import PUSHES, disagreement, element_sums, is_sampled, read
from megatron_rl.models import FAMILIES, read_shape
from megatron_rl.types import Mesh


def test_every_module_is_in_the_sample_of_one_push_in_32(tmp_path):
    names = {
        shard.local_name.rpartition(".")[0]
        for shard in FAMILIES["qwen3"].vllm_shards(read_shape(write_model(tmp_path, 0)), 1, 0)
    }
    assert all(sum(is_sampled(name, version) for version in range(PUSHES)) == 1 for name in names)


def test_a_later_push_sums_nothing_outside_of_its_sample_and_waits_three_times_for_the_device(make_own_stage, folders):
    """The numbers are of one rank and two pushes."""
    stage, summed, waits = make_own_stage(folders[0], Mesh(), max_prompt_tokens=8, max_response_tokens=8), [], []

    def sums(tensor: torch.Tensor) -> torch.Tensor:
        summed.append(tensor)
        return element_sums(tensor)

    def wait(found: list[torch.Tensor]) -> list:
        waits.append(len(found))
        return read(found)

    shape = read_shape(folders[0])
    shards = FAMILIES["qwen3"].vllm_shards(shape, 1, 0)
    with pytest.MonkeyPatch.context() as patch:
        for module in (model_parameters, verification):
            patch.setattr(module, "element_sums", sums)
            patch.setattr(module, "read", wait)
        stage.push(folders[0], 0)
        assert len(summed) >= 3 * len(shards), "when it arrived, before vLLM goes on, and for the other engines"
        summed.clear(), waits.clear()
        stage.push(folders[1], 1)
    sampled = [shard for shard in shards if is_sampled(shard.local_name.rpartition(".")[0], 1)]
    assert 0 < len(sampled) < len(shards) / 4 and len(summed) == 3 * len(sampled) and len(waits) == 3


def test_a_disagreement_names_engines_rank_and_module():
    same = [{"a": "1", "b": "2"}, {"a": "3"}]
    assert disagreement({0: same, 2: same}) is None
    other = [same[0], {"a": "4"}]
    expected = "after the same push rank 1 of engine 1 and rank 1 of engine 3 hold different weights of a"
    assert disagreement({1: same, 2: same, 3: other}) == expected
    assert "weights of b" in disagreement({0: same, 1: [{"a": "1"}, {"a": "3"}]})

"""Steps that the balance room calls costlier take the real actor longer.

Not covered: a GPU, where small micro-batches do not fill the chip.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scenarios import Layout
from shares import TrainSample

from megatron_rl.balance import fit_cost, plan_microbatches, sample_costs
from megatron_rl.config.balance import BalanceConfig
from megatron_rl.config.policy import ParallelConfig
from megatron_rl.models import read_shape
from megatron_rl.types import Group, Minibatches, Prompt, Rollout, StepBatch, Tokens

STEPS = [[48], [32, 24, 48], [96] * 2, [256], [48] * 10, [768], [384] * 3, [96] * 16, [1536], [768] * 4]
"""Lengths of the samples of each optimizer step: few and many, long and short, 48 to 3,072 tokens."""


@pytest.fixture(scope="module")
def wide_model_folder(tmp_path_factory):
    """Wide enough that matrix products, not Python, take the time."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        intermediate_size=256, vocab_size=512, tie_word_embeddings=False, rope_theta=10000.0,
        max_position_embeddings=2048,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def random_sample(length: int, seed: int) -> TrainSample:
    rng = np.random.default_rng(seed)
    mask = np.arange(length) > 0
    ids = rng.integers(0, 512, length).astype(np.int32)
    tokens = Tokens(ids, mask, np.zeros(length, np.float32), np.where(mask, 0, -1).astype(np.int32))
    return TrainSample(f"sample {seed}", tokens, 0.0, 1 / length, index=seed)


def ranks_of(values) -> np.ndarray:
    return np.argsort(np.argsort(values))


@pytest.mark.deep
def test_step_time_follows_the_predicted_cost(trainers, wide_model_folder):
    shape = read_shape(wide_model_folder)
    groups = [
        Group(Prompt(str(i), (), ""), [Rollout(n, 1, n - 1, 0, "stop") for n in lengths], None, 0)
        for i, lengths in enumerate(STEPS)
    ]
    batch = StepBatch.of_groups(groups, version=0)
    balance = BalanceConfig(max_tokens_per_microbatch=1536)
    active = np.ones(len(batch.names), bool)
    plan = plan_microbatches(batch, active, shape, ParallelConfig(), balance, Minibatches(len(STEPS)))
    minibatches = [
        [[random_sample(int(batch.lengths[s]), s) for s in microbatch] for microbatch in ranks[0]]
        for ranks in plan.minibatches
    ]
    [seconds] = trainers.run(
        "time_updates", 1, folder=wide_model_folder, minibatches=minibatches, layout=Layout(), repeats=4
    )
    predicted = [sum(ranks[0]) for ranks in plan.flops]
    assert np.corrcoef(ranks_of(predicted), ranks_of(seconds))[0, 1] > 0.9

    # The same from the timings themselves.
    fit = fit_cost(STEPS, seconds)
    fitted = [sample_costs(np.array(lengths), fit, shape).sum() for lengths in STEPS]
    assert np.corrcoef(ranks_of(fitted), ranks_of(seconds))[0, 1] > 0.9

"""The estimates of times, against calculations by hand for Qwen3-32B and for Qwen3-30B-A3B."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.balance.flops import forward_flops, training_flops
from megatron_rl.config.load import validate
from megatron_rl.config.optimizer import AdamConfig
from megatron_rl.config.policy import ParallelConfig
from megatron_rl.config.schema import GrpoRunConfig, SftRunConfig
from megatron_rl.models import read_shape
from megatron_rl.planning.estimates import (
    Work,
    largest_work,
    most_microbatches,
    planned_microbatches,
    training_seconds,
)
from megatron_rl.planning.parameters import rank_parameters
from megatron_rl.planning.rates import Rates

CONFIGS = Path(__file__).parents[3] / "configs" / "model"
SHAPE = read_shape(CONFIGS / "Qwen3-32B.json")
MIXTURE = read_shape(CONFIGS / "Qwen3-30B-A3B.json")
WORK = Work(np.full(8, 1000), num_updates=1, num_passes=0)
RATE, MIXTURE_RATE = 989e12 * 0.42, 989e12 * 0.36
"""The FLOPs per second that one GPU is taken to reach."""
NVLINK, NIC = 0.8 * 450e9, 0.85 * 50e9
"""The bytes per second."""


def seconds(shape, work=WORK, micro=4, recompute="none", optimizer=AdamConfig(), **parallel) -> float:
    how = {"dtype": "bfloat16", "recompute": recompute, "optimizer": optimizer}
    return training_seconds(work, shape, ParallelConfig(**parallel), micro, **how)


def test_one_gpu_only_computes():
    assert seconds(SHAPE) == pytest.approx(training_flops(WORK.lengths, SHAPE).sum() / RATE)


@pytest.mark.parametrize(("moments", "width"), [("float32", 12), ("bfloat16", 8)])
def test_an_offloaded_state_crosses_the_link_to_the_host_in_each_update(moments, width):
    """Each GPU of TP8 has the state of its eighth of the parameters."""
    work, held = replace(WORK, num_updates=3), rank_parameters(SHAPE, ParallelConfig(tensor=8).mesh, 0)
    kept, offloaded = (
        seconds(SHAPE, work, optimizer=AdamConfig(moments=moments, offload=offload), tensor=8)
        for offload in (False, True)
    )
    assert offloaded - kept == pytest.approx(3 * width * held.total / 55e9)


def test_forward_passes_before_the_updates_are_added():
    work = replace(WORK, num_updates=2, num_passes=2)
    flops = training_flops(WORK.lengths, SHAPE).sum() + 2 * forward_flops(WORK.lengths, SHAPE).sum()
    assert seconds(SHAPE, work) == pytest.approx(flops / RATE)


def test_a_pipeline_waits_while_it_fills_and_drains():
    """Four stages and 12 micro-batches: 15 of 12 turns. The last of four stages has 16 of 64 layers and the output
    layer, and the others wait for it. With two chunks a stage half of the turns are lost."""
    output = 2 * 5120 * 151_936 * 1000
    whole = forward_flops(np.array([1000]), SHAPE)[0]
    slowest = (whole - output) / 4 + output
    expected = seconds(SHAPE) * slowest / whole * 15 / 12
    assert seconds(SHAPE, micro=12, pipeline=4) == pytest.approx(expected)
    assert seconds(SHAPE, micro=12, pipeline=4, virtual=2) == pytest.approx(expected * 13.5 / 15)
    fewer = (whole - output) * 13 / 64 + output
    uneven = seconds(SHAPE, micro=12, pipeline=4, layers=(17, 17, 17, 13))
    assert uneven == pytest.approx(seconds(SHAPE) * max(fewer, (whole - output) * 17 / 64) / whole * 15 / 12)


def test_tensor_parallelism_gathers_and_scatters_inside_the_node():
    """A forward and a backward pass of 64 layers, in each of which attention and MLP gather and scatter 8,000 tokens x
    5,120 x 2 bytes, three quarters of which are of other ranks."""
    sent = 2 * 64 * 2 * 2 * 8000 * 5120 * 2 * 3 / 4
    assert seconds(SHAPE, tensor=4) == pytest.approx(seconds(SHAPE) / 4 + sent / NVLINK)
    again = training_flops(WORK.lengths, SHAPE, "full").sum() / RATE / 4 + 1.5 * sent / NVLINK
    assert seconds(SHAPE, tensor=4, recompute="full") == pytest.approx(again)


def test_data_parallelism_reduces_gradients_and_gathers_weights_in_every_update():
    """Of all parameters, 4 bytes of gradients and 2 of weights; half of them are of the other rank. Two ranks are in
    one node; sixteen are not, so that their bytes take a NIC. Half of the time overlaps with computation."""
    held = rank_parameters(SHAPE, ParallelConfig().mesh, 0).total
    work = replace(WORK, num_updates=3)
    assert seconds(SHAPE, work, data=2) == pytest.approx(seconds(SHAPE) / 2 + 3 * held / 2 * 6 / NVLINK / 2)
    assert seconds(SHAPE, work, data=16) == pytest.approx(seconds(SHAPE) / 16 + 3 * held * 15 / 16 * 6 / NIC / 2)


def test_the_ring_of_context_parallelism_passes_keys_and_values_on():
    """Each of two ranks has 4,000 tokens, whose 2 x 8 x 128 numbers of 2 bytes travel once in the forward pass and
    twice in the backward pass, in 64 layers; half of that overlaps. The two ranks share the optimizer's state, as
    data-parallel ones do."""
    ring = 3 * 64 * 4000 * 2 * 8 * 128 * 2
    shared = seconds(SHAPE, data=2)
    assert seconds(SHAPE, context=2) == pytest.approx(shared + ring / NVLINK / 2)


def test_experts_get_their_tokens_and_send_them_back():
    """48 mixtures, 8 active experts, hidden 2048: each of 8 ranks has 1,000 tokens and sends 7/8 of their copies, out
    and back, in a forward and a backward pass. All experts' gradients stay, because nobody shares an expert."""
    held = rank_parameters(MIXTURE, ParallelConfig(data=8, expert=8).mesh, 0)
    sent = 2 * 2 * 48 * 1000 * 8 * 2048 * 2 * 7 / 8
    expected = seconds(MIXTURE) / 8 + sent / NVLINK + held.dense * 7 / 8 * 6 / NVLINK / 2
    assert seconds(MIXTURE, data=8, expert=8) == pytest.approx(expected)
    assert seconds(MIXTURE) == pytest.approx(training_flops(WORK.lengths, MIXTURE).sum() / MIXTURE_RATE)


def test_experts_on_two_nodes_send_half_of_their_tokens_over_the_nic():
    """Each of 16 ranks has 500 tokens and sends 1/16 of their copies to each of 7 ranks of its node and to each of 8 on
    the other node, at the same time."""
    held = rank_parameters(MIXTURE, ParallelConfig(data=16, expert=16).mesh, 0)
    away = 2 * 2 * 48 * 500 * 8 * 2048 * 2 * 8 / 16
    expected = seconds(MIXTURE) / 16 + away / NIC + held.dense * 15 / 16 * 6 / NIC / 2
    assert seconds(MIXTURE, data=16, expert=16) == pytest.approx(expected)


def test_fp8_has_shares_of_its_own():
    run = config()
    bf16 = Rates.of(run)
    run.policy.megatron.transformer["fp8"] = "hybrid"
    fp8 = Rates.of(run)
    assert (fp8.dense / bf16.dense, fp8.mixture / bf16.mixture) == (0.85 / 0.42, 0.42 / 0.36)


def config(**algorithm) -> GrpoRunConfig:
    return validate(
        GrpoRunConfig,
        {
            "run": {"name": "x", "steps": 1},
            "model": {"path": "nowhere", "dtype": "bfloat16"},
            "data": {"train": "rows"},
            "policy": {"parallel": {"tensor": 4}},
            "rollout": {
                "num_engines": 2,
                "parallel": {"tensor": 4},
                "prompts_per_step": 4,
                "samples_per_prompt": 2,
                "max_prompt_tokens": 10,
                "max_response_tokens": 3,
            },
            "balance": {"max_tokens_per_microbatch": 32},
            "algorithm": algorithm,
        },
    )


def test_the_work_of_a_step_is_that_of_its_longest_samples():
    work = largest_work(config(updates_per_step=2, kl={}))
    assert work.lengths.tolist() == [13] * 8 and (work.num_updates, work.num_passes) == (2, 2)
    assert largest_work(config()).num_passes == 0
    kl_cov = {"loss": {"kind": "kl_cov"}, "updates_per_step": 4}
    assert largest_work(config(**kl_cov)).num_passes == 1 + 3 / 4, "of each later mini-batch before its update, too"
    assert largest_work(config(kl={"place": "reward"}, adv_estimator={"kind": "reinforce_plus_plus"})).num_passes == 2
    without = {"loss": {"kind": "dppo_tv"}, "correction": None, "updates_per_step": 4}
    assert largest_work(config(**without)).num_passes == 0, "its anchor is the engine's policy"
    again = largest_work(config(updates_per_step=2, epochs=3, kl={}))
    assert (again.num_updates, again.num_passes, again.num_epochs) == (6, 2, 3)
    assert largest_work(config(**kl_cov, epochs=2)).num_passes == 1 + 7 / 4
    two = config(updates_per_step=2)
    plan = planned_microbatches(two, SHAPE, ParallelConfig(tensor=4), largest_work(two))
    # 13 tokens are padded to 16, so two samples fill a micro-batch of 32; an update has four samples.
    assert len(plan.minibatches) == 2 and most_microbatches(plan) == 2


def test_the_work_of_a_supervised_step():
    supervised = validate(
        SftRunConfig,
        {
            "run": {"name": "x", "steps": 1},
            "model": {"path": "nowhere"},
            "sft": {"rows": "rows", "rows_per_step": 6, "max_tokens": 16},
            "balance": {"max_tokens_per_microbatch": 32},
        },
    )
    work = largest_work(supervised)
    assert work.lengths.tolist() == [16] * 6 and (work.num_updates, work.num_passes) == (1, 0)
    assert most_microbatches(planned_microbatches(supervised, SHAPE, ParallelConfig(), work)) == 3

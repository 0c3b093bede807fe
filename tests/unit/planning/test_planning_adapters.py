"""What the planner counts of adapters, against counts by hand and against the rows of the weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_planning_memory import config

from megatron_rl.balance import training_flops
from megatron_rl.config.policy import LoraConfig, ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.layout import Engines
from megatron_rl.models import FAMILIES, padded_vocabulary, read_shape, vllm_shards, volume
from megatron_rl.models.adapters import A, B
from megatron_rl.planning.activations import activations, layer_bytes
from megatron_rl.planning.adapters import served_adapters, slot_bytes
from megatron_rl.planning.estimates import Work, training_seconds
from megatron_rl.planning.layouts import parallel_sizes
from megatron_rl.planning.memory import run_memory
from megatron_rl.planning.parameters import checkpoint_bytes, count_parameters, rank_parameters
from megatron_rl.planning.shapes import planned_critic_shape, planned_shape
from megatron_rl.planning.trainer import trainer_memory
from megatron_rl.planning.transfer import planned_transfer
from megatron_rl.types import Adapters, Mesh

CONFIGS = Path(__file__).parents[3] / "configs" / "model"
BASE = read_shape(CONFIGS / "Qwen3-32B.json")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SHAPE = replace(BASE, adapters=Adapters(20, 40.0, ATTENTION))
MIXTURE = replace(read_shape(CONFIGS / "Qwen3-30B-A3B.json"), adapters=Adapters(8, 16.0))
LORA = {"rank": 20, "targets": list(ATTENTION)}
OF_LAYER = 20 * (5120 + 8192 + 2 * (5120 + 1024) + 8192 + 5120)
"""A and B of q, of k and v, and of o: rank x (inputs + outputs)."""
MESH = Mesh(tensor=4, pipeline=4, data=2)


def test_of_frozen_weights_there_are_the_weights_alone():
    """On TP4 A of q, k and v is whole, and B of o; 16 of 64 layers."""
    held, whole = rank_parameters(SHAPE, MESH, 0), rank_parameters(BASE, MESH, 0)
    mine = 16 * 20 * (3 * 5120 + 8192 // 4 + 2 * 1024 // 4 + 8192 // 4 + 5120)
    assert (held.trained, held.frozen, held.matrices) == (mine, whole.trained, mine)
    assert held.weight_bytes("bfloat16") == 2 * (mine + held.padding + whole.trained)
    assert held.gradient_bytes() == 4 * (mine + held.padding)
    assert held.state_bytes(MESH, "bfloat16") == 12 * mine / 2 and held.kept_bytes("bfloat16") == 2 * mine
    assert count_parameters(SHAPE) == (64 * OF_LAYER, FAMILIES["qwen3"].num_parameters(BASE))
    assert checkpoint_bytes(SHAPE, "bfloat16") == 14 * 64 * OF_LAYER


def test_the_output_layers_adapter_is_on_the_last_stage():
    """B has the padding rows of the vocabulary, too; its gradient and the copy in fp32 need memory in the update."""
    both = replace(BASE, adapters=Adapters(20, 40.0, (*ATTENTION, "lm_head")))
    num_rows, mesh = 152_064, Mesh(tensor=8, pipeline=2)
    assert padded_vocabulary(both, 8) == num_rows
    more = [rank_parameters(both, mesh, rank).trained - rank_parameters(SHAPE, mesh, rank).trained for rank in (0, 15)]
    assert more == [0, 20 * (5120 + num_rows // 8)]
    assert count_parameters(both).trained == 64 * OF_LAYER + 20 * (5120 + 151_936)
    needed = [
        activations(shape, ParallelConfig(tensor=8), 0, 8192, width=2, recomputed={"full"}, fused=False).output
        for shape in (SHAPE, both)
    ]
    assert needed[1] - needed[0] == (4 + 4 + 2) * 20 * num_rows // 8


def test_a_critics_value_head_is_trained_with_its_adapters():
    critic = replace(SHAPE, output="value")
    assert count_parameters(critic).trained == 64 * OF_LAYER + 5120
    assert rank_parameters(critic, Mesh(), 0).trained == 64 * OF_LAYER + 5120


def test_experts_have_their_own_adapters():
    held = rank_parameters(MIXTURE, Mesh(data=4, expert=4), 0)
    assert held.expert == 48 * 32 * 8 * 3 * (2048 + 768)


@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj", "down_proj")], ids=["all", "some"])
@pytest.mark.parametrize("engines", [Engines(tensor=2, pipeline=3), Engines(tensor=16)], ids=str)
def test_engines_hold_the_rows_of_b_and_the_columns_of_a_that_they_hold_of_the_weight(targets, engines):
    """With TP16 two ranks hold the same KV head."""
    shape = replace(BASE, adapters=Adapters(3, 6.0, targets))
    for rank, recording in enumerate(served_adapters(shape, engines)):
        weights = vllm_shards(BASE, engines.tensor, rank, pipeline=engines.pipeline)
        boxes = {(shard.hf_name, shard.hf_box) for shard in weights}
        found = {shard.hf_name: shard.hf_box for shard in recording.shards}
        for name in (name for name in found if f".{A}." in name):
            a, b, weight = found[name], found[name.replace(A, B)], name.replace(f"{A}.", "")
            assert (weight, (b[0], a[1])) in boxes and a[0] == b[1] == (0, 3)
        named = Counter(name.split(".")[-2] for name in found)
        layers = [shard.hf_name.split(".")[-2] for shard in weights if shard.hf_name.endswith("proj.weight")]
        expected = sum(not targets or layer in targets for layer in layers)
        assert named[A] == named[B] == expected


def test_a_push_has_the_adapters_and_a_slot_is_wider():
    """On TP4 each rank has a quarter of B of q, k and v, and of A of o. vLLM's slot has rank 32, and room for k, which
    it fuses with q and v."""
    run = config(policy={"lora": LORA})
    plan = planned_transfer(run, SHAPE, MESH)
    of_layer = 3 * 5120 + 8192 // 4 + 2 * 1024 // 4 + 8192 // 4 + 5120
    assert plan.engine_bytes.tolist() == [2 * 64 * 20 * of_layer] * 4
    assert slot_bytes(SHAPE, plan.engines, 2, 0) == 2 * 64 * 32 * of_layer
    assert slot_bytes(replace(SHAPE, adapters=Adapters(20, 1, ("q_proj", "v_proj", "o_proj"))), plan.engines, 2, 0) == (
        2 * 64 * 32 * of_layer
    )
    assert slot_bytes(BASE, plan.engines, 2, 0) == 0


@pytest.mark.parametrize("colocate", [False, True])
def test_the_memory_of_a_run(colocate):
    given = {"algorithm": {"kl": {}}, "cluster": {"colocate": colocate, "mirror": not colocate}}
    run = config(policy={"lora": LORA}, **given)
    assert planned_shape(run).adapters == LoraConfig(**LORA).adapters
    memory, of_base = run_memory(run, SHAPE), run_memory(config(**given), BASE)
    held = rank_parameters(SHAPE, MESH, 0)
    assert "reference policy" in of_base.trainer.host and "reference policy" not in memory.trainer.host
    assert memory.trainer.host["a checkpoint's copy"] == held.trained / 2 * 14
    assert memory.fused and of_base.fused
    parts, base_parts = memory.engine.gpu.parts, of_base.engine.gpu.parts
    assert parts["weights"] == base_parts["weights"]
    slot = slot_bytes(SHAPE, Engines(tensor=4), 2, 0)
    assert parts["slot of the adapters"][2] == slot
    assert parts["KV cache"][2] == base_parts["KV cache"][2] - slot
    if not colocate:  # an evaluation keeps its version
        of_two = run_memory(config(policy={"lora": LORA}, rollout={"max_lag": 1}, **given), SHAPE).engine.gpu.parts
        assert of_two["slot of the adapters"][2] == 2 * slot
    sent = 2 * held.trained
    assert memory.trainer.parts["the adapters as a push sends them"] == (sent, sent, sent)
    if colocate:
        assert memory.engine.gpu.host == {"lent to the trainers": parts["weights"][2] + slot}
        assert not of_base.engine.gpu.host
    else:
        assert memory.trainer.host["4 mirrors"] == 4 * (2 * held.trained + 12 * held.trained / 2)


@pytest.mark.parametrize("lora", [{"rank": 20, "targets": list(ATTENTION)}, {"rank": 8}], ids=["some", "experts too"])
def test_a_push_of_merged_weights_has_the_size_of_the_model(lora):
    """Engines and the plan are a run's that trains all weights, with Megatron's local layers; the trainer's memory is
    the adapters', but for the copy that a push sends."""
    sizes = {"parallel": {"tensor": 4, "data": 2, "expert": 8, "expert_tensor": 1}}
    local = {"layers": "local"}
    run = config(policy=sizes | {"lora": lora}, rollout={"lora": "merged"}, model=local)
    full, served = config(policy=sizes, model=local), config(policy=sizes | {"lora": lora}, model=local)
    shape, mesh = replace(MIXTURE, adapters=LoraConfig(**lora).adapters), run.policy.parallel.mesh
    plan = planned_transfer(run, shape, mesh)
    assert plan.digest == planned_transfer(full, shape.base, mesh).digest
    memory = run_memory(run, shape)
    assert memory.engine == run_memory(full, shape.base).engine
    ours, theirs = memory.trainer.parts, run_memory(served, shape).trainer.parts
    push = {"the adapters as a push sends them", "rows that a push merges (fp32)"}
    assert ours.keys() & push == {"rows that a push merges (fp32)"}
    assert theirs.keys() & push == {"the adapters as a push sends them"}
    assert ours["rows that a push merges (fp32)"] == (0.0, 2**25, 0.0)
    of_both = ("weights", "gradients", "optimizer state")
    assert [ours[part] for part in of_both] == [theirs[part] for part in of_both]


def test_experts_that_no_push_brings_are_not_repacked():
    of_attention = replace(MIXTURE, adapters=Adapters(8, 16.0, ATTENTION))
    sizes = {"parallel": {"tensor": 4, "data": 2, "expert": 8, "expert_tensor": 1}}
    blackwell = {"gpu_memory_gb": 180}
    run = config(policy=sizes | {"lora": {"rank": 8, "targets": list(ATTENTION)}}, cluster=blackwell)
    phases = zip(*run_memory(run, of_attention).engine.gpu.parts.values(), strict=True)
    assert len({sum(sizes) for sizes in phases}) == 1
    whole = run_memory(config(policy=sizes, cluster=blackwell), of_attention.base).engine.gpu
    assert "experts before vLLM repacks them" in whole.parts


def test_a_critic_has_adapters_of_its_own():
    sections = {"algorithm": {"adv_estimator": {"kind": "gae"}}, "policy": {"lora": LORA}}
    lora = {"rank": 4, "targets": "all-linear"}
    run = config(critic={"lora": lora}, **sections)
    shape = planned_critic_shape(run)
    assert shape.value_head and shape.adapters == LoraConfig(**lora).adapters
    assert planned_critic_shape(config(critic={}, **sections)).adapters is None


def test_a_layer_keeps_a_x_for_each_fused_weight():
    """q, k, v of all tokens, and o of the rank's tokens."""
    parallel = ParallelConfig(tensor=4)
    layer = SHAPE.layers[0]
    more = layer_bytes(SHAPE, parallel, layer, 2, fused=False) - layer_bytes(BASE, parallel, layer, 2, fused=False)
    assert more == 2 * 20 * (3 + 1 / 4)
    one = ParallelConfig(), MIXTURE.layers[0], 2
    of_experts = layer_bytes(MIXTURE, *one, fused=False)
    assert of_experts - layer_bytes(MIXTURE.base, *one, fused=False) == 2 * 8 * (3 + 1 + 8 * 3)


def test_a_frozen_output_layer_has_no_gradient():
    found = [
        activations(shape, ParallelConfig(), 0, 8192, width=2, recomputed={"full"}, fused=False).output
        for shape in (BASE, SHAPE)
    ]
    assert found[0] - found[1] == pytest.approx(6 * 5120 * 151_936, rel=0.01)


def test_a_step_computes_no_gradient_of_frozen_weights():
    """An update: two passes of the weights in place of three, and no gradients of them to reduce."""
    work = Work(lengths=np.full(8, 1000), num_updates=1, num_passes=0)

    def seconds(shape, **parallel):
        how = {"dtype": "bfloat16", "recompute": "none"}
        return training_seconds(work, shape, ParallelConfig(**parallel), 4, **how)

    flops = {shape: training_flops(work.lengths, shape).sum() for shape in (BASE, SHAPE)}
    assert seconds(SHAPE) / seconds(BASE) == pytest.approx(flops[SHAPE] / flops[BASE])
    assert 2 / 3 < flops[SHAPE] / flops[BASE] < 0.68  # attention scores and values have two gradients
    communicated = [seconds(shape, data=2) - seconds(shape) / 2 for shape in (BASE, SHAPE)]
    assert communicated[1] < 0.01 * communicated[0]


def test_layouts_have_context_parallelism_where_the_base_models_do():
    """With Transformer Engine's layers."""

    def contexts(shape, **changes):
        return {parallel.context for parallel in parallel_sizes(config(**changes), shape, 8)}

    assert contexts(SHAPE, policy={"lora": LORA}) == contexts(BASE) > {1, 2}
    assert contexts(SHAPE, policy={"lora": LORA}, model={"layers": "local"}) == {1}


def test_one_node_is_enough_for_32_billion_parameters():
    """The 65.5 GB of bf16 weights are 8.2 GB on each rank of TP8. Full training has nine times as much: fp32 gradients,
    and 12 bytes of state for each parameter."""
    model = ModelConfig(path=Path("m"), dtype="bfloat16", recompute="full")
    memory = trainer_memory(SHAPE, model, PolicyConfig(parallel=ParallelConfig(tensor=8)), 9216, on_gpus=True)
    fixed = [memory.parts[part][0] for part in ("weights", "gradients", "optimizer state")]
    whole = trainer_memory(BASE, model, PolicyConfig(parallel=ParallelConfig(tensor=8)), 9216, on_gpus=True)
    full = [whole.parts[part][0] for part in ("weights", "gradients", "optimizer state")]
    assert sum(fixed) < 10e9 and sum(full) == pytest.approx(9 * full[0])


def test_the_bytes_of_a_rank_are_counted_once():
    [recording] = served_adapters(SHAPE, Engines())
    assert sum(volume(shard.local_box) for shard in recording.shards) == 64 * OF_LAYER

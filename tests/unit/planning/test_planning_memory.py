"""The memory of GPUs by hand: layers, stages, buffers, communicators, engines; what does not fit is refused.

tests/ranks/test_actor_memory.py compares the same functions with what the actor allocates.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_models import changed

from megatron_rl.config.load import load_config, validate
from megatron_rl.config.optimizer import AdamConfig, MuonConfig
from megatron_rl.config.policy import ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.models import FAMILIES, read_shape
from megatron_rl.planning.activations import activations, layer_bytes, mask_bytes
from megatron_rl.planning.engine import ENGINE_WORK_BYTES, activation_bytes, sequence_bytes
from megatron_rl.planning.layouts import MAX_SHOWN, fitting_layouts, parallel_sizes
from megatron_rl.planning.memory import run_memory
from megatron_rl.planning.parameters import checkpoint_bytes, largest_stage, rank_parameters
from megatron_rl.planning.rates import H100
from megatron_rl.planning.trainer import num_communicators, trainer_memory
from megatron_rl.planning.transfer import COMMUNICATOR_BYTES, PEER_BYTES, bridge_communicators, planned_transfer
from megatron_rl.types import DeltaNet, Mesh

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs" / "model"
SHAPE = read_shape(CONFIGS / "Qwen3-32B.json")
MIXTURE = read_shape(CONFIGS / "Qwen3-30B-A3B.json")
PARALLEL = ParallelConfig(tensor=4, pipeline=4)


def test_a_fused_layer_by_hand():
    """Inputs of two norms and two blocks and the residual: 5 x 5120; q, k, v: 8192 + 2 x 1024; q and k before and after
    their norm's rotation: 2 x 9216; attention's output: 8192; gate, up and their product: 3 x 25600."""
    elements = 25_600 + 10_240 + 18_432 + 8_192 + 76_800
    assert layer_bytes(SHAPE, PARALLEL, SHAPE.layers[0], 2, fused=True) == elements * 2 / 4 == 69_632


def test_without_sequence_parallelism_norms_are_whole():
    parallel = ParallelConfig(tensor=4, sequence=False)
    assert layer_bytes(SHAPE, parallel, SHAPE.layers[0], 2, fused=True) == 69_632 + 25_600 * 2 * 3 / 4


def test_a_fused_mixture_keeps_the_tokens_that_its_experts_get():
    """Eight active experts: each gets a copy of the token, and keeps gate, up and their product. The router's 128
    scores are kept twice in fp32, and four numbers for each active expert."""
    elements = 5 * 2048 + (4096 + 2 * 512) + 2 * 4608 + 4096 + 8 * (2048 + 3 * 768)
    assert layer_bytes(MIXTURE, ParallelConfig(), MIXTURE.layers[0], 2, fused=True) == 2 * elements + 4 * (256 + 32)


def test_fused_latent_attention_by_hand():
    """DeepSeek-V3's first layer on eight ranks. Inputs of two norms and two blocks and the residual: 5 x 7168; q and k
    with 192, v and the output with 128 dims a head; the inputs and outputs of two compressions, 1536 and 512, and 64
    rotated dims; gate, up and their product: 3 x 18432. Each rank has the down projections whole."""
    shape, parallel = read_shape(CONFIGS / "DeepSeek-V3.json"), ParallelConfig(tensor=8)
    elements = 5 * 7168 + 128 * (2 * 192 + 2 * 128) + 2 * (1536 + 512) + 64 + 3 * 18_432
    assert layer_bytes(shape, parallel, shape.layers[0], 2, fused=True) == elements * 2 / 8
    whole, split = (rank_parameters(shape, parallel.mesh, 0, fused) for fused in (True, False))
    assert whole.dense - split.dense == 61 * 7168 * (1536 + 512 + 64) * 7 / 8
    assert whole.expert == split.expert and whole.matrices - split.matrices == whole.dense - split.dense


def test_masks_of_local_layers_count_in_fp32():
    """gpt-oss has a window of 128 tokens in every second layer, and sinks in all; OLMo 3 has windows of 4,096."""
    gpt, olmo = (read_shape(CONFIGS / f"{name}.json") for name in ("gpt-oss-120b", "Olmo-3-32B-Think-DPO"))
    assert [mask_bytes(layer, 8192) for layer in gpt.layers[:2]] == [4 * 128 * 255, 4 * 8192 * 8193]
    assert [mask_bytes(olmo.layers[n], 8192) for n in (0, 3)] == [4 * 4096 * 8191, 0]
    assert mask_bytes(olmo.layers[0], 4096) == 0, "no token is outside of the window"
    sizes = {width: activations(olmo, PARALLEL, 0, 8192, width=width, recomputed=(), fused=False) for width in (2, 4)}
    own = {width: layer_bytes(olmo, PARALLEL, olmo.layers[0], width, fused=False) * 8192 for width in (2, 4)}
    assert sizes[4].layer - own[4] == 4 * 4096 * 8191 and sizes[2].layer == own[2]


def of_stage(stage: int, parallel=PARALLEL, recompute: str = "full", num_tokens: int = 16_384):
    return activations(SHAPE, parallel, stage, num_tokens, width=2, recomputed={recompute} - {"none"}, fused=True)


def test_stages_hold_as_many_micro_batches_as_are_in_flight():
    first = of_stage(0)
    assert first.kept == 4 * 16 * 5120 * 16_384 * 2 / 4  # four micro-batches, 16 layers, one input each
    assert first.layer == 2 * 69_632 * 16_384 and first.output == 0
    assert of_stage(2).kept == first.kept / 2
    assert of_stage(0, recompute="none").kept == 4 * 16 * 69_632 * 16_384


def test_the_last_stage_also_has_the_output_layer():
    """The input of the last norm; hidden states of all tokens, which are not split over the ranks; and two indices and
    four numbers of each token."""
    hidden = 5120 * 16_384 * 2
    last = of_stage(3)
    assert last.kept == of_stage(0).kept / 4 + hidden / 4 + hidden + 32 * 16_384
    # Three chunks of 256 MiB, the gradient of the hidden states, and that of the weight in fp32 and in bf16.
    assert last.output == 3 * 2**28 + hidden + 151_936 / 4 * 5120 * 6
    assert of_stage(3, num_tokens=64).output == 3 * 64 * 151_936 / 4 * 4 + 5120 * 64 * 2 + 151_936 / 4 * 5120 * 6


def test_uneven_stages_keep_what_their_own_layers_need():
    parallel = ParallelConfig(tensor=4, pipeline=4, layers=(10, 22, 16, 16))
    one = 5120 * 16_384 * 2 / 4
    assert of_stage(0, parallel).kept == 4 * 10 * one and of_stage(1, parallel).kept == 3 * 22 * one
    model = ModelConfig(path=Path("nowhere"), dtype="bfloat16", recompute="full")
    assert (
        trainer_memory(SHAPE, model, PolicyConfig(parallel=parallel), 16_384, on_gpus=True).name == "trainer, stage 1"
    )


def test_the_interleaved_schedule_has_more_chunks_in_flight():
    """Two chunks of 8 layers in each of 4 stages: 2 x 3 + 4 + 1 = 11 passes in flight on the first stage; the first
    four and the last three are of chunk 0, the others of chunk 1. Chunk 0 of stage 0 has 6 layers, chunk 1 has 10. Each
    pass keeps its output, too."""
    layers = (6, 8, 8, 8, 10, 8, 8, 8)
    parallel = ParallelConfig(tensor=4, pipeline=4, virtual=2, layers=layers)
    one = 5120 * 16_384 * 2 / 4
    assert of_stage(0, parallel).kept == (4 * 6 + 4 * 10 + 3 * 6 + 11) * one


def test_the_buffers_of_the_distributed_optimizer_are_padded():
    """Every parameter begins at a multiple of 64, and the buffer ends at a multiple of 128 and of the ranks. With TP8
    the norms of q and k have 128, all others many times 64; so only the end is padded: for three ranks to 384."""
    shape = replace(SHAPE, layers=SHAPE.layers[:2])
    alone, shared = (rank_parameters(shape, Mesh(tensor=8, data=data), 0) for data in (1, 3))
    assert alone.padding == 0 and alone.total == shared.total
    assert (shared.total + shared.padding) % 384 == 0 and 0 <= shared.padding < 384
    odd = rank_parameters(changed(shape, attention={"head_dim": 100}), Mesh(tensor=8, data=2), 0)
    # Two norms of 100 in each of two layers begin 28 elements later than without padding.
    assert odd.padding >= 4 * 28 and odd.gradient_bytes() == 4 * (odd.total + odd.padding)
    assert odd.weight_bytes("bfloat16") == 2 * (odd.total + odd.padding)


def test_the_padding_of_the_vocabulary_is_held():
    """OLMo's 100,278 tokens on 8 ranks are 100,352 rows, 12,544 on each rank."""
    shape = read_shape(CONFIGS / "Olmo-3-32B-Think-DPO.json")
    with_ends, whole = rank_parameters(shape, Mesh(tensor=8), 7), rank_parameters(shape, Mesh(tensor=8), 0)
    assert with_ends.total == whole.total
    layers = rank_parameters(replace(shape, vocab_size=0), Mesh(tensor=8), 0)
    assert whole.total - layers.total == 2 * 12_544 * 5120


def test_the_ranks_of_671b_hold_every_parameter_once():
    """16 uneven stages of 64 ranks, which share all experts: 671 billion parameters, of which the routers' biases have
    no gradient and stay fp32."""
    shape = read_shape(CONFIGS / "DeepSeek-V3.json")
    mesh = Mesh(pipeline=16, data=64, expert=64, layers=(3, *[4] * 14, 2))
    stages = [rank_parameters(shape, mesh, stage * 64) for stage in range(16)]
    assert sum(held.dense + held.constant + 64 * held.expert for held in stages) == 671_026_419_200
    assert FAMILIES[shape.family].num_parameters(shape) == 671_026_419_200
    assert stages[0].constant == 0 and stages[1].constant == 4 * 256
    assert stages[1].weight_bytes("bfloat16") == 2 * (stages[1].dense + stages[1].expert + stages[1].padding) + 4 * 1024


def test_the_state_of_muon_by_hand():
    """A layer of Qwen3-32B has matrices of 5120 x (2 x 8192 + 2 x 1024) and 3 x 5120 x 25600, and norms of 2 x 5120 and
    2 x 128; embedding and output layer have 151936 x 5120 each."""
    matrices, norms = 5120 * (2 * 8192 + 2 * 1024) + 3 * 5120 * 25_600, 2 * 5120 + 2 * 128
    shape = replace(SHAPE, layers=SHAPE.layers[:2])
    others = 2 * norms + 2 * 151_936 * 5120 + 5120
    muon, mesh = MuonConfig(), Mesh(data=4)
    held = rank_parameters(shape, mesh, 0)
    assert (held.matrices, held.dense - held.matrices) == (2 * matrices, others)
    # A copy and one momentum of a matrix; a copy and two moments of all else. Without bf16 there is no copy.
    assert held.state_bytes(mesh, "bfloat16", muon) == (2 * matrices * 8 + others * 12) / 4
    assert held.state_bytes(mesh, "float32", muon) == (2 * matrices * 4 + others * 8) / 4
    assert held.state_bytes(mesh, "float16", muon) == held.state_bytes(mesh, "bfloat16", muon)
    assert checkpoint_bytes(shape, "bfloat16", muon) == 2 * matrices * 10 + others * 14
    assert checkpoint_bytes(shape, "bfloat16") == (2 * matrices + others) * 14


def test_the_experts_of_muon_have_one_momentum():
    mesh = Mesh(data=8, expert=4)
    held = rank_parameters(MIXTURE, mesh, 0)
    assert held.expert == 48 * 32 * 3 * 2048 * 768
    assert held.matrices == 48 * (2048 * (2 * 4096 + 2 * 512) + 128 * 2048)  # attention and router
    expected = 8 * held.expert / 2 + (8 * held.matrices + 12 * (held.dense - held.matrices)) / 8
    assert held.state_bytes(mesh, "bfloat16", MuonConfig()) == expected


def test_an_update_of_muon_needs_room_for_its_largest_matrix():
    """Five numbers for each element of 5120 x 25600, and three products of 5120 x 5120, in fp32; with DP also what a
    rank gives away and gets."""
    model = ModelConfig(path=Path("nowhere"), dtype="bfloat16")
    work = 4 * (5 * 5120 * 25_600 + 3 * 5120**2)
    row, muon = "optimizer state in an update", MuonConfig()
    alone = trainer_memory(
        SHAPE, model, PolicyConfig(parallel=ParallelConfig(tensor=8), optimizer=muon), 1024, on_gpus=True
    )
    assert alone.parts[row] == (work, 0.0, 0.0)
    shared = trainer_memory(
        SHAPE, model, PolicyConfig(parallel=ParallelConfig(tensor=8, data=4), optimizer=muon), 1024, on_gpus=True
    )
    held = rank_parameters(SHAPE, Mesh(tensor=8, data=4), 0)
    assert shared.parts[row][0] == work + 2 * 4 * held.matrices / 4


@pytest.mark.deep
def test_layouts_of_muon_are_never_offloaded():
    policy = {"parallel": {"tensor": 4, "pipeline": 4, "data": 2}, "optimizer": {"kind": "muon"}}
    layouts = fitting_layouts(config(policy=policy), SHAPE)
    assert layouts and all(layout.offload is None for layout in layouts)
    assert not any("offload" in key for layout in layouts for key in (*layout.overrides, layout.label))
    stages = ParallelConfig(pipeline=4, layers=(15, 17, 17, 15))
    assert replace(layouts[0], parallel=stages).label.startswith("PP4 of 15+17x2+15 layers, recompute ")


def test_communicators_are_those_of_groups_of_several_ranks():
    assert num_communicators(Mesh()) == 0
    assert num_communicators(Mesh(data=2)) == 2  # all ranks, data parallelism
    assert num_communicators(Mesh(tensor=4, pipeline=4, data=2)) == 5  # and TP, PP, both together
    assert num_communicators(Mesh(tensor=2, data=4, expert=4, expert_tensor=1)) == 6  # TP twice, EP, expert-DP


def config(parallel=None, **sections) -> GrpoRunConfig:
    given = {
        "run": {"name": "x", "steps": 1},
        "model": {"path": "models/Qwen3-32B", "recompute": "full"},
        "data": {"train": "rows"},
        "policy": {"parallel": parallel or {"tensor": 4, "pipeline": 4, "data": 2}},
        "rollout": {
            "num_engines": 8,
            "parallel": {"tensor": 4},
            "prompts_per_step": 16,
            "samples_per_prompt": 4,
            "max_prompt_tokens": 1024,
            "max_response_tokens": 8192,
        },
        "balance": {"max_tokens_per_microbatch": 16384},
        "cluster": {"gpus_per_trainer": 1, "gpus_per_engine_rank": 1, "gpus_per_node": 8},
    }
    for name, section in sections.items():
        given[name] = given.get(name, {}) | section
    return validate(GrpoRunConfig, given)


def test_the_communicators_of_the_bridge():
    """TP4 x PP4 x DP2 feeds 8 engines of TP4: 224 pairs, 7 for each of 32 trainer ranks. Four stages with two replicas
    each may send to an engine rank. On shared GPUs every pair of GPUs has a communicator of its own."""
    mesh = Mesh(tensor=4, pipeline=4, data=2)
    plan = planned_transfer(config(), SHAPE, mesh)
    assert plan.num_routes == 224
    shared = COMMUNICATOR_BYTES + 7 * PEER_BYTES, COMMUNICATOR_BYTES + 8 * PEER_BYTES
    assert bridge_communicators(plan) == shared
    own = bridge_communicators(plan, colocated=True)
    assert own.trainer == 7 * COMMUNICATOR_BYTES and 7 * COMMUNICATOR_BYTES <= own.engine <= 8 * COMMUNICATOR_BYTES
    chained = planned_transfer(config(bridge={"chains": 2}), SHAPE, mesh)  # and four routes into a rank
    assert bridge_communicators(chained).engine == 2 * COMMUNICATOR_BYTES + 5 * PEER_BYTES


def test_the_phases_of_a_run_by_hand():
    memory = run_memory(config(algorithm={"kl": {}}), SHAPE)
    trainer, engine = memory.trainer, memory.engine
    held = rank_parameters(SHAPE, Mesh(tensor=4, pipeline=4, data=2), 0)
    assert trainer.host == {
        "a checkpoint's copy": held.total / 2 * 14,
        "reference policy": (held.total + 5120) * 2,  # the last stage has the final norm too
    }
    always = held.total * (2 + 4) + held.total / 2 * 12 + (5 + 1) * COMMUNICATOR_BYTES + 7 * PEER_BYTES + 2 * 64 * 2**20
    used = of_stage(0)
    assert trainer.name == "trainer, stage 0"
    assert trainer.totals == pytest.approx((always + used.kept + used.layer, always, always), rel=1e-6)
    # Three hidden states, and gate, up and their product on each of four ranks, of vLLM's 16,384 tokens a step.
    work = ENGINE_WORK_BYTES + 16_384 * 2 * (3 * 5120 + 3 * 25_600 / 4)
    cache = 0.85 * 85.5e9 - engine.gpu.parts["weights"][0] - work
    assert engine.gpu.parts["KV cache"][0] == pytest.approx(cache)
    # Two of eight KV heads on each rank, 64 layers, 2 x 128 numbers of 2 bytes: 65,536 bytes a token.
    assert sequence_bytes(SHAPE, 4, 9216, 2, range(64)) == 9216 * 65_536
    assert engine.longest == int(cache // (9216 * 65_536)) and engine.half == int(cache // (4608 * 65_536))
    assert memory.problems == []


def test_a_vision_tower_is_on_the_first_stages():
    """704,573,696 parameters less (8192 - 5120) x 5121 of the tower of 72B, in two bytes. vLLM splits its linear layers
    over the ranks of each stage, and not the 1280 x 1176 weights of patches, 65 norms and the biases of outputs. It
    keeps tower outputs of 16,384 tokens, which a step computes; a Qwen3-VL has four rows of them for each."""
    shape = read_shape(CONFIGS / "Qwen2.5-VL-32B-Instruct.json")
    number, whole = 704_573_696 - 3072 * 5121, 1280 * (1176 + 65 + 2 * 32) + 5120
    local = {"layers": "local"}
    memory, without = (run_memory(config(model=local), one) for one in (shape, replace(shape, vision=None)))
    assert memory.trainer.name == "trainer, stage 0"
    part = memory.trainer.parts["vision tower and its outputs"]
    assert part == (2 * number + 2**30,) * 3
    assert sum(memory.trainer.totals) - sum(without.trainer.totals) == pytest.approx(sum(part))
    engines = [one.engine.gpu.parts for one in (memory, without)]
    assert engines[0]["weights"][0] - engines[1]["weights"][0] == 2 * ((number - whole) / 4 + whole)
    kept = "outputs of the vision tower"
    on_one = {"colocate": True, "world_size": 32}
    shared = [
        run_memory(config(cluster=on_one, model=local), one).engine.gpu for one in (shape, replace(shape, vision=None))
    ]
    assert [one.host.get("lent to the trainers") for one in shared] == [engines[0]["weights"][0], None]
    trained = run_memory(config(model=local), PolicyConfig(vision_tower="trained").adapted(shape))
    assert trained.engine.gpu.parts["weights"] == engines[0]["weights"]
    assert trained.engine.longest == memory.engine.longest
    # Each of the tokens of four micro-batches may be four patches, of a layer 11 x 1280 + 4 x 3456 numbers and 8 x 1280
    # bytes each, or its input; in front of the layers 1176 numbers, and behind them 4 x 1280 and as many bytes twice.
    patches, ends = 4 * 4 * 16_384, 2 * 1176 + 12 * 1280
    whole_layers = run_memory(
        config(model=local | {"recompute": "none"}), PolicyConfig(vision_tower="trained").adapted(shape)
    )
    activations_of_tower = "activations of the vision tower"
    assert whole_layers.trainer.parts[activations_of_tower] == (patches * (32 * 66_048 + ends), 0, 0)
    assert trained.trainer.parts.pop(activations_of_tower) == (patches * (32 * 2560 + ends), 0, 0)
    assert trained.trainer.parts.pop("the layer of the vision tower being computed")[0] == patches / 4 * 66_048
    without.trainer.parts.pop("the layer being computed")
    more = {name: part[0] - without.trainer.parts[name][0] for name, part in trained.trainer.parts.items()}
    ways = config().policy.parallel.data
    assert more["weights"] == pytest.approx(2 * number, abs=2**12) and len(more) == len(without.trainer.parts)
    assert more["gradients"] == pytest.approx(4 * number, abs=2**12)
    assert more["optimizer state"] == pytest.approx(12 * number / ways)
    assert engines[0][kept] == (16_384 * 5120 * 2,) * 3 and kept not in engines[1]
    parallel = {"tensor": 4, "pipeline": 2, "data": 4, "expert": 16, "expert_tensor": 1}
    deep = run_memory(config(parallel), read_shape(CONFIGS / "Qwen3-VL-235B-A22B-Instruct.json"))
    assert deep.engine.gpu.parts[kept][0] == 16_384 * 4 * 4096 * 2


def test_a_window_and_shared_heads_bound_the_cache():
    windowed = changed(SHAPE, range(48), attention={"window": 1000})
    every = range(64)
    assert sequence_bytes(windowed, 8, 4000, 2, every) == (16 * 4000 + 48 * 1000) * 2 * 128 * 2
    assert sequence_bytes(windowed, 16, 4000, 2, every) == sequence_bytes(windowed, 8, 4000, 2, every)  # one head each
    assert sequence_bytes(windowed, 8, 4000, 2, range(40, 60)) == (12 * 4000 + 8 * 1000) * 2 * 128 * 2


def test_states_of_linear_attention_do_not_grow_with_the_answer():
    """Qwen3-Next's sizes: 36 of 48 layers have 32 states of 128 x 128 and 3 x 8192 inputs of the convolution, 12 have
    2 KV heads of 256."""
    delta = DeltaNet(16, 32, 128, 128, convolution=4, interleaved=True)
    linear = [layer for layer in range(48) if (layer + 1) % 4]
    shape = changed(replace(SHAPE, layers=SHAPE.layers[:48]), attention={"num_kv_heads": 2, "head_dim": 256})
    shape = changed(shape, linear, attention=delta)
    states = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert sequence_bytes(shape, 1, 9216, 2, range(48)) == states + 12 * 9216 * 2 * 2 * 256 * 2
    assert sequence_bytes(shape, 2, 100, 2, range(48)) == states / 2 + 12 * 100 * 2 * 256 * 2
    assert sequence_bytes(shape, 1, 9216, 2, range(3)) == sequence_bytes(shape, 1, 1, 2, range(3))


def test_the_stages_of_an_engine_by_hand():
    """64 layers of 489,709,824 parameters in three stages of 21, 22 and 21, each over four ranks but for the norms. The
    first stage has the embedding, and the last one the output layer and a norm. The middle stage has the longest rows
    in the KV cache, and no matrix of the vocabulary."""
    memory = run_memory(config(rollout={"parallel": {"tensor": 4, "pipeline": 3}}), SHAPE)
    stages = memory.engine.stages
    assert [stage.name for stage in stages] == ["engine, stage 0", "engine, stage 1", "engine, stage 2"]
    layer, norms, vocabulary = 5120 * (10240 + 8192 + 3 * 25600), 2 * 5120 + 2 * 128, 151936 * 5120
    weights = [2 * (n * (layer / 4 + norms)) + 2 * more for n, more in ((21, vocabulary / 4), (22, 0), (21, 0))]
    weights[2] += 2 * (vocabulary / 4 + 5120)
    assert [stage.parts["weights"][0] for stage in stages] == weights
    work = ENGINE_WORK_BYTES + 16_384 * 2 * (3 * 5120 + 3 * 25_600 / 4)
    caches = [0.85 * 85.5e9 - own - work for own in weights]
    assert [stage.parts["KV cache"][0] for stage in stages] == pytest.approx(caches)
    fitting = [int(cache // (9216 * n * 1024)) for cache, n in zip(caches, (21, 22, 21), strict=True)]
    assert memory.engine.longest == min(fitting) == fitting[1] < fitting[0]
    assert memory.engine.gpu in stages and memory.gpus[1:] == [*stages]
    assert memory.problems == []
    with pytest.raises(ValueError, match="65 pipeline.*the 64.*rollout.parallel.pipeline"):
        run_memory(config(rollout={"parallel": {"tensor": 4, "pipeline": 65}}), SHAPE)


def test_quantised_linear_layers_of_an_engine_have_one_byte_a_number():
    """Qwen3-30B-A3B over four ranks: embedding, output layer, norms and routers stay in bfloat16."""
    shared = 2 * 151_936 * 2048 / 4 + 2048 + 48 * (2 * 2048 + 2 * 128 + 128 * 2048)
    linear = 48 / 4 * ((2 * 4096 + 2 * 512) * 2048 + 128 * 3 * 768 * 2048)
    run = config({"tensor": 4, "pipeline": 4}, rollout={"quantization": "fp8", "gpu_memory_utilization": 0.7})
    parts = run_memory(run, MIXTURE).engine.gpu.parts
    assert parts["weights"] == (2 * shared + linear,) * 3
    work = parts["activations of a step of vLLM"][0] + ENGINE_WORK_BYTES
    assert parts["KV cache"][0] == pytest.approx(0.7 * 85.5e9 - 2 * shared - linear - work)
    with_experts = run_memory(
        config({"tensor": 4, "pipeline": 4}, rollout={"parallel": {"tensor": 4, "expert": 4}}), MIXTURE
    )
    assert with_experts.engine.gpu.parts["weights"][0] == 2 * (shared + linear)


@pytest.mark.parametrize(
    ("gpu_memory_gb", "rollout", "repacked"),
    [
        (80, {}, False),
        (144, {}, False),
        (180, {}, True),
        (180, {"vllm": {"moe_backend": "triton"}}, False),
        (80, {"vllm": {"moe_backend": "flashinfer_cutlass"}}, True),
        (80, {"quantization": "fp8"}, True),
    ],
)
def test_an_engine_holds_half_of_its_experts_twice_in_a_push_that_repacks_them(gpu_memory_gb, rollout, repacked):
    parallel = {"tensor": 2, "data": 8, "expert": 8, "expert_tensor": 1}
    cluster = {"gpu_memory_gb": gpu_memory_gb}
    run = config(parallel, model={"path": "models/Qwen3-30B-A3B"}, cluster=cluster, rollout=rollout)
    parts = run_memory(run, MIXTURE).engine.gpu.parts
    experts = 48 * 128 * 3 * 768 * 2048 * 2 / 4
    held = {
        "experts before vLLM repacks them": experts / 2,
        "a layer's experts, made again to verify them": experts / 48,
    }
    assert {name: parts[name] for name in held if name in parts} == (
        {n: (0, b, 0) for n, b in held.items()} if repacked else {}
    )


def test_the_activations_of_an_engines_step_by_hand():
    """Qwen3-30B-A3B: eight active experts of 768, over four ranks or whole. The kernels' buffers have rows of the
    larger of an expert's sizes and the hidden size, 2048."""
    rollout = config().rollout
    assert activation_bytes(MIXTURE, rollout, 1000, 2) == 1000 * 2 * 2048 * (3 + 8 * 2 + 1)
    wide = changed(MIXTURE, mlp={"ffn_size": 1536})
    whole = config(rollout={"parallel": {"tensor": 4, "expert": 4}}).rollout
    assert activation_bytes(wide, whole, 1000, 2) == 1000 * 2 * (3 * 2048 + 8 * (2048 + 3072) + 2048)
    run = config(rollout={"vllm": {"max_num_batched_tokens": 1_000_000}})
    assert "lower rollout.vllm.max_num_batched_tokens" in run_memory(run, SHAPE).problems[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model": {"recompute": "none"}},
            ["training needs 102", "trainer, stage 0", "activations kept for the backward passes", "recompute to full"],
        ),
        (
            {"parallel": {"tensor": 4}},
            ["optimizer state", "set policy.optimizer.offload, or policy.optimizer.moments"],
        ),
        ({"rollout": {"gpu_memory_utilization": 1.0}}, ["(engine)", "lower rollout.gpu_memory_utilization"]),
        (
            {"rollout": {"parallel": {"tensor": 1}}},
            ["KV cache", "holds no sequence of the largest length", "raise rollout.parallel.tensor"],
        ),
        (
            {"bridge": {"bucket_mib": 40_000}},
            ["training needs", "are two buffers of the bridge", "lower bridge.bucket_mib"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_phase_size_and_advice(changes, said):
    memory = run_memory(config(**changes), SHAPE)
    problems = "\n".join(memory.problems)
    assert all(words in problems for words in said), problems


def test_a_cpu_has_no_limit_and_no_communicator():
    run = config(cluster={"gpus_per_trainer": 0, "gpus_per_engine_rank": 0}, model={"recompute": "none"})
    memory = run_memory(run, SHAPE)
    assert memory.problems == [] and memory.engine is None and not memory.fused
    assert not any("NCCL" in part for part in memory.trainer.parts)


def test_ranks_that_share_a_gpu_share_its_memory():
    run = config(cluster={"gpus_per_trainer": 0.25, "gpus_per_engine_rank": 1})
    memory = run_memory(run, SHAPE)
    assert memory.trainer_limit == 80e9 / 4
    assert any("on a GPU of 20 GB (trainer" in problem for problem in memory.problems)


@pytest.mark.parametrize("shape", [SHAPE, MIXTURE], ids=["dense", "mixture"])
def test_all_ways_to_split_a_model_divide_it_and_have_its_ranks(shape):
    run = config(
        {"tensor": 4, "data": 4}, model={"path": "models/Qwen3-30B-A3B" if shape.mixture else "models/Qwen3-32B"}
    )
    found = list(parallel_sizes(run, shape, 8))
    keys = {tuple(parallel.model_dump().items()) for parallel in found}
    assert len(keys) == len(found) > 10
    for parallel in found:
        assert parallel.mesh.world_size == 16 and parallel.tensor <= 8
        FAMILIES[shape.family].check_mesh(shape, parallel.mesh)
    assert ParallelConfig(tensor=4, data=4) in found
    if shape.mixture:
        assert ParallelConfig(tensor=2, data=8, expert=8, expert_tensor=1) in found


def test_stages_that_do_not_divide_the_layers_are_balanced():
    """94 layers on 4 or 8 stages."""
    run = config({"pipeline": 2, "data": 4}, model={"path": "models/Qwen3-235B-A22B"})
    found = list(parallel_sizes(run, read_shape(CONFIGS / "Qwen3-235B-A22B.json"), 8))
    uneven = {parallel.pipeline: parallel.layers for parallel in found if parallel.layers}
    assert set(uneven) == {4, 8} and all(sum(layers) == 94 for layers in uneven.values())
    assert uneven[4][-1] < uneven[4][0]  # the last stage has the output layer


def test_layouts_that_fit_come_fastest_first():
    run = config(model={"recompute": "none"})
    layouts = fitting_layouts(run, SHAPE)
    assert 0 < len(layouts) <= MAX_SHOWN + 1
    seconds = [layout.seconds for layout in layouts]
    assert seconds == sorted(seconds)
    for layout in layouts:
        assert layout.parallel.mesh.world_size == 32
        parallel = layout.parallel.model_dump(exclude_defaults=True)
        policy = {"parallel": parallel, "optimizer": {"offload": layout.offload}}
        changed = config(policy=policy, model={"recompute": layout.recompute})
        assert run_memory(changed, SHAPE).trainer == layout.memory and max(layout.memory.totals) <= 80e9


@pytest.mark.deep
def test_layouts_on_shared_gpus_fit_beside_the_engine_and_into_the_nodes():
    """A sleeping engine leaves room in training, so the push and the generation decide, and what is lent and offloaded
    is in the nodes' memory."""
    policy = {"parallel": {"tensor": 4, "pipeline": 4, "data": 2}}
    cluster = {"gpus_per_trainer": 1, "gpus_per_engine_rank": 1, "gpus_per_node": 8, "colocate": True}
    rollout = {"num_engines": 8, "gpu_memory_utilization": 0.8}

    def shared(policy: dict, model: dict, **limits: float) -> GrpoRunConfig:
        return config(policy=policy, model=model, cluster=cluster | limits, rollout=rollout)

    found = {limit: fitting_layouts(shared(policy, {}, node_memory_gb=limit), SHAPE) for limit in (2000, 300)}
    assert found[300] and {one.label for one in found[300]} != {one.label for one in found[2000]}
    for limit, layouts in found.items():
        for one in layouts:
            chosen = {"parallel": one.parallel.model_dump(), "optimizer": {"offload": one.offload}}
            changed = shared(chosen, {"recompute": one.recompute}, node_memory_gb=limit)
            assert run_memory(changed, SHAPE).problems == [], one.label


@pytest.mark.deep
def test_the_overrides_of_a_layout_make_it_of_any_configuration():
    """Also of one whose sizes the layout leaves at their defaults."""
    given = ["policy.parallel={tensor: 2, context: 2, pipeline: 4, data: 2, layers: [17, 16, 16, 15]}"]
    given += [str(ROOT / "configs" / name) for name in ("model/qwen3_32b.yaml", "run/gsm8k_32b.yaml")]
    run = load_config(GrpoRunConfig, [*given, "cluster.device=gpu"])
    for layout in fitting_layouts(run, SHAPE):
        changed = load_config(GrpoRunConfig, [*given, *layout.overrides])
        assert (changed.policy.parallel, changed.model.recompute) == (layout.parallel, layout.recompute)
        assert changed.policy.optimizer.offload == layout.offload


@pytest.mark.deep
def test_a_layout_that_the_bridge_makes_offload_has_the_time_of_an_offloaded_one():
    """The GPU has room for the fastest layout, but not for the communicators of its bridge beside it."""
    fastest = fitting_layouts(config(), SHAPE)[0]
    assert not fastest.offload
    bridge = fastest.memory.parts["NCCL communicators of the bridge"][0]
    gpu_gb = (max(fastest.memory.totals) - bridge / 2) / 1e9
    gpus = {"gpus_per_trainer": 1, "gpus_per_engine_rank": 1, "gpus_per_node": 8, "gpu_memory_gb": gpu_gb}
    layouts = fitting_layouts(config(cluster=gpus), SHAPE)
    [same] = [one for one in layouts if (one.parallel, one.recompute) == (fastest.parallel, fastest.recompute)]
    held = largest_stage(SHAPE, same.parallel.mesh, "bfloat16", AdamConfig())
    moved = held.state_bytes(same.parallel.mesh, "bfloat16") / H100.host_bytes_per_s
    assert same.offload and same.seconds == pytest.approx(fastest.seconds + moved)
    assert [one.seconds for one in layouts] == sorted(one.seconds for one in layouts)


@pytest.mark.deep
def test_a_state_is_offloaded_only_where_the_layout_does_not_fit_otherwise():
    layouts = fitting_layouts(config({"tensor": 4, "pipeline": 4}), SHAPE)
    assert {layout.offload for layout in layouts} == {False, True}
    for layout in layouts:
        policy = {"parallel": layout.parallel.model_dump(exclude_defaults=True)}
        kept = run_memory(config(policy=policy, model={"recompute": layout.recompute}), SHAPE).trainer
        assert layout.offload == (max(kept.totals) > 80e9)
        assert layout.label.endswith(", offload") == layout.offload


def test_shared_gpus_hold_in_each_phase_what_the_phase_needs():
    """Training has nothing of the engine but its work, generating nothing of the trainer but its communicators."""
    shared = {"colocate": True, "gpus_per_trainer": 1, "gpus_per_engine_rank": 1, "gpus_per_node": 8}
    run = config(rollout={"num_engines": 8, "parallel": {"tensor": 4}}, cluster=shared)
    apart = run_memory(config(rollout={"num_engines": 8, "parallel": {"tensor": 4}}), SHAPE)
    [gpu] = run_memory(run, SHAPE).gpus
    trainer, engine = apart.trainer.parts, apart.engine.gpu.parts
    constant = sum(size[2] for part, size in gpu.parts.items() if "communicators" in part or "buffers" in part)
    states = [trainer[part][0] for part in ("weights", "gradients", "optimizer state")]
    computed = sum(size[0] for part, size in trainer.items() if "activations" in part or "computed" in part)
    work, weights = engine["work of vLLM"][0] + engine["activations of a step of vLLM"][0], engine["weights"][0]
    assert gpu.totals == pytest.approx(
        (
            sum(states) + computed + work + constant,
            states[0] + weights + work + constant,
            weights + engine["KV cache"][0] + work + constant,
        )
    )
    assert run_memory(run, SHAPE).problems == []
    greedy = config(
        rollout={"num_engines": 8, "parallel": {"tensor": 4}, "gpu_memory_utilization": 0.99}, cluster=shared
    )
    [problem] = run_memory(greedy, SHAPE).problems
    assert "generating needs" in problem and "lower rollout.gpu_memory_utilization" in problem


@pytest.mark.parametrize(
    ("settings", "stored", "of_gpu", "in_update"),
    [
        ({}, 12, 12, None),
        ({"offload": True}, 12, 0, 3 * 12),  # one piece arrives, one is updated, and one leaves
        ({"moments": "bfloat16"}, 8, 8, 8),  # the moments of one, in fp32
        ({"moments": "bfloat16", "offload": True}, 8, 0, 3 * 12),
    ],
)
def test_a_streamed_optimizer_state_passes_through_the_gpu_in_pieces(settings, stored, of_gpu, in_update):
    run = config(policy={"optimizer": settings})
    trainer = run_memory(run, SHAPE).trainer
    held = rank_parameters(SHAPE, run.policy.parallel.mesh, 0)
    elements = (held.dense + held.expert) / 2
    state = tuple(trainer.parts.get("optimizer state", (0, 0, 0)))
    assert state == (of_gpu * elements,) * 3
    assert trainer.host.get("optimizer state", 0) == (stored * elements if settings.get("offload") else 0)
    assert trainer.host["a checkpoint's copy"] == (2 + stored) * elements
    updated = trainer.parts.get("optimizer state in an update")
    assert updated == ((in_update * 2**24, 0, 0) if in_update else None)
    num_parameters = FAMILIES["qwen3"].num_parameters(SHAPE)
    assert checkpoint_bytes(SHAPE, "bfloat16", run.policy.optimizer) == (2 + stored) * num_parameters


def test_a_larger_gpu_has_a_larger_cache_and_bound():
    gpus = {"gpus_per_trainer": 1, "gpus_per_engine_rank": 1}
    small, large = (run_memory(config(cluster=gpus | size), SHAPE) for size in ({}, {"gpu_memory_gb": 144}))
    cache = [memory.engine.gpu.parts["KV cache"][0] for memory in (small, large)]
    assert cache[1] - cache[0] == pytest.approx(0.85 * 64e9)
    assert (small.trainer_limit, large.trainer_limit) == (80e9, 144e9)


def test_mirrors_and_what_is_lent_are_in_the_memory_of_the_node():
    """Two steps of a rank and of one of the node before it; with the ranks of one node alone two of its own. While the
    engines have the GPU, weights and state are in the node too."""
    held, mesh = rank_parameters(SHAPE, Mesh(tensor=4, pipeline=4, data=2), 0), {"tensor": 8}
    state = held.total * 2 + held.total / 2 * 12
    gpus = {"gpus_per_trainer": 1, "gpus_per_engine_rank": 1, "gpus_per_node": 8}
    several, one = (
        run_memory(config(parallel, cluster=gpus | {"mirror": True}), SHAPE).trainer.host for parallel in (None, mesh)
    )
    assert several["4 mirrors"] == 4 * state
    whole = rank_parameters(SHAPE, Mesh(tensor=8), 0)
    assert one["2 mirrors"] == 2 * whole.total * 14 and "4 mirrors" not in one
    shared = config(rollout={"num_engines": 8, "parallel": {"tensor": 4}}, cluster=gpus | {"colocate": True})
    assert run_memory(shared, SHAPE).trainer.host["lent to the engines"] == state


def test_all_ranks_of_a_node_together_must_fit_into_its_memory():
    """With eight trainer ranks a node; with two of one replica beside two of a critic; and of three roles on each
    GPU."""
    gpus = {"gpus_per_trainer": 1, "gpus_per_engine_rank": 1, "gpus_per_node": 8}
    apart = run_memory(config(cluster=gpus | {"mirror": True}), SHAPE)
    of_rank = sum(apart.trainer.host.values())
    assert apart.nodes.bytes == 8 * of_rank and apart.problems == []
    tight = {"mirror": True, "node_memory_gb": 8 * of_rank / 1e9 - 1}
    [problem] = run_memory(config(cluster=gpus | tight), SHAPE).problems
    mirrors = 8 * apart.trainer.host["4 mirrors"] / 1e9
    assert f"need {8 * of_rank / 1e9:,.0f} GB of its memory, and cluster.node_memory_gb is" in problem
    assert f"; {mirrors:,.0f} GB are 4 mirrors of a trainer rank; set cluster.mirror to false" in problem
    assert run_memory(config(cluster=gpus | tight | {"node_memory_gb": 8 * of_rank / 1e9 + 1}), SHAPE).problems == []

    ppo = {"algorithm": {"adv_estimator": {"kind": "gae"}}, "critic": {"parallel": {"tensor": 4, "pipeline": 2}}}
    beside = run_memory(config({"tensor": 4}, **ppo), SHAPE)
    critic, trainer = sum(beside.critic.host.values()), sum(beside.trainer.host.values())
    assert trainer > critic and beside.nodes.bytes == 4 * trainer + 4 * critic
    pools = {"pools": {"trainer": "train", "critic": "value"}}
    assert run_memory(config({"tensor": 4}, cluster=gpus | pools, **ppo), SHAPE).nodes.bytes == 4 * trainer

    served = {"policy": {"parallel": {"tensor": 4, "data": 2}, "lora": {"rank": 8}}}
    run = config(rollout={"num_engines": 2, "parallel": {"tensor": 4}}, cluster=gpus | {"colocate": True}, **served)
    shared = run_memory(run, run.policy.adapted(SHAPE))
    engine = shared.engine.gpu.host["lent to the trainers"]
    assert shared.nodes.bytes == pytest.approx(8 * (sum(shared.trainer.host.values()) + engine))

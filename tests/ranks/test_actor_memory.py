"""The estimates of planning/parameters.py and planning/activations.py against what the actor allocates and what
autograd saves."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import cover
import image_models
import numpy as np
import pytest
from muon_scenarios import MUON
from scenarios import OPTIMIZER, Layout
from shares import TrainSample
from test_actor_families import LAYOUTS as FAMILY_LAYOUTS
from test_actor_layouts import LAYOUTS

from megatron_rl.config.policy import LoraConfig, MegatronConfig, ModelConfig, ParallelConfig, PolicyConfig
from megatron_rl.data.pictures import Pictures
from megatron_rl.models import read_shape
from megatron_rl.planning.activations import activations, recomputed_modules
from megatron_rl.planning.parameters import rank_parameters
from megatron_rl.planning.tower import tower_bytes
from megatron_rl.types import Mesh, Tokens

MODULE = "memory_scenarios"
SHAPES = (
    "one",
    "tp4_two_kv_heads",
    "pp2_uneven",
    "tp2_pp2_vpp2",
    "cp2_dp2_empty_microbatch",
    "pp2_dp2_empty_microbatch",
)
ALL = {name: Layout(LAYOUTS[name].mesh) for name in SHAPES}
ALL["tp2_pp2_vpp2"] = LAYOUTS["tp2_pp2_vpp2"]  # virtual stages need as many micro-batches as there are stages
ALL |= {f"{name}_bf16": Layout(LAYOUTS[name].mesh, dtype="bfloat16") for name in ("one", "tp2_dp2_empty_microbatch")}
"""The bytes of weights, gradients and state are the same whatever the micro-batches, recomputation and sequence
parallelism are."""
MIXTURES = {name: FAMILY_LAYOUTS[name] for name in ("cp2_ep2", "pp2_dp2_ep2", "tp2_dp2_ep2", "tp2_dp2_ep2_whole")}


def check_allocated(results, folder, layout: Layout, lora: LoraConfig | None = None) -> None:
    """Weights and gradients are exact on each rank, and the optimizer's state over the ranks of a stage. A single rank
    may have more or less state than the others, by what the padding of the buffers shifts."""
    shape, mesh = PolicyConfig(lora=lora).adapted(read_shape(folder)), layout.mesh
    states, expected_states = defaultdict(float), defaultdict(float)
    for rank, (weights, gradients, state) in enumerate(results):
        held = rank_parameters(shape, mesh, rank)
        assert weights == held.weight_bytes(layout.dtype)
        assert gradients == held.gradient_bytes()
        expected = held.state_bytes(mesh, layout.dtype)
        assert abs(state - expected) <= 12 * held.padding
        states[mesh.coordinates(rank)[1]] += state
        expected_states[mesh.coordinates(rank)[1]] += expected
    for stage, state in states.items():
        assert state == pytest.approx(expected_states[stage], rel=1e-12)  # sums of thirds and halves in float64


@pytest.mark.parametrize("name", cover.essential(ALL, "pp2_uneven", "tp2_dp2_empty_microbatch_bf16"))
def test_weights_gradients_and_state_are_those_that_the_actor_allocates(trainers, model_folder, samples, name):
    layout = ALL[name]
    results = trainers.run(
        f"{MODULE}.allocated", layout.mesh.world_size, folder=model_folder, samples=samples, layout=layout
    )
    check_allocated(results, model_folder, layout)


@pytest.mark.parametrize("mesh", cover.essential([Mesh(data=2), Mesh(pipeline=2, data=2)], Mesh(data=2)), ids=str)
def test_tied_embeddings_are_allocated_where_they_are_counted(trainers, tied_model_folder, samples, mesh):
    layout = Layout(mesh)
    results = trainers.run(
        f"{MODULE}.allocated", mesh.world_size, folder=tied_model_folder, samples=samples, layout=layout
    )
    check_allocated(results, tied_model_folder, layout)


@pytest.mark.parametrize("name", cover.essential(MIXTURES, "pp2_dp2_ep2"))
def test_experts_are_allocated_where_they_are_counted(trainers, folders, samples, name):
    layout = MIXTURES[name]
    results = trainers.run(
        f"{MODULE}.allocated", layout.mesh.world_size, folder=folders["qwen3_moe"], samples=samples, layout=layout
    )
    check_allocated(results, folders["qwen3_moe"], layout)


SOME = {"targets": ("q_proj", "v_proj", "down_proj", "lm_head")}
ADAPTED = [
    ("qwen3", Layout(Mesh(tensor=2, data=2), dtype="bfloat16"), SOME | {"base": "fp8"}),
    ("qwen3", Layout(Mesh(tensor=2, data=2), dtype="bfloat16"), SOME),
    ("qwen3", Layout(Mesh(pipeline=2)), {}),
    *((name, FAMILY_LAYOUTS["tp2_dp2_ep2"], {"base": "fp8"}) for name in ("qwen3_moe", "qwen3_next")),
    ("nemotron_h", FAMILY_LAYOUTS["tp2"], {"base": "fp8"}),
]


@pytest.mark.parametrize("name, layout, given", cover.essential(ADAPTED, ADAPTED[0]))
def test_adapters_alone_have_gradients_and_state(trainers, folders, model_folder, samples, name, layout, given):
    folder, lora = folders.get(name, model_folder), LoraConfig(rank=3, **given)
    given = dict(folder=folder, samples=samples, layout=layout, lora=lora)
    results = trainers.run(f"{MODULE}.allocated", layout.mesh.world_size, **given)
    check_allocated(results, folder, layout, lora)
    held = rank_parameters(PolicyConfig(lora=lora).adapted(read_shape(folder)), layout.mesh, 0)
    whole = rank_parameters(read_shape(folder), layout.mesh, 0)
    assert held.frozen == whole.trained


def test_gradients_in_bf16_have_half_of_the_bytes(trainers, model_folder, samples):
    """The optimizer takes fp32 copies of its part of them, and frees these. The update differs by the rounding of
    sums: 2^-8 of each."""
    layout, updates = Layout(Mesh(data=2), dtype="bfloat16"), []
    for gradients in ("float32", "bfloat16"):
        optimizer = OPTIMIZER.model_copy(update={"gradients": gradients})
        given = dict(folder=model_folder, samples=samples, layout=layout, optimizer=optimizer)
        for rank, (_, found, _) in enumerate(trainers.run(f"{MODULE}.allocated", 2, **given)):
            assert found == rank_parameters(read_shape(model_folder), layout.mesh, rank).gradient_bytes(optimizer)
        updates.append(trainers.run(f"{MODULE}.updated", 2, **given)[0])
    wide, narrow = updates
    assert narrow["loss"] == wide["loss"]
    assert (
        narrow["grad_norm"] == pytest.approx(wide["grad_norm"], rel=2**-8) and narrow["grad_norm"] != wide["grad_norm"]
    )


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "mesh", [Mesh(tensor=2, pipeline=2), Mesh(tensor=2, data=2, expert=2, expert_tensor=1)], ids=str
)
def test_the_state_of_muon_is_what_the_actor_allocates(trainers, folders, samples, mesh, dtype):
    """Over the ranks of a stage: those of DP have equally many elements, but not equally many of matrices."""
    layout, folder = Layout(mesh, dtype=dtype), folders["qwen3_moe"]
    results = trainers.run(
        f"{MODULE}.allocated", mesh.world_size, folder=folder, samples=samples, layout=layout, optimizer=MUON
    )
    found, expected = defaultdict(float), defaultdict(float)
    for rank, (weights, gradients, state) in enumerate(results):
        held = rank_parameters(read_shape(folder), mesh, rank)
        assert (weights, gradients) == (held.weight_bytes(dtype), held.gradient_bytes())
        found[mesh.coordinates(rank)[1]] += state
        expected[mesh.coordinates(rank)[1]] += held.state_bytes(mesh, dtype, MUON)
    assert found == pytest.approx(expected, rel=1e-12)  # sums of halves in float64


ACTIVATIONS = {
    "one": Layout(),
    "one_bf16": Layout(dtype="bfloat16"),
    "tp2": Layout(Mesh(tensor=2)),
    "tp2_no_sequence": Layout(Mesh(tensor=2), sequence=False),
    "cp2": Layout(Mesh(context=2)),
    "pp2": Layout(Mesh(pipeline=2)),
    "pp2_uneven": Layout(Mesh(pipeline=2, layers=(3, 1))),
    "tp4_two_kv_heads": Layout(Mesh(tensor=4)),
}


def saved(trainers, world_size: int, **arguments) -> list:
    """In fresh processes, because the graphs that nobody goes back through hold the models."""
    return trainers.run(f"{MODULE}.saved_activations", world_size, fresh=True, **arguments)


def check_saved(results, folder, layout: Layout) -> None:
    """Within 10 %, the accuracy that is promised: small tensors (indices, cosines, numbers of the loss) are left out of
    the estimate. A mixture's tokens go to the ranks unevenly, so the ranks of a stage are summed."""
    mesh = layout.mesh
    parallel = ParallelConfig(
        tensor=mesh.tensor,
        pipeline=mesh.pipeline,
        data=mesh.data,
        context=mesh.context,
        expert=mesh.expert,
        expert_tensor=mesh.expert_tensor,
        layers=mesh.layers,
        sequence=layout.sequence,
    )
    for stage in range(mesh.pipeline):
        ranks = [rank for rank in range(mesh.world_size) if mesh.coordinates(rank)[1] == stage]
        saved, num_tokens = sum(results[rank][0] for rank in ranks), results[ranks[0]][1]
        estimate = activations(
            read_shape(folder),
            parallel,
            stage,
            num_tokens,
            width={"float32": 4, "bfloat16": 2}[layout.dtype],
            recomputed=recomputed_modules(ModelConfig(path=folder, recompute=layout.recompute), layout.megatron),
            fused=False,
        )
        in_flight = mesh.pipeline - stage
        assert estimate.kept / in_flight * len(ranks) == pytest.approx(saved, rel=0.1)


SAVED = [(name, recompute) for name in ACTIVATIONS for recompute in ("none", "full")]


@pytest.mark.parametrize(
    "name, recompute", cover.essential(SAVED, ("one_bf16", "full"), ("tp2", "none"), ("pp2_uneven", "full"))
)
def test_activations_of_a_dense_model_are_what_autograd_saves(trainers, model_folder, equal_samples, name, recompute):
    layout = ACTIVATIONS[name]
    layout = Layout(layout.mesh, layout.sequence, dtype=layout.dtype, recompute=recompute)
    results = saved(trainers, layout.mesh.world_size, folder=model_folder, samples=equal_samples, layout=layout)
    check_saved(results, model_folder, layout)


OTHERS = [
    (family, recompute)
    for family in ("llama", "olmo2", "mixtral", "qwen3_moe", "gpt_oss", "minimax_m2", "gemma3")
    for recompute in ("none", "full")
]


@pytest.mark.parametrize("family, recompute", cover.essential(OTHERS, ("olmo2", "none"), ("qwen3_moe", "none")))
def test_activations_of_other_layers_are_what_autograd_saves(trainers, folders, equal_samples, family, recompute):
    """Without norms of q and k; with norms after the blocks, and on both sides; all layers mixtures; a dense layer and
    mixtures."""
    layout = Layout(recompute=recompute)
    results = saved(trainers, 1, folder=folders[family], samples=equal_samples, layout=layout)
    check_saved(results, folders[family], layout)


HYBRIDS = [
    ("nemotron_h", Layout()),
    ("nemotron_h", Layout(dtype="bfloat16")),
    ("nemotron_h", Layout(Mesh(tensor=2), recompute="full")),
    ("nemotron_h", Layout(Mesh(tensor=2))),
    ("nemotron_h", Layout(Mesh(pipeline=2, layers=(5, 1)))),
    ("nemotron_h_experts", Layout()),
]


@pytest.mark.parametrize("family, layout", cover.essential(HYBRIDS, HYBRIDS[4]), ids=str)
def test_activations_of_layers_with_one_block_are_what_autograd_saves(trainers, folders, equal_samples, family, layout):
    """Of samples as long as a chunk, as the estimate assumes."""
    samples = [replace(sample, tokens=_longer(sample.tokens, 64)) for sample in equal_samples]
    results = saved(trainers, layout.mesh.world_size, folder=folders[family], samples=samples, layout=layout)
    check_saved(results, folders[family], layout)


def _longer(tokens: Tokens, length: int) -> Tokens:
    """The same tokens once more, up to the length."""
    return Tokens(
        *(np.resize(getattr(tokens, name), length) for name in ("ids", "action_mask", "logp_rollout", "version"))
    )


SELECTIVE = [("llama", "mlp"), ("qwen3_moe", "moe")]
"""The modules whose outputs Megatron discards (norms, activations) need Transformer Engine."""


@pytest.mark.parametrize("family, module", cover.essential(SELECTIVE, ("qwen3_moe", "moe")))
def test_activations_with_selective_recomputation_are_what_autograd_saves(
    trainers, folders, equal_samples, family, module
):
    chosen = {"recompute_granularity": "selective", "recompute_modules": (module,)}
    layout = Layout(megatron=MegatronConfig(transformer=chosen))
    results = saved(trainers, 1, folder=folders[family], samples=equal_samples, layout=layout)
    check_saved(results, folders[family], layout)


@pytest.mark.parametrize("mesh", cover.essential([Mesh(tensor=2), Mesh(data=2, expert=2)], Mesh(tensor=2)), ids=str)
def test_activations_of_a_mixture_on_several_ranks(trainers, folders, equal_samples, mesh):
    layout = Layout(mesh)
    results = saved(trainers, 2, folder=folders["qwen3_moe"], samples=equal_samples, layout=layout)
    check_saved(results, folders["qwen3_moe"], layout)


@pytest.mark.deep
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_a_trained_tower_saves_what_the_plan_counts(trainers, tmp_path, kind, dtype, recompute):
    """There are two images, and the second one is there twice, which is computed once. What is kept with a frozen
    tower is the text model's."""
    folder, tower = tmp_path / "model", dict(depth=8, hidden_size=128, intermediate_size=192, num_heads=8)
    image_models.write_model(folder, kind, **tower)
    pictures = Pictures(folder, folder / "images")
    one, two = image_models.drawing(64, 80, 0), image_models.drawing(80, 64, 1)
    rows = [image_models.row(pictures, [2, one, 3, two, 5], 0), image_models.row(pictures, [two, 5], 1)]
    samples = [TrainSample(str(number), row, 1.0, 1.0) for number, row in enumerate(rows)]
    layout = Layout(dtype=dtype, recompute=recompute)
    given = dict(folder=folder, samples=samples, layout=layout)
    (saved, _), (rest, _) = (
        trainers.run(f"{MODULE}.saved_activations", 1, fresh=True, vision_tower=tower, **given)[0]
        for tower in ("trained", "frozen")
    )
    shape = PolicyConfig(vision_tower="trained").adapted(read_shape(folder))
    counted = {"width": 4 if dtype == "float32" else 2, "recompute": recompute == "full"}
    expected = tower_bytes(shape, Mesh(), 0, sum(map(shape.vision.num_tokens, rows[0].pictures)), **counted)
    assert expected.kept == pytest.approx(saved - rest, rel=0.1)

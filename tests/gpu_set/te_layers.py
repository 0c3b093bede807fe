"""Builds Transformer Engine's layers as `build_model` does, for all ranks of a mesh, without a GPU.

The constructors of Transformer Engine and Megatron are the real ones. The parameters are on the CPU, the process group
is torch's fake one, and what torch.cuda says about a device is faked. Nothing is computed.

    python tests/gpu_set/te_layers.py FAMILY '{"tensor": 2, "pipeline": 2, "virtual": 2}' ...
    python tests/gpu_set/te_layers.py 'FAMILY with adapters' '{"tensor": 2}' ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import faked
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from numbered import SHAPES  # noqa: E402
from small_models import changed  # noqa: E402

from megatron_rl.actor import platform  # noqa: E402
from megatron_rl.models import FAMILIES  # noqa: E402
from megatron_rl.models.adapters import is_adapter  # noqa: E402
from megatron_rl.types import Adapters, LatentAttention, Rope, YarnRope  # noqa: E402

ADAPTED = " with adapters"


def pretend() -> None:
    """Let Transformer Engine's layers be built on the CPU."""
    faked.pretend()
    platform.HAS_TRANSFORMER_ENGINE = True
    platform._replace_cuda_functions()


def shape_of(name: str) -> Any:
    """Sizes that Transformer Engine accepts: it wants multiples of 8 and 16."""
    shape = SHAPES[name.removesuffix(ADAPTED)]
    share = 0.5 if shape.family == "glm4_moe" else 1.0
    heads = dict(num_heads=4, num_kv_heads=2, head_dim=16, rope=Rope(1e4, share=share))
    if isinstance(shape.attention, LatentAttention):
        rank = 48 if shape.attention.query_rank else 0
        sizes = dict(query_rank=rank, kv_rank=32, nope_dim=32, rope_dim=16, value_dim=32)
        heads = dict(num_heads=4, **sizes, rope=Rope(1e4, YarnRope(4.0, 64)))
    shape = changed(shape, attention=heads, mlp={"size": 128, "num_experts": 4, "ffn_size": 32})
    if shape.mixture and shape.mixture.shared_ffn_size:
        shape = changed(shape, mlp={"shared_ffn_size": 32})
    if shape.mixture and shape.mixture.router_bias:
        shape = changed(shape, mlp={"score": "sigmoid"})
    shape = replace(shape, layers=shape.layers[:4], hidden_size=64, vocab_size=200)
    return replace(shape, adapters=Adapters(8, 16.0)) if name.endswith(ADAPTED) else shape


def built(shape: Any, sizes: dict[str, int], layers: str = "transformer_engine") -> Iterator[tuple[Any, int, Any, Any]]:
    """The mesh, the rank, its models and their configuration, for each rank of the mesh."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron_rl.actor.adapters import Adapting
    from megatron_rl.actor.model import build_model
    from megatron_rl.config.policy import ModelConfig, ParallelConfig, PolicyConfig
    from megatron_rl.models import megatron_shards

    parallel = ParallelConfig(**sizes)
    policy, mesh = PolicyConfig(parallel=parallel), parallel.mesh
    model = ModelConfig(path="model", dtype="bfloat16", layers=layers)
    for rank in range(mesh.world_size):
        faked.join(rank, mesh.world_size)
        with platform.running():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=mesh.tensor,
                pipeline_model_parallel_size=mesh.pipeline,
                virtual_pipeline_model_parallel_size=mesh.virtual if mesh.virtual > 1 else None,
                context_parallel_size=mesh.context,
                expert_model_parallel_size=mesh.expert,
                expert_tensor_parallel_size=mesh.expert_ways,
                create_gloo_process_groups=False,
            )
            model_parallel_cuda_manual_seed(1)
            shards = megatron_shards(shape, mesh, rank, layers == "transformer_engine")
            adapting = Adapting(shape.adapters, shards, seed=0) if shape.adapters else None
            chunks = build_model(shape, model, policy, mesh.coordinates(rank)[1], adapting)
        yield mesh, rank, chunks, chunks[0].config
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def check(name: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Compare the parameters of all ranks with the family's table. Returns what a test asks about."""
    from megatron_rl.actor import state
    from megatron_rl.models import check_parameters, megatron_shards

    shape, fused, classes = shape_of(name), set[bool](), set[str]()
    summed = set[str]()
    for mesh, rank, chunks, config in built(shape, sizes):
        shards = list(megatron_shards(shape, mesh, rank, True))
        live = state.local_parameters(chunks)
        check_parameters(shards, {key: tuple(value.shape) for key, value in live.items()}, f"rank {rank}")
        is_whole = dict.fromkeys((shard.local_name for shard in shards), True)
        for shard in shards:
            whole = FAMILIES[shape.family].hf_tensors(shape)[shard.hf_name]
            is_whole[shard.local_name] &= tuple(stop - start for start, stop in shard.hf_box) == whole
        parameters = dict(state.named_parameters(chunks))
        for key, parameter in parameters.items():
            assert parameter.requires_grad == (shape.adapters is None or is_adapter(key)), f"rank {rank}: {key}"
        of_experts = {key for key, value in parameters.items() if getattr(value, "allreduce", True) is False}
        # A norm counts a whole matrix of an expert's adapter on one of the ranks that share the expert.
        shared = {key for key in parameters if is_adapter(key) and ".experts." in key and is_whole[key]}
        is_first = mesh.expert_coordinates(rank)[0] == 0
        assert all(parameters[key].tensor_model_parallel == is_first for key in shared), f"rank {rank}: {shared}"
        for key in parameters.keys() - of_experts - shared if mesh.tensor > 1 else ():
            is_split = bool(getattr(parameters[key], "tensor_model_parallel", False))
            assert is_split != is_whole[key], f"rank {rank}: {key}: split {is_split}, in the table {not is_whole[key]}"
        # Otherwise norms would count an expert on one rank alone (Megatron-LM's pull request 5916).
        assert all(parameters[key].tensor_model_parallel for key in of_experts - shared), f"rank {rank}: {of_experts}"
        if mesh.tensor > 1:
            mine = summed_over_tensor_ranks(chunks, config, parameters)
            replicated = {key for key, one in parameters.items() if is_whole[key] and one.requires_grad}
            replicated -= of_experts | shared
            of_heads = {key for key in replicated if "q_layernorm" in key or "k_layernorm" in key}
            assert mine == (replicated if config.sequence_parallel else of_heads), f"rank {rank}: {mine ^ replicated}"
            summed |= mine
        modules = [module for chunk in chunks for module in chunk.modules()]
        classes |= {type(module).__name__ for module in modules}
        fused |= {module.fuse_wgrad_accumulation for module in modules if hasattr(module, "fuse_wgrad_accumulation")}
    classes = {one for one in classes if one.startswith("TE")}
    return {"summed": sorted(summed), "classes": sorted(classes), "adds_up_gradients": sorted(fused)}


def summed_over_tensor_ranks(chunks: Any, config: Any, parameters: dict[str, Any]) -> set[str]:
    """The parameters whose gradients Megatron sums over the tensor-parallel ranks, by its own function."""
    from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads

    def double(buffer: Any, **_: Any) -> None:
        buffer.mul_(2)

    parameters = {key: parameter for key, parameter in parameters.items() if parameter.requires_grad}
    for parameter in parameters.values():
        parameter.main_grad.fill_(1)
    with mock.patch.object(dist, "all_reduce", double):
        _allreduce_non_tensor_model_parallel_grads(chunks, config)
    found = {key for key, parameter in parameters.items() if bool((parameter.main_grad == 2).all())}
    assert all(bool((parameters[key].main_grad == 1).all()) for key in parameters.keys() - found)
    return found


if __name__ == "__main__":
    pretend()
    family, *meshes = sys.argv[1:]
    print(json.dumps([check(family, json.loads(sizes)) for sizes in meshes]))

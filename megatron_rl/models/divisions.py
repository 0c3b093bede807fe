"""Checks that a mesh or an engine divides a model, and names the sizes that would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_rl.types import Mesh, ModelShape

if TYPE_CHECKING:
    from megatron_rl.models.family import Family


def check_mesh(family: Family, shape: ModelShape, mesh: Mesh) -> None:
    """
    Raises:
        ValueError: the mesh does not divide heads, KV heads, FFN, experts or layers. The message says which values
            do.
    """
    for name, value, ways, axis in _divisions(family, shape, mesh):
        if value % ways:
            may_be = [n for n in divisors(value) if _may_be(family, shape, mesh, axis, n)]
            told = f"; it may be {listed(may_be)}" if may_be else ""
            raise ValueError(f"the model has {value} {name}, which policy.parallel.{axis}={ways} does not divide{told}")
    if shape.latent is None and mesh.tensor > shape.num_kv_heads:
        _check_shared_heads(family, shape, mesh)
    mesh.layer_range(shape.num_layers, 0)


def check_engine(family: Family, shape: ModelShape, tensor: int, expert_parallel: bool, pipeline: int) -> None:
    """
    Raises:
        ValueError: vLLM cannot split the model so. The message says which `rollout.parallel.tensor` it can.
    """

    def fault(tensor: int) -> str | None:
        try:
            family.vllm_placed(shape, tensor, 0, expert_parallel, pipeline)
        except ValueError as error:
            return str(error)
        return None

    if found := fault(tensor):
        may_be = [n for n in divisors(shape.num_heads) if fault(n) is None]
        if not may_be:  # something else is wrong
            raise ValueError(found)
        told = f"with rollout.parallel.tensor={tensor} the engines cannot split it: it may be {listed(may_be)}"
        raise ValueError(f"{found}; {told}")


def _may_be(family: Family, shape: ModelShape, mesh: Mesh, axis: str, ways: int) -> bool:
    """Whether the mesh divides the model if one of its axes has another length."""
    try:
        mesh = replace(mesh, **{axis: ways})  # type: ignore[arg-type]  # every axis is the name of a size
    except ValueError:  # the axes do not fit together
        return False
    shares = shape.latent is None and mesh.tensor > shape.num_kv_heads  # see `_check_shared_heads`
    if shares and (mesh.tensor % shape.num_kv_heads or family.qk_norm(shape) == "full"):
        return False
    return not any(value % ways for _, value, ways, _ in _divisions(family, shape, mesh))


def _divisions(family: Family, shape: ModelShape, mesh: Mesh) -> list[tuple[str, int, int, str]]:
    """What is divided, its number, into how many parts, and the axis of the mesh."""
    experts = shape.experts
    if experts is None and mesh.expert > 1:
        raise ValueError(f"policy.parallel.expert={mesh.expert}, but a {family.name} model has no experts")
    divisions = [("attention heads", shape.num_heads, mesh.tensor, "tensor")]
    if shape.latent is None and mesh.tensor <= shape.num_kv_heads:
        divisions.append(("KV heads", shape.num_kv_heads, mesh.tensor, "tensor"))
    if shape.delta:  # each rank of a context group computes a part of its heads
        heads, name = shape.delta.num_key_heads, "key heads of linear attention"
        divisions.append((name, heads, mesh.tensor, "tensor"))
        divisions.append((f"{name} on a tensor-parallel rank", heads // mesh.tensor, mesh.context, "context"))
    if experts is None or experts.first_dense_layers:
        divisions.append(("FFN size", shape.ffn_size, mesh.tensor, "tensor"))
    if experts:
        divisions.append(("experts", experts.num_experts, mesh.expert, "expert"))
        divisions.append(("FFN size of an expert", experts.ffn_size, mesh.expert_ways, "expert_tensor"))
        divisions.append(("FFN size of the shared experts", experts.shared_ffn_size, mesh.tensor, "tensor"))
    return divisions


def _check_shared_heads(family: Family, shape: ModelShape, mesh: Mesh) -> None:
    """Check that several ranks can share each KV head. Megatron then splits the rows of `linear_qkv` evenly,
    gathers its output from all ranks, and gives each rank its query heads and the KV head that they attend to."""
    refused = f"the model has {shape.num_kv_heads} KV heads, which policy.parallel.tensor={mesh.tensor} does not divide"
    if mesh.tensor % shape.num_kv_heads:
        raise ValueError(refused)
    if family.qk_norm(shape) == "full":
        raise ValueError(
            f"{refused}, and a {family.name} model normalises the heads of all ranks together, so no two ranks may "
            f"hold the same head; set it to {shape.num_kv_heads} or less"
        )


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def listed(numbers: Sequence[int]) -> str:
    """1, 2 or 4."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last

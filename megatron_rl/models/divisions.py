"""Checks that a mesh or an engine divides a model, and names the sizes that would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_rl.types import Division, Mesh, ModelShape

if TYPE_CHECKING:
    from megatron_rl.models.family import Family


def check_mesh(family: Family, shape: ModelShape, mesh: Mesh) -> None:
    """
    Raises:
        ValueError: the mesh does not divide heads, KV heads, FFN, experts or layers. The message says which values
            do. Or the layers to whose outputs a vision tower adds are not all on the first stage.
    """
    if shape.mixture is None and mesh.expert > 1:
        raise ValueError(f"policy.parallel.expert={mesh.expert}, but a {family.name} model has no experts")
    for name, value, ways, axis in _divisions(shape, mesh):
        if value % ways:
            may_be = [n for n in divisors(value) if _may_be(shape, mesh, axis, n)]
            told = f"; it may be {listed(may_be)}" if may_be else ""
            raise ValueError(f"the model has {value} {name}, which policy.parallel.{axis}={ways} does not divide{told}")
    if fault := _fault_of_shared_heads(shape, mesh):
        raise ValueError(fault)
    first, num_deep = len(mesh.layer_range(shape.num_layers, 0, 0)), shape.vision.num_deep if shape.vision else 0
    if first < num_deep:
        raise ValueError(
            f"the vision tower adds to the outputs of the first {num_deep} layers, but the first part of the pipeline "
            f"has {first}; give it more by policy.parallel.layers, or set pipeline or virtual to a smaller number"
        )


def check_engine(family: Family, shape: ModelShape, tensor: int, expert_parallel: bool, pipeline: int) -> None:
    """
    Raises:
        ValueError: vLLM cannot split the model so. The message says which `rollout.parallel.tensor` it can.
    """
    if shape.vision is not None:  # vLLM splits a frozen tower, too
        shape = replace(shape, vision=replace(shape.vision, trained=True))

    def fault(tensor: int) -> str | None:
        try:
            family.vllm_placed(shape, tensor, 0, expert_parallel, pipeline)
        except ValueError as error:
            return str(error)
        return None

    if found := fault(tensor):
        may_be = [n for n in divisors(shape.attention.num_heads) if fault(n) is None]
        if not may_be:  # something else is wrong
            raise ValueError(found)
        told = f"with rollout.parallel.tensor={tensor} the engines cannot split it: it may be {listed(may_be)}"
        raise ValueError(f"{found}; {told}")


def _may_be(shape: ModelShape, mesh: Mesh, axis: str, ways: int) -> bool:
    """Whether the mesh divides the model if one of its axes has another length."""
    try:
        mesh = replace(mesh, **{axis: ways})  # type: ignore[arg-type]  # every axis is the name of a size
    except ValueError:  # the axes do not fit together
        return False
    divides = not any(value % ways for _, value, ways, _ in _divisions(shape, mesh))
    return divides and not _fault_of_shared_heads(shape, mesh)


def _divisions(shape: ModelShape, mesh: Mesh) -> list[Division]:
    """What the mesh divides, in every block once."""
    blocks = dict.fromkeys([shape.attention, *shape.attentions, *(layer.mlp for layer in shape.layers)])
    return [division for block in blocks for division in block.divisions(mesh)]


def _fault_of_shared_heads(shape: ModelShape, mesh: Mesh) -> str | None:
    """Why ranks cannot share each KV head, if there are fewer heads than ranks. Megatron then splits the rows of
    `linear_qkv` evenly, gathers its output from all ranks, and gives each rank its query heads and the KV head that
    they attend to."""
    heads = shape.attention.num_kv_heads
    if mesh.tensor <= heads:
        return None
    refused = f"the model has {heads} KV heads, which policy.parallel.tensor={mesh.tensor} does not divide"
    if mesh.tensor % heads == 0 and shape.attention.norms == "full":
        refused += (
            f", and a {shape.family} model normalises the heads of all ranks together, so no two ranks may hold the "
            f"same head; set it to {heads} or less"
        )
    return refused if mesh.tensor % heads or shape.attention.norms == "full" else None


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def listed(numbers: Sequence[int]) -> str:
    """1, 2 or 4."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last

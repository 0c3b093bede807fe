"""The adapters of a run on the engines' side: what a push brings, and the slot that vLLM keeps for them.

In a run the engines' side is recorded from vLLM (`bridge/adapter_slot.py`). Invariant (tests/ranks): each rank holds
the rectangles that were recorded.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.layout import Engines
from megatron_rl.layout.recording import Recording
from megatron_rl.models import FAMILIES, engine_layers
from megatron_rl.models.adapters import adapter_rules
from megatron_rl.models.family import VLLM_LAYER
from megatron_rl.models.placement import Placed, Placement, linear_experts, place_row
from megatron_rl.models.rule import Rule
from megatron_rl.models.shards import volume
from megatron_rl.types import Layer, ModelShape

SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM's slots can have (`rollout.start.slot_rank`, which needs vLLM)."""


def served_adapters(shape: ModelShape, engines: Engines) -> tuple[Recording, ...]:
    """What each rank of an engine holds of the adapters: of a layer that is split over its outputs the whole A and its
    rows of B, of one that is split over its inputs its columns of A and the whole B."""
    return tuple(_recording(shape, engines, rank) for rank in range(engines.world_size))


def _recording(shape: ModelShape, engines: Engines, rank: int) -> Recording:
    placements: list[Placement] = []
    rows, known = [], {}
    for number in engine_layers(shape.num_layers, engines.pipeline, rank // engines.tensor):
        layer = shape.layers[number]
        if layer not in known:
            found = _placements(shape, layer, engines, rank % engines.tensor)
            known[layer] = range(len(placements), len(placements) + len(found))
            placements += found
        prefixes = FAMILIES[shape.family].hf_layer.format(number), VLLM_LAYER.format(number)
        rows += [(*prefixes, index) for index in known[layer]]
    return Recording(tuple(placements), tuple(rows))


def _placements(shape: ModelShape, layer: Layer, engines: Engines, rank: int) -> list[Placement]:
    sizes = shape.sizes(layer)

    def place(rule: Rule) -> Placement:
        ways, experts = (engines.tensor, rank), None
        if rule.per_expert:
            experts = 0, sizes["experts"]
            if engines.expert_parallel:
                ways, experts = (1, 0), linear_experts(sizes["experts"], engines.tensor, rank)
        return place_row(rule, rule.split.vllm, sizes, ways, rule.hf[0].name, experts)

    rules = adapter_rules(FAMILIES[shape.family].layer_rules(layer), shape.adapters)
    return [placement for placement in map(place, rules) if placement.pieces]


def slot_bytes(shape: ModelShape, engines: Engines, width: int, stage: int) -> float:
    """The bytes of vLLM's slot for one adapter on a rank of a pipeline stage; 0 without adapters. vLLM's layers that
    fuse several weights have room for the adapters of all of them, and every A and B has the rank of the slot."""
    adapters = shape.adapters
    if adapters is None:
        return 0.0
    rank = next((size for size in SLOT_RANKS if size >= adapters.rank), adapters.rank)
    roomy = replace(shape, adapters=replace(adapters, rank=rank, targets=_with_fused(shape, adapters.targets)))
    held = _recording(roomy, engines, stage * engines.tensor).placed
    return float(width * sum(elements(placed) for placed in held))


def elements(placed: Placed) -> int:
    """The numbers that a rank holds of a row."""
    row = placed.placement
    return row.num_experts * sum(volume(local) for _, _, local in row.pieces)


def _with_fused(shape: ModelShape, chosen: tuple[str, ...]) -> tuple[str, ...]:
    """The chosen targets, and the other weights that vLLM fuses with one of them."""
    family = FAMILIES[shape.family]
    if not chosen:
        return ()
    named = [
        [tensor.name.split(".")[-2] for tensor in rule.hf if tensor.name.endswith(".weight")]
        for layer in set(shape.layers)
        for rule in family.layer_rules(layer)
    ]
    return tuple({name for names in named for name in names if set(names) & set(chosen)})

"""The rows of low-rank adapters (LoRA, arXiv:2106.09685), which follow from the rows of the weights.

An adapter of the HF tensor `M.weight` [out, in] is two HF tensors with PEFT's names, `M.lora_A.weight` [rank, in] and
`M.lora_B.weight` [out, rank]. On a rank of Megatron the parameter `L.weight` of several HF tensors has one parameter
`L.lora_A` with their As below each other, and one `L.lora_B` with the rows of their Bs in the order of the weight's
rows. TP splits B where it splits the weight's rows, and A where it splits the columns; the other one is whole.

Worked example: q, k and v of 8, 2 and 2 heads of 16, hidden size 128, rank 4, TP2. Each rank has `lora_A` [12, 128],
three times 4 rows, and `lora_B` [96, 4]: of each of its query groups four heads of q, one of k and one of v.

Invariants (tests/unit/layout): the shards of all ranks partition A and B; B's rows on a rank belong to the rows of the
weight that the rank has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.layout.rule import HfTensor, Rule, sizes
from megatron_rl.layout.splits import Piece, Split, SplitKind
from megatron_rl.types import ModelShape

A, B = "lora_A", "lora_B"
SERVED_ID = 1
"""vLLM's number of the adapter that a run trains; 0 means the base model."""
PINNED_ID = 2
"""vLLM's number of an older version of the same adapter (`RolloutConfig.num_adapters`)."""
OUTPUT = "lm_head"
"""The name of the output layer as a target."""
RANK = "adapter_rank"
"""The dim of A and B that is no dim of the weight, as a key of `rule.sizes`."""


def is_adapter(name: str) -> bool:
    """Whether an HF tensor, or a parameter of Megatron, is a part of an adapter."""
    return f".{A}" in name or f".{B}" in name


def adapter_rules(rules: Sequence[Rule], shape: ModelShape) -> list[Rule]:
    """The rows of the adapters of some rows of a layer; none if the model has no adapters."""
    if shape.adapters is None:
        return []
    return [row for rule in rules for row in _rows_for(rule, shape.adapters.targets)]


def output_adapter_rules(output: Rule, shape: ModelShape) -> list[Rule]:
    """The rows of the output layer's adapter, which a model has only if it is named, as in PEFT."""
    return adapter_rules([output], shape) if shape.adapters and shape.adapters.targets else []


def linear_names(rules: Sequence[Rule]) -> list[str]:
    """The names that `Adapters.targets` may have, in the order of the rows."""
    return list(dict.fromkeys(_target(tensor) for rule in rules if _is_linear(rule) for tensor in rule.hf))


def inseparable_names(rules: Sequence[Rule]) -> list[str]:
    """The linear layers without adapters among the rows of one layer: several rows are one parameter of Megatron."""
    rows = Counter(rule.megatron for rule in rules)
    return linear_names([rule for rule in rules if rows[rule.megatron] > 1])


def _is_linear(rule: Rule) -> bool:
    """Whether the row is the weight of a linear layer. Routers are not: they are no such layers in transformers."""
    named = all(tensor.name.endswith(".weight") and len(tensor.dims) == 2 for tensor in rule.hf)
    is_layer = rule.megatron.rpartition(".")[2] == "weight" and not rule.megatron.endswith("router.weight")
    return named and is_layer


def _target(tensor: HfTensor) -> str:
    """`q_proj` of `self_attn.q_proj.weight`."""
    return tensor.name.split(".")[-2]


def _rows_for(rule: Rule, targets: Sequence[str]) -> list[Rule]:
    if not _is_linear(rule):
        return []
    chosen = tuple(i for i, tensor in enumerate(rule.hf) if not targets or _target(tensor) in targets)
    if not chosen:
        return []

    def row(part: str, dims: Sequence[tuple[str, str]], split: SplitKind) -> Rule:
        named = [rule.hf[i].name.removesuffix("weight") + f"{part}.weight" for i in chosen]
        return replace(
            rule,
            split=split,
            hf=tuple(HfTensor(name, dim) for name, dim in zip(named, dims, strict=True)),
            megatron=rule.megatron.replace(".weight", f".{part}"),
            fused=rule.fused and rule.fused.replace(".weight", f".{part}"),
            vllm=None,
            float32=False,
            served_float32=False,
        )

    of_a = [(RANK, rule.hf[i].dims[1]) for i in chosen]
    of_b = [(rule.hf[i].dims[0], RANK) for i in chosen]
    split = rule.split
    if split.dim == 1:
        assert len(chosen) == len(rule.hf) == 1, "a layer whose input is split has one weight"
        return [row(A, of_a, split), row(B, of_b, replace(split, megatron=_whole, vllm=_whole, dim=0))]
    ours, served = (_rows(rule, one, chosen) for one in (split.megatron, split.vllm))
    fused = split.fused and _rows(rule, split.fused, chosen)
    return [row(A, of_a, SplitKind(_whole, _whole)), row(B, of_b, SplitKind(ours, served, fused=fused))]


def _whole(shape: ModelShape, lengths: tuple[int, ...], ways: int, rank: int) -> list[Piece]:
    """Every rank has all rows, tensor below tensor."""
    pieces, offset = [], 0
    for tensor, length in enumerate(lengths):
        pieces.append(Piece(tensor, 0, 0, length, offset))
        offset += length
    return pieces


def _rows(rule: Rule, split: Split, chosen: Sequence[int]) -> Split:
    """The rows of the chosen tensors that a rank has of the weight, in their order there, without the others'."""

    def of_rank(shape: ModelShape, lengths: tuple[int, ...], ways: int, rank: int) -> list[Piece]:
        known = sizes(shape)
        every = split(shape, tuple(known[tensor.dims[0]] for tensor in rule.hf), ways, rank)
        pieces, offset = [], 0
        for piece in sorted(every, key=lambda piece: piece.local_start):
            if piece.tensor in chosen:
                pieces.append(replace(piece, tensor=chosen.index(piece.tensor), local_start=offset))
                offset += piece.stop - piece.start
        return pieces

    return of_rank

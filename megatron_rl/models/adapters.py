"""The rows of low-rank adapters (LoRA, arXiv:2106.09685), which follow from the rows of the weights.

An adapter of the HF tensor `M.weight` [out, in] is two HF tensors with PEFT's names, `M.lora_A.weight` [rank, in] and
`M.lora_B.weight` [out, rank]. On a rank of Megatron the parameter `L.weight` of several HF tensors has one parameter
`L.lora_A` with their As below each other, and one `L.lora_B` with the rows of their Bs in the order of the weight's
rows. That is so too where several rows of the family's table share the parameter (`in_proj` of linear attention). TP
splits B where it splits the weight's rows, and A where it splits the columns; the other one is whole.

Worked example: q, k and v of 8, 2 and 2 heads of 16, hidden size 128, rank 4, TP2. Each rank has `lora_A` [12, 128],
three times 4 rows, and `lora_B` [96, 4]: of each of its query groups four heads of q, one of k and one of v.

Invariants (tests/unit/models): the shards of all ranks partition A and B; B's rows on a rank belong to the rows of the
weight that the rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_rl.models.rule import VALUE_HEAD, HfTensor, Rule
from megatron_rl.models.splits import Piece, Sizes, Split, SplitKind
from megatron_rl.types import Adapters, ModelShape

A, B = "lora_A", "lora_B"
SERVED_ID = 1
"""vLLM's number of the adapter that a run trains; 0 means the base model."""
PINNED_ID = 2
"""vLLM's number of an older version of the same adapter (`RolloutConfig.num_adapters`)."""
OUTPUT = "lm_head"
"""The name of the output layer as a target."""
RANK = "adapter_rank"
"""The dim of A and B that is no dim of the weight, as a key of `ModelShape.sizes`."""


def is_adapter(name: str) -> bool:
    """Whether an HF tensor, or a parameter of Megatron, is a part of an adapter."""
    return f".{A}" in name or f".{B}" in name


def trains(shape: ModelShape, name: str) -> bool:
    """Whether a weight is trained. With LoRA only the adapters and a value head are.

    Args:
        name: of a Hugging Face tensor, or the local name of a trainer's parameter.
    """
    return shape.adapters is None or is_adapter(name) or name in (VALUE_HEAD.megatron, VALUE_HEAD.hf[0].name)


def adapter_rules(rules: Sequence[Rule], adapters: Adapters | None) -> list[Rule]:
    """The rows of the adapters of some rows of a layer; none if the model has no adapters."""
    if adapters is None:
        return []
    parts: dict[str, list[Rule]] = {}
    for rule in filter(_is_linear, rules):
        parts.setdefault(rule.megatron, []).append(rule)
    return [row for own in parts.values() for row in _rows_for(own, adapters.targets)]


def output_adapter_rules(output: Rule, adapters: Adapters | None) -> list[Rule]:
    """The rows of the output layer's adapter, which a model has only if it is named, as in PEFT."""
    return adapter_rules([output], adapters) if adapters and adapters.targets else []


def linear_names(rules: Sequence[Rule]) -> list[str]:
    """The names that `Adapters.targets` may have, in the order of the rows."""
    return list(dict.fromkeys(_target(tensor) for rule in rules if _is_linear(rule) for tensor in rule.hf))


def _is_linear(rule: Rule) -> bool:
    """Whether the row is the weight of a linear layer. Routers are not: they are no such layers in transformers."""
    named = all(tensor.name.endswith(".weight") and len(tensor.dims) == 2 for tensor in rule.hf)
    is_layer = rule.megatron.rpartition(".")[2] == "weight" and not rule.megatron.endswith("router.weight")
    return named and is_layer


def _target(tensor: HfTensor) -> str:
    """`q_proj` of `self_attn.q_proj.weight`."""
    return tensor.name.split(".")[-2]


def _rows_for(rules: Sequence[Rule], targets: Sequence[str]) -> list[Rule]:
    """
    Args:
        rules: all rows of one parameter of Megatron, in their order there.
    """
    tensors = [tensor for rule in rules for tensor in rule.hf]
    chosen = tuple(i for i, tensor in enumerate(tensors) if not targets or _target(tensor) in targets)
    if not chosen:
        return []
    first = rules[0]

    def row(part: str, dims: Sequence[tuple[str, str]], split: SplitKind) -> Rule:
        named = [tensors[i].name.removesuffix("weight") + f"{part}.weight" for i in chosen]
        return replace(
            first,
            split=split,
            hf=tuple(HfTensor(name, dim) for name, dim in zip(named, dims, strict=True)),
            megatron=first.megatron.replace(".weight", f".{part}"),
            fused=first.fused and first.fused.replace(".weight", f".{part}"),
            vllm=None,
            float32=False,
            served_float32=False,
        )

    of_a = [(RANK, tensors[i].dims[1]) for i in chosen]
    of_b = [(tensors[i].dims[0], RANK) for i in chosen]
    if first.split.dim == 1:
        assert len(chosen) == len(tensors) == 1, "a layer whose input is split has one weight"
        return [row(A, of_a, first.split), row(B, of_b, replace(first.split, megatron=_whole, vllm=_whole, dim=0))]
    ours = _rows([(rule, rule.split.megatron) for rule in rules], chosen)
    served = _rows([(rule, rule.split.vllm) for rule in rules], chosen)
    fused = _rows([(rule, rule.split.fused or rule.split.megatron) for rule in rules], chosen)
    return [row(A, of_a, SplitKind(_whole, _whole)), row(B, of_b, SplitKind(ours, served, fused=fused))]


def _whole(sizes: Sizes, lengths: tuple[int, ...], ways: int, rank: int) -> list[Piece]:
    """Every rank has all rows, tensor below tensor."""
    pieces, offset = [], 0
    for tensor, length in enumerate(lengths):
        pieces.append(Piece(tensor, 0, 0, length, offset))
        offset += length
    return pieces


def _rows(parts: Sequence[tuple[Rule, Split]], chosen: Sequence[int]) -> Split:
    """The rows of the chosen tensors that a rank has of the weight, in their order there, without the others'.

    Args:
        parts: the rows of the weight, and how each of them is split.
        chosen: the numbers of tensors, counted through all parts.
    """

    def of_rank(sizes: Sizes, lengths: tuple[int, ...], ways: int, rank: int) -> list[Piece]:
        pieces, offset, first = [], 0, 0
        for rule, split in parts:
            every = split(sizes, tuple(sizes[tensor.dims[0]] for tensor in rule.hf), ways, rank)
            for piece in sorted(every, key=lambda piece: piece.local_start):
                if first + piece.tensor in chosen:
                    pieces.append(replace(piece, tensor=chosen.index(first + piece.tensor), local_start=offset))
                    offset += piece.stop - piece.start
            first += len(rule.hf)
        return pieces

    return of_rank

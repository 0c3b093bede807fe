"""The few ways to split a row of a family's table over ranks, in Megatron and in vLLM.

A split turns whole Hugging Face tensors into the pieces of one rank. Invariant (tests/unit/models): the pieces of all
ranks cover every row or column exactly once, or equally often if heads or whole tensors are replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

VOCABULARY_MULTIPLE = 32
"""Megatron pads the vocabulary to a multiple of this times TP, so that every rank's matrix has aligned rows."""
VLLM_VOCABULARY_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this: DEFAULT_VOCAB_PADDING_SIZE in
vllm.model_executor.layers.vocab_parallel_embedding."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an HF tensor on one rank: the rows or columns [start, stop) along `dim`. In the rank's parameter they
    begin at `local_start`."""

    tensor: int
    """The tensor, as an index into the row's `hf`."""
    dim: int
    start: int
    stop: int
    local_start: int


Sizes = Mapping[str, int]
"""The extents of a layer by name (`ModelShape.sizes`)."""
Split = Callable[[Sizes, tuple[int, ...], int, int], list[Piece]]
"""(sizes, extents of the split dim of each HF tensor, ways, rank) -> the rank's pieces.

It raises ValueError if the extents do not divide."""


@dataclass(frozen=True, slots=True)
class SplitKind:
    """How one kind of row is split in Megatron and in vLLM."""

    megatron: Split
    vllm: Split
    dim: int = 0
    """The dim of the HF tensors that is split."""
    fused: Split | None = None
    """Megatron's split with Transformer Engine's layers, if it differs from `megatron`."""


def padded(length: int, multiple: int) -> int:
    """`length` rounded up to a multiple."""
    return -(-length // multiple) * multiple


def part(length: int, ways: int, index: int) -> tuple[int, int]:
    """The interval [start, stop) of one of `ways` equal parts.

    Raises:
        ValueError: `ways` does not divide the length.
    """
    if length % ways:
        fitting = ", ".join(str(n) for n in range(1, 65) if length % n == 0)
        raise ValueError(f"{length} does not divide into {ways} equal parts, but into {fitting}")
    return index * (length // ways), (index + 1) * (length // ways)


def _stacked(dim: int, first: Callable[[Sizes, int], int] = lambda sizes, ways: 0) -> Split:
    """Each tensor is split evenly along `dim`, and a rank stacks its parts, such as [gate_t ; up_t].

    Args:
        first: where they begin in the local parameter.
    """

    def split(sizes: Sizes, lengths: tuple[int, ...], ways: int, rank: int) -> list[Piece]:
        pieces, offset = [], first(sizes, ways)
        for index, length in enumerate(lengths):
            start, stop = part(length, ways, rank)
            pieces.append(Piece(index, dim, start, stop, offset))
            offset += stop - start
        return pieces

    return split


def _replicated(offset: Callable[[Sizes], int] = lambda sizes: 0) -> Split:
    """Every rank holds the whole tensor, which begins `offset` rows after the beginning of the local parameter."""

    def split(sizes: Sizes, lengths: tuple[int, ...], ways: int, rank: int) -> list[Piece]:
        return [Piece(0, 0, 0, lengths[0], offset(sizes))]

    return split


def _first_rank(sizes: Sizes, lengths: tuple[int, ...], ways: int, rank: int) -> list[Piece]:
    """The first rank holds the whole tensor, and the others zeros, because the ranks' outputs are added up."""
    return [] if rank else [Piece(0, 0, 0, lengths[0], 0)]


def _vocabulary(multiple: Callable[[int], int]) -> Split:
    """The rows are padded to a multiple and then split evenly. A rank with only padding rows holds no HF row."""

    def split(sizes: Sizes, lengths: tuple[int, ...], ways: int, rank: int) -> list[Piece]:
        start, stop = (min(row, lengths[0]) for row in part(padded(lengths[0], multiple(ways)), ways, rank))
        return [Piece(0, 0, start, stop, 0)]

    return split


def _megatron_qkv(sizes: Sizes, lengths: tuple[int, ...], ways: int, rank: int) -> list[Piece]:
    """Each query group is [q ... q, k, v], the groups follow each other, and all rows are split evenly over TP. If
    there are fewer groups than ranks, the rows of a group are on several ranks, and Megatron gathers their output."""
    heads, size = sizes["heads"] // sizes["kv_heads"], sizes["head"]
    rows = [
        (tensor, group * length, length)
        for group in range(sizes["kv_heads"])
        for tensor, length in ((0, heads * size), (1, size), (2, size))
    ]
    return _even_part(rows, ways, rank)


def _megatron_gated_qkv(sizes: Sizes, lengths: tuple[int, ...], ways: int, rank: int) -> list[Piece]:
    """Like `_megatron_qkv`, with groups [q ... q, gate ... gate, k, v]. The HF tensor of q is [q ; gate] for each
    head."""
    heads, size = sizes["heads"] // sizes["kv_heads"], sizes["head"]
    rows = []
    for group in range(sizes["kv_heads"]):
        of_group = range(group * heads, (group + 1) * heads)
        rows += [(0, (2 * head + is_gate) * size, size) for is_gate in (0, 1) for head in of_group]
        rows += [(tensor, group * size, size) for tensor in (1, 2)]
    return _even_part(rows, ways, rank)


def _even_part(rows: list[tuple[int, int, int]], ways: int, rank: int) -> list[Piece]:
    """A rank's even part of the rows of a whole parameter.

    Args:
        rows: the intervals of HF rows that follow each other in the parameter: (tensor, first row, number of rows).
    """
    first, last = part(sum(length for _, _, length in rows), ways, rank)
    pieces, row = [], 0
    for tensor, begin, length in rows:
        start, stop = max(row, first), min(row + length, last)
        if start < stop:
            pieces.append(Piece(tensor, 0, begin + start - row, begin + stop - row, start - first))
        row += length
    return pieces


def _delta_sections(sizes: Sizes, lengths: tuple[int, ...], ways: int, rank: int) -> list[Piece]:
    """The first tensor is [q ; k ; v] of all heads of linear attention, and a rank stacks its heads' rows of each of
    the three. The rows of its heads of further tensors follow."""
    key, value = sizes["delta_key"], sizes["delta_value"]
    part(sizes["delta_key_heads"], ways, rank)
    sections = [(0, 0, key), (0, key, key), (0, 2 * key, value)]
    sections += [(tensor, 0, length) for tensor, length in enumerate(lengths) if tensor]
    pieces, offset = [], 0
    for tensor, begin, length in sections:
        start, stop = part(length, ways, rank)
        pieces.append(Piece(tensor, 0, begin + start, begin + stop, offset))
        offset += stop - start
    return pieces


def _after_qkvz(sizes: Sizes, ways: int) -> int:
    """The rows of q, k, v and z of a rank."""
    return sizes["delta_qkvz"] // ways


def _vllm_qkv(sizes: Sizes, lengths: tuple[int, ...], ways: int, rank: int) -> list[Piece]:
    """A rank stacks its heads as [q heads ; k heads ; v heads]. If there are fewer KV heads than ranks, each KV head is
    replicated."""
    copies = max(1, ways // sizes["kv_heads"])
    part(sizes["heads"], ways, rank)
    part(sizes["kv_heads"] * copies, ways, rank)
    pieces, offset = [], 0
    for tensor, parts, index in (
        (0, ways, rank),
        (1, ways // copies, rank // copies),
        (2, ways // copies, rank // copies),
    ):
        start, stop = part(lengths[tensor], parts, index)
        pieces.append(Piece(tensor, 0, start, stop, offset))
        offset += stop - start
    return pieces


def _gathered_heads(sizes: Sizes, lengths: tuple[int, ...], ways: int, rank: int) -> list[Piece]:
    """Every rank gathers the heads of all ranks, normalises them with the whole weight, and keeps its own heads
    (TPAwareNormMixin in vllm.model_executor.models.transformers.fusers.rms_norm). vLLM cannot gather KV heads if each
    head is on several ranks. A single KV head is whole on every rank, so it needs no gathering."""
    if ways > (heads := sizes["kv_heads"]) > 1:
        raise ValueError(
            f"the engine has {ways} tensor-parallel ranks, the model {heads} KV heads, and vLLM cannot normalise heads "
            f"together if several ranks hold the same one; set rollout.parallel.tensor to {heads} or less"
        )
    return [Piece(0, 0, 0, lengths[0], 0)]


ROWS = SplitKind(_stacked(0), _stacked(0))
"""The split of layers that Megatron calls column-parallel: their outputs are split."""
COLUMNS = SplitKind(_stacked(1), _stacked(1), dim=1)
"""The split of layers that Megatron calls row-parallel: their inputs are split."""
REPLICATED = SplitKind(_replicated(), _replicated())
ONCE = SplitKind(_replicated(), _first_rank)
"""The split of an expert's bias whose input is split. All of Megatron's ranks hold it, and the first one adds it."""
QKV = SplitKind(_megatron_qkv, _vllm_qkv)
"""The split of weights and biases of the projection to q, k and v."""
GATED_QKV = SplitKind(_megatron_gated_qkv, _vllm_qkv)
"""The split of `QKV` where q's projection also gives the gates of attention's output."""
DELTA_SECTIONS = SplitKind(_delta_sections, _delta_sections)
"""The split of linear attention's tensors that have q, k and v one after the other."""
DELTA_STRENGTH = SplitKind(_stacked(0, _after_qkvz), _stacked(0))
"""The split of the projection to strength and decay of linear attention. Megatron's ranks have its rows below the
rows of q, k, v and z in one parameter."""
WIDE_NORM = SplitKind(_stacked(0), _gathered_heads)
"""The split of a norm of q or k over all heads together. Megatron's ranks hold the weights of their own heads."""
VOCABULARY = SplitKind(
    _vocabulary(lambda ways: VOCABULARY_MULTIPLE * ways), _vocabulary(lambda ways: VLLM_VOCABULARY_MULTIPLE)
)
LATENT_DOWN = SplitKind(_stacked(0), _replicated(), fused=_replicated())
"""The split of the down projections of latent attention: Megatron's local layers split them over TP and gather the
output; Transformer Engine and vLLM have the whole projections on every rank."""
LATENT_KV_DOWN = SplitKind(_stacked(0), _replicated(lambda sizes: sizes["query_rank"]), fused=_replicated())
"""The split of the down projection of k and v in latent attention. vLLM stacks its rows below the query's down
projection."""

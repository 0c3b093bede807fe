"""What a model family is: one table, one row a fused parameter, and the few ways in which rows are split.

The row `Rule(qkv, megatron=..., vllm=..., hf=(q, k, v))` is all that the actor, the loader, the exporter and the
bridge know of an attention input. A new dense family is a new table (`layout/families/`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_rl.layout.shards import Box, Shard
from megatron_rl.types import Mesh, ModelShape

VOCABULARY_MULTIPLE = 32
"""Megatron pads the vocabulary to a multiple of this times TP, so that every rank's matrix has aligned rows."""
VLLM_VOCABULARY_MULTIPLE = 64
"""vllm.model_executor.layers.vocab_parallel_embedding.DEFAULT_VOCAB_PADDING_SIZE"""


@dataclass(frozen=True, slots=True)
class HfTensor:
    name: str
    dims: tuple[str, ...]
    """Symbols of `sizes`: q, kv, hidden, ffn, vocab, head."""


def sizes(shape: ModelShape) -> dict[str, int]:
    return {
        "q": shape.num_heads * shape.head_dim,
        "kv": shape.num_kv_heads * shape.head_dim,
        "hidden": shape.hidden_size,
        "ffn": shape.ffn_size,
        "vocab": shape.vocab_size,
        "head": shape.head_dim,
    }


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of an HF tensor on one rank: rows or columns [start, stop) of dim, then where it begins locally."""

    tensor: int
    """Index into the rule's `hf`."""
    dim: int
    start: int
    stop: int
    local_start: int


Split = Callable[[ModelShape, tuple[int, ...], int, int], list[Piece]]
"""(shape, extents of the split dim of each HF tensor, TP size, TP rank) -> the rank's pieces."""


def _stacked(dim: int) -> Split:
    """Each tensor split evenly along dim, a rank's parts one after the other: [gate_t ; up_t]."""

    def split(shape: ModelShape, lengths: tuple[int, ...], size: int, rank: int) -> list[Piece]:
        pieces, offset = [], 0
        for index, length in enumerate(lengths):
            part = length // size
            pieces.append(Piece(index, dim, rank * part, (rank + 1) * part, offset))
            offset += part
        return pieces

    return split


def _replicated(shape: ModelShape, lengths: tuple[int, ...], size: int, rank: int) -> list[Piece]:
    return [Piece(0, 0, 0, lengths[0], 0)]


def _vocabulary(multiple: Callable[[int], int]) -> Split:
    """Rows padded to a multiple, then split; padding rows are no HF rows, so a rank may have none."""

    def split(shape: ModelShape, lengths: tuple[int, ...], size: int, rank: int) -> list[Piece]:
        part = padded(lengths[0], multiple(size)) // size
        start, stop = min(rank * part, lengths[0]), min((rank + 1) * part, lengths[0])
        return [Piece(0, 0, start, stop, 0)]

    return split


def _megatron_qkv(shape: ModelShape, lengths: tuple[int, ...], size: int, rank: int) -> list[Piece]:
    """Per query group [q ... q, k, v], the groups split evenly over TP."""
    head, per_group = shape.head_dim, shape.num_heads // shape.num_kv_heads
    groups = shape.num_kv_heads // size
    pieces, offset = [], 0
    for group in range(rank * groups, (rank + 1) * groups):
        for tensor, heads in ((0, per_group), (1, 1), (2, 1)):
            length = heads * head
            pieces.append(Piece(tensor, 0, group * length, (group + 1) * length, offset))
            offset += length
    return pieces


def _vllm_qkv(shape: ModelShape, lengths: tuple[int, ...], size: int, rank: int) -> list[Piece]:
    """[q heads of t ; k heads of t ; v heads of t]; with fewer KV heads than ranks, KV heads are replicated."""
    copies = max(1, size // shape.num_kv_heads)
    pieces, offset = [], 0
    for tensor, parts, index in (
        (0, size, rank),
        (1, size // copies, rank // copies),
        (2, size // copies, rank // copies),
    ):
        part = lengths[tensor] // parts
        pieces.append(Piece(tensor, 0, index * part, (index + 1) * part, offset))
        offset += part
    return pieces


@dataclass(frozen=True, slots=True)
class SplitKind:
    """How one kind of fused parameter lies on each side."""

    megatron: Split
    vllm: Split
    dim: int = 0
    """The HF dim that is split."""


ROWS = SplitKind(_stacked(0), _stacked(0))
COLUMNS = SplitKind(_stacked(1), _stacked(1), dim=1)
REPLICATED = SplitKind(_replicated, _replicated)
QKV = SplitKind(_megatron_qkv, _vllm_qkv)
VOCABULARY = SplitKind(
    _vocabulary(lambda tensor: VOCABULARY_MULTIPLE * tensor), _vocabulary(lambda tensor: VLLM_VOCABULARY_MULTIPLE)
)


def padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Rule:
    split: SplitKind
    hf: tuple[HfTensor, ...]
    megatron: str
    vllm: str
    megatron_fused_norm: str | None = None
    """The Megatron name when Transformer Engine fuses the norm into the linear layer after it."""


@dataclass(frozen=True, slots=True)
class Family:
    """Names in `layer` are relative to a layer's prefix; the other rules carry whole names."""

    name: str
    """`model_type` of the HF config.json."""
    embedding: Rule
    layer: tuple[Rule, ...]
    final_norm: Rule
    output: Rule
    hf_layer: str = "model.layers.{}."
    megatron_layer: str = "decoder.layers.{}."
    vllm_layer: str = "model.layers.{}."

    def hf_tensors(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """Every HF tensor of a model and its extents."""
        size = sizes(shape)
        rules = [("", r) for r in (self.embedding, self.final_norm)]
        rules += [] if shape.tied_embeddings else [("", self.output)]
        rules += [(self.hf_layer.format(i), r) for i in range(shape.num_layers) for r in self.layer]
        return {prefix + t.name: tuple(size[d] for d in t.dims) for prefix, r in rules for t in r.hf}

    def check_mesh(self, shape: ModelShape, mesh: Mesh) -> None:
        """Raises ValueError when heads, KV heads, FFN or layers do not divide."""
        for name, value, ways, axis in (
            ("attention heads", shape.num_heads, mesh.tensor, "tensor"),
            ("KV heads", shape.num_kv_heads, mesh.tensor, "tensor"),
            ("FFN size", shape.ffn_size, mesh.tensor, "tensor"),
            ("layers", shape.num_layers, mesh.pipeline, "pipeline"),
        ):
            if value % ways:
                raise ValueError(f"the model has {value} {name}, which policy.parallel.{axis}={ways} does not divide")

    def megatron_shards(self, shape: ModelShape, mesh: Mesh, rank: int, fused_norms: bool = False) -> list[Shard]:
        """All parameters of one trainer rank. `fused_norms`: the model has Transformer Engine's layers."""
        self.check_mesh(shape, mesh)
        tensor, stage, _ = mesh.coordinates(rank)
        first, last = stage == 0, stage == mesh.pipeline - 1
        per_stage = shape.num_layers // mesh.pipeline

        def place(rule: Rule, hf_prefix: str = "", prefix: str = "") -> list[Shard]:
            local = rule.megatron_fused_norm if fused_norms and rule.megatron_fused_norm else rule.megatron
            return _shards(rule, rule.split.megatron, (shape, mesh.tensor, tensor), hf_prefix, prefix + local)

        shards = place(self.embedding) if first else []
        for i in range(per_stage):
            hf_prefix = self.hf_layer.format(stage * per_stage + i)
            for rule in self.layer:
                shards += place(rule, hf_prefix, self.megatron_layer.format(i))
        if last:
            shards += place(self.final_norm)
            if not shape.tied_embeddings:
                shards += place(self.output)
            elif not first:  # the last stage's own copy of the word embedding
                shards += _shards(
                    self.embedding,
                    self.embedding.split.megatron,
                    (shape, mesh.tensor, tensor),
                    "",
                    self.output.megatron,
                )
        return shards

    def vllm_shards(self, shape: ModelShape, size: int, rank: int) -> list[Shard]:
        """All parameters of one rank of an engine with `size` tensor-parallel ranks."""

        def place(rule: Rule, hf_prefix: str = "", prefix: str = "") -> list[Shard]:
            return _shards(rule, rule.split.vllm, (shape, size, rank), hf_prefix, prefix + rule.vllm)

        shards = place(self.embedding)
        for i in range(shape.num_layers):
            for rule in self.layer:
                shards += place(rule, self.hf_layer.format(i), self.vllm_layer.format(i))
        return shards + place(self.final_norm) + ([] if shape.tied_embeddings else place(self.output))


def _shards(
    rule: Rule, split: Split, where: tuple[ModelShape, int, int], hf_prefix: str, local_name: str
) -> list[Shard]:
    shape, size, rank = where
    known = sizes(shape)
    full = [tuple(known[d] for d in tensor.dims) for tensor in rule.hf]
    result = []
    for piece in split(shape, tuple(extent[rule.split.dim] for extent in full), size, rank):
        hf_box = _with(full[piece.tensor], piece.dim, piece.start, piece.stop)
        length = piece.stop - piece.start
        local_box = _with(full[piece.tensor], piece.dim, piece.local_start, piece.local_start + length)
        result.append(Shard(hf_prefix + rule.hf[piece.tensor].name, hf_box, local_name, local_box))
    return result


def _with(extent: tuple[int, ...], dim: int, start: int, stop: int) -> Box:
    return tuple((start, stop) if d == dim else (0, length) for d, length in enumerate(extent))

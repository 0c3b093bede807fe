"""Causal attention over a packed row, for the layers that run without Transformer Engine.

Sequences of similar length are attended together as one padded batch: causality hides the padding on the
right, so no mask is built, and a row of 256 short answers costs a few kernel calls instead of 256. Rotary
embeddings are applied here too, from positions that restart with each sequence; Megatron's own packed form
loops over sequences. What depends on lengths alone is computed once a micro-batch (`PackedSequences`) and
shared by all layers.

Invariants (tests/unit/actor): output and gradients equal those of plain attention, sequence by sequence.

Shape letters: T packed tokens, S sequences, B sequences of one padded batch, L its length, N query heads,
G key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.actor import platform
from megatron_rl.types import ModelShape

MAX_PADDING = 0.2
"""A batch of similar sequences holds at most this share of padding."""


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron hands it to every attention layer untouched."""

    batches: tuple[Tensor, ...] = ()
    """int64 [B, L] each: the packed position of every entry; padding repeats its sequence's last one."""
    unpad_T: Tensor | None = None
    """int64: where each packed position stands in the batches, flattened one after the other."""
    cos_T: Tensor | None = None
    """[T, 1, D], float32."""
    sin_T: Tensor | None = None


def packed_sequences(lengths_S: Tensor, shape: ModelShape, fused: bool) -> PackedSeqParams:
    """What attention needs to know of a packed row: sequences of these lengths (on the CPU), one after the
    other. `fused`: for Transformer Engine's attention."""
    if not fused:
        return plan_attention(lengths_S, shape.head_dim, shape.rope_theta)
    starts = F.pad(lengths_S.cumsum(0), (1, 0)).to(device=platform.device(), dtype=torch.int32)
    longest = int(lengths_S.max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def plan_attention(lengths_S: Tensor, head_dim: int, rope_theta: float) -> PackedSequences:
    """The plan of our own attention over one row."""
    device = platform.device()
    starts_S = F.pad(lengths_S.cumsum(0), (1, 0))
    num_tokens = int(starts_S[-1])
    batches, unpad_T, offset = [], torch.empty(num_tokens, dtype=torch.int64), 0
    for members in _similar(lengths_S):
        length_B1, start_B1 = lengths_S[members, None], starts_S[members, None]
        column_L = torch.arange(int(length_B1.max()))
        batch_BL = start_B1 + torch.minimum(column_L, length_B1 - 1)
        real_BL = column_L < length_B1
        unpad_T[batch_BL[real_BL]] = offset + real_BL.flatten().nonzero().squeeze(1)
        offset += batch_BL.numel()
        batches.append(batch_BL.to(device))
    position_T = torch.arange(num_tokens) - torch.repeat_interleave(starts_S[:-1], lengths_S)
    inverse_frequency = 1.0 / rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle_T = torch.outer(position_T.float(), inverse_frequency).repeat(1, 2).unsqueeze(1).to(device)
    return PackedSequences(
        qkv_format="thd",
        batches=tuple(batches),
        unpad_T=unpad_T.to(device),
        cos_T=angle_T.cos(),
        sin_T=angle_T.sin(),
    )


def _similar(lengths_S: Tensor) -> list[Tensor]:
    """Indices of the sequences, longest first, cut where padding to the longest would exceed MAX_PADDING."""
    order = torch.argsort(lengths_S, descending=True, stable=True)
    lengths = lengths_S[order].tolist()
    cuts, first, tokens = [0], 0, 0
    for i, length in enumerate(lengths):
        tokens += length
        if tokens < (1 - MAX_PADDING) * lengths[first] * (i - first + 1):
            cuts.append(i)
            first, tokens = i, length
    return list(torch.tensor_split(order, cuts[1:]))


class PackedAttention(torch.nn.Module):
    """Megatron's `core_attention`: query-key-value of a packed row to the heads' outputs."""

    def __init__(self, config: TransformerConfig, **unused):
        super().__init__()
        assert config.attention_dropout == 0, "packed attention has no dropout"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        packed_seq_params: PackedSequences,
        **unused,
    ) -> Tensor:
        """query [T, N, D], key and value [T, G, D], before rotation; returns [T, N * D]."""
        packed = packed_seq_params
        num_heads, num_groups, head_dim = query.shape[1], key.shape[1], query.shape[2]
        cos_T, sin_T = packed.cos_T.to(query.dtype), packed.sin_T.to(query.dtype)
        rotated_T = _rotate(torch.cat((query, key), 1), cos_T, sin_T)
        qkv_T = torch.cat((rotated_T, value), 1)
        outputs = []
        for batch_BL in packed.batches:
            qkv = qkv_T.index_select(0, batch_BL.flatten()).view(*batch_BL.shape, -1, head_dim)
            q, k, v = qkv.transpose(1, 2).split((num_heads, num_groups, num_groups), dim=1)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=num_heads != num_groups)
            outputs.append(out.transpose(1, 2).reshape(-1, num_heads * head_dim))
        return torch.cat(outputs).index_select(0, packed.unpad_T)


def _rotate(x_T: Tensor, cos_T: Tensor, sin_T: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021, arXiv:2104.09864) on the two halves of each head."""
    first, second = x_T.chunk(2, dim=-1)
    return x_T * cos_T + torch.cat((-second, first), -1) * sin_T

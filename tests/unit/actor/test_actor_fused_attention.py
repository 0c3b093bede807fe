"""The rotation that stands in front of Transformer Engine's attention in models that see images."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from small_models import model

from megatron_rl.actor.attention import PackedAttention, attend, packed_sequences
from megatron_rl.actor.context import ContextRank
from megatron_rl.actor.fused_attention import rotating
from megatron_rl.types import Vision

SHAPE = replace(model("x", 1, 32, 4, 2, 16, 32, 64), vision=Vision("x", 9, 2, 0, (4, 2, 2), interleaved=True))
LENGTHS = torch.tensor([6, 9, 5])
POSITION_3T = torch.randint(0, 30, (3, 20), generator=torch.Generator().manual_seed(0))


class Core(torch.nn.Module):
    """Attention of the row without rotation, called as Megatron calls Transformer Engine's."""

    def forward(self, query, key, value, attention_mask, *, attn_mask_type, packed_seq_params):
        assert attn_mask_type == "causal" and packed_seq_params.cu_seqlens_q.tolist() == [0, 6, 15, 20]
        return attend(query, key, value, packed_sequences(LENGTHS, SHAPE, fused=False).full)


def test_query_and_key_are_rotated_as_in_local_layers():
    torch.manual_seed(1)
    query, key, value = (torch.randn(20, heads, 16) for heads in (4, 2, 2))
    fused, local = (packed_sequences(LENGTHS, SHAPE, fused=is_fused, position_3T=POSITION_3T) for is_fused in (1, 0))
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    expected = PackedAttention(config, 1)(query, key, value, None, packed_seq_params=local)
    found = rotating(Core)()(query, key, value, None, attn_mask_type="causal", packed_seq_params=fused)
    torch.testing.assert_close(found, expected)
    assert rotating(rotating(Core)).__base__ is Core, "like layers share their spec, and each is fitted"


@pytest.mark.parametrize("position_3T", [POSITION_3T, None], ids=["images", "no images"])
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_the_angles_are_the_ones_of_local_layers(rank, position_3T):
    lengths = torch.tensor([8, 8, 4])
    context = None if rank is None else ContextRank(None, rank, 2)
    fused, local = (
        packed_sequences(lengths, SHAPE, fused=is_fused, context=context, position_3T=position_3T)
        for is_fused in (True, False)
    )
    assert torch.equal(fused.full.cos_T, local.full.cos_T) and torch.equal(fused.full.sin_T, local.full.sin_T)
    assert len(fused.full.cos_T) == (20 if rank is None else 10)
    without = packed_sequences(lengths, replace(SHAPE, vision=None), fused=True, context=context)
    assert without.full is None, "Megatron rotates these"

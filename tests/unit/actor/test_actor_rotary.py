from __future__ import annotations

import pytest
import torch
from small_models import changed, model
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.actor.attention import packed_sequences
from megatron_rl.actor.context import ContextRank
from megatron_rl.actor.rotary import rotation
from megatron_rl.types import LatentAttention, LinearRope, Llama3Rope, Rope, YarnRope

LLAMA = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
SCALINGS = {
    "llama 3.1": (LLAMA, Llama3Rope(8.0, 1.0, 4.0, 8192)),
    "linear": ({"rope_type": "linear", "factor": 8.0}, LinearRope(8.0)),
    "yarn": (YARN, YarnRope(8.0, 8192)),
    "yarn of OLMo 3": (
        YARN | {"attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1},
        YarnRope(8.0, 8192, attention_factor=1.2079441541679836),
    ),
    "yarn of DeepSeek": (
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        YarnRope(8.0, 8192, mscale=1.0, mscale_all_dim=0.7),
    ),
    "yarn of gpt-oss": (
        YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        YarnRope(8.0, 8192, truncate=False),
    ),
    "yarn with one edge": (YARN | {"beta_fast": 1304, "beta_slow": 1304}, YarnRope(8.0, 8192, 1304, 1304)),
}


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_angles_equal_those_of_transformers(name, share):
    theirs, ours = SCALINGS[name]
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        head_dim=128,
        max_position_embeddings=65536,
        rope_parameters=theirs | {"rope_theta": 500000.0, "partial_rotary_factor": share},
    )
    frequency, factor = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, torch.device("cpu"))
    positions = torch.arange(0, 512)
    angle = torch.outer(positions.float(), frequency).repeat(1, 2)[:, None]
    cos, sin = rotation(positions, int(128 * share), 500000.0, ours)
    # The fp32 frequencies may differ by one rounding, 6e-8, which 512 positions multiply.
    torch.testing.assert_close(cos, angle.cos() * factor, atol=5e-5, rtol=0)
    torch.testing.assert_close(sin, angle.sin() * factor, atol=5e-5, rtol=0)
    plain, _ = rotation(positions, int(128 * share), 500000.0)
    assert (cos - plain).abs().max() > 0.1


def test_llama_scaling_keeps_short_waves_and_stretches_long_ones():
    """Golden values: a head of size 2 has one frequency, 1 radian per token, with the wavelength 6.28."""
    kept, _ = rotation(torch.tensor([3]), 2, 1e4, Llama3Rope(8.0, 1.0, 4.0, 8192))
    stretched, _ = rotation(torch.tensor([3]), 2, 1e4, Llama3Rope(8.0, 1.0, 4.0, 6))
    assert kept[0, 0].tolist() == pytest.approx([torch.cos(torch.tensor(3.0)).item()] * 2)
    assert stretched[0, 0].tolist() == pytest.approx([torch.cos(torch.tensor(3.0 / 8)).item()] * 2)


@pytest.mark.parametrize("context", [None, ContextRank(None, 1, 2)], ids=["whole", "second of two ranks"])
def test_latent_attention_rotates_alike_in_both_kinds_of_layers(context):
    """Megatron rotates the other models of Transformer Engine's layers, whose rows have no angles."""
    rope, sizes = Rope(1e4, YarnRope(4.0, 16)), dict(query_rank=8, kv_rank=8, nope_dim=16, rope_dim=8, value_dim=16)
    llama = model("llama", 1, 8, 2, 2, 24, 8, 8)
    latent = changed(llama, family="deepseek_v3", attention=LatentAttention(2, **sizes, rope=rope))
    lengths = torch.tensor([8, 12, 4])
    local, fused = (packed_sequences(lengths, latent, fused, context) for fused in (False, True))
    assert torch.equal(fused.full.cos_T, local.full.cos_T) and torch.equal(fused.full.sin_T, local.full.sin_T)
    assert len(fused.full.cos_T) == (24 if context is None else 12)
    # The lengths of the whole row, also with context parallelism: Transformer Engine divides them.
    assert fused.cu_seqlens_q.tolist() == [0, 8, 20, 24] and fused.max_seqlen_q == 12
    assert packed_sequences(lengths, llama, True, context).full is None

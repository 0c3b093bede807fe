"""PyTorch's formulas in the place of Transformer Engine's kernels, which run on GPUs alone.

Of the linear layers only products and norms are replaced: what Transformer Engine does around them forward and
backward, its collectives, and what it keeps and frees, is its own code. Norms on their own, attention and the rotary
embedding are replaced whole. What Megatron and Transformer Engine build stays: parameters, their marks, process groups,
the order of calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import faked
import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor
from transformer_engine.pytorch import utils
from transformer_engine.pytorch.module import grouped_linear, layernorm_linear, linear
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

from megatron_rl.actor import model, platform, trainer
from megatron_rl.actor.context import ContextRank, plan_ring, ring_attention


def install() -> None:
    """Let `build_model` make Transformer Engine's layers on a CPU, and let them compute there."""
    platform.HAS_TRANSFORMER_ENGINE = True
    TransformerEngineBaseModule.prepare_forward = _prepared
    for module in (linear, layernorm_linear, grouped_linear):
        module.get_dummy_wgrad = lambda extents, dtype, zero=False: torch.zeros(extents, dtype=dtype)
    utils._empty_tensor = torch.Tensor
    linear.general_gemm = layernorm_linear.general_gemm = _product
    grouped_linear.general_grouped_gemm = _grouped_products
    layernorm_linear.apply_normalization = _normalised
    layernorm_linear.tex.rmsnorm_bwd = _norm_gradients
    torch.cuda.is_current_stream_capturing = lambda: False
    te.RMSNorm.forward = lambda self, x: _rms_norm(x, self.weight, self)
    te.DotProductAttention.forward = _attention
    rope_utils.fused_apply_rotary_pos_emb_thd = _rotate
    real = model.build_model

    def build(*arguments: Any) -> Any:
        with _pretending():
            return real(*arguments)

    trainer.build_model = build


@contextmanager
def _pretending() -> Iterator[None]:
    """The constructors ask for a device."""
    names = ("is_available", "device_count", "get_device_capability", "get_device_properties", "get_device_name")
    names += ("current_device", "set_device", "synchronize", "mem_get_info", "Stream")
    with mock.patch.multiple(torch.cuda, **{name: getattr(torch.cuda, name) for name in names}):
        current = torch.cuda.current_device
        faked.pretend()
        torch.cuda.current_device = current  # platform's: the CPU
        yield


@contextmanager
def _prepared(
    self: Any, x: Tensor, num_gemms: int = 1, allow_non_contiguous: bool = False, **others: Any
) -> Iterator[Tensor]:
    """Transformer Engine's own, without the check that tensors are on a GPU."""
    self.allow_different_data_and_param_types, self.forwarded_at_least_once = False, True
    self.set_activation_dtype(x)
    self.init_fp8_metadata(num_gemms=num_gemms)
    yield x if allow_non_contiguous else x.contiguous()


def _product(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    layout: str = "TN",
    out: Tensor | None = None,
    accumulate: bool = False,
    bias: Tensor | None = None,
    grad: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None, None, None]:
    """The product of cuBLAS, whose matrices are transposed: `layout` says which of them is so, a's letter first."""
    assert not any(others.pop(name, None) for name in ("quantization_params", "ub", "gelu", "extra_output")), others
    flat = b.flatten(0, -2)  # torch would round products of three dims by whether a has a gradient
    if layout == "NT":
        result = flat.t() @ a.flatten(0, -2)
    else:
        result = (flat @ (a.t() if layout == "TN" else a)).unflatten(0, b.shape[:-1])
    of_bias = None
    if bias is not None and grad:
        of_bias = flat.sum(0)
    elif bias is not None:
        result = result + bias
    if out is None:
        return result.to(out_dtype), of_bias, None, None
    return out.add_(result) if accumulate else out.copy_(result), of_bias, None, None


def _grouped_products(
    a: list[Tensor],
    b: list[Tensor],
    out: list[Tensor],
    quantization_params: list[None],
    out_dtype: torch.dtype,
    *,
    m_splits: list[int],
    single_output: bool = False,
    use_bias: bool = False,
    bias: Any = None,
    **how: Any,
) -> tuple[list[Tensor], list[Tensor | None], None]:
    assert not use_bias
    parts = out[0].split(m_splits) if single_output else out
    for one_a, one_b, part in zip(a, b, parts, strict=True):
        _product(one_a, one_b, out=part, **how)
    return out, [None] * len(a), None


def _normalised(
    x: Tensor,
    out: None,
    weight: Tensor,
    bias: None,
    eps: float,
    quantizer: None,
    dtype: torch.dtype,
    kind: str,
    margin: int,
    zero_centered: bool,
) -> tuple[Tensor, None, Tensor]:
    """The output, no mean, and 1 / the root of the mean square."""
    assert (out, bias, quantizer, kind) == (None, None, None, "RMSNorm")
    factors = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * factors * (weight + 1 if zero_centered else weight), None, factors


def _norm_gradients(
    gradient: Tensor, x: Tensor, factors: Tensor, weight: Tensor, margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Of x, and of the weight."""
    unit, scaled = x * factors, gradient * (weight + 1 if zero_centered else weight)
    of_x = factors * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    return of_x, (gradient * unit).sum(0)


def _rms_norm(x: Tensor, weight: Tensor, module: Any) -> Tensor:
    factor = weight + 1 if module.zero_centered_gamma else weight
    return F.rms_norm(x, x.shape[-1:], factor, module.eps)


def _rotate(x: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0) -> Tensor:
    """A part of the dims is rotated if there are fewer frequencies than a head has dims (fused_rope.cu)."""
    groups = mock.Mock(size=lambda: cp_size, rank=lambda: cp_rank)
    return rope_utils._apply_rotary_pos_emb_thd(x, cu_seqlens, freqs, cp_group=groups)


def _attention(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    qkv_format: str,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_mask_type: str,
    **others: Any,
) -> Tensor:
    """Causal attention over the sequences of a packed row, with the checks of Transformer Engine's own method."""
    assert (qkv_format, attn_mask_type, self.softmax_type) == ("thd", "padding_causal", "vanilla")
    assert not any(value is not None for value in others.values()), others
    assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_kv)
    assert query.shape[-1] == key.shape[-1] == self.hidden_size_per_attention_head_k
    assert value.shape[-1] == self.hidden_size_per_attention_head_v
    assert key.shape[1] == value.shape[1] == self.num_gqa_groups_per_partition
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    scale, width = self.fused_attention.softmax_scale, value.shape[-1]
    lengths = cu_seqlens_q.diff().long()
    assert max_seqlen_q == max_seqlen_kv == int(lengths.max())
    if self.cp_group is not None and self.cp_group.size() > 1:
        assert self.cp_comm_type == "p2p" and self.window_size in (None, (-1, -1), (-1, 0))
        plan = plan_ring(lengths, ContextRank(self.cp_group, self.cp_group.rank(), self.cp_group.size()))
        wide = F.pad(value, (0, query.shape[-1] - width))
        out = ring_attention(query, key, wide, plan, scale)
        return out.view(*query.shape)[..., :width].flatten(1)
    parts = []
    for q, k, v in zip(*(x.transpose(0, 1).split(lengths.tolist(), 1) for x in (query, key, value)), strict=True):
        back = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        seen = back >= 0
        if self.window_size and self.window_size[0] >= 0:
            seen &= back <= self.window_size[0]
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], seen, scale=scale, enable_gqa=True)[0]
        parts.append(out.transpose(0, 1).flatten(1))
    return torch.cat(parts)

"""PyTorch's formulas in the place of Transformer Engine's kernels, which run on GPUs alone.

Only what a module computes from its tensors is replaced. What Megatron and Transformer Engine build stays: parameters,
their marks, process groups, the order of calls. A tensor-parallel module communicates with Megatron's own functions.
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
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megatron_rl.actor import model, platform, trainer
from megatron_rl.actor.context import ContextRank, plan_ring, ring_attention


def install() -> None:
    """Let `build_model` make Transformer Engine's layers on a CPU, and let them compute there."""
    platform.HAS_TRANSFORMER_ENGINE = True
    te.Linear.forward = _linear
    te.LayerNormLinear.forward = _norm_and_linear
    te.GroupedLinear.forward = _grouped_linear
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


def _with_bias(module: Any, out: Tensor) -> Any:
    bias = module.bias if module.use_bias else None
    if module.return_bias:
        return out, bias
    return out if bias is None else out + bias


def _linear(self: Any, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
    return _split_linear(self, x)


def _norm_and_linear(self: Any, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
    assert self.normalization == "RMSNorm"
    return _split_linear(self, _rms_norm(x, self.layer_norm_weight, self))


def _split_linear(module: Any, x: Tensor) -> Any:
    is_split, group = module.tp_size > 1, module.tp_group
    if is_split and module.parallel_mode == "column":
        gather = module.sequence_parallel
        x = (gather_from_sequence_parallel_region if gather else copy_to_tensor_model_parallel_region)(x, group=group)
    out = F.linear(x, module.weight)
    if is_split and module.parallel_mode == "row":
        scatter = module.sequence_parallel
        add = reduce_scatter_to_sequence_parallel_region if scatter else reduce_from_tensor_model_parallel_region
        out = add(out, group=group)
    return _with_bias(module, out)


def _grouped_linear(self: Any, x: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
    assert not self.use_bias and self.tp_size == 1, "Megatron's dispatcher communicates"
    parts = zip(x.split(m_splits), (getattr(self, f"weight{i}") for i in range(self.num_gemms)), strict=True)
    return torch.cat([F.linear(part, weight) for part, weight in parts])


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

"""Transformer Engine's attention for tokens that have positions in time, height and width (M-RoPE, arXiv:2409.12191).

Megatron's code for packed rows rotates query and key by the place of a token in its sequence alone. Here the row's own
angles rotate them, right before the kernel, as in the layers that run without Transformer Engine.

Invariant (tests/gpu_set): gradients are as near to float64 as those of local layers, in every layout.

Shape letters: T packed tokens, N query heads, G key-value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.actor.attention import PackedSequences, rotate


def rotating(core: Any) -> type[torch.nn.Module]:
    """The class `core` of a layer's `core_attention`, whose query and key are rotated first.

    Args:
        core: Transformer Engine's class, as Megatron wraps it. If it rotates already, it stays; like layers share it.
    """
    if getattr(core, "rotates", False):
        return core  # type: ignore[no-any-return]

    class RotatingAttention(core):  # type: ignore[misc]  # the class is known where Transformer Engine is
        rotates = True

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            *more: Any,
            packed_seq_params: PackedSequences,
            **options: Any,
        ) -> Tensor:
            """
            Args:
                query: [T, N, D], before rotation.
                key: [T, G, D], before rotation.
                value: [T, G, D].

            Returns:
                [T, N * D].
            """
            plan = packed_seq_params.full
            assert plan is not None, "a row of a model that sees images has its angles"
            cos_T, sin_T = plan.cos_T.to(query.dtype), plan.sin_T.to(query.dtype)
            query, key = rotate(query, cos_T, sin_T), rotate(key, cos_T, sin_T)
            out: Tensor = super().forward(
                query, key, value, attention_mask, *more, packed_seq_params=packed_seq_params, **options
            )
            return out

    return RotatingAttention

"""Multi-head latent attention over a packed row (DeepSeek-V2, arXiv:2405.04434).

Megatron's module makes the parameters; the path from hidden states to query, key and value is ours, for two reasons.
Megatron's module rotates one sequence after another; here the angles of the whole row are known (attention.py). And
Megatron's module loses gradients with TP > 1 if there is no sequence parallelism, or the layers are local: each rank
uses the rotated part of the key, which all heads share, for its own heads only, but the gradients of the ranks are not
added up.

Local layers split the weights of the down projections over the ranks. With Transformer Engine every rank has them
whole and projects its own tokens, and the norms of compressed query, key and value are a part of the up projections.

Rotary dims are interleaved pairs in the weights. They are put in the order of halves after the projection, for query
and key alike, so their products stay the same. The heads of the value are narrower than the heads of query and key. In
local layers zeros fill them up, because the kernels take heads of one width; cuDNN's take both widths.

Invariants (tests/ranks): logits, loss and gradients equal transformers' in every layout; tests/gpu_set shows the same
of Transformer Engine's layers with other kernels.

Shape letters: T packed tokens of a rank, t tokens that it has between the layers (fewer than T with sequence
parallelism), N heads of a rank, D dims of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.actor.attention import PackedSequences, attend, rotate
from megatron_rl.actor.gradient_sum import copied_to_all_ranks


class LatentSelfAttention(MLASelfAttention):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.are_downs_whole = not isinstance(self.linear_kv_down_proj, ColumnParallelLinear)
        """Whether each rank has the down projections whole, and applies them to its own tokens."""
        if self.are_downs_whole:
            # Transformer Engine marks every weight as split, and norms of gradients would count these on each rank.
            for name, parameter in self.named_parameters():
                if "_down_proj." in name:
                    parameter.tensor_model_parallel = False

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: None = None,
        position_ids: None = None,
        packed_seq_params: PackedSequences | None = None,
        inference_context: None = None,
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """
        Args:
            hidden_states: [t, 1, hidden size].
            packed_seq_params: the plan of the row; the other arguments are Megatron's and not used here.

        Returns:
            Query and key, [T, N, nope_dim + rope_dim], rotated; value, [T, N, value_dim]; and nothing in the place of
            the compressed tensors, which only sparse attention reads.
        """
        assert packed_seq_params is not None and packed_seq_params.full is not None, "every row has this plan"
        config, plan = self.config, packed_seq_params.full
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            compressed = self._compressed(self.linear_q_down_proj, hidden_states)
            query, _ = self.linear_q_up_proj(self.q_layernorm(self._own_tokens(compressed)))
        compressed = self._compressed(self.linear_kv_down_proj, hidden_states)
        compressed, key_rope = torch.split(compressed, [config.kv_lora_rank, config.qk_pos_emb_head_dim], -1)
        key_rope = self._for_all_heads(key_rope)
        key_and_value, _ = self.linear_kv_up_proj(self.kv_layernorm(self._own_tokens(compressed)))

        heads = (len(query), self.num_attention_heads_per_partition, -1)
        nope_and_rope = (config.qk_head_dim, config.qk_pos_emb_head_dim)
        query_nope, query_rope = query.view(heads).split(nope_and_rope, -1)
        key_nope, value = key_and_value.view(heads).split((config.qk_head_dim, config.v_head_dim), -1)
        cos_T, sin_T = plan.cos_T.to(query.dtype), plan.sin_T.to(query.dtype)
        query_rope = rotate(_halves(query_rope), cos_T, sin_T)
        key_rope = rotate(_halves(key_rope), cos_T, sin_T)
        key_rope = key_rope.expand(*key_nope.shape[:2], -1)
        return torch.cat((query_nope, query_rope), -1), torch.cat((key_nope, key_rope), -1), value, None, None

    def _compressed(self, linear: torch.nn.Module, hidden_states: Tensor) -> Tensor:
        """The output of a down projection: [T, 1, rank], or [t, 1, rank] if each rank has its weight whole."""
        compressed: Tensor
        compressed, _ = linear(hidden_states)
        return compressed if self.are_downs_whole else gather_from_tensor_model_parallel_region(compressed)

    def _own_tokens(self, x: Tensor) -> Tensor:
        """The rows of this rank's tokens, [t, ...], with sequence parallelism: the next layer gathers them again."""
        is_own = self.are_downs_whole or not self.config.sequence_parallel
        return x if is_own else scatter_to_sequence_parallel_region(x)

    def _for_all_heads(self, key_rope: Tensor) -> Tensor:
        """The key's shared part, [T, 1, rope_dim], from an output of `_compressed`. The heads of all ranks read it, so
        its gradients are summed over the ranks."""
        if self.are_downs_whole and self.config.sequence_parallel:
            whole: Tensor = gather_from_sequence_parallel_region(key_rope)
            return whole
        return copied_to_all_ranks(key_rope)


class LatentCoreAttention(torch.nn.Module):
    """The module `core_attention` of a layer with latent attention: from query, key and value to the heads' outputs."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **unused: object) -> None:
        super().__init__()
        assert config.attention_dropout == 0, "packed attention has no dropout"
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        packed_seq_params: PackedSequences,
        **unused: object,
    ) -> Tensor:
        """
        Args:
            query, key: [T, N, nope_dim + rope_dim], rotated.
            value: [T, N, value_dim].

        Returns:
            [T, N * value_dim].
        """
        width = max(query.shape[-1], value.shape[-1])
        wide_query, wide_key, wide_value = (F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
        assert packed_seq_params.full is not None, "every row has this plan"
        out = attend(wide_query, wide_key, wide_value, packed_seq_params.full, self.softmax_scale)
        return out.view(*query.shape[:2], width)[..., : value.shape[-1]].flatten(1)


def _halves(x: Tensor) -> Tensor:
    """The last dim in the order x0 x2 ... x1 x3 ... instead of x0 x1 x2 x3 ..."""
    pairs: Tensor = x.unflatten(-1, (-1, 2))  # type: ignore[no-untyped-call]  # it has no types
    return pairs.transpose(-1, -2).flatten(-2)
